"""Tokens of a corpus whose states point where one token's state points, found in bounded memory.

Of a small corpus all tokens are looked at; of a large one as many as `SAMPLE_BYTES` of states hold, in
stretches spread evenly over it, which says so. Cosines are of states as they are stored: nothing is
subtracted, so that in most models all of them lie high, and the median beside them says how high.

Border: rows of one variable at one layer in, packed places out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...store.arrays import Floats, Ints
from .opened import OpenedRun

__all__ = ["Similar", "most_similar", "stretches"]

SAMPLE_BYTES = 12 << 20
"""Of states read per question, as float32: a tenth of a second or two."""
STRETCHES = 24
MOST = 12
"""Tokens told."""


@dataclass(frozen=True)
class Similar:
    """tokens: packed places, most similar first. cosine: theirs, float64. median: of all that were looked at.
    looked, of: tokens looked at, and all there are."""

    tokens: Ints
    cosine: Floats
    median: float
    looked: int
    of: int


def stretches(n_tokens: int, row_bytes: int) -> list[tuple[int, int]]:
    """Ranges of tokens to look at: all of them, or `STRETCHES` of equal length, evenly spread.

    >>> stretches(100, 4), len(stretches(10**9, 1024))
    ([(0, 100)], 24)
    """
    room = max(STRETCHES, SAMPLE_BYTES // row_bytes)
    if n_tokens <= room:
        return [(0, n_tokens)]
    length = room // STRETCHES
    starts = np.linspace(0, n_tokens - length, STRETCHES).astype(int).tolist()
    return [(start, start + length) for start in starts]


def most_similar(run: OpenedRun, variable: str, layer: int | None, token: int, most: int = MOST) -> Similar:
    """The tokens most similar to one by cosine, without itself; states of length zero are similar to none."""
    own = run.rows(variable, layer, token, token + 1)[0]
    own = own / (np.linalg.norm(own) or 1.0)
    n_tokens = run.entry.tokens.n_tokens
    places, cosines = [], []
    for start, stop in stretches(n_tokens, 4 * math.prod(run.spec(variable).tail)):
        for at in range(start, stop, step := 1 << 13):
            rows = run.rows(variable, layer, at, min(at + step, stop))
            length = np.sqrt(np.einsum("th,th->t", rows, rows))
            with np.errstate(invalid="ignore", divide="ignore"):
                cosines.append(np.where(length > 0, rows @ own / length, 0.0))
            places.append(np.arange(at, at + len(rows)))
    place, cosine = np.concatenate(places), np.concatenate(cosines).astype(np.float64)
    others = place != token
    place, cosine = place[others], cosine[others]
    best = np.argsort(-cosine, kind="stable")[:most]
    median = float(np.median(cosine)) if len(cosine) else math.nan
    return Similar(place[best], cosine[best], median, len(place) + int((~others).sum()), n_tokens)
