"""Batches of stored activations in the order of order.py, read a window at a time.

A window is a buffer of rows that are shuffled together. One thread reads the next window while the current
one is used, so two are in memory. Each row is written to its place in the order, so a batch is a slice of a
window. Batches cross the borders of windows and epochs.

Batches are numbered over all epochs, and batch b has the same rows whoever makes it: worker i of n makes
those with b % n == i, counted from the start, and reads only their rows.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ...store.arrays import Array, Ints
from ...store.errors import ConfigError
from .conversion import as_tensor
from .order import Order, RowStretch

if TYPE_CHECKING:
    from torch import Tensor

    from .stored import Cell, TokenRows

__all__ = ["Batch", "Batches", "every"]

CellT = TypeVar("CellT", bound="Cell")


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of several cells at the same tokens."""

    number: int
    """Number over all epochs."""
    tokens: Ints
    """Token of each row, on the token axis of the source, int64 [row]."""
    rows: dict[Cell, Array]
    """Cell -> [row, width] in the stored dtype. Do not modify or keep: it may be a view of a window."""

    def tensors(self) -> dict[Cell, Tensor]:
        """Rows of each cell as float32 tensors."""
        return {cell: as_tensor(rows) for cell, rows in self.rows.items()}


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of the rows of a source.

    Raises:
        ConfigError: An epoch has fewer rows than a batch.
    """

    source: TokenRows
    """Rows, and which tokens are selected."""
    cells: tuple[Cell, ...]
    """Hook points and layers that every batch holds."""
    batch: int
    """Rows per batch."""
    window: int
    """Rows that are shuffled together."""
    block: int
    """Neighbouring tokens that enter a window together."""
    seed: int
    """Seed of the order."""
    epochs: int | None = None
    """Number of passes over the rows; None for an endless sequence."""
    drop_last: bool = False
    """Whether to leave out a shorter last batch."""

    def __post_init__(self) -> None:
        if (count := self.order.rows) < self.batch:
            raise ConfigError(
                f"expected at least one batch of {self.batch} tokens to train on, found {count}; capture "
                "more prompts, or set a smaller batch"
            )

    @cached_property
    def order(self) -> Order:
        """Shuffled order of the rows of all blocks."""
        # Rows per block, not tokens: skipped positions and excluded ids leave blocks unequally full.
        counts = self.source.counts(*self._blocks)
        return Order(counts, max(1, self.window // self.block), self.seed)

    @cached_property
    def _blocks(self) -> tuple[Ints, Ints]:
        # Cached: for a corpus of a billion tokens this is a million blocks, needed for every window.
        return self.source.blocks(self.block)

    @property
    def total(self) -> int | None:
        """Number of batches in all epochs; None for an endless sequence."""
        if self.epochs is None:
            return None
        rows = self.epochs * self.order.rows
        return rows // self.batch if self.drop_last else -(-rows // self.batch)

    def since(self, start: int, worker: tuple[int, int] = (0, 1)) -> Generator[Batch, None, None]:
        """Batches from number `start` on.

        Arguments:
            start: Number of the first batch.
            worker: (number, number of workers); only the batches of this worker are made.
        """
        number, parts, missing_rows = start + worker[0], list[_Read](), 0
        for read in self._windows(start, worker):
            offset = 0
            while offset < len(read.tokens):
                missing_rows = missing_rows or self._size(number)
                taken = read.cut(offset, offset + missing_rows)
                missing_rows, offset = missing_rows - len(taken.tokens), offset + len(taken.tokens)
                if missing_rows:
                    # A copy, so that the rest of a batch does not keep the memory of its window from reuse.
                    parts.append(taken.copied())
                else:
                    yield _joined(number, [*parts, taken])
                    number, parts = number + worker[1], []
                # Deleted before the next window is read: _Memory reuses only buffers that nobody references.
                del taken
            del read

    def _size(self, number: int) -> int:
        """Rows of a batch: `batch`, or fewer for the last one."""
        if self.epochs is None:
            return self.batch
        return min(self.batch, self.epochs * self.order.rows - number * self.batch)

    def _windows(self, start: int, worker: tuple[int, int]) -> Iterator[_Read]:
        """Read window after window, one ahead of its use."""
        memory = _Memory()
        end = None
        # total * batch is past the last row, unless drop_last leaves the last rows out.
        if self.epochs is not None and self.total is not None:
            end = min(self.total * self.batch, self.epochs * self.order.rows)
        # The None at the end lets the loop return the last window, which has no successor to read ahead.
        pieces: Iterator[RowStretch | None] = chain(self.order.pieces(start * self.batch, end), [None])
        # One reader: at most two windows are in memory. Two readers were no faster on two cores (measured).
        with ThreadPoolExecutor(1, thread_name_prefix="window") as reader:
            ahead: Future[_Read] | None = None
            try:
                for piece in pieces:
                    window_rows = None if ahead is None else ahead.result()
                    ahead = None if piece is None else reader.submit(self._read, piece, start, worker, memory)
                    if window_rows is not None:
                        yield window_rows
                    del window_rows
            # A consumer that stops early closes the generator here: its thread must not outlive it.
            finally:
                reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, piece: RowStretch, start: int, worker: tuple[int, int], memory: _Memory) -> _Read:
        """Read the rows of a stretch that belong to batches of a worker, in order.

        Arguments:
            piece: rows of one window.
            start: number of the first batch of this iteration, from which workers are counted.
            worker: (number, number of workers).
            memory: pool of buffers.
        """
        blocks = self.order.blocks(piece.epoch, piece.window)
        tokens = [self.source.tokens(int(self._blocks[0][n]), int(self._blocks[1][n])) for n in blocks]
        window_tokens = np.concatenate(tokens)
        selected = self.order.permutation(piece.epoch, piece.window, len(window_tokens))[
            piece.start : piece.stop
        ]
        worker_number, workers = worker
        # Every worker computes the whole order, which is cheap, but reads only its own rows.
        if workers > 1:
            numbers = (piece.first + np.arange(len(selected))) // self.batch
            selected = selected[(numbers - start) % workers == worker_number]
        # The inverse of the permutation: for each token as stored, its row in the shuffled window.
        places = np.full(len(window_tokens), -1, np.int64)
        places[selected] = np.arange(len(selected))
        rows = {
            cell: memory.rows(len(selected), self.source.width(cell), self.source.dtype(cell))
            for cell in self.cells
        }
        offset = 0
        for block_tokens in tokens:
            # -1 marks rows of the window that no batch of this worker needs.
            targets = places[offset : offset + len(block_tokens)]
            offset += len(block_tokens)
            is_selected = targets >= 0
            if is_selected.any():
                for cell, out in rows.items():
                    self.source.scatter(cell, block_tokens[is_selected], out, targets[is_selected])
        return _Read(window_tokens[selected], rows)


class _Memory:
    """Pool of window buffers. A buffer is reused once no batch references it.

    Fresh memory costs a page fault per page: a scatter into it takes 1.3 times as long (measured).
    """

    def __init__(self) -> None:
        self._buffers: list[Array] = []

    def rows(self, rows: int, width: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised array [row, width].

        Arguments:
            rows: number of rows.
            width: length of a row.
            dtype: dtype of the array.
        """
        buffer = None
        for n in range(len(self._buffers)):
            # A view of an array or a tensor over it holds a reference. If only this list and this call hold
            # one, nobody can see the array being overwritten.
            if sys.getrefcount(self._buffers[n]) == _UNUSED and self._fits(n, rows, width, dtype):
                buffer = self._buffers.pop(n)
                break
        if buffer is None:
            buffer = np.empty((rows, width), dtype)
        # The oldest buffer is dropped from the pool; whoever still holds its rows keeps it alive.
        self._buffers = [*self._buffers, buffer][-_MOST:]
        return buffer[:rows]

    def _fits(self, n: int, rows: int, width: int, dtype: npt.DTypeLike) -> bool:
        # By number: an argument of this method would be one more reference to the buffer.
        buffer = self._buffers[n]
        return len(buffer) >= rows and buffer.shape[1] == width and buffer.dtype == dtype


_UNUSED = 2
"""sys.getrefcount of a buffer that only the pool holds: the list's reference, and the call's own argument."""
_MOST = 16
"""Maximum number of buffers in the pool: two per cell, for several cells."""


@dataclass(frozen=True, eq=False)
class _Read:
    """Consecutive rows in the order of reading, with their tokens."""

    tokens: Ints
    """Token of each row, int64 [row]."""
    rows: dict[Cell, Array]
    """Cell -> [row, width], as a view of a window."""

    def copied(self) -> _Read:
        return _Read(self.tokens, {cell: rows.copy() for cell, rows in self.rows.items()})

    def cut(self, start: int, stop: int) -> _Read:
        return _Read(self.tokens[start:stop], {cell: rows[start:stop] for cell, rows in self.rows.items()})


def _joined(number: int, parts: Sequence[_Read]) -> Batch:
    # A batch within one window is a view of it: copying would cost a quarter of the rate.
    if len(parts) == 1:
        return Batch(number, parts[0].tokens, parts[0].rows)
    rows = {cell: np.concatenate([part.rows[cell] for part in parts]) for cell in parts[0].rows}
    return Batch(number, np.concatenate([part.tokens for part in parts]), rows)


def every(
    source: TokenRows, cells: Iterable[CellT], *, block: int, apart: int = 1
) -> Iterator[dict[CellT, Tensor]]:
    """Iterate over all rows of a source, block by block in stored order: cell -> float32 tensor [row, width].

    Arguments:
        source: The rows.
        cells: Cells to read.
        block: Tokens per block.
        apart: Use every `apart`-th block only; 1 for all rows.
    """
    requested = tuple(cells)
    for start, stop in zip(*(ends[::apart].tolist() for ends in source.blocks(block)), strict=True):
        tokens = source.tokens(start, stop)
        # A selected prompt may have no row in this block, after skipped positions and excluded ids.
        if not len(tokens):
            continue
        rows = {cell: np.empty((len(tokens), source.width(cell)), source.dtype(cell)) for cell in requested}
        for cell, out in rows.items():
            source.scatter(cell, tokens, out, np.arange(len(tokens)))
        yield {cell: as_tensor(values) for cell, values in rows.items()}
