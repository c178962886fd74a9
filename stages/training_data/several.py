"""Several runs as one source of rows: concatenated, side by side, and hook points joined to one wide row.

EndToEnd      more tokens of one model: the token axes are concatenated
SideBySide    the same tokens of several models: a cell also has the number of its run
Joined        concatenated cells: input and output of a crosscoder
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
    """Runs of one model, with concatenated token axes.

    Raises:
        ConfigError: The runs have different models or interventions.
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
        """Exclude the first positions of each prompt, and token ids."""
        excluded_ids = tuple(tokens)
        return EndToEnd(tuple(run.leaving_out(positions=positions, tokens=excluded_ids) for run in self.runs))

    def split(self, share: float, seed: int) -> tuple[EndToEnd, EndToEnd]:
        """Split prompts of every run at random into training and held-out sets."""
        splits = [run.split(share, seed) for run in self.runs]
        most_prompts, held_out = zip(*splits, strict=True)
        return EndToEnd(most_prompts), EndToEnd(held_out)

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layer numbers stored for a hook kind in every run."""
        return _common(run.layers(kind) for run in self.runs)

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids per selected prompt, run by run; stops after `most` tokens."""
        ids_by_prompt: list[list[int]] = []
        for run in self.runs:
            remaining = None if most is None else most - sum(map(len, ids_by_prompt))
            ids_by_prompt += run.ids(remaining)
        return ids_by_prompt

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) of the blocks of all runs; no block crosses runs."""
        blocks_by_run = [run.blocks(size) for run in self.runs]
        starts, stops = (
            np.concatenate(
                [
                    bounds[end] + run_start
                    for bounds, run_start in zip(blocks_by_run, self._starts, strict=False)
                ]
            )
            for end in (0, 1)
        )
        return starts, stops

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """Number of selected tokens in each block, int64 [block]."""
        run_numbers = self._run_of(starts)
        n_tokens = np.zeros(len(starts), np.int64)
        for number, run in enumerate(self.runs):
            is_in_run = run_numbers == number
            n_tokens[is_in_run] = run.counts(
                starts[is_in_run] - self._starts[number], stops[is_in_run] - self._starts[number]
            )
        return n_tokens

    def tokens(self, start: int, stop: int) -> Indices:
        """Selected tokens of a block, ascending."""
        number = int(self._run_of(np.array([start]))[0])
        run_start = int(self._starts[number])
        return self.runs[number].tokens(start - run_start, stop - run_start) + run_start

    def count(self) -> int:
        """Number of selected tokens."""
        return sum(run.count() for run in self.runs)

    def width(self, cell: Cell) -> int:
        """Length of a row; ShapeError if runs differ."""
        widths = {run.width(cell) for run in self.runs}
        if len(widths) != 1:
            raise ShapeError(f"expected rows of {cell[0]} of one width, found {sorted(widths)}")
        return widths.pop()

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """Common dtype of the rows; float32 if runs differ."""
        dtypes = {run.dtype(cell) for run in self.runs}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def require(self, cells: Iterable[Cell]) -> None:
        """Check that every run has these cells complete, with one row per token."""
        requested = tuple(cells)
        for run in self.runs:
            run.require(requested)

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of the content of these cells and of the selected prompts."""
        requested = tuple(cells)
        return digest("training data end to end", [run.identity(requested) for run in self.runs])

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Copy rows of one block (ascending tokens) into `out`."""
        number = int(self._run_of(tokens[:1])[0])
        self.runs[number].scatter(cell, tokens - self._starts[number], out, places)

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id per token, int64."""
        run_numbers = self._run_of(tokens)
        labels = {name: np.zeros(len(tokens), np.int64) for name in ("run", "prompt", "position", "token_id")}
        labels["run"] = run_numbers
        for number, run in enumerate(self.runs):
            is_in_run = run_numbers == number
            for name, values in run.labels(tokens[is_in_run] - self._starts[number]).items():
                if name != "run":
                    labels[name][is_in_run] = values
        return labels

    def _run_of(self, tokens: Indices) -> Indices:
        run_numbers: Indices = np.searchsorted(self._starts, tokens, side="right") - 1
        return run_numbers


@dataclass(frozen=True, eq=False)
class SideBySide:
    """The same prompts in runs of several models; a cell is (hook kind, layer, number of the run).

    The first run decides which tokens are read, and in which order.

    Raises:
        PromptError: Another run lacks a prompt of the first.
    """

    runs: tuple[StoredActivations, ...]

    def __post_init__(self) -> None:
        _ = self._moved

    @cached_property
    def _moved(self) -> list[Indices | None]:
        """Per run, the offset of each of the first run's prompts on its token axis, [prompt]; None for no
        offset."""
        return [_moves(self.runs[0], run, number) for number, run in enumerate(self.runs)]

    def leaving_out(self, *, positions: int = 0, tokens: Iterable[int] = ()) -> SideBySide:
        """Exclude the first positions of each prompt, and token ids."""
        return self._of(self.runs[0].leaving_out(positions=positions, tokens=tokens))

    def split(self, share: float, seed: int) -> tuple[SideBySide, SideBySide]:
        """Split prompts at random into training and held-out sets, equal in all runs."""
        most_prompts, held_out = self.runs[0].split(share, seed)
        return self._of(most_prompts), self._of(held_out)

    def _of(self, first_run: StoredActivations) -> SideBySide:
        return replace(self, runs=(first_run, *self.runs[1:]))

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layer numbers stored for a hook kind in every run."""
        return _common(run.layers(kind) for run in self.runs)

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) of blocks of the first run."""
        return self.runs[0].blocks(size)

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """Number of selected tokens in each block of the first run, int64 [block]."""
        return self.runs[0].counts(starts, stops)

    def tokens(self, start: int, stop: int) -> Indices:
        """Selected tokens of a block of the first run, ascending."""
        return self.runs[0].tokens(start, stop)

    def count(self) -> int:
        """Number of selected tokens of the first run."""
        return self.runs[0].count()

    def width(self, cell: Cell) -> int:
        """Length of a row of the cell."""
        return self._run(cell).width(cell)

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """Dtype in which rows are returned."""
        return self._run(cell).dtype(cell)

    def require(self, cells: Iterable[Cell]) -> None:
        """Check that these cells are complete, with one row per token."""
        for cell in cells:
            self._run(cell).require([cell])

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of the content of these cells and of the selected prompts."""
        by_run: dict[int, list[Cell]] = {number: [] for number in range(len(self.runs))}
        for cell in cells:
            by_run[_number(cell)].append(cell)
        contents = [run.identity(by_run[number]) for number, run in enumerate(self.runs)]
        return digest("training data side by side", contents)

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Copy rows of one block (ascending tokens) into `out`."""
        offsets = self._moved[_number(cell)]
        if offsets is not None:
            starts = self.runs[0].entry.tokens.row_start
            tokens = tokens + offsets[np.searchsorted(starts, tokens, side="right") - 1]
            # scatter expects ascending tokens, but prompts may be in another order in this run.
            order = np.argsort(tokens)
            tokens, places = tokens[order], places[order]
        self._run(cell).scatter(cell, tokens, out, places)

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id per token of the first run, int64."""
        return self.runs[0].labels(tokens)

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids per selected prompt, in order; stops after `most` tokens."""
        return self.runs[0].ids(most)

    def _run(self, cell: Cell) -> StoredActivations:
        return self.runs[_number(cell)]


@dataclass(frozen=True, eq=False)
class Joined:
    """Rows of a source with further cells, each a concatenation of cells of the source."""

    source: TokenRows
    cells: Mapping[Cell, Sequence[Cell]]

    def blocks(self, size: int) -> tuple[Indices, Indices]:
        """(starts, stops) of blocks on the token axis."""
        return self.source.blocks(size)

    def counts(self, starts: Indices, stops: Indices) -> Indices:
        """Number of selected tokens in each block, int64 [block]."""
        return self.source.counts(starts, stops)

    def tokens(self, start: int, stop: int) -> Indices:
        """Selected tokens of a block, ascending."""
        return self.source.tokens(start, stop)

    def count(self) -> int:
        """Number of selected tokens."""
        return self.source.count()

    def width(self, cell: Cell) -> int:
        """Row length: sum over the concatenated cells."""
        return sum(map(self.source.width, self.cells[cell]))

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """Common dtype of the parts; float32 if they differ."""
        dtypes = {self.source.dtype(part) for part in self.cells[cell]}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def require(self, cells: Iterable[Cell]) -> None:
        """Check that all parts are complete, with one row per token."""
        self.source.require(part for cell in cells for part in self.cells[cell])

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of the content of these cells and of the selected prompts."""
        return self.source.identity([part for cell in cells for part in self.cells[cell]])

    def scatter(self, cell: Cell, tokens: Indices, out: Array, places: Indices) -> None:
        """Copy rows of one block (ascending tokens) into `out`."""
        column = 0
        for part in self.cells[cell]:
            width = self.source.width(part)
            self.source.scatter(part, tokens, out[:, column : column + width], places)
            column += width

    def labels(self, tokens: Indices) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id per token, int64."""
        return self.source.labels(tokens)


def _common(layers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set.intersection(*map(set, layers))))


def _number(cell: Cell) -> int:
    """Number of the run that a cell belongs to."""
    return cell[2] if len(cell) == 3 else 0


def _moves(reference: StoredActivations, other: StoredActivations, number: int) -> Indices | None:
    """Offset of each prompt of `reference` on the token axis of `other`, [prompt]; None if all tokens are
    equal."""
    reference_tokens, other_tokens = reference.entry.tokens, other.entry.tokens
    if reference_tokens.digest == other_tokens.digest:
        return None
    # Reversed, so that of equal prompts the first one is found.
    row_by_ids = {_ids(other_tokens, row): row for row in np.flatnonzero(other.chosen).tolist()[::-1]}
    offsets = np.zeros(reference_tokens.n_prompts, np.int64)
    for row in np.flatnonzero(reference.chosen).tolist():
        other_row = row_by_ids.get(_ids(reference_tokens, row))
        if other_row is None:
            raise PromptError(
                f"expected prompt {row} of run {reference.entry.digest[:12]} in run {number} as well "
                f"({other.entry.digest[:12]}), found none with its token ids; capture the same "
                "prompts of both models, which must share a tokenizer"
            )
        offsets[row] = other_tokens.row_start[other_row] - reference_tokens.row_start[row]
    return offsets


def _ids(tokens: PackedTokens, row: int) -> bytes:
    return tokens.prompt(row).tobytes()
