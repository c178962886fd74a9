"""Rows of activations out of a stored run: which hook points and layers, which tokens.

Border: an entry of a store, its memory-mapped shards; knows nothing of order or batches. A cell is (hook
kind, layer), as in the store. Heads are laid side by side, so that a row is one vector.

Axes: token (packed, as stored), width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ...store.arrays import as_indices
from ...store.digest import digest
from ...store.errors import ConfigError, EntryNotFound, PromptError, ShapeError
from ...store.runs.entries import group_attributes
from ...store.runs.quantised import QUANTISED
from .conversion import is_finite

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store
    from ...store.arrays import Array
    from ...store.keys import RunKey
    from ...store.runs.committed import VariableLayer
    from ...store.runs.entries import Entry
    from ...store.runs.packed import PackedTokens
    from ...store.runs.quantised import RestoredRows
    from ...store.runs.shards import ShardRows

__all__ = ["Cell", "StoredActivations", "TokenRows"]

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Cell = tuple[str, int | None] | tuple[str, int | None, int]
"""(hook kind, layer), and of runs side by side the number of the run."""


class TokenRows(Protocol):
    """What rows are read from: a run, or several.

    Blocks are ranges of neighbouring tokens, given as where each starts and stops.
    """

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) of the token axis in blocks of at most `size`; none without a chosen prompt."""
        ...

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """How many tokens of each block are read, int64 [block]."""
        ...

    def tokens(self, start: int, stop: int) -> Indices:
        """The tokens of a block that are read, ascending."""
        ...

    def count(self) -> int:
        """How many tokens are read in all."""
        ...

    def width(self, cell: Cell) -> int:
        """How many numbers a row of the cell has, its axes multiplied."""
        ...

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """As which they are stored."""
        ...

    def require(self, cells: Iterable[Cell]) -> None:
        """Raise unless these are stored whole (EntryNotFound) and have one row per token (ShapeError)."""
        ...

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of what these cells hold and of which tokens are read."""
        ...

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Write the row of each of some ascending tokens of a block to its place in `out` [place, width].

        Raises ShapeError naming prompt and position where a number is not finite.
        """
        ...

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id of tokens; the id is -1 where it is not known."""
        ...


@dataclass(frozen=True, eq=False)
class StoredActivations:
    """Some tokens of a stored run.

    prompts: bool [prompt of the entry], which of them; None for all. skip_positions: first positions of each
    prompt that are left out. without: token ids that are left out wherever they stand.
    """

    entry: Entry
    prompts: Mask | None = None
    skip_positions: int = 0
    without: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompts is not None and self.prompts.shape != (self.entry.tokens.n_prompts,):
            raise ShapeError(
                f"expected a mask over {self.entry.tokens.n_prompts} prompts, found shape "
                f"{list(self.prompts.shape)}"
            )
        if self.skip_positions < 0:
            raise ConfigError(f"expected skip_positions of at least 0, found {self.skip_positions}")

    @classmethod
    def of_run(
        cls, store: Store, run: RunKey, tokens: PackedTokens, dtype: str, cells: Sequence[VariableLayer]
    ) -> StoredActivations:
        """The prompts `tokens` of a run, or of a larger one that holds them, once these cells are stored.

        Raises EntryNotFound before.
        """
        with suppress(EntryNotFound):
            entry = store.entry(run, dtype)
            if all(entry.record(*cell) for cell in cells):
                return cls(entry)
        larger = store.find_prompts(run, tokens, dtype, cells)
        if larger is None:
            raise EntryNotFound(f"these activations are not stored in {store.address}; run the capture first")
        return cls(larger[0]).of_prompts(larger[1])

    @classmethod
    def of_dataset(cls, dataset: xr.Dataset) -> StoredActivations:
        """The prompts of a dataset as it was opened, or as `ds.mi.prompts` left it.

        Raises EntryNotFound for one that does not say which run it is, ShapeError for one of which single
        tokens were selected: leave those out here.
        """
        from ...store.reading.direct import entry_of

        found = cls(entry_of(dataset))
        sizes = found.entry.tokens.row_size
        if "prompt_id" not in dataset.coords or "row_size" not in dataset.coords:
            raise ShapeError(
                "expected a dataset with whole prompts (coordinates prompt_id and row_size), found none; "
                "open the run, and leave tokens out with skip_positions= or without="
            )
        rows = dataset["prompt_id"].values
        same = np.array_equal(sizes[rows], dataset["row_size"].values)
        if not same or dataset.sizes["token"] != sizes[rows].sum():
            raise ShapeError(
                "expected whole prompts, found some tokens of them; open the run, and leave tokens out with "
                "skip_positions= or without="
            )
        return found if len(rows) == len(sizes) else found.of_prompts(rows.tolist())

    def of_prompts(self, rows: Sequence[int]) -> StoredActivations:
        """These prompts of the entry alone, in its order, whichever were chosen before."""
        mask = np.zeros(self.entry.tokens.n_prompts, bool)
        mask[list(rows)] = True
        return replace(self, prompts=mask)

    def leaving_out(self, *, positions: int = 0, tokens: Iterable[int] = ()) -> StoredActivations:
        """Without the first positions of each prompt, and without these token ids."""
        chosen = tuple(sorted(set(as_indices(tokens, "token ids"))))
        if chosen and not self._has_ids:
            raise ConfigError(
                f"run {self.entry.digest[:12]} was imported without token ids, so that none can be left out; "
                "leave positions out"
            )
        return replace(self, skip_positions=positions, without=chosen)

    @property
    def chosen(self) -> Mask:
        """bool [prompt of the entry]."""
        return np.ones(self.entry.tokens.n_prompts, bool) if self.prompts is None else self.prompts

    def split(self, share: float, seed: int) -> tuple[StoredActivations, StoredActivations]:
        """(most of the prompts, about `share` of them), drawn by `seed`; each part has one at least.

        Whole prompts: neighbouring tokens are much alike, and would leak from one part into the other. Raises
        PromptError when there is one prompt only.
        """
        held = np.flatnonzero(self.chosen)
        if len(held) < 2:
            raise PromptError(
                "expected at least two prompts to hold some out, found one; set validation to 0"
            )
        count = min(len(held) - 1, max(1, round(share * len(held))))
        drawn = np.random.default_rng([seed, len(held)]).permutation(held)[:count]
        out = np.zeros_like(self.chosen)
        out[drawn] = True
        return replace(self, prompts=self.chosen & ~out), replace(self, prompts=out)

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layers of which a kind of hook point is stored whole; EntryNotFound names the nearest kind."""
        count = self.entry.spec(kind).layers or 0
        return tuple(layer for layer in range(count) if self.entry.record(kind, layer) is not None)

    def require(self, cells: Iterable[Cell]) -> None:
        """Raise unless these are stored whole (EntryNotFound) and have one row per token (ShapeError)."""
        missing: dict[str, list[int | None]] = {}
        for kind, layer, *_ in cells:
            spec = self.entry.spec(kind)
            if spec.packed != "token":
                raise ShapeError(f"expected one row per token, found {kind} with axes {list(spec.dims)}")
            if self.entry.record(kind, layer) is None:
                missing.setdefault(kind, []).append(layer)
        if missing:
            told = "; ".join(
                f"{kind} of layers {', '.join(map(str, held))}" for kind, held in missing.items()
            )
            raise EntryNotFound(f"run {self.entry.digest[:12]} has not all of {told}; capture it first")

    def width(self, cell: Cell) -> int:
        """See `TokenRows`."""
        return math.prod(self.entry.spec(cell[0]).tail)

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """As which they are stored; int8 is read as the float32 it stands for."""
        return np.dtype(np.float32) if self.entry.dtype == QUANTISED else self.entry.layout(cell[0]).native

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of what these cells hold and of which prompts are read."""
        contents = [[kind, layer, self.entry.content(kind, layer)] for kind, layer, *_ in cells]
        return digest("training data", contents, np.flatnonzero(self.chosen).tolist())

    # -- tokens

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) of the token axis in blocks of at most `size` that cross no segment, without those
        of no chosen prompt.
        """
        length, total = self.entry.segment_tokens, self.entry.tokens.n_tokens
        inside = np.arange(0, length, size)
        starts = (np.arange(0, total, length)[:, None] + inside).ravel()
        stops = np.minimum(starts + size, (starts // length + 1) * length).clip(max=total)
        there = starts < total
        starts, stops = starts[there], stops[there]
        held = self._before(stops, 0) > self._before(starts, 0)
        return starts[held], stops[held]

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """See `TokenRows`."""
        if not self.without:
            return self._before(stops, self.skip_positions) - self._before(starts, self.skip_positions)
        sizes = [len(self.tokens(int(a), int(b))) for a, b in zip(starts, stops, strict=True)]
        return np.array(sizes, np.int64)

    def tokens(self, start: int, stop: int) -> Indices:
        """The tokens of a block that are read, ascending: of the chosen prompts, behind their first
        positions, not among those left out.
        """
        where = np.arange(start, stop)
        prompt, position = self._places(where)
        kept = self.chosen[prompt] & (position >= self.skip_positions)
        if self.without:
            kept &= ~np.isin(self.entry.tokens.ids[start:stop], self.without)
        return where[kept]

    def count(self) -> int:
        """See `TokenRows`."""
        if self.without:
            return int(self.counts(*self.blocks(1 << 20)).sum())
        sizes = self.entry.tokens.row_size[self.chosen]
        return int((sizes - self.skip_positions).clip(min=0).sum())

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids of the chosen prompts in order, until they are `most` tokens or more."""
        found: list[list[int]] = []
        total = 0
        for number in np.flatnonzero(self.chosen):
            if most is not None and total >= most:
                break
            found.append(self.entry.tokens.prompt(int(number)).tolist())
            total += len(found[-1])
        return found

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id of tokens; the id is -1 where none are known."""
        prompt, position = self._places(tokens)
        ids = np.full(len(tokens), -1, np.int64)
        return {
            "run": np.zeros(len(tokens), np.int64),
            "prompt": prompt,
            "position": position,
            "token_id": self.entry.tokens.ids[tokens].astype(np.int64) if self._has_ids else ids,
        }

    # -- rows

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Write the row of each of some ascending tokens to its place in `out` [place, width].

        Raises ShapeError naming prompt and position where a number is not finite.
        """
        length = self.entry.segment_tokens
        edges = np.searchsorted(tokens, np.arange(tokens[0] // length, tokens[-1] // length + 2) * length)
        for first, last in pairwise(edges.tolist()):
            if first == last:
                continue
            here = tokens[first:last]
            segment = int(here[0]) // length
            shard = self.entry.values(cell[0], cell[1], segment)
            for at, rows in _pieces(shard, here - segment * length):
                if not is_finite(rows):
                    raise self._not_finite(cell, here[at : at + len(rows)], rows)
                out[places[first + at : first + at + len(rows)]] = rows.reshape(len(rows), -1)

    @cached_property
    def _has_ids(self) -> bool:
        """Whether token ids are known: of states harvested elsewhere they need not be."""
        return group_attributes(self.entry.folder, self.entry.path).get("token_ids") != "unknown"

    @cached_property
    def _starts(self) -> Indices:
        return self.entry.tokens.row_start

    def _places(self, tokens: Indices) -> tuple[Indices, Indices]:
        """(prompt, position) of tokens."""
        prompt = np.searchsorted(self._starts, tokens, side="right") - 1
        return prompt, tokens - self._starts[prompt]

    def _before(self, tokens: Indices, skip: int) -> Indices:
        """How many tokens of the chosen prompts, behind their first `skip` positions, lie before each."""
        kept = (self.entry.tokens.row_size - skip).clip(min=0) * self.chosen
        sums = np.concatenate([[0], np.cumsum(kept)])
        prompt = (np.searchsorted(self._starts, tokens, side="right") - 1).clip(min=0)
        within = (tokens - self._starts[prompt] - skip).clip(min=0)
        found: Indices = sums[prompt] + np.minimum(within, kept[prompt])
        return found

    def _not_finite(self, cell: Cell, tokens: Indices, rows: npt.NDArray[Any]) -> ShapeError:
        row = int(np.flatnonzero(~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1))[0])
        prompt, position = (int(found[row]) for found in self._places(tokens))
        return ShapeError(
            f"expected finite activations, found NaN or infinity in {cell[0]} of layer {cell[1]}, prompt "
            f"{prompt}, position {position} of run {self.entry.digest[:12]}; capture it in a wider dtype, or "
            "leave the prompt out"
        )


def _pieces(shard: ShardRows | RestoredRows, rows: Indices) -> list[tuple[int, Array]] | Any:
    """(place, rows) of ascending rows of a shard: views of the map where they are neighbours, else copied."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return shard.blocks(int(rows[0]), int(rows[-1]) + 1)
    return [(0, shard[rows])]
