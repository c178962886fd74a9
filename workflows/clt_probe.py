"""Which features stand for what is at a place in a prompt, and which would write a given word?

Two ways to find features worth switching: by what is active at one position, layer by layer and over all
layers (stages/features/effects/activity.py), and by how nearly what they write points along a word's
embedding, whatever the prompt (stages/features/effects/alignment.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.corpus.positions import position_of
from ..stages.features.effects.activity import FeatureActivity
from ..stages.features.effects.alignment import DecoderSearch
from ..stages.features.layers.layout import FeatureId
from ..stages.forward.models.files import SPECIMEN
from ..store.errors import ConfigError
from .answers import encoded, fact, named, plain
from .feature_injection import is_one_token, word_id
from .feature_presets import PRESETS
from .sae_features import dictionary_of
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.models.model import Model
    from .report import Element

__all__ = ["CltProbe", "Settings"]

CANDIDATES = 3
"""Layers from which features to suppress are proposed."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    dictionary: str = setting("", "transcoders: directory or org/repo; none: specimen/clt")
    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    position: int | str = setting(
        "last", 'position probed: an index, "first", "last", or a phrase of the prompt'
    )
    word: str = setting("", "in place of a position: a token of the prompt, spaces and case aside")
    top_k: int = setting(10, "features listed per layer")
    top: int = setting(20, "features listed over all layers")
    search: str = setting("", "word to look for in what features write, one token; none: the fact's own")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.top < 1:
            raise ConfigError(f"expected top_k and top of at least 1, found {self.top_k} and {self.top}")


class CltProbe(Workflow):
    """A place in a prompt, and a word."""

    name = "clt_probe"
    question = "Which features stand for what is at a place in a prompt, and which would write a given word?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.prompt, answer = _asked(settings)
        self.encoding = encoded(self.subject, self.prompt)
        self.dictionary = dictionary_of(settings.dictionary, settings.model, "clt")
        self.dictionary.require_fit(self.subject.config, self.subject.name)
        self.position = self._position()
        names = self.dictionary.name, self.dictionary.identity
        given, ids = model or settings.model, tuple(self.encoding.ids)
        self.nodes = {"activity": FeatureActivity(ids, *names).on(given, dtype=settings.dtype)}
        self.word = settings.search or (answer if is_one_token(self.subject, answer) else "")
        if self.word:
            self.token = word_id(self.subject, self.word)
            search = DecoderSearch(self.token, *names, top_k=settings.top)
            self.nodes["search"] = search.on(given, dtype=settings.dtype)

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    @cached_property
    def active(self) -> xr.Dataset:
        """What is active at the position, strongest first."""
        found = self.result("activity").load()
        here = found.isel(active=found["active_position"].values == self.position)
        columns = ("active_feature", "active_layer")
        order = np.lexsort((*(here[name].values for name in columns), -here["activation"].values))
        return here.isel(active=order)

    @property
    def candidates(self) -> list[FeatureId]:
        """The strongest features of up to three layers, in order of strength."""
        found: dict[int, FeatureId] = {}
        for row in self._rows(self.active):
            found.setdefault(row["layer"], FeatureId(row["layer"], row["index"]))
        return list(found.values())[:CANDIDATES]

    def tables(self) -> list[Table]:
        """The strongest features here, and those that write the word."""
        from rich.table import Table

        token = plain(self.tokens[self.position])
        title = f"{self.dictionary.name} in {self.subject.name} at {token!r} ({self.position})"
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("feature", "activation"):
            table.add_column(column, justify="right")
        for row in self._rows(self.active)[:10]:
            table.add_row(str(FeatureId(row["layer"], row["index"])), f"{row['activation']:.4f}")
        table.caption = (
            f"{self.active.sizes['active']} of {len(self.dictionary.layers) * self.dictionary.n_features} "
            f"active; to suppress: {' '.join(map(str, self.candidates)) or 'none'}"
        )
        return [table, *([self._search_table()] if self.word else [])]

    def _search_table(self) -> Table:
        from rich.table import Table

        table = Table(title=f"Features that write {plain(self.word)!r}", box=None, pad_edge=False)
        for column in ("feature", "cosine"):
            table.add_column(column, justify="right")
        for row in self._found()[:10]:
            table.add_row(str(FeatureId(row["layer"], row["index"])), f"{row['cosine']:+.4f}")
        table.caption = "best cosine of what the feature writes to any layer with the word's embedding"
        return table

    def draw(self, folder: Path) -> list[Path]:
        """The strongest features of all layers at every position."""
        from .figures_features import layers_page

        activity = self.result("activity").load()
        return [
            self.figure(
                folder / "clt_probe.png",
                lambda: layers_page(
                    self._counts(activity),
                    self.tokens,
                    position=self.position,
                    name=self.dictionary.name,
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The tables, and how many features are active where."""
        import xarray as xr

        from .report import Heatmap, from_rich

        counts = self._counts(self.result("activity").load())
        tokens = [f"{i} {token}" for i, token in enumerate(self.tokens)]
        about = {"units": "1", "long_name": "active features"}
        grid = xr.DataArray(
            counts, {"layer": list(self.dictionary.layers), "token": tokens}, ("layer", "token"), attrs=about
        )
        return [*map(from_rich, self.tables()), Heatmap.of(grid, title="How many features are active where")]

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example."""
        rows = self._rows(self.active)
        layers = [
            {
                "layer": layer,
                "features": [row for row in rows if row["layer"] == layer][: self.settings.top_k],
            }
            for layer in self.dictionary.layers
        ]
        found = {
            **self.header(),
            "model_id": self.subject.files.name,
            "clt_repo": self.dictionary.name,
            "prompt": self.prompt,
            "tokens": [{"position": i, "text": text} for i, text in enumerate(self.tokens)],
            "probed_position": self.position,
            "probed_token": self.tokens[self.position],
            "n_layers": len(self.dictionary.layers),
            "n_features_per_layer": self.dictionary.n_features,
            "top_k": self.settings.top_k,
            "layers": layers,
            "aggregate": rows[: self.settings.top],
            "suppress_candidates": [str(feature) for feature in self.candidates],
        }
        if self.word:
            found |= {"search_word": self.word, "token_id": self.token, "features": self._found()}
        return found

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

    def _rows(self, active: xr.Dataset) -> list[dict[str, Any]]:
        columns = (active[name].values.tolist() for name in ("active_layer", "active_feature", "activation"))
        return [{"layer": a, "index": b, "activation": c} for a, b, c in zip(*columns, strict=True)]

    def _found(self) -> list[dict[str, Any]]:
        found = self.result("search").load()
        columns = (found[name].values.tolist() for name in ("source_layer", "feature", "score"))
        return [{"layer": a, "index": b, "cosine": c} for a, b, c in zip(*columns, strict=True)]

    def _counts(self, activity: xr.Dataset) -> Any:
        """Active features by layer and position."""
        layers = {layer: i for i, layer in enumerate(self.dictionary.layers)}
        counts = np.zeros((len(layers), len(self.tokens)), np.int32)
        rows = np.array([layers[layer] for layer in activity["active_layer"].values.tolist()], np.int64)
        np.add.at(counts, (rows, activity["active_position"].values), 1)
        return counts


def _asked(settings: Settings) -> tuple[str, str]:
    """The prompt and its answer; by default of the specimen the fact of its preset, whose answer is a word of
    one token."""
    if settings.model == SPECIMEN and not settings.prompt:
        preset = PRESETS[SPECIMEN]
        return preset.prompt, preset.suppress_word
    return fact(settings.model, settings.prompt, "")


WORKFLOW = CltProbe
