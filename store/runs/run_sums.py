"""Reductions over a whole run (mean, sum, max): stored per segment, combined on reading, bit-reproducible.

A mean must not depend on how a run is cut into segments, on their order, or on the number of threads. So sums
are kept exactly: each value is split into `QUANTA` multiples, largest quantum first, each rounded to nearest.
Sums of such multiples are integers below 2^53 times the quantum, which float64 adds without rounding. Only
below the last quantum is a value rounded, by at most 2^-72; a float32 of at least 2^-47 is represented to its
last bit.

Readers without mizarr sum over segments and parts and divide by the number of tokens, exact to about 1e-15.

Method: Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array, Floats

__all__ = ["BELOW", "MOST_TOKENS", "PART", "QUANTA", "combined", "how_combined", "mean_of_parts"]

PART = "part"
"""Dimension name: last axis of a stored sum, one entry per quantum."""
# 28 bits apart: 2^26 multiples of at most 2^27 stay below 2^53, the limit of exact integers in float64.
_EXPONENTS = (13, -15, -43, -71)
QUANTA = tuple(2.0**exponent for exponent in _EXPONENTS)
"""Quantum (power of two) per part of a sum."""
BELOW = 2.0**40
"""Exclusive limit on magnitudes: 2^27 times the largest quantum."""
MOST_TOKENS = 1 << 26
"""Limit on the number of summed rows: 2^53 / 2^27."""


def combined(rows: Array, combine: str, over: int, dims: Sequence[str]) -> Array:
    """Combine the rows that a reduction (mean, sum, max over a run) stored per segment into one.

    Arguments:
        rows: [segment, …]; with quantum parts on the last axis if its dimension is `PART`.
        combine: "mean", "sum" or "max".
        over: Number of tokens of the run, the divisor of a mean.
        dims: Dimension names of `rows`.

    Returns:
        The reduction over the run, without the segment and part axes. A max is 0 where it is -inf in every
        segment, that is over no values.
    """
    if combine == "max":
        largest: Array = rows.max(axis=0)
        return np.where(np.isneginf(largest), np.zeros_like(largest), largest)
    if dims[-1] == PART:
        return mean_of_parts(rows, over if combine == "mean" else 1)
    total: Array = rows.sum(axis=0)
    return total


def how_combined(combine: str, over: int, dims: Sequence[str]) -> str:
    """Text that tells readers without mizarr how to combine the stored rows, as an attribute of the array.

    Arguments:
        combine: See `combined`.
        over: See `combined`.
        dims: See `combined`.
    """
    axes = f"segment and {PART}" if dims[-1] == PART else "segment"
    divided = ", divided by them" if combine == "mean" else ""
    return f"{'max' if combine == 'max' else 'sum'} over {axes}, of {over} tokens{divided}"


def mean_of_parts(parts: Floats, count: int) -> Floats:
    """Divide exact sums, stored in parts per segment, by the number of summed rows.

    Arguments:
        parts: Multiples of each power of two in `QUANTA`, [segment, …, part].
        count: Number of rows that were summed.

    Returns:
        Means [...], each rounded once; NaN where any part is not finite.
    """
    smallest_exponent = _EXPONENTS[-1]
    # Sums in units of the smallest quantum. Python integers: over many segments a sum may exceed 64 bits, and
    # the final division is exact.
    total: Array = np.zeros(parts.shape[1:-1], object)
    is_not_finite = ~np.isfinite(parts).all(axis=(0, -1))
    for part, (quantum, exponent) in enumerate(zip(QUANTA, _EXPONENTS, strict=True)):
        multiples = np.where(is_not_finite, 0, parts[..., part]) / quantum
        multiple_of_run = multiples.astype(np.int64).sum(axis=0).astype(object)
        total = total + multiple_of_run * (1 << (exponent - smallest_exponent))
    # np.asarray: for a single number the division returns a plain Python float.
    mean = np.asarray(total / (count << -smallest_exponent), np.float64)
    return np.where(is_not_finite, np.nan, mean)
