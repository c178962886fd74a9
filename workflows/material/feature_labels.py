"""Labels of features: the token whose logit a feature raises most, and the token of the prompt that activates
it.

    nodes |= named_nodes(subject, dictionary, ids, features)    # before anything runs
    labels = FeatureLabels.of_trace(subject, ids, result("words"), result("trace"))
    labels.short(feature)                                       # "L0:128 (' English')"
    labels.label(feature)                                       # "writes ' English', fires on ' in'"

The written token is the largest logit of the decoder vector times the unembedding
(stages/features/effects/words.py); a dictionary that does not write to the residual stream has none.

Border: builds nodes and reads their results; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import StageNode
from ...stages.features.effects.activity import FeatureTrace
from ...stages.features.effects.words import feature_words, words_of_active, words_of_ranked
from ...stages.features.labels import labels_of
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.readout import readout_node
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...stages.features.dictionary import Dictionary
    from ...store.store import Store
    from ..subject import Subject

__all__ = ["FeatureLabels", "active_words", "named_nodes", "ranked_words", "writes_to_stream"]


@dataclass(frozen=True)
class FeatureLabels:
    """Labels of features: the token that each promotes, the token that it fires on, and labels that people
    gave."""

    writes: Mapping[FeatureId, str] = field(default_factory=dict)
    """Token whose logit the feature raises most."""
    fires: Mapping[FeatureId, str | None] = field(default_factory=dict)
    """Token of the prompt with the feature's largest activation; None for a feature inactive in the
    prompt."""
    by_people: Mapping[FeatureId, str] = field(default_factory=dict)
    """Labels that people gave (stages/features/labels.py)."""

    def with_labels_by_people(self, store: Store | None, dictionary: Dictionary) -> FeatureLabels:
        """Copy with the human labels of a dictionary's features.

        Arguments:
            store: the store that holds the labels; None for no labels.
            dictionary: the feature dictionary.
        """
        labels = labels_of(store, dictionary).items()
        return replace(self, by_people={feature: label.text for feature, label in labels})

    @property
    def spoken(self) -> tuple[str, ...]:
        """Labels that people gave, as "feature label", ordered by feature."""
        return tuple(f"{feature} {text}" for feature, text in sorted(self.by_people.items()))

    @classmethod
    def of(
        cls, subject: Subject, ids: Sequence[int], words: xr.Dataset | None, activity: xr.Dataset
    ) -> FeatureLabels:
        """Labels of the features that are active in a prompt.

        Arguments:
            subject: the model.
            ids: token ids of the prompt.
            words: result of a stage in words.py; None if features do not write to the stream.
            activity: result of `feature_activity` in this prompt.
        """
        # Sorted by activation, so that in the dict below the strongest position overwrites weaker ones.
        rows = activity.isel(active=np.argsort(activity["activation"].values, kind="stable"))
        columns = ("active_layer", "active_feature", "active_position")
        active = zip(*(rows[name].values.tolist() for name in columns), strict=True)
        writes = _written_tokens(subject, words)
        peaks: dict[FeatureId, int | None] = dict.fromkeys(writes)
        peaks |= {FeatureId(layer, feature): position for layer, feature, position in active}
        return cls(writes, _peak_tokens(subject, ids, peaks))

    @classmethod
    def of_words(cls, subject: Subject, words: xr.Dataset | None) -> FeatureLabels:
        """Labels without a prompt: only the tokens that features promote.

        Arguments:
            subject: the model.
            words: result of a stage in words.py; None if features do not write to the stream.
        """
        return cls(_written_tokens(subject, words))

    @classmethod
    def of_trace(
        cls, subject: Subject, ids: Sequence[int], words: xr.Dataset | None, trace: xr.Dataset
    ) -> FeatureLabels:
        """Labels of features whose activations at every position of a prompt are known.

        Arguments:
            subject: the model.
            ids: token ids of the prompt.
            words: see `of`.
            trace: result of `feature_trace` or `ranked_trace` in this prompt.
        """
        values = trace["trace"].transpose(..., "position").values
        rows = zip(
            trace["source_layer"].values.tolist(), trace["feature"].values.tolist(), values, strict=True
        )
        peaks = {
            FeatureId(layer, index): int(row.argmax()) if row.max() > 0 else None
            for layer, index, row in rows
        }
        return cls(_written_tokens(subject, words), _peak_tokens(subject, ids, peaks))

    def label(self, feature: FeatureId) -> str:
        """All known labels of a feature: by people, promoted token, and token that it fires on: "writes '
        English', fires on ' in'"."""
        parts = [f'"{self.by_people[feature]}"'] if feature in self.by_people else []
        parts += [f"writes '{self.writes[feature]}'"] if feature in self.writes else []
        if feature in self.fires:
            fires = self.fires[feature]
            parts.append("silent here" if fires is None else f"fires on '{fires}'")
        return ", ".join(parts)

    def short(self, feature: FeatureId) -> str:
        """Feature with one label: by people, or else the token that it promotes, or else the one that it
        fires on: "L0:128 (' English')"."""
        if feature in self.by_people:
            return f'{feature} ("{self.by_people[feature]}")'
        word = self.writes.get(feature, self.fires.get(feature))
        return str(feature) if word is None else f"{feature} ('{word}')"

    def several(self, features: Iterable[FeatureId]) -> str:
        """Short labels of several features, separated by commas."""
        return ", ".join(map(self.short, features))

    def json(self, feature: FeatureId) -> dict[str, Any]:
        """JSON fields of a feature: {"layer", "index", "label"}."""
        return asdict(feature) | {"label": self.label(feature)}

    def __or__(self, other: FeatureLabels) -> FeatureLabels:
        """Union of two label sets; labels of `other` take precedence."""
        writes, fires = {**self.writes, **other.writes}, {**self.fires, **other.fires}
        return FeatureLabels(writes, fires, {**self.by_people, **other.by_people})


def named_nodes(
    subject: Subject, dictionary: Dictionary, ids: Sequence[int], features: Iterable[FeatureId]
) -> Nodes:
    """Nodes that labels of given features are read from: "trace", their activations in a prompt, and "words",
    the tokens that they promote, if they write to the residual stream.

    Arguments:
        subject: the model.
        dictionary: the feature dictionary.
        ids: token ids of the prompt.
        features: the features.
    """
    names = tuple(sorted({(feature.layer, feature.index) for feature in features}))
    trace = FeatureTrace(tuple(ids), dictionary.name, dictionary.identity, names)
    nodes: Nodes = {"trace": subject.on_model(trace)}
    if writes_to_stream(subject, dictionary):
        nodes["words"] = feature_words.on(
            **_inputs(subject, dictionary), chosen=[list(name) for name in names]
        )
    return nodes


def active_words(
    subject: Subject, dictionary: Dictionary, activity: ResultNode, *, most: int, position: int | None = None
) -> Nodes:
    """Node "words" with the tokens that the most active features of a prompt promote; empty if features do
    not write to the residual stream.

    Arguments:
        subject: the model.
        dictionary: the feature dictionary.
        activity: node of the active features.
        most: number of features.
        position: position of the prompt; None for all.
    """
    if not writes_to_stream(subject, dictionary):
        return {}
    params = {"most": most, "position": position}
    return {"words": words_of_active.on(active=activity, **_inputs(subject, dictionary), **params)}


def ranked_words(subject: Subject, dictionary: Dictionary, ranked: ResultNode) -> StageNode:
    """Node of the tokens that the features of a ranking promote.

    Arguments:
        subject: the model.
        dictionary: the feature dictionary.
        ranked: node of the ranking.
    """
    return words_of_ranked.on(ranked=ranked, **_inputs(subject, dictionary))


def _inputs(subject: Subject, dictionary: Dictionary) -> dict[str, Any]:
    return {
        "readout": readout_node(subject.files, dtype=subject.dtype),
        "dictionary": dictionary.as_resource(),
    }


def writes_to_stream(subject: Subject, dictionary: Dictionary) -> bool:
    """Whether the tokens that features promote are defined: the dictionary writes to the residual stream, and
    logits are linear in the normalised stream.

    Arguments:
        subject: the model.
        dictionary: the feature dictionary.
    """
    return dictionary.d_out == subject.config.hidden_size and subject.config.transform is None


def _written_tokens(subject: Subject, words: xr.Dataset | None) -> dict[FeatureId, str]:
    """Token whose logit each feature raises most."""
    if words is None:
        return {}
    pairs = zip(words["layer"].values.tolist(), words["feature"].values.tolist(), strict=True)
    labels = subject.token_labels(words["raised"].transpose("named", "rank").values[:, 0])
    return {FeatureId(*pair): label for pair, label in zip(pairs, labels, strict=True)}


def _peak_tokens(
    subject: Subject, ids: Sequence[int], peaks: Mapping[FeatureId, int | None]
) -> dict[FeatureId, str | None]:
    """Token of the prompt with each feature's largest activation; None for an inactive feature. peaks: token
    positions."""
    texts = subject.token_labels(ids)
    return {feature: None if position is None else texts[position] for feature, position in peaks.items()}
