"""Which rows in which order: a shuffle of two levels, a function of (seed, epoch); a place in it is a number.

Border: counts and numbers; what the rows hold is not known here.

Idea: shuffling activations on disk costs more than training on them. The store keeps the order of the
prompts, and order is made at reading, on two levels. An epoch is a permutation of blocks of neighbouring
tokens; some blocks in a row are a window, held in memory; a window is permuted row by row. Epochs follow
each other without a gap, so that row r of the whole is in epoch r // rows, and where a training stands is the
number of batches it took.

How well it mixes: a window holds `window / block` blocks drawn from everywhere. Tokens of one block are
always in one window, a third of its rows apart on average, and a batch of B rows has about B block / window
of each block. Tokens of one document in different blocks are as far apart as any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Order", "RowStretch"]

Indices = npt.NDArray[np.int64]
_BLOCKS, _ROWS = 1, 2  # tags that keep the two kinds of permutation apart


@dataclass(frozen=True)
class RowStretch:
    """Rows of one window that follow each other in the order. first: the number of the first of them in all
    epochs. window: which, and of which epoch. start, stop: of the permuted window.
    """

    epoch: int
    window: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Order:
    """counts: rows of each block. per_window: blocks of a window."""

    counts: Indices
    per_window: int
    seed: int

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return int(self.counts.sum())

    @property
    def windows(self) -> int:
        """Windows of one epoch; the last may have fewer blocks than the others."""
        return -(-len(self.counts) // self.per_window)

    def blocks(self, epoch: int, window: int) -> Indices:
        """Which blocks are in a window, in the order they are read."""
        return self._blocks(epoch)[window * self.per_window : (window + 1) * self.per_window]

    def permutation(self, epoch: int, window: int, rows: int) -> Indices:
        """The order of the rows of a window that has so many."""
        return np.random.default_rng([self.seed, _ROWS, epoch, window]).permutation(rows)

    def pieces(self, first: int, stop: int | None) -> Iterator[RowStretch]:
        """Rows `first` to `stop` of all epochs, without end where that is None, window by window."""
        epoch, done = divmod(first, self.rows)
        while stop is None or epoch * self.rows < stop:
            sizes = np.add.reduceat(
                self.counts[self._blocks(epoch)], np.arange(0, len(self.counts), self.per_window)
            )
            ends = np.cumsum(sizes)  # of each window, in rows of the epoch
            for window in range(int(np.searchsorted(ends, done, side="right")), self.windows):
                here = epoch * self.rows + int(ends[window] - sizes[window])
                begin, end = max(0, first - here), int(sizes[window])
                if stop is not None:
                    end = min(end, stop - here)
                if begin < end:
                    yield RowStretch(epoch, window, here + begin, begin, end)
            epoch, done = epoch + 1, 0

    def _blocks(self, epoch: int) -> Indices:
        return np.random.default_rng([self.seed, _BLOCKS, epoch]).permutation(len(self.counts))
