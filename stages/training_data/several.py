"""Several runs read as one: end to end, side by side, and hook points joined to one wide row.

    EndToEnd      more tokens of one model: the token axes of the runs follow each other
    SideBySide    the same tokens of several models: a cell has the number of its run besides
    Joined        some cells in a row: what a crosscoder reads and writes

Border: rows of runs; which of them a training wants is its own business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...store.digest import digest
from ...store.errors import ConfigError, PromptError, ShapeError

if TYPE_CHECKING:
    from ...store.arrays import Array
    from ...store.runs.packed import PackedTokens
    from .stored import Cell, Indices, StoredActivations, TokenRows

__all__ = ["EndToEnd", "Joined", "SideBySide"]


@dataclass(frozen=True, eq=False)
class EndToEnd:
    """Runs of one model, their tokens one after the other.

    Raises ConfigError for runs of different models or interventions.
    """

    runs: tuple[StoredActivations, ...]

    def __post_init__(self) -> None:
        kinds = {(run.entry.run.model, run.entry.run.hooks) for run in self.runs}
        if len(kinds) != 1:
            raise ConfigError(
                f"expected runs of one model under one set of interventions, found {len(kinds)} kinds in "
                f"{len(self.runs)} runs; read the others apart, or side by side where tokens are the same"
            )

    @cached_property
    def _starts(self) -> Indices:
        sizes = [run.entry.tokens.n_tokens for run in self.runs]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def leaving_out(self, *, positions: int = 0, tokens: Iterable[int] = ()) -> EndToEnd:
        """Without the first positions of each prompt, and without these token ids."""
        some = tuple(tokens)
        return EndToEnd(tuple(run.leaving_out(positions=positions, tokens=some) for run in self.runs))

    def split(self, share: float, seed: int) -> tuple[EndToEnd, EndToEnd]:
        """(most of the prompts, about `share` of them) of every run."""
        parts = [run.split(share, seed) for run in self.runs]
        kept, held = zip(*parts, strict=True)
        return EndToEnd(kept), EndToEnd(held)

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layers of which every run has a kind of hook point."""
        return _common(run.layers(kind) for run in self.runs)

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids of the chosen prompts, run by run, until they are `most` tokens or more."""
        found: list[list[int]] = []
        for run in self.runs:
            left = None if most is None else most - sum(map(len, found))
            found += run.ids(left)
        return found

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) of all runs; none lies in two."""
        found = [run.blocks(size) for run in self.runs]
        starts, stops = (
            np.concatenate([part[end] + first for part, first in zip(found, self._starts, strict=False)])
            for end in (0, 1)
        )
        return starts, stops

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """See `TokenRows`."""
        which = self._run_of(starts)
        found = np.zeros(len(starts), np.int64)
        for number, run in enumerate(self.runs):
            here = which == number
            found[here] = run.counts(starts[here] - self._starts[number], stops[here] - self._starts[number])
        return found

    def tokens(self, start: int, stop: int) -> Indices:
        """The tokens of a block that are read, ascending."""
        number = int(self._run_of(np.array([start]))[0])
        first = int(self._starts[number])
        return self.runs[number].tokens(start - first, stop - first) + first

    def count(self) -> int:
        """See `TokenRows`."""
        return sum(run.count() for run in self.runs)

    def width(self, cell: Cell) -> int:
        """Numbers of a row; ShapeError where runs differ."""
        found = {run.width(cell) for run in self.runs}
        if len(found) != 1:
            raise ShapeError(f"expected rows of {cell[0]} of one width, found {sorted(found)}")
        return found.pop()

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """As which they are stored; float32 where runs differ."""
        found = {run.dtype(cell) for run in self.runs}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    def require(self, cells: Iterable[Cell]) -> None:
        """Raise unless every run has these whole, with one row per token."""
        asked = tuple(cells)
        for run in self.runs:
            run.require(asked)

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of what these cells hold and of which prompts are read."""
        asked = tuple(cells)
        return digest("training data end to end", [run.identity(asked) for run in self.runs])

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Write the row of each of some ascending tokens of a block to its place in `out`."""
        number = int(self._run_of(tokens[:1])[0])
        self.runs[number].scatter(cell, tokens - self._starts[number], out, places)

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id of tokens."""
        which = self._run_of(tokens)
        found = {name: np.zeros(len(tokens), np.int64) for name in ("run", "prompt", "position", "token_id")}
        found["run"] = which
        for number, run in enumerate(self.runs):
            here = which == number
            for name, values in run.labels(tokens[here] - self._starts[number]).items():
                if name != "run":
                    found[name][here] = values
        return found

    def _run_of(self, tokens: Indices) -> Indices:
        found: Indices = np.searchsorted(self._starts, tokens, side="right") - 1
        return found


@dataclass(frozen=True, eq=False)
class SideBySide:
    """The same prompts in runs of several models; cells are (hook kind, layer, number of the run).

    Which tokens are read, and in which order, is the first run's to say. Raises PromptError for a prompt of
    the first run that another one has not.
    """

    runs: tuple[StoredActivations, ...]

    def __post_init__(self) -> None:
        _ = self._moved

    @cached_property
    def _moved(self) -> list[Indices | None]:
        """For each run, by how much tokens of each prompt of the first are moved in it; None: not at all."""
        return [_moves(self.runs[0], run, number) for number, run in enumerate(self.runs)]

    def leaving_out(self, *, positions: int = 0, tokens: Iterable[int] = ()) -> SideBySide:
        """Without the first positions of each prompt, and without these token ids."""
        return self._of(self.runs[0].leaving_out(positions=positions, tokens=tokens))

    def split(self, share: float, seed: int) -> tuple[SideBySide, SideBySide]:
        """(most of the prompts, about `share` of them), the same in all runs."""
        kept, held = self.runs[0].split(share, seed)
        return self._of(kept), self._of(held)

    def _of(self, first: StoredActivations) -> SideBySide:
        return replace(self, runs=(first, *self.runs[1:]))

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layers of which every run has a kind of hook point."""
        return _common(run.layers(kind) for run in self.runs)

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) in the first run."""
        return self.runs[0].blocks(size)

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """See `TokenRows`; as the first run says."""
        return self.runs[0].counts(starts, stops)

    def tokens(self, start: int, stop: int) -> Indices:
        """The tokens of a block that are read, ascending, as the first run has them."""
        return self.runs[0].tokens(start, stop)

    def count(self) -> int:
        """See `TokenRows`; as the first run says."""
        return self.runs[0].count()

    def width(self, cell: Cell) -> int:
        """See `TokenRows`."""
        return self._run(cell).width(cell)

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """As which they are stored."""
        return self._run(cell).dtype(cell)

    def require(self, cells: Iterable[Cell]) -> None:
        """Raise unless these are stored whole, with one row per token."""
        for cell in cells:
            self._run(cell).require([cell])

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of what these cells hold and of which prompts are read."""
        by_run: dict[int, list[Cell]] = {number: [] for number in range(len(self.runs))}
        for cell in cells:
            by_run[_number(cell)].append(cell)
        contents = [run.identity(by_run[number]) for number, run in enumerate(self.runs)]
        return digest("training data side by side", contents)

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Write the row of each of some ascending tokens of a block to its place in `out`."""
        moved = self._moved[_number(cell)]
        if moved is not None:
            starts = self.runs[0].entry.tokens.row_start
            tokens = tokens + moved[np.searchsorted(starts, tokens, side="right") - 1]
            order = np.argsort(tokens)
            tokens, places = tokens[order], places[order]
        self._run(cell).scatter(cell, tokens, out, places)

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id of tokens, as the first run has them."""
        return self.runs[0].labels(tokens)

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids of the chosen prompts in order, until they are `most` tokens or more."""
        return self.runs[0].ids(most)

    def _run(self, cell: Cell) -> StoredActivations:
        return self.runs[_number(cell)]


@dataclass(frozen=True, eq=False)
class Joined:
    """A source with one more name: a cell whose rows are those of some cells in a row."""

    source: TokenRows
    cells: Mapping[Cell, Sequence[Cell]]

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) of the token axis."""
        return self.source.blocks(size)

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """See `TokenRows`."""
        return self.source.counts(starts, stops)

    def tokens(self, start: int, stop: int) -> Indices:
        """The tokens of a block that are read, ascending."""
        return self.source.tokens(start, stop)

    def count(self) -> int:
        """See `TokenRows`."""
        return self.source.count()

    def width(self, cell: Cell) -> int:
        """Numbers of a row, of all parts together."""
        return sum(map(self.source.width, self.cells[cell]))

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """As which they are stored; float32 where parts differ."""
        found = {self.source.dtype(part) for part in self.cells[cell]}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    def require(self, cells: Iterable[Cell]) -> None:
        """Raise unless all parts are stored whole, with one row per token."""
        self.source.require(part for cell in cells for part in self.cells[cell])

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of what these cells hold and of which prompts are read."""
        return self.source.identity([part for cell in cells for part in self.cells[cell]])

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Write the row of each of some ascending tokens of a block to its place in `out`."""
        at = 0
        for part in self.cells[cell]:
            width = self.source.width(part)
            self.source.scatter(part, tokens, out[:, at : at + width], places)
            at += width

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id of tokens."""
        return self.source.labels(tokens)


def _common(layers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set.intersection(*map(set, layers))))


def _number(cell: Cell) -> int:
    """Of the run that a cell is of."""
    return cell[2] if len(cell) == 3 else 0


def _moves(first: StoredActivations, other: StoredActivations, number: int) -> Indices | None:
    """By how much tokens of each prompt of one run are moved in another; None where all lie alike."""
    ours, theirs = first.entry.tokens, other.entry.tokens
    if ours.digest == theirs.digest:
        return None
    places = {_ids(theirs, row): row for row in np.flatnonzero(other.chosen).tolist()[::-1]}
    found = np.zeros(ours.n_prompts, np.int64)
    for row in np.flatnonzero(first.chosen).tolist():
        there = places.get(_ids(ours, row))
        if there is None:
            raise PromptError(
                f"expected prompt {row} of run {first.entry.digest[:12]} in run {number} as well "
                f"({other.entry.digest[:12]}), found none with its token ids; capture the same "
                "prompts of both models, which must share a tokenizer"
            )
        found[row] = theirs.row_start[there] - ours.row_start[row]
    return found


def _ids(tokens: PackedTokens, row: int) -> bytes:
    return tokens.prompt(row).tobytes()
