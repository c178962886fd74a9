"""Search for the tokens whose activations are most similar to those of one token, in bounded memory.

A small run is searched completely, a large one in `STRETCHES` evenly spaced ranges of tokens, whose
activations take `SAMPLE_BYTES` together. Similarity is the cosine of the stored activations, without
centring: in most models all cosines are therefore high, and the median over all compared tokens is reported
beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...store.arrays import Floats, Ints
from .opened import OpenedRun

__all__ = ["SimilarTokens", "most_similar", "stretches"]

SAMPLE_BYTES = 12 << 20
"""Bytes of activations, as float32, that one search reads at most; this takes 0.1 to 0.2 seconds."""
STRETCHES = 24
"""Number of ranges of tokens in which a large run is searched."""
MOST = 12
"""Largest number of similar tokens that a search returns by default."""


@dataclass(frozen=True)
class SimilarTokens:
    """Result of a search for similar tokens."""

    tokens: Ints
    """Indices of the tokens along the packed axis, most similar first."""
    cosine: Floats
    """Cosine similarity of each of these tokens, float64."""
    median: float
    """Median cosine over all compared tokens; NaN if there are none."""
    n_compared: int
    """Number of tokens that were read, the token itself included."""
    n_tokens: int
    """Number of tokens of the run."""


def stretches(n_tokens: int, row_bytes: int) -> list[tuple[int, int]]:
    """Packed ranges (start, stop) of the tokens to compare: the whole run, or STRETCHES evenly spaced ranges.

    Arguments:
        n_tokens: Number of tokens of the run.
        row_bytes: Bytes of one token's activation as float32.

    >>> stretches(100, 4), len(stretches(10**9, 1024))
    ([(0, 100)], 24)
    """
    # At least one token per range.
    n_compared = max(STRETCHES, SAMPLE_BYTES // row_bytes)
    if n_tokens <= n_compared:
        return [(0, n_tokens)]
    length = n_compared // STRETCHES
    starts = np.linspace(0, n_tokens - length, STRETCHES).astype(int).tolist()
    return [(start, start + length) for start in starts]


def most_similar(
    run: OpenedRun, variable: str, layer: int | None, token: int, most: int = MOST
) -> SimilarTokens:
    """The tokens with the highest cosine similarity to one token.

    Arguments:
        run: The run to search.
        variable: Stored variable to compare, such as "resid_post".
        layer: Layer of the variable; None if it has none.
        token: Packed index of the token; it is not part of the result.
        most: Largest number of similar tokens to return.
    """
    query = run.rows(variable, layer, token, token + 1)[0]
    # `or 1.0`: the norm of a zero vector is not a divisor.
    query = query / (np.linalg.norm(query) or 1.0)
    n_tokens = run.entry.tokens.n_tokens
    index_parts, cosine_parts = [], []
    for start, stop in stretches(n_tokens, 4 * math.prod(run.spec(variable).tail)):
        # 8192 tokens at a time, so that the memory does not grow with the range.
        for row_start in range(start, stop, step := 1 << 13):
            rows = run.rows(variable, layer, row_start, min(row_start + step, stop))
            norms = np.sqrt(np.einsum("th,th->t", rows, rows))
            # A zero vector has no direction: its cosine is set to 0.
            with np.errstate(invalid="ignore", divide="ignore"):
                cosine_parts.append(np.where(norms > 0, rows @ query / norms, 0.0))
            index_parts.append(np.arange(row_start, row_start + len(rows)))
    index, cosine = np.concatenate(index_parts), np.concatenate(cosine_parts).astype(np.float64)
    n_compared = len(index)
    is_candidate = index != token
    index, cosine = index[is_candidate], cosine[is_candidate]
    # A stable sort: of equal cosines the earlier token comes first, so that a page is always the same.
    best = np.argsort(-cosine, kind="stable")[:most]
    median = float(np.median(cosine)) if len(cosine) else math.nan
    return SimilarTokens(index[best], cosine[best], median, n_compared, n_tokens)
