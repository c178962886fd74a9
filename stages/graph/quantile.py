"""Which score keeps a given share of all of it, without sorting all scores.

Border: non-negative numbers in blocks that can be read several times; knows no graphs.

Idea: radix selection. The bits of a non-negative float64, read as an integer, have the order of the numbers,
so counts and sums by the first 16 bits find the bin in which the cumulative sum passes the share; the next
pass looks at the next 16 bits within that bin, and a bin small enough is sorted. At most four passes over the
blocks, and a few MB, however many scores there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ...store.arrays import Floats

__all__ = ["share_threshold", "sorted_threshold"]

BITS, BINS = 16, 1 << 16
SORTED = 1 << 20
"""Scores that are sorted at once."""


def sorted_threshold(scores: Floats, share: float) -> float:
    """The score down to which the largest scores sum to `share` of all; inf where all are zero."""
    return share_threshold(lambda: [scores], share)


def share_threshold(blocks: Callable[[], Iterable[Floats]], share: float) -> float:
    """The score at which the cumulative sum of the scores, in descending order, first reaches `share` (0 to
    1) of the total: keeping what is >= keeps that share.

    blocks: gives the same non-negative scores, of any shape, each time it is called. inf where all are zero.
    Never 0: a share of 1 keeps every positive score and no other.
    """
    above, prefix, wanted = 0.0, 0, 0.0
    for level in range(4):
        shift = 64 - BITS * (level + 1)
        sums, counts = np.zeros(BINS), np.zeros(BINS, np.int64)
        for bits, values in _chosen(blocks(), prefix, shift + BITS):
            digit = (bits >> np.uint64(shift)) & np.uint64(BINS - 1)
            sums += np.bincount(digit.astype(np.int64), weights=values, minlength=BINS)
            counts += np.bincount(digit.astype(np.int64), minlength=BINS)
        if level == 0:
            total = float(sums.sum())
            if total == 0:
                return float("inf")
            wanted = share * total
        bin_ = _crossing(above, sums, counts, wanted)
        above += float(sums[bin_ + 1 :].sum())
        prefix = (prefix << BITS) | bin_
        if shift == 0:
            return float(np.uint64(prefix).view(np.float64))  # all of them are this number
        if counts[bin_] <= SORTED:
            break
    found = [values for _, values in _chosen(blocks(), prefix, shift)]
    ranked = np.sort(np.concatenate(found))[::-1]
    place = int(np.searchsorted(above + np.cumsum(ranked), wanted))
    return float(ranked[min(place, len(ranked) - 1)])


def _chosen(
    blocks: Iterable[Floats], prefix: int, shift: int
) -> Iterable[tuple[npt.NDArray[np.uint64], Floats]]:
    """Bits and values of the positive scores whose bits above `shift` are `prefix`."""
    for block in blocks:
        values = np.ascontiguousarray(block, np.float64).ravel()
        values = values[values > 0]
        bits = values.view(np.uint64)
        if shift < 64:
            kept = (bits >> np.uint64(shift)) == np.uint64(prefix)
            bits, values = bits[kept], values[kept]
        yield bits, values


def _crossing(above: float, sums: Floats, counts: npt.NDArray[np.int64], wanted: float) -> int:
    """The bin in which the sum from the top reaches `wanted`; the lowest one that holds anything if rounding
    keeps it from getting there."""
    held = np.flatnonzero(counts)[::-1]
    reached = above + np.cumsum(sums[held])
    return int(held[min(int(np.searchsorted(reached, wanted)), len(held) - 1)])
