"""What is kept of a whole run: a row for each segment, put together when it is read.

Border: rows in, one out; who made them, and where they lie, is told elsewhere.

A mean must not depend on how a run is cut, in which order its segments come or how many threads add: so sums
are exact. Each value is the sum of `QUANTA` multiples, the largest first, each rounded to the nearest; sums
of such multiples are whole numbers below 2^53 of their quantum, which float64 adds without rounding. Below
the last quantum a value is rounded, which is 2^-72 at most; a float32 of 2^-47 or more is met to its last
bit. Readers without mizarr add segments and parts, and divide by the number of tokens, to about 1e-15.

Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013, keep such parts of a running sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array, Floats

__all__ = ["BELOW", "MOST_TOKENS", "PART", "QUANTA", "combined", "how_combined", "mean_of_parts"]

PART = "part"
"""Axis of the parts of a sum."""
_EXPONENTS = (13, -15, -43, -71)
QUANTA = tuple(2.0**exponent for exponent in _EXPONENTS)
"""What each part is a multiple of."""
BELOW = 2.0**40
"""Magnitudes are smaller: 2^27 of the first quantum."""
MOST_TOKENS = 1 << 26
"""Rows whose parts one sum holds, 2^53 over 2^27."""


def combined(rows: Array, combine: str, over: int, dims: Sequence[str]) -> Array:
    """Rows of segments [segment, …] -> what they are of the run: a "mean" over so many tokens, a "sum", or a
    "max" (0 where no segment has any). dims: of the array, `PART` the last where sums are in parts."""
    if combine == "max":
        largest: Array = rows.max(axis=0)
        return np.where(np.isneginf(largest), np.zeros_like(largest), largest)
    if dims[-1] == PART:
        return mean_of_parts(rows, over if combine == "mean" else 1)
    total: Array = rows.sum(axis=0)
    return total


def how_combined(combine: str, over: int, dims: Sequence[str]) -> str:
    """What readers without mizarr are told."""
    axes = " and ".join(("segment", *([PART] if dims[-1] == PART else [])))
    divided = ", divided by them" if combine == "mean" else ""
    return f"{'max' if combine == 'max' else 'sum'} over {axes}, of {over} tokens{divided}"


def mean_of_parts(parts: Floats, count: int) -> Floats:
    """Sums of each segment [segment, …, part] -> means over `count` rows, each rounded once; NaN where a
    part is."""
    total: Array = np.zeros(parts.shape[1:-1], object)
    unknown = ~np.isfinite(parts).all(axis=(0, -1))
    for part, (quantum, exponent) in enumerate(zip(QUANTA, _EXPONENTS, strict=True)):
        multiples = np.where(unknown, 0, parts[..., part]) / quantum
        # Whole numbers of Python: of all segments they may be more than 64 bits, and they divide exactly.
        whole = multiples.astype(np.int64).sum(axis=0).astype(object)
        total = total + whole * (1 << (exponent - _EXPONENTS[-1]))
    mean = np.asarray(total / (count << -_EXPONENTS[-1]), np.float64)  # of one number it is Python's own
    return np.where(unknown, np.nan, mean)
