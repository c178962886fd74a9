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
    from ...store.arrays import Array, Ints
    from ...store.runs.packed import PackedTokens
    from .stored import Cell, StoredActivations, TokenRows

__all__ = ["EndToEnd", "Joined", "SideBySide"]


@dataclass(frozen=True, eq=False)
class EndToEnd:
    """Runs of one model, with concatenated token axes.

    Raises:
        ConfigError: The runs have different models or interventions.
    """

    runs: tuple[StoredActivations, ...]
    """Runs, in the order of their tokens."""

    def __post_init__(self) -> None:
        # Under other interventions the same hook point has another distribution; one dictionary fits neither.
        kinds = {(run.entry.run.model, run.entry.run.hooks) for run in self.runs}
        if len(kinds) != 1:
            raise ConfigError(
                "runs can be joined if they have the same model and the same interventions, found "
                f"{len(kinds)} different combinations in {len(self.runs)} runs; load them separately, or "
                "with SideBySide if they have the same prompts"
            )

    @cached_property
    def _starts(self) -> Ints:
        """First token of each run, and the end of the last, int64 [run + 1]."""
        sizes = [run.entry.tokens.n_tokens for run in self.runs]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def leaving_out(self, *, positions: int = 0, tokens: Iterable[int] = ()) -> EndToEnd:
        """As `StoredActivations.leaving_out`, in every run.

        Arguments:
            positions: number of first positions of each prompt.
            tokens: token ids.
        """
        # A tuple: an iterator would be used up by the first run.
        excluded_ids = tuple(tokens)
        return EndToEnd(tuple(run.leaving_out(positions=positions, tokens=excluded_ids) for run in self.runs))

    def split(self, share: float, seed: int) -> tuple[EndToEnd, EndToEnd]:
        """As `StoredActivations.split`, of each run by itself.

        Arguments:
            share: share of the prompts that is held out.
            seed: seed of the split.
        """
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

    def blocks(self, size: int) -> tuple[Ints, Ints]:
        """(first tokens, tokens after the last) of the blocks of all runs; no block crosses runs."""
        blocks_by_run = [run.blocks(size) for run in self.runs]
        # strict=False: `_starts` has one entry more, the end of the last run.
        moved = [
            (starts + offset, stops + offset)
            for (starts, stops), offset in zip(blocks_by_run, self._starts, strict=False)
        ]
        all_starts, all_stops = map(np.concatenate, zip(*moved, strict=True))
        return all_starts, all_stops

    def counts(self, starts: Ints, stops: Ints) -> Ints:
        """Number of selected tokens in each block, int64 [block]."""
        run_numbers = self._run_of(starts)
        n_tokens = np.zeros(len(starts), np.int64)
        for number, run in enumerate(self.runs):
            is_in_run = run_numbers == number
            n_tokens[is_in_run] = run.counts(
                starts[is_in_run] - self._starts[number], stops[is_in_run] - self._starts[number]
            )
        return n_tokens

    def tokens(self, start: int, stop: int) -> Ints:
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
            raise ShapeError(
                f"expected {cell[0]} to have the same width in all runs, found widths {sorted(widths)}"
            )
        return widths.pop()

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """Common dtype of the rows; float32 if runs differ."""
        return _common_dtype(run.dtype(cell) for run in self.runs)

    def require(self, cells: Iterable[Cell]) -> None:
        """Check that every run has these cells complete, with one row per token."""
        # A tuple: an iterator would be used up by the first run.
        requested = tuple(cells)
        for run in self.runs:
            run.require(requested)

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of the content of these cells and of the selected prompts."""
        requested = tuple(cells)
        return digest("training data end to end", [run.identity(requested) for run in self.runs])

    def scatter(self, cell: Cell, tokens: Ints, out: Array, places: Ints) -> None:
        """Copy rows of one block to `out`. See `TokenRows.scatter`."""
        # No block crosses runs, so the first token decides.
        number = int(self._run_of(tokens[:1])[0])
        self.runs[number].scatter(cell, tokens - self._starts[number], out, places)

    def labels(self, tokens: Ints) -> dict[str, npt.NDArray[Any]]:
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

    def _run_of(self, tokens: Ints) -> Ints:
        """Number of the run that each token belongs to, int64 [token]."""
        # side="right": the first token of a run belongs to it, not to the run before.
        run_numbers: Ints = np.searchsorted(self._starts, tokens, side="right") - 1
        return run_numbers


@dataclass(frozen=True, eq=False)
class SideBySide:
    """The same prompts in runs of several models; a cell is (hook kind, layer, number of the run).

    The first run decides which tokens are read, and in which order.

    Raises:
        PromptError: Another run lacks a prompt of the first.
    """

    runs: tuple[StoredActivations, ...]
    """One run per model; the first decides tokens and order."""

    def __post_init__(self) -> None:
        # Computed here, so that a missing prompt is an error before anything is trained.
        _ = self._offsets

    @cached_property
    def _offsets(self) -> list[Ints | None]:
        """Per run, what to add to tokens of the first run, int64 [prompt]; None for equal tokens."""
        return [_prompt_offsets(self.runs[0], run, number) for number, run in enumerate(self.runs)]

    def leaving_out(self, *, positions: int = 0, tokens: Iterable[int] = ()) -> SideBySide:
        """As `StoredActivations.leaving_out`, in the first run, which decides.

        Arguments:
            positions: number of first positions of each prompt.
            tokens: token ids.
        """
        return self._of(self.runs[0].leaving_out(positions=positions, tokens=tokens))

    def split(self, share: float, seed: int) -> tuple[SideBySide, SideBySide]:
        """As `StoredActivations.split`, with the same prompts held out in all runs.

        Arguments:
            share: share of the prompts that is held out.
            seed: seed of the split.
        """
        most_prompts, held_out = self.runs[0].split(share, seed)
        return self._of(most_prompts), self._of(held_out)

    def _of(self, first_run: StoredActivations) -> SideBySide:
        """A copy with another selection of tokens in the first run."""
        return replace(self, runs=(first_run, *self.runs[1:]))

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layer numbers stored for a hook kind in every run."""
        return _common(run.layers(kind) for run in self.runs)

    def blocks(self, size: int) -> tuple[Ints, Ints]:
        """(starts, stops) of blocks of the first run."""
        return self.runs[0].blocks(size)

    def counts(self, starts: Ints, stops: Ints) -> Ints:
        """Number of selected tokens in each block of the first run, int64 [block]."""
        return self.runs[0].counts(starts, stops)

    def tokens(self, start: int, stop: int) -> Ints:
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

    def scatter(self, cell: Cell, tokens: Ints, out: Array, places: Ints) -> None:
        """Copy rows of one block to `out`. See `TokenRows.scatter`."""
        offsets = self._offsets[_number(cell)]
        if offsets is not None:
            starts = self.runs[0].entry.tokens.row_start
            tokens = tokens + offsets[np.searchsorted(starts, tokens, side="right") - 1]
            # scatter expects ascending tokens, but prompts may be in another order in this run.
            order = np.argsort(tokens)
            tokens, places = tokens[order], places[order]
        self._run(cell).scatter(cell, tokens, out, places)

    def labels(self, tokens: Ints) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id per token of the first run, int64."""
        return self.runs[0].labels(tokens)

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids per selected prompt, in order; stops after `most` tokens."""
        return self.runs[0].ids(most)

    def _run(self, cell: Cell) -> StoredActivations:
        """The run that a cell belongs to."""
        return self.runs[_number(cell)]


@dataclass(frozen=True, eq=False)
class Joined:
    """Rows of a source with wide cells, each a concatenation of cells of the source."""

    source: TokenRows
    """Rows of the parts."""
    cells: Mapping[Cell, Sequence[Cell]]
    """Wide cell -> its parts, in order."""

    def blocks(self, size: int) -> tuple[Ints, Ints]:
        """(starts, stops) of blocks on the token axis."""
        return self.source.blocks(size)

    def counts(self, starts: Ints, stops: Ints) -> Ints:
        """Number of selected tokens in each block, int64 [block]."""
        return self.source.counts(starts, stops)

    def tokens(self, start: int, stop: int) -> Ints:
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
        return _common_dtype(self.source.dtype(part) for part in self.cells[cell])

    def require(self, cells: Iterable[Cell]) -> None:
        """Check that all parts are complete, with one row per token."""
        self.source.require(part for cell in cells for part in self.cells[cell])

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of the content of these cells and of the selected prompts."""
        return self.source.identity([part for cell in cells for part in self.cells[cell]])

    def scatter(self, cell: Cell, tokens: Ints, out: Array, places: Ints) -> None:
        """Copy rows of one block to `out`. See `TokenRows.scatter`."""
        column = 0
        for part in self.cells[cell]:
            width = self.source.width(part)
            # A view of `out`: parts are written side by side, without a copy to concatenate them.
            self.source.scatter(part, tokens, out[:, column : column + width], places)
            column += width

    def labels(self, tokens: Ints) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id per token, int64."""
        return self.source.labels(tokens)


def _common_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype if all are equal, else float32, to which each stored dtype converts exactly."""
    distinct = set(dtypes)
    return distinct.pop() if len(distinct) == 1 else np.dtype(np.float32)


def _common(layers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Layer numbers common to all tuples, in ascending order."""
    return tuple(sorted(set.intersection(*map(set, layers))))


def _number(cell: Cell) -> int:
    """Number of the run that a cell belongs to."""
    return cell[2] if len(cell) == 3 else 0


def _prompt_offsets(reference: StoredActivations, other: StoredActivations, number: int) -> Ints | None:
    """Position of each prompt in `other` minus its position in `reference`, on their token axes.

    Arguments:
        reference: run whose prompts are looked for.
        other: run with the same prompts, possibly in another order and among others.
        number: number of the other run, for the message.

    Returns:
        int64 [prompt]; None if the runs have equal tokens. 0 for prompts that are not selected.

    Raises:
        PromptError: `other` lacks a selected prompt.
    """
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
                f"prompt {row} of run {reference.entry.digest[:12]} is not in run {number} "
                f"({other.entry.digest[:12]}), which has no prompt with the same token ids; capture the same "
                "prompts with both models, which must share a tokenizer"
            )
        offsets[row] = other_tokens.row_start[other_row] - reference_tokens.row_start[row]
    return offsets


def _ids(tokens: PackedTokens, row: int) -> bytes:
    """Token ids of a prompt as bytes, to look them up in a dict."""
    # Bytes are hashable, and a tuple of Python integers would take ten times the memory.
    return tokens.prompt(row).tobytes()
