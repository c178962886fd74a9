"""Batches of stored activations in the order of order.py, read a window at a time.

Border: rows and their order; what the rows mean is the trainer's.

One thread reads the next window while this one is used; two windows are all that is in memory. Rows are
written where they will be used, so that a batch is a range of a window. Batches run across the borders of
windows and epochs.

Batches are numbered through all epochs, and number b is the same whoever makes it: worker i of n makes those
with b % n == i, counted from where they start, and reads the rows of these only.
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

from ...store.errors import ConfigError
from .conversion import as_tensor
from .order import Order, RowStretch

if TYPE_CHECKING:
    from torch import Tensor

    from ...store.arrays import Array
    from .stored import Cell, TokenRows

__all__ = ["Batch", "Batches", "every"]

Indices = npt.NDArray[np.int64]
CellT = TypeVar("CellT", bound="Cell")


@dataclass(frozen=True, eq=False)
class Batch:
    """number: through all epochs. tokens: of its rows, on the axis of the source. rows: cell -> [row, width]
    in the stored dtype, aligned; not to be changed or kept, as they may be a part of a window.
    """

    number: int
    tokens: Indices
    rows: dict[Cell, Array]

    def tensors(self) -> dict[Cell, Tensor]:
        """The rows of each cell, float32."""
        return {cell: as_tensor(rows) for cell, rows in self.rows.items()}


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of the rows of a source, for `epochs`, or without end.

    window: rows shuffled together, of blocks of `block` neighbouring tokens. drop_last: leave out a last
    batch that is shorter. Raises ConfigError when an epoch does not fill a batch.
    """

    source: TokenRows
    cells: tuple[Cell, ...]
    batch: int
    window: int
    block: int
    seed: int
    epochs: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if (count := self.order.rows) < self.batch:
            raise ConfigError(
                f"expected at least one batch of {self.batch} tokens to train on, found {count}; capture "
                "more prompts, or set a smaller batch"
            )

    @cached_property
    def order(self) -> Order:
        """Of the rows of all blocks."""
        counts = self.source.counts(*self._blocks)
        return Order(counts, max(1, self.window // self.block), self.seed)

    @cached_property
    def _blocks(self) -> tuple[Indices, Indices]:
        return self.source.blocks(self.block)

    @property
    def total(self) -> int | None:
        """Batches of all epochs; None where there is no end."""
        if self.epochs is None:
            return None
        rows = self.epochs * self.order.rows
        return rows // self.batch if self.drop_last else -(-rows // self.batch)

    def since(self, start: int, worker: tuple[int, int] = (0, 1)) -> Generator[Batch, None, None]:
        """Batch number `start` and those behind it; worker: (which, of how many), for its share of them."""
        number, parts, wanted = start + worker[0], list[_Read](), 0
        for read in self._windows(start, worker):
            at = 0
            while at < len(read.tokens):
                wanted = wanted or self._size(number)
                taken = read.cut(at, at + wanted)
                wanted, at = wanted - len(taken.tokens), at + len(taken.tokens)
                if wanted:
                    parts.append(taken.copied())  # so that a window goes when it is used up
                else:
                    yield _joined(number, [*parts, taken])
                    number, parts = number + worker[1], []
                del taken
            del read

    def _size(self, number: int) -> int:
        """Rows of a batch, by its number: all have `batch`, the last may have fewer."""
        if self.epochs is None:
            return self.batch
        return min(self.batch, self.epochs * self.order.rows - number * self.batch)

    def _windows(self, start: int, worker: tuple[int, int]) -> Iterator[_Read]:
        """What is read of each window, the next one meanwhile."""
        memory = _Memory()
        end = None
        if self.epochs is not None and self.total is not None:
            end = min(self.total * self.batch, self.epochs * self.order.rows)
        pieces: Iterator[RowStretch | None] = chain(self.order.pieces(start * self.batch, end), [None])
        with ThreadPoolExecutor(1, thread_name_prefix="window") as reader:
            ahead: Future[_Read] | None = None
            try:
                for piece in pieces:
                    found = None if ahead is None else ahead.result()
                    ahead = None if piece is None else reader.submit(self._read, piece, start, worker, memory)
                    if found is not None:
                        yield found
                    del found
            finally:
                reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, piece: RowStretch, start: int, worker: tuple[int, int], memory: _Memory) -> _Read:
        """The rows of a piece that are in batches of a worker, in their order."""
        blocks = self.order.blocks(piece.epoch, piece.window)
        tokens = [self.source.tokens(int(self._blocks[0][n]), int(self._blocks[1][n])) for n in blocks]
        held = np.concatenate(tokens)
        chosen = self.order.permutation(piece.epoch, piece.window, len(held))[piece.start : piece.stop]
        which, workers = worker
        if workers > 1:
            numbers = (piece.first + np.arange(len(chosen))) // self.batch
            chosen = chosen[(numbers - start) % workers == which]
        places = np.full(len(held), -1, np.int64)
        places[chosen] = np.arange(len(chosen))
        rows = {
            cell: memory.rows(len(chosen), self.source.width(cell), self.source.dtype(cell))
            for cell in self.cells
        }
        at = 0
        for some in tokens:
            to = places[at : at + len(some)]
            at += len(some)
            mine = to >= 0
            if mine.any():
                for cell, out in rows.items():
                    self.source.scatter(cell, some[mine], out, to[mine])
        return _Read(held[chosen], rows)


class _Memory:
    """Memory of windows that nobody holds a part of any more, for those that are read next.

    Fresh memory costs a fault a page: a scatter into it takes 1.3 times as long, measured.
    """

    def __init__(self) -> None:
        self._held: list[Array] = []

    def rows(self, rows: int, width: int, dtype: npt.DTypeLike) -> Array:
        """Uninitialised [row, width]."""
        found = None
        for n in range(len(self._held)):
            # A part of an array, and a tensor over it, holds it: where the list and this call alone do,
            # nobody sees what is written over it.
            if sys.getrefcount(self._held[n]) == _NOBODY_ELSE and self._fits(n, rows, width, dtype):
                found = self._held.pop(n)
                break
        if found is None:
            found = np.empty((rows, width), dtype)
        self._held = [*self._held, found][-_MOST:]
        return found[:rows]

    def _fits(self, n: int, rows: int, width: int, dtype: npt.DTypeLike) -> bool:
        held = self._held[n]
        return len(held) >= rows and held.shape[1] == width and held.dtype == dtype


_NOBODY_ELSE = 2
_MOST = 16
"""Windows remembered: two for each of a few cells."""


@dataclass(frozen=True, eq=False)
class _Read:
    """Rows that follow each other in the order, with their tokens."""

    tokens: Indices
    rows: dict[Cell, Array]

    def copied(self) -> _Read:
        return _Read(self.tokens, {cell: rows.copy() for cell, rows in self.rows.items()})

    def cut(self, start: int, stop: int) -> _Read:
        return _Read(self.tokens[start:stop], {cell: rows[start:stop] for cell, rows in self.rows.items()})


def _joined(number: int, parts: Sequence[_Read]) -> Batch:
    if len(parts) == 1:
        return Batch(number, parts[0].tokens, parts[0].rows)
    rows = {cell: np.concatenate([part.rows[cell] for part in parts]) for cell in parts[0].rows}
    return Batch(number, np.concatenate([part.tokens for part in parts]), rows)


def every(
    source: TokenRows, cells: Iterable[CellT], *, block: int, apart: int = 1
) -> Iterator[dict[CellT, Tensor]]:
    """Rows of a source, block by block in the order of the store: cell -> float32 [row, width].

    apart: every how manieth block; 1 for all rows.
    """
    asked = tuple(cells)
    for start, stop in zip(*(ends[::apart].tolist() for ends in source.blocks(block)), strict=True):
        tokens = source.tokens(start, stop)
        if not len(tokens):
            continue
        rows = {cell: np.empty((len(tokens), source.width(cell)), source.dtype(cell)) for cell in asked}
        for cell, out in rows.items():
            source.scatter(cell, tokens, out, np.arange(len(tokens)))
        yield {cell: as_tensor(held) for cell, held in rows.items()}
