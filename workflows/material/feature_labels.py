"""What a feature is called beside its number: the token it writes most, and where in the prompt it fires.

    nodes |= named_nodes(subject, dictionary, ids, features)    # before anything runs
    labels = FeatureLabels.of_trace(subject, ids, result("words"), result("trace"))
    labels.short(feature)                                       # "L0:128 (' English')"
    labels.label(feature)                                       # "writes ' English', fires on ' in'"

What it writes is its decoder, read by the unembedding (stages/features/effects/words.py); a dictionary whose
features do not write to the residual stream has no such token.

Border: declares nodes and reads them; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import StageNode
from ...stages.features.effects.activity import FeatureTrace
from ...stages.features.effects.words import feature_words, words_of_active, words_of_ranked
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_token
from ...stages.logits.readout import readout_node
from ..workflow import Nodes
from .answers import named

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...stages.features.dictionary import Dictionary
    from ...store.upkeep.annotations import Annotation
    from ..subject import Subject

__all__ = ["FeatureLabels", "active_words", "named_nodes", "ranked_words", "writes_to_stream"]


@dataclass(frozen=True)
class FeatureLabels:
    """Of some features the token each raises most, and the token of the prompt at which it is strongest: None
    for one that is silent there; said: what people call them (stages/features/labels.py)."""

    writes: Mapping[FeatureId, str] = field(default_factory=dict)
    fires: Mapping[FeatureId, str | None] = field(default_factory=dict)
    said: Mapping[FeatureId, str] = field(default_factory=dict)

    def called(self, labels: Mapping[FeatureId, Annotation]) -> FeatureLabels:
        """The same with what people call them."""
        return replace(self, said={feature: each.text for feature, each in labels.items()})

    @property
    def spoken(self) -> tuple[str, ...]:
        """What people call them, in order of feature."""
        return tuple(f"{feature} {text}" for feature, text in sorted(self.said.items()))

    @classmethod
    def of(
        cls, subject: Subject, ids: Sequence[int], words: xr.Dataset | None, activity: xr.Dataset
    ) -> FeatureLabels:
        """words: of one of the stages in words.py; None for none. activity: of `feature_activity`, in the
        prompt of these tokens."""
        # The strongest place comes last, and stays.
        rows = activity.isel(active=np.argsort(activity["activation"].values, kind="stable"))
        columns = ("active_layer", "active_feature", "active_position")
        places = zip(*(rows[name].values.tolist() for name in columns), strict=True)
        writes = _written(subject, words)
        peaks: dict[FeatureId, int | None] = dict.fromkeys(writes)
        peaks |= {FeatureId(layer, feature): place for layer, feature, place in places}
        return cls(writes, _fired(subject, ids, peaks))

    @classmethod
    def of_words(cls, subject: Subject, words: xr.Dataset | None) -> FeatureLabels:
        """Of no prompt: what is written alone."""
        return cls(_written(subject, words))

    @classmethod
    def of_trace(
        cls, subject: Subject, ids: Sequence[int], words: xr.Dataset | None, trace: xr.Dataset
    ) -> FeatureLabels:
        """trace: of `feature_trace` or `ranked_trace`, activations by feature and position."""
        values = trace["trace"].transpose(..., "position").values
        rows = zip(
            trace["source_layer"].values.tolist(), trace["feature"].values.tolist(), values, strict=True
        )
        peaks = {
            FeatureId(layer, index): int(row.argmax()) if row.max() > 0 else None
            for layer, index, row in rows
        }
        return cls(_written(subject, words), _fired(subject, ids, peaks))

    def label(self, feature: FeatureId) -> str:
        """What people call it, what it writes and where it fires."""
        told = [f'"{self.said[feature]}"'] if feature in self.said else []
        told += [f"writes '{self.writes[feature]}'"] if feature in self.writes else []
        if feature in self.fires:
            fires = self.fires[feature]
            told.append("silent here" if fires is None else f"fires on '{fires}'")
        return ", ".join(told)

    def short(self, feature: FeatureId) -> str:
        """The feature, and what people call it; else what it writes; else where it fires."""
        if feature in self.said:
            return f'{feature} ("{self.said[feature]}")'
        word = self.writes.get(feature, self.fires.get(feature))
        return str(feature) if word is None else f"{feature} ('{word}')"

    def several(self, features: Iterable[FeatureId]) -> str:
        """Each in short, with commas between them."""
        return ", ".join(map(self.short, features))

    def json(self, feature: FeatureId) -> dict[str, Any]:
        """{"layer", "index", "label"}."""
        return asdict(feature) | {"label": self.label(feature)}

    def __or__(self, other: FeatureLabels) -> FeatureLabels:
        """Labels of both; where both have one, that of the other."""
        writes, fires = {**self.writes, **other.writes}, {**self.fires, **other.fires}
        return FeatureLabels(writes, fires, {**self.said, **other.said})


def named_nodes(
    subject: Subject, dictionary: Dictionary, ids: Sequence[int], features: Iterable[FeatureId]
) -> Nodes:
    """Nodes "trace" and, where features write to the stream, "words", of features named in advance."""
    names = tuple(sorted({(feature.layer, feature.index) for feature in features}))
    trace = FeatureTrace(tuple(ids), dictionary.name, dictionary.identity, names)
    nodes: Nodes = {"trace": subject.on_model(trace)}
    if writes_to_stream(subject, dictionary):
        nodes["words"] = feature_words.on(
            **_given(subject, dictionary), chosen=[list(name) for name in names]
        )
    return nodes


def active_words(
    subject: Subject, dictionary: Dictionary, activity: ResultNode, *, most: int, position: int | None = None
) -> Nodes:
    """The node "words" of the strongest features of a prompt; see `words_of_active`."""
    if not writes_to_stream(subject, dictionary):
        return {}
    chosen = {"most": most, "position": position}
    return {"words": words_of_active.on(active=activity, **_given(subject, dictionary), **chosen)}


def ranked_words(subject: Subject, dictionary: Dictionary, ranked: ResultNode) -> StageNode:
    """What the features of a ranking write."""
    return words_of_ranked.on(ranked=ranked, **_given(subject, dictionary))


def _given(subject: Subject, dictionary: Dictionary) -> dict[str, Any]:
    return {
        "readout": readout_node(subject.files, dtype=subject.dtype),
        "dictionary": dictionary.as_resource(),
    }


def writes_to_stream(subject: Subject, dictionary: Dictionary) -> bool:
    """Whether what it writes is as wide as the stream, and tokens are read off that by directions."""
    return dictionary.d_out == subject.config.hidden_size and subject.config.transform is None


def _written(subject: Subject, words: xr.Dataset | None) -> dict[FeatureId, str]:
    """The token each of them raises most."""
    if words is None:
        return {}
    pairs = zip(words["layer"].values.tolist(), words["feature"].values.tolist(), strict=True)
    texts = named(subject, words["raised"].transpose("named", "rank").values[:, 0])
    return {FeatureId(*pair): format_token(text) for pair, text in zip(pairs, texts, strict=True)}


def _fired(
    subject: Subject, ids: Sequence[int], peaks: Mapping[FeatureId, int | None]
) -> dict[FeatureId, str | None]:
    """The token at each of some places."""
    texts = [format_token(text) for text in named(subject, ids)]
    return {feature: None if place is None else texts[place] for feature, place in peaks.items()}
