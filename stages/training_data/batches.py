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
    """Activations of some tokens at several hook points and layers."""

    number: int
    """Number of the batch, counted over all epochs."""
    tokens: Ints
    """Index of each row's token on the token axis of the source, int64 [row]."""
    rows: dict[Cell, Array]
    """(hook kind, layer) -> activations [row, width] in the stored dtype. Do not modify or keep them: they
    may be a view of a buffer that is used again."""

    def tensors(self) -> dict[Cell, Tensor]:
        """(hook kind, layer) -> activations as a float32 tensor [row, width]."""
        return {cell: as_tensor(rows) for cell, rows in self.rows.items()}


@dataclass(frozen=True, eq=False)
class Batches:
    """Shuffled batches of stored activations.

    Raises:
        ConfigError: An epoch has fewer rows than a batch.
    """

    source: TokenRows
    """The stored activations, and the selection of their tokens."""
    cells: tuple[Cell, ...]
    """(hook kind, layer) of all activations that a batch holds."""
    batch: int
    """Number of rows per batch."""
    window: int
    """Number of rows that are shuffled together."""
    block: int
    """Number of neighbouring tokens that enter a window together."""
    seed: int
    """Seed of the shuffled order."""
    epochs: int | None = None
    """Number of passes over the rows; None for an endless sequence."""
    drop_last: bool = False
    """Whether to leave out a shorter last batch."""

    def __post_init__(self) -> None:
        if (count := self.order.rows) < self.batch:
            raise ConfigError(
                f"expected stored activations of at least one batch of {self.batch} tokens, found {count} "
                "tokens; capture more prompts, or set a smaller batch"
            )

    @cached_property
    def order(self) -> Order:
        """Shuffled order of the rows of all blocks."""
        # Rows per block, not tokens: skipped positions and excluded ids leave blocks unequally full.
        counts = self.source.counts(*self._blocks)
        return Order(counts, max(1, self.window // self.block), self.seed)

    @cached_property
    def _blocks(self) -> tuple[Ints, Ints]:
        """(first token, token after the last) of each block, int64 [block] each."""
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
        """Batches in order, from number `start` on.

        Arguments:
            start: Number of the first batch.
            worker: (number of the worker, number of workers); only the batches of this worker are made.
        """
        number, parts, missing_rows = start + worker[0], list[_WindowRows](), 0
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
                    yield _joined_batch(number, [*parts, taken])
                    number, parts = number + worker[1], []
                # Deleted before the next window is read: _Memory reuses only buffers that nobody references.
                del taken
            del read

    def _size(self, number: int) -> int:
        """Number of rows of a batch: `batch`, or fewer for the last one."""
        if self.epochs is None:
            return self.batch
        return min(self.batch, self.epochs * self.order.rows - number * self.batch)

    def _windows(self, start: int, worker: tuple[int, int]) -> Iterator[_WindowRows]:
        """Yield the rows of successive windows; the next window is read while the current one is used.

        Arguments as in `since`.
        """
        memory = _Memory()
        end = None
        # total * batch is past the last row, unless drop_last leaves the last rows out.
        if self.epochs is not None and self.total is not None:
            end = min(self.total * self.batch, self.epochs * self.order.rows)
        # The None at the end lets the loop return the last window, which has no successor to read ahead.
        pieces: Iterator[RowStretch | None] = chain(self.order.pieces(start * self.batch, end), [None])
        # One reader: at most two windows are in memory. Two readers were no faster on two cores (measured).
        with ThreadPoolExecutor(1, thread_name_prefix="window") as reader:
            ahead: Future[_WindowRows] | None = None
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

    def _read(self, piece: RowStretch, start: int, worker: tuple[int, int], memory: _Memory) -> _WindowRows:
        """Read those rows of a stretch that belong to batches of a worker, in the shuffled order.

        Arguments:
            piece: Stretch of rows of one window.
            start: Number of the first batch of this iteration, from which workers are counted.
            worker: (number of the worker, number of workers).
            memory: Pool of buffers.
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
        return _WindowRows(window_tokens[selected], rows)


class _Memory:
    """Pool of window buffers. A buffer is reused once no batch references it.

    Fresh memory costs a page fault per page: a scatter into it takes 1.3 times as long (measured).
    """

    def __init__(self) -> None:
        self._buffers: list[Array] = []

    def rows(self, rows: int, width: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised array [row, width], which may be a buffer that was used before.

        Arguments:
            rows: Number of rows.
            width: Length of a row.
            dtype: Dtype of the array.
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
        """Whether buffer number `n` has the dtype and width, and at least as many rows."""
        # By number: an argument of this method would be one more reference to the buffer.
        buffer = self._buffers[n]
        return len(buffer) >= rows and buffer.shape[1] == width and buffer.dtype == dtype


_UNUSED = 2
"""sys.getrefcount of a buffer that only the pool holds: the list's reference, and the call's own argument."""
_MOST = 16
"""Maximum number of buffers in the pool: two per cell, for several cells."""


@dataclass(frozen=True, eq=False)
class _WindowRows:
    """Consecutive rows of the shuffled order that lie in one window, with their tokens."""

    tokens: Ints
    """Index of each row's token, int64 [row]."""
    rows: dict[Cell, Array]
    """(hook kind, layer) -> activations [row, width], a view of the buffer of the window."""

    def copied(self) -> _WindowRows:
        """A copy that does not share memory with the window."""
        return _WindowRows(self.tokens, {cell: rows.copy() for cell, rows in self.rows.items()})

    def cut(self, start: int, stop: int) -> _WindowRows:
        """The rows from `start` up to `stop`, as views."""
        return _WindowRows(
            self.tokens[start:stop], {cell: rows[start:stop] for cell, rows in self.rows.items()}
        )


def _joined_batch(number: int, parts: Sequence[_WindowRows]) -> Batch:
    """The batch with some number from its rows, which may come from several windows."""
    # A batch within one window is a view of it: copying would cost a quarter of the rate.
    if len(parts) == 1:
        return Batch(number, parts[0].tokens, parts[0].rows)
    rows = {cell: np.concatenate([part.rows[cell] for part in parts]) for cell in parts[0].rows}
    return Batch(number, np.concatenate([part.tokens for part in parts]), rows)


def every(
    source: TokenRows, cells: Iterable[CellT], *, block: int, apart: int = 1
) -> Iterator[dict[CellT, Tensor]]:
    """Iterate over stored activations in stored order, block by block.

    Arguments:
        source: The stored activations.
        cells: (hook kind, layer) of the activations to read.
        block: Number of tokens per block.
        apart: Use every `apart`-th block only; 1 for all.

    Returns:
        For each block (hook kind, layer) -> float32 tensor [row, width].
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
