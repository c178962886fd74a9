"""Which features are active at a position, and which would write a given word?

Two searches for features to suppress or inject: by activation at one position, per layer and over all layers
(stages/features/effects/activity.py), and, independently of the prompt, by the cosine of a decoder vector
with a word's embedding (stages/features/effects/alignment.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.corpus.positions import position_of
from ...stages.features.effects.activity import FeatureActivity
from ...stages.features.effects.alignment import DecoderSearch
from ...stages.features.layers.layout import FeatureId
from ...stages.forward.models.files import SPECIMEN
from ...store.errors import ConfigError
from ..feature_exchange.presets import PRESETS
from ..labelled import labelled, records
from ..material.answers import fact, is_one_token, word_id
from ..material.feature_labels import FeatureLabels, active_words, ranked_words
from ..settings import Count, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import Nodes, loaded
from .prompt_features import PromptFeaturesSettings, PromptFeaturesWorkflow

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["CltProbe", "CltProbeSettings"]

CANDIDATES, ROWS = 3, 10
"""Largest number of features proposed to suppress, each of another layer, and of rows of each table."""


@dataclass(frozen=True)
class CltProbeSettings(PromptFeaturesSettings):
    """Settings of the workflow `clt_probe`: the prompt, the position to probe, and the word to search."""

    dictionary: str = setting("", "transcoders: directory or org/repo; none: specimen/clt")
    word: str = setting(
        "", "token of the prompt to probe in place of a position; its first match without spaces and case"
    )
    top_k: Count = setting(10, "number of features listed per layer")
    top: Count = setting(20, "number of features listed over all layers")
    search: str = setting(
        "", "word of one token with whose embedding decoders are compared; none: the answer of the fact"
    )


class CltProbe(PromptFeaturesWorkflow):
    """Workflow that lists features active at one position, and features whose decoders point along a word's
    embedding."""

    name = "clt_probe"
    question = "Which features are active at a position, and which would write a given word?"
    descriptive = "Which features are active at a position, and which decode towards a word's embedding."
    settings_type = CltProbeSettings
    settings: CltProbeSettings
    shipped = "clt"

    activity = loaded("activity")
    """All active features of the prompt with their layers, positions and activations, [active], in memory."""

    def plan(self) -> Nodes:
        """Nodes of the active features and, if a word is searched, of the decoders nearest to it."""
        settings = self.settings
        prompt, answer = _prompt_and_answer(settings)
        self.read_prompt(prompt)
        self.position = self._position()
        names = self.dictionary.name, self.dictionary.identity
        nodes: Nodes = {"activity": self.on_model(FeatureActivity(tuple(self.encoding.ids), *names))}
        # A decoder is compared with one row of the embedding, which an answer of several tokens does not
        # have.
        self.word = settings.search or (answer if is_one_token(self.subject, answer) else "")
        if self.word:
            self.token = word_id(self.subject, self.word)
            nodes["search"] = self.on_model(DecoderSearch(self.token, *names, top_k=settings.top))
            nodes["search_words"] = ranked_words(self.subject, self.dictionary, nodes["search"])
        # Words are looked up for each layer; the larger number serves the lists by layer and the one over all
        # layers.
        n_labelled = max(settings.top_k, settings.top)
        return nodes | active_words(
            self.subject, self.dictionary, nodes["activity"], most=n_labelled, position=self.position
        )

    @cached_property
    def labels(self) -> FeatureLabels:
        """Labels of the strongest active features and of the features with the nearest decoders."""
        labels = self.active_labels(self.activity)
        if not self.word:
            return labels
        search = self.result("search_words").load()
        return FeatureLabels.of(self.subject, self.encoding.ids, search, self.activity) | labels

    @cached_property
    def active(self) -> list[dict[str, Any]]:
        """Features active at the position, largest activation first, then by layer and index: records with
        layer, index, activation and label."""
        activity = self.activity
        at_position = activity.isel(active=activity["active_position"].values == self.position)
        # `lexsort` sorts by its last key first.
        order = np.lexsort(
            (at_position["active_feature"], at_position["active_layer"], -at_position["activation"].values)
        )
        columns = {"layer": "active_layer", "index": "active_feature", "activation": "activation"}
        return self._labelled(records(at_position.isel(active=order), "active", **columns))

    def _labelled(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records of features with a field "label" added."""
        return [row | {"label": self.labels.label(_feature(row))} for row in rows]

    @property
    def candidates(self) -> list[FeatureId]:
        """Features proposed to suppress: the strongest feature of each of up to `CANDIDATES` layers."""
        by_layer: dict[int, FeatureId] = {}
        for row in self.active:
            # `active` is sorted by activation, so the first feature of a layer is its strongest.
            by_layer.setdefault(row["layer"], FeatureId(row["layer"], row["index"]))
        return list(by_layer.values())[:CANDIDATES]

    def views(self) -> Iterator[View]:
        """Views in reading order: features active at the position, decoders nearest to the word, and the
        number of active features by layer and token."""
        rows, settings, layers = self.active, self.settings, self.dictionary.layers
        by_layer = [
            {"layer": layer, "features": [row for row in rows if row["layer"] == layer][: settings.top_k]}
            for layer in layers
        ]
        yield Data(
            json={
                "model_id": self.subject.files.name,
                "clt_repo": self.dictionary.name,
                "prompt": self.prompt,
                "tokens": [{"position": i, "text": text} for i, text in enumerate(self.tokens)],
                "probed_position": self.position,
                "probed_token": self.tokens[self.position],
                "n_layers": len(layers),
                "n_features_per_layer": self.dictionary.n_features,
                "top_k": settings.top_k,
                "layers": by_layer,
                "aggregate": rows[: settings.top],
                "suppress_candidates": list(map(str, self.candidates)),
            }
        )
        token = self.at_position(self.position)
        yield Table.of(
            rows[:ROWS],
            ("feature", _feature, str),
            ("label", "label"),
            ("activation", "activation", ".4f"),
            title=f"Features of {self.dictionary.name} active in {self.subject.name} at {token}",
            caption=f"One row per feature, layer:index, largest activation first. {len(rows)} of "
            f"{len(layers) * self.dictionary.n_features} features are active at this token. Label: writes, "
            "the token whose logit the feature raises most; fires on, the token of the prompt with its "
            "largest activation. Candidates for suppression, the strongest feature of each of up to "
            f"{CANDIDATES} layers: {self.labels.several(self.candidates) or 'none'}.",
        )
        if self.word:
            columns = {"layer": "source_layer", "index": "feature", "cosine": "score"}
            matches = self._labelled(records(self.result("search").load(), "rank", **columns))
            yield Table.of(
                matches[:ROWS],
                ("feature", _feature, str),
                ("label", "label"),
                ("cosine", "cosine", "+.4f"),
                title=f"Features whose decoders point towards {self.word!r}",
                caption="One row per feature. Cosine: between its decoder vector and the embedding of the "
                "word, the largest over the layers that the feature writes to. Label: writes, the token "
                "whose logit the decoder raises most; fires on, the token of the prompt with its largest "
                "activation. No feature is injected.",
                json={"search_word": self.word, "token_id": self.token, "features": matches},
            )
        counts = Heatmap.of(
            self._counts(),
            "Number of active features by layer and token",
            "Each cell: number of features of one layer (row) that are active at one token (column) of the "
            f"prompt. Framed: {token}, the probed token.",
            low=0.0,
            framed=((0, self.position, len(layers) - 1, self.position),),
            frame_name="the probed token",
        ).without_first_token()
        title = f"Active features of {self.dictionary.name} in {self.subject.name}"
        yield from together("clt_probe", title, counts, caption=counts.caption)

    def _counts(self) -> xr.DataArray:
        """Number of active features, int [layer, token]."""
        layers = self.dictionary.layers
        counts = np.zeros((len(layers), len(self.tokens)), np.int32)
        rows = np.array([layers.index(layer) for layer in self.activity["active_layer"].values.tolist()], int)
        # `counts[rows, positions] += 1` would count a repeated pair of indices once.
        np.add.at(counts, (rows, self.activity["active_position"].values), 1)
        return labelled(counts, "active features", layer=layers, token=self.token_axis)

    def _position(self) -> int:
        """Position to probe: that of the setting `word` or `position`. Raises ConfigError for a word that is
        no token of the prompt."""
        word = self.settings.word.strip().lower()
        if not word:
            return position_of(self.encoding, self.settings.position)
        for position, token in enumerate(self.tokens):
            # Most tokens contain the space before their word.
            if token.strip().lower() == word:
                return position
        raise ConfigError(
            f"expected word to be a token of the prompt, found {self.settings.word!r}; choose one of "
            f"{' '.join(map(repr, self.tokens))}"
        )


def _prompt_and_answer(settings: CltProbeSettings) -> tuple[str, str]:
    """(prompt, answer). Without a prompt in the settings, the specimen gets that of its preset, whose answer
    is one token."""
    if settings.model == SPECIMEN and not settings.prompt:
        preset = PRESETS[SPECIMEN]
        return preset.prompt, preset.suppress_word
    return fact(settings.model, settings.prompt, "")


def _feature(row: dict[str, Any]) -> FeatureId:
    """Id of the feature of a record, from the fields layer and index."""
    return FeatureId(row["layer"], row["index"])
