"""The threshold above which scores sum to a given share of the total, without sorting all scores.

Radix selection: the bits of non-negative float64 numbers, read as integers, sort like the numbers. So sums by
the first 16 bits find the bin in which the cumulative sum reaches the share; the next pass splits that bin by
the next 16 bits, and a bin that is small enough is sorted. This takes at most four passes over the blocks,
and a few MB of memory for any number of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ...store.arrays import Floats

__all__ = ["share_threshold", "sorted_threshold"]

BITS, BINS = 16, 1 << 16
"""Number of bits that one pass over the scores distinguishes, and its number of bins."""
SORTED = 1 << 20
"""Largest number of scores that is sorted instead of split once more."""


def sorted_threshold(scores: Floats, share: float) -> float:
    """The score from which on larger scores sum to a share of the total, for scores in memory.

    Arguments:
        scores: Non-negative scores of any shape.
        share: Share of the total, 0 to 1.
    """
    return share_threshold(lambda: [scores], share)


def share_threshold(blocks: Callable[[], Iterable[Floats]], share: float) -> float:
    """The score at which the sum of all scores, largest first, reaches a share of the total.

    Arguments:
        blocks: Function that returns the non-negative scores, in blocks of any shape; called several times.
        share: Share of the total, 0 to 1.

    Returns:
        Threshold: scores at or above it sum to at least the share. inf if all scores are zero. Never 0: a
        share of 1 keeps exactly the positive scores.
    """
    # Sum of the scores above the current bin; leading bits of the scores in it; sum that is to be reached.
    above, prefix, target = 0.0, 0, 0.0
    for level in range(4):
        shift = 64 - BITS * (level + 1)
        sums, counts = np.zeros(BINS), np.zeros(BINS, np.int64)
        for bits, values in _with_prefix(blocks(), prefix, shift + BITS):
            digit = (bits >> np.uint64(shift)) & np.uint64(BINS - 1)
            sums += np.bincount(digit.astype(np.int64), weights=values, minlength=BINS)
            counts += np.bincount(digit.astype(np.int64), minlength=BINS)
        if level == 0:
            total = float(sums.sum())
            if total == 0:
                return float("inf")
            target = share * total
        bin_ = _crossing(above, sums, counts, target)
        above += float(sums[bin_ + 1 :].sum())
        prefix = (prefix << BITS) | bin_
        if shift == 0:
            return float(np.uint64(prefix).view(np.float64))  # all 64 bits are fixed: one number is left
        if counts[bin_] <= SORTED:
            break
    in_bin = [values for _, values in _with_prefix(blocks(), prefix, shift)]
    ranked = np.sort(np.concatenate(in_bin))[::-1]
    # Rounding of the cumulative sum may keep it below the target: then the smallest score of the bin.
    place = int(np.searchsorted(above + np.cumsum(ranked), target))
    return float(ranked[min(place, len(ranked) - 1)])


def _with_prefix(
    blocks: Iterable[Floats], prefix: int, shift: int
) -> Iterable[tuple[npt.NDArray[np.uint64], Floats]]:
    """Bits and values of the positive scores whose bits above `shift` are `prefix`."""
    for block in blocks:
        values = np.ascontiguousarray(block, np.float64).ravel()
        values = values[values > 0]  # zeros add nothing, and most edges are outside the causal cone
        bits = values.view(np.uint64)
        if shift < 64:  # the first pass has no prefix yet
            matches = (bits >> np.uint64(shift)) == np.uint64(prefix)
            bits, values = bits[matches], values[matches]
        yield bits, values


def _crossing(above: float, sums: Floats, counts: npt.NDArray[np.int64], target: float) -> int:
    """The bin in which the cumulative sum from the top bin down, starting at `above`, reaches `target`.

    The lowest bin that is not empty if rounding keeps the sum below the target.
    """
    non_empty = np.flatnonzero(counts)[::-1]
    reached = above + np.cumsum(sums[non_empty])
    return int(non_empty[min(int(np.searchsorted(reached, target)), len(non_empty) - 1)])
