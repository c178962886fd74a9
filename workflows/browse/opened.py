"""Stored runs opened for the pages: token texts, activations of a few tokens at a time, progress of the
capture.

Only the tokens that a page shows are read. This module never imports torch.

Axes: layer, token (the tokens of all prompts, joined: the packed axis), hidden (all axes after the token
axis, flattened).
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

__all__ = ["Harvest", "OpenedRun", "harvest", "open_run"]


@dataclass(frozen=True)
class Harvest:
    """Progress of the capture of a run, in segments: ranges of its tokens that are written at once.

    A segment is complete if it holds every variable and layer that any segment of the run holds.
    """

    total: int
    """Number of segments of the run."""
    done: int
    """Number of complete segments."""
    claimed: int
    """Number of segments that a process is computing now."""
    tokens: int
    """Number of tokens in complete segments."""

    @property
    def is_live(self) -> bool:
        """Whether a process is computing a segment."""
        return self.claimed > 0

    @property
    def is_whole(self) -> bool:
        """Whether all segments are complete."""
        return self.done == self.total


@dataclass(frozen=True)
class OpenedRun:
    """A run opened for reading, with the vocabulary of its tokenizer."""

    folder: HeldFolder
    """Folder of the run in the store."""
    entry: LabelledEntry
    """The run's stored arrays and tokens."""
    words: tuple[str, ...] | None
    """Text of each token id; None if the store has no vocabulary for the run."""
    has_ids: bool
    """Whether the run's token ids are known; False for activations imported without token ids."""
    _arrays: dict[tuple[str, int | None], xr.Variable] = field(default_factory=dict, init=False, repr=False)
    """(variable, layer) -> opened array, so that a page opens each array once."""

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """Text of each token, with visible whitespace.

        Arguments:
            tokens: Indices of the tokens along the packed axis.
        """
        return list(map(format_token, self._plain_texts(tokens)))

    def passage(self, tokens: Iterable[int]) -> str:
        """Text of consecutive tokens, joined on one line, with plain spaces.

        Arguments:
            tokens: Indices of the tokens along the packed axis.
        """
        return format_text("".join(self._plain_texts(tokens)))

    def _plain_texts(self, tokens: Iterable[int]) -> list[str]:
        """Text of each token: from the vocabulary, else cut from the prompt's text, else "[id]", else "?"."""
        packed = self.entry.tokens
        texts = []
        for token in map(int, tokens):
            token_id = int(packed.ids[token])
            if self.has_ids and self.words is not None and token_id < len(self.words):
                texts.append(self.words[token_id])
            elif packed.texts is not None and packed.char_start is not None and packed.char_end is not None:
                prompt_text = packed.texts[int(packed.prompt_of(token))]
                texts.append(prompt_text[int(packed.char_start[token]) : int(packed.char_end[token])])
            else:
                texts.append(f"[{token_id}]" if self.has_ids else "?")
        return texts

    def per_token(self) -> dict[str, list[int | None]]:
        """Completely captured variables with a value per token, such as "resid_post" -> their layers.

        The layers of a variable without layers are [None].
        """
        layers: dict[str, list[int | None]] = {}
        specs = self.entry.specs
        for variable, layer in self.entry.published():
            # Other variables have a row per pair of tokens (attention patterns) or per segment.
            if specs[variable].packed == "token":
                layers.setdefault(variable, []).append(layer)
        return layers

    def spec(self, variable: str) -> ArraySpec:
        """Dims, shape, dtype and hook point of a stored variable."""
        return self.entry.spec(variable)

    def rows(self, variable: str, layer: int | None, start: int, stop: int) -> Array:
        """Stored values of consecutive tokens, float32 [token, hidden]; hidden is 1 for scalar variables.

        Arguments:
            variable: Name of the stored variable.
            layer: Layer number; None for a variable without layers.
            start: Packed index of the first token.
            stop: Packed index after the last token.
        """
        array = self._arrays.get((variable, layer))
        if array is None:
            layers = None if layer is None else [layer]
            # chunks=None opens without dask: a page reads few rows, for which a task graph is slower.
            array = self.entry.open([variable], layers, chunks=None)[variable].variable
            # One layer was opened: the layer axis is the first, of length 1.
            array = array if layer is None else array.isel({array.dims[0]: 0})
            self._arrays[variable, layer] = array
        values = np.asarray(array.isel(token=slice(start, stop)).values, np.float32)
        return values.reshape(stop - start, -1)

    def norms(self, variable: str, layers: Iterable[int | None], start: int, stop: int) -> Floats:
        """L2 norms of the activations of consecutive tokens, float64 [layer, token].

        For a variable with one number per token, the number itself. One layer is in memory at a time.

        Arguments:
            variable: Name of the stored variable.
            layers: Layer numbers; [None] for a variable without layers.
            start: Packed index of the first token.
            stop: Packed index after the last token.
        """
        norms = []
        for layer in layers:
            rows = self.rows(variable, layer, start, stop).astype(np.float64)
            # einsum instead of (rows**2).sum(1): no temporary array of squares.
            norms.append(rows[:, 0] if rows.shape[1] == 1 else np.sqrt(np.einsum("th,th->t", rows, rows)))
        return np.array(norms).reshape(-1, stop - start)


def open_run(store: Store, folder: HeldFolder) -> OpenedRun:
    """Open a run for reading; the last four opened runs are cached.

    Arguments:
        store: The store.
        folder: Folder of the run.
    """
    stat = store.files.stat(f"{folder.data}/zarr.json")
    stamp = None if stat is None else stat.stamp
    return OpenedRun(folder, *_open_run(store.address, folder.data, stamp))


@lru_cache(maxsize=4)
def _open_run(address: str, data: str, stamp: object) -> tuple[LabelledEntry, tuple[str, ...] | None, bool]:
    """The fields `entry`, `words` and `has_ids` of an `OpenedRun`.

    Arguments:
        address: Path or URL of the store.
        data: Folder of the run, relative to the store.
        stamp: Version of the run's metadata file; not read, but a changed run is thus opened anew.
    """
    from ...store import open_store

    store = open_store(address, mode="r")
    attributes = group_attributes(store.files, data)
    entry = store.entry(data.rpartition("/")[2])
    tokenizer = attributes.get("tokenizer")
    words = None if tokenizer is None else _vocabulary(address, str(tokenizer))
    return entry, words, attributes.get("token_ids") != "unknown"


@lru_cache(maxsize=2)
def _vocabulary(address: str, tokenizer: str) -> tuple[str, ...] | None:
    """Text of each token id of a tokenizer; None for a missing or damaged vocabulary.

    Arguments:
        address: Path or URL of the store.
        tokenizer: Digest of the tokenizer.
    """
    from ...store import open_store

    try:
        words = open_store(address, mode="r").vocabulary(tokenizer)
    # Without texts of tokens the page still shows the numbers.
    except CorruptEntry:
        return None
    return None if words is None else tuple(words)


def harvest(store: Store, folder: HeldFolder) -> Harvest:
    """Progress of the capture of a run, from its finished segments and the claim files of running processes.

    Arguments:
        store: The store.
        folder: Folder of the run.
    """
    entry = open_run(store, folder).entry
    # (variable, layer) pairs that each segment holds.
    written = entry.committed()
    all_pairs = {pair for segment in written for pair in segment}
    # `all_pairs and`: the empty set is part of every segment, so that a run without data would be complete.
    complete = [i for i, segment in enumerate(written) if all_pairs and all_pairs <= set(segment)]
    now = store.files.now()
    # A claim file that was not renewed within TTL seconds belongs to a process that has died.
    claims = [
        name
        for name, stat in store.files.stamps(f"{folder.data}/seg")
        if name.endswith(".claim") and now - stat.modified < TTL
    ]
    n_tokens = sum(len(entry.segments[i]) for i in complete)
    return Harvest(len(written), len(complete), len(claims), n_tokens)
