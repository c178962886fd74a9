"""Which features are active at a position, and which would write a given word?

Two ways to find features worth switching: by what is active at one position, layer by layer and over all
layers (stages/features/effects/activity.py), and by how nearly what they write points along a word's
embedding, whatever the prompt (stages/features/effects/alignment.py).
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
from ...stages.features.labels import labels_of
from ...stages.features.layers.layout import FeatureId
from ...stages.forward.models.files import SPECIMEN
from ...stages.logits.lens import format_token
from ...store.errors import ConfigError
from ..feature_exchange.presets import PRESETS
from ..labelled import labelled, records
from ..material.answers import encoded, fact, is_one_token, named, word_id
from ..material.feature_labels import FeatureLabels, active_words, ranked_words
from ..settings import Count, ModelSettings, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded
from .sae_features import dictionary_of

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["CltProbe", "CltProbeSettings"]

CANDIDATES, ROWS = 3, 10
"""Layers from which features to suppress are proposed; features in a table."""


@dataclass(frozen=True)
class CltProbeSettings(ModelSettings):
    """What `--set` can change. Raises ConfigError for a top_k or top below 1."""

    dictionary: str = setting("", "transcoders: directory or org/repo; none: specimen/clt")
    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    position: int | str = setting(
        "last", 'position probed: an index, "first", "last", or a phrase of the prompt'
    )
    word: str = setting("", "in place of a position: a token of the prompt, spaces and case aside")
    top_k: Count = setting(10, "features listed per layer")
    top: Count = setting(20, "features listed over all layers")
    search: str = setting("", "word to look for in what features write, one token; none: the fact's own")


class CltProbe(ModelWorkflow):
    """Features active at a position, and features that write a word."""

    name = "clt_probe"
    question = "Which features are active at a position, and which would write a given word?"
    descriptive = "Which features are active at a position, and which decode towards a word's embedding."
    settings_type = CltProbeSettings
    settings: CltProbeSettings

    activity = loaded("activity")
    """What is active anywhere in the prompt, [active]."""

    def plan(self) -> Nodes:
        """Active features of the prompt, and the features that write the word, if there is one."""
        given = self.settings
        self.prompt, answer = _asked(given)
        self.encoding = encoded(self.subject, self.prompt)
        self.dictionary = dictionary_of(given.dictionary, given.model, "clt")
        self.dictionary.require_fit(self.subject.config, self.subject.name)
        self.position = self._position()
        names = self.dictionary.name, self.dictionary.identity
        nodes: Nodes = {"activity": self.on_model(FeatureActivity(tuple(self.encoding.ids), *names))}
        self.word = given.search or (answer if is_one_token(self.subject, answer) else "")
        if self.word:
            self.token = word_id(self.subject, self.word)
            nodes["search"] = self.on_model(DecoderSearch(self.token, *names, top_k=given.top))
            nodes["search_words"] = ranked_words(self.subject, self.dictionary, nodes["search"])
        most = max(given.top_k, given.top)
        return nodes | active_words(
            self.subject, self.dictionary, nodes["activity"], most=most, position=self.position
        )

    @cached_property
    def labels(self) -> FeatureLabels:
        """What the strongest features here are called, and those that write the word."""
        words = self.result("words").load() if "words" in self.nodes else None
        found = FeatureLabels.of(self.subject, self.encoding.ids, words, self.activity).called(
            labels_of(self.store, self.dictionary)
        )
        if not self.word:
            return found
        search = self.result("search_words").load()
        return FeatureLabels.of(self.subject, self.encoding.ids, search, self.activity) | found

    @property
    def spoken(self) -> tuple[str, ...]:
        """See `Workflow`."""
        return self.labels.spoken

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    @cached_property
    def active(self) -> list[dict[str, Any]]:
        """What is active at the position, strongest first; equal ones by layer and index."""
        found = self.activity
        here = found.isel(active=found["active_position"].values == self.position)
        order = np.lexsort((here["active_feature"], here["active_layer"], -here["activation"].values))
        columns = {"layer": "active_layer", "index": "active_feature", "activation": "activation"}
        return self._labelled(records(here.isel(active=order), "active", **columns))

    def _labelled(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"label": self.labels.label(_feature(row))} for row in rows]

    @property
    def candidates(self) -> list[FeatureId]:
        """The strongest features of up to three layers, in order of strength."""
        found: dict[int, FeatureId] = {}
        for row in self.active:
            found.setdefault(row["layer"], FeatureId(row["layer"], row["index"]))
        return list(found.values())[:CANDIDATES]

    def views(self) -> Iterator[View]:
        """Strongest features of the position, counts by layer and token, and features that write the word."""
        rows, given, layers = self.active, self.settings, self.dictionary.layers
        here = [
            {"layer": layer, "features": [row for row in rows if row["layer"] == layer][: given.top_k]}
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
                "top_k": given.top_k,
                "layers": here,
                "aggregate": rows[: given.top],
                "suppress_candidates": list(map(str, self.candidates)),
            }
        )
        token = f"'{format_token(self.tokens[self.position])}' ({self.position})"
        yield Table.of(
            rows[:ROWS],
            ("feature", _feature, str),
            ("", "label"),
            ("activation", "activation", ".4f"),
            title=f"{self.dictionary.name} in {self.subject.name} at {token}",
            caption=f"{len(rows)} of {len(layers) * self.dictionary.n_features} active; to suppress: "
            f"{self.labels.several(self.candidates) or 'none'}",
        )
        if self.word:
            columns = {"layer": "source_layer", "index": "feature", "cosine": "score"}
            found = self._labelled(records(self.result("search").load(), "rank", **columns))
            yield Table.of(
                found[:ROWS],
                ("feature", _feature, str),
                ("", "label"),
                ("cosine", "cosine", "+.4f"),
                title=f"Features that write {self.word!r}",
                caption="best cosine of what the feature writes to any layer with the word's embedding",
                json={"search_word": self.word, "token_id": self.token, "features": found},
            )
        counts = Heatmap.of(
            self._counts(),
            "How many features are active where",
            f"framed: {token}, the token probed",
            low=0.0,
            framed=((0, self.position, len(layers) - 1, self.position),),
            frame_name="the token probed",
        ).without_first_token()
        title = f"How many features of {self.dictionary.name} are active in {self.subject.name}"
        yield from together("clt_probe", title, counts, caption=counts.caption)

    def _counts(self) -> xr.DataArray:
        """How many features are active, [layer, token]."""
        layers = self.dictionary.layers
        counts = np.zeros((len(layers), len(self.tokens)), np.int32)
        rows = np.array([layers.index(each) for each in self.activity["active_layer"].values.tolist()], int)
        np.add.at(counts, (rows, self.activity["active_position"].values), 1)
        tokens = [f"{i} {format_token(token)}" for i, token in enumerate(self.tokens)]
        return labelled(counts, "active features", layer=layers, token=tokens)

    def _position(self) -> int:
        wanted = self.settings.word.strip().lower()
        if not wanted:
            return position_of(self.encoding, self.settings.position)
        for place, token in enumerate(self.tokens):
            if token.strip().lower() == wanted:
                return place
        raise ConfigError(
            f"expected a token {self.settings.word!r} in the prompt, found {' '.join(map(repr, self.tokens))}"
        )


def _asked(settings: CltProbeSettings) -> tuple[str, str]:
    """The prompt and its answer; by default of the specimen the fact of its preset, whose answer is a word of
    one token."""
    if settings.model == SPECIMEN and not settings.prompt:
        preset = PRESETS[SPECIMEN]
        return preset.prompt, preset.suppress_word
    return fact(settings.model, settings.prompt, "")


def _feature(row: dict[str, Any]) -> FeatureId:
    return FeatureId(row["layer"], row["index"])
