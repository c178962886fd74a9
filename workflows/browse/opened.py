"""A run opened for reading: its tokens as text, its states of a few tokens at a time, how far it is.

Border: one stored run; arrays are read for the tokens that are asked for. Never imports torch.

Axes: layer, token (packed, all prompts), hidden: whatever follows a token, laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...stages.logits.lens import format_text, format_token
from ...store import Store
from ...store.arrays import Array, Floats
from ...store.errors import CorruptEntry
from ...store.reading.labelled import LabelledEntry
from ...store.runs.claims import TTL
from ...store.runs.entries import ArraySpec, group_attributes
from ..holdings import HeldFolder

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Harvest", "OpenedRun", "harvest", "opened"]


@dataclass(frozen=True)
class Harvest:
    """How far a run is, in segments. cells: variables and layers that some pass wrote, and all segments get.

    done: those with all of them. claimed: those somebody is at now. tokens: in segments that are done.
    """

    total: int
    done: int
    claimed: int
    tokens: int

    @property
    def is_live(self) -> bool:
        """Whether somebody is at it."""
        return self.claimed > 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing of what was begun."""
        return self.done == self.total


@dataclass(frozen=True)
class OpenedRun:
    """A run's folder, its entry, and the strings of its vocabulary (None: not kept). has_ids: whether its
    token ids are ids of that vocabulary."""

    folder: HeldFolder
    entry: LabelledEntry
    words: tuple[str, ...] | None
    has_ids: bool
    _arrays: dict[tuple[str, int | None], xr.Variable] = field(default_factory=dict, init=False, repr=False)

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """Each token, by its place on the packed axis, with its whitespace visible."""
        return list(map(format_token, self._pieces(tokens)))

    def passage(self, tokens: Iterable[int]) -> str:
        """The text of neighbouring tokens on one line; its spaces are spaces."""
        return format_text("".join(self._pieces(tokens)))

    def _pieces(self, tokens: Iterable[int]) -> list[str]:
        """Tokens of the vocabulary, else as they stand in the prompt's text, else by id."""
        packed = self.entry.tokens
        found = []
        for token in tokens:
            at, number = int(token), int(packed.ids[int(token)])
            if self.has_ids and self.words is not None and number < len(self.words):
                found.append(self.words[number])
            elif packed.texts is not None and packed.char_start is not None and packed.char_end is not None:
                text = packed.texts[int(packed.prompt_of(at))]
                found.append(text[int(packed.char_start[at]) : int(packed.char_end[at])])
            else:
                found.append(f"[{number}]" if self.has_ids else "?")
        return found

    def per_token(self) -> dict[str, list[int | None]]:
        """Published variables with a row for each token, and their layers; [None] without a layer axis."""
        found: dict[str, list[int | None]] = {}
        specs = self.entry.specs
        for variable, layer in self.entry.published():
            if specs[variable].packed == "token":
                found.setdefault(variable, []).append(layer)
        return found

    def spec(self, variable: str) -> ArraySpec:
        """How a variable is stored."""
        return self.entry.spec(variable)

    def rows(self, variable: str, layer: int | None, start: int, stop: int) -> Array:
        """Stored values of some tokens, float32 [token, hidden]; hidden is 1 for a number per token."""
        array = self._arrays.get((variable, layer))
        if array is None:
            layers = None if layer is None else [layer]
            array = self.entry.open([variable], layers, chunks=None)[variable].variable
            array = array if layer is None else array.isel({array.dims[0]: 0})
            self._arrays[variable, layer] = array
        values = np.asarray(array.isel(token=slice(start, stop)).values, np.float32)
        return values.reshape(stop - start, -1)

    def norms(self, variable: str, layers: Iterable[int | None], start: int, stop: int) -> Floats:
        """Length (L2) of each row, float64 [layer, token]; of a number per token the number itself. One layer
        is in memory at a time."""
        found = []
        for layer in layers:
            rows = self.rows(variable, layer, start, stop).astype(np.float64)
            found.append(rows[:, 0] if rows.shape[1] == 1 else np.sqrt(np.einsum("th,th->t", rows, rows)))
        return np.array(found).reshape(-1, stop - start)


def opened(store: Store, folder: HeldFolder) -> OpenedRun:
    """A run of a store, kept open while it is looked at."""
    stat = store.files.stat(f"{folder.data}/zarr.json")
    return OpenedRun(folder, *_opened(store.address, folder.data, None if stat is None else stat.stamp))


@lru_cache(maxsize=4)
def _opened(address: str, data: str, _: object) -> tuple[LabelledEntry, tuple[str, ...] | None, bool]:
    from ...store import open_store

    store = open_store(address, mode="r")
    about = group_attributes(store.files, data)
    entry = store.entry(data.rpartition("/")[2])
    tokenizer = about.get("tokenizer")
    words = None if tokenizer is None else _words(address, str(tokenizer))
    return entry, words, about.get("token_ids") != "unknown"


@lru_cache(maxsize=2)
def _words(address: str, tokenizer: str) -> tuple[str, ...] | None:
    from ...store import open_store

    try:
        words = open_store(address, mode="r").vocabulary(tokenizer)
    except CorruptEntry:
        return None
    return None if words is None else tuple(words)


def harvest(store: Store, folder: HeldFolder) -> Harvest:
    """How far a run is. Reads its records, and who touched a claim lately."""
    entry = opened(store, folder).entry
    held = entry.committed()
    begun = {cell for segment in held for cell in segment}
    done = [n for n, segment in enumerate(held) if begun and begun <= set(segment)]
    now = store.files.now()
    claims = [
        name
        for name, stat in store.files.stamps(f"{folder.data}/seg")
        if name.endswith(".claim") and now - stat.modified < TTL
    ]
    tokens = sum(len(entry.segments[n]) for n in done)
    return Harvest(len(held), len(done), len(claims), tokens)
