"""Two-level shuffle of rows, as a function of (seed, epoch); a position in it is one number.

Shuffling activations on disk would cost more than training on them. The store keeps the order of prompts, and
rows are shuffled on reading: an epoch is a permutation of blocks of neighbouring tokens; consecutive blocks
of it form a window, which is held in memory; within a window, rows are permuted. Epochs follow each other
without a gap, so row r of all epochs is in epoch r // rows, and the state of a training run is the number of
batches it has taken.

Quality of mixing: a window has `window / block` blocks drawn from the whole data. Tokens of one block are
always in one window, on average a third of its rows apart, and a batch of B rows has about B block / window
rows of each block. Tokens of one document in different blocks are as far apart as any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...store.arrays import Ints

__all__ = ["Order", "RowStretch"]

_BLOCKS, _ROWS = 1, 2
"""Part of the random seed that makes permutations of blocks and of rows independent."""


@dataclass(frozen=True)
class RowStretch:
    """Consecutive rows of the shuffled order that lie in one window."""

    epoch: int
    """Number of the epoch, from 0."""
    window: int
    """Number of the window within the epoch, from 0."""
    first: int
    """Number of the first row, counted over all epochs."""
    start: int
    """Index of the first row within the permuted window."""
    stop: int
    """Index after the last row within the permuted window."""


@dataclass(frozen=True, eq=False)
class Order:
    """Shuffled order of the rows of all epochs, computed from a seed."""

    counts: Ints
    """Number of rows of each block, int64 [block]."""
    per_window: int
    """Number of blocks per window."""
    seed: int
    """Seed of all permutations."""

    @property
    def rows(self) -> int:
        """Number of rows per epoch."""
        return int(self.counts.sum())

    @property
    def windows(self) -> int:
        """Number of windows per epoch; the last may have fewer blocks."""
        return -(-len(self.counts) // self.per_window)

    def blocks(self, epoch: int, window: int) -> Ints:
        """Numbers of the blocks of a window, in the order of reading, int64 [block].

        Arguments:
            epoch: number of the epoch.
            window: number of the window within it.
        """
        return self._blocks(epoch)[window * self.per_window : (window + 1) * self.per_window]

    def permutation(self, epoch: int, window: int, rows: int) -> Ints:
        """Random permutation of the rows of a window.

        Arguments:
            epoch: number of the epoch.
            window: number of the window within it.
            rows: number of rows in the window.
        """
        # Seeded by its position, so that any window can be computed without those before it.
        return np.random.default_rng([self.seed, _ROWS, epoch, window]).permutation(rows)

    def pieces(self, first: int, stop: int | None) -> Iterator[RowStretch]:
        """Stretches of rows of all epochs, window by window.

        Arguments:
            first: number of the first row, counted over all epochs.
            stop: number after the last row; None for an endless sequence.
        """
        epoch, rows_before = divmod(first, self.rows)
        while stop is None or epoch * self.rows < stop:
            # Rows per window of this epoch: windows have equally many blocks, but blocks differ in rows.
            sizes = np.add.reduceat(
                self.counts[self._blocks(epoch)], np.arange(0, len(self.counts), self.per_window)
            )
            # End of each window, in rows of the epoch.
            ends = np.cumsum(sizes)
            # Starts in the window of the first row: resuming a long training permutes no window before it.
            for window in range(int(np.searchsorted(ends, rows_before, side="right")), self.windows):
                window_start = epoch * self.rows + int(ends[window] - sizes[window])
                begin, end = max(0, first - window_start), int(sizes[window])
                if stop is not None:
                    end = min(end, stop - window_start)
                if begin < end:
                    yield RowStretch(epoch, window, window_start + begin, begin, end)
            epoch, rows_before = epoch + 1, 0

    def _blocks(self, epoch: int) -> Ints:
        """Permutation of all blocks in an epoch."""
        return np.random.default_rng([self.seed, _BLOCKS, epoch]).permutation(len(self.counts))
