"""Chunked linear recurrences: matrix products over all chunks at once, then a loop over chunks.

Reads within a chunk, and the chunk's contribution to the state, are products of the matrices of pairs.py,
computed for all chunks at once. With a correction, every token also writes what its alpha reads, u_t =
alpha_t^T S_{t-1}. Within a chunk these u solve a unit lower triangular system, so they are linear in the
state before the chunk and in its values (Yang et al., Parallelizing Linear Transformers with the Delta Rule,
2024, section 3). Only reads of that state depend on the previous chunk.

Axes: as in recurrence.py; chunk = C tokens of one head of one prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .pairs import ChunkPairs, pair
from .terms import Terms

LENGTH = 32
"""Tokens per chunk."""


def by_chunks(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """What each token reads from the state, [B, H, T, V], and the state after the last token, [B, H, K, V],
    computed in chunks of tokens: the kernel for many tokens and any decay.

    Arguments:
        terms: Inputs of the linear recurrence at each token.
        state: State before the first token, [B, H, K, V].
    """
    length = terms.values.shape[2]
    if terms.correction is None:
        read, state = _diagonal(terms, state)
    else:
        read, state = _corrected(terms, *terms.correction, state)
    return read.flatten(2, 3)[:, :, :length], state


def _chunked(x: Tensor) -> Tensor:
    """Tokens x [B, H, T, width] cut into chunks, [chunk, C, width], padded with zeros: tokens that do not
    change the state."""
    missing = -x.shape[2] % LENGTH
    filled = F.pad(x, (0, 0, 0, missing)) if missing else x
    return filled.reshape(-1, LENGTH, x.shape[3])


def _diagonal(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens read, [B, H, chunk, C, V], and the state after the last chunk, [B, H, K, V], for a
    recurrence without correction. state: before the first chunk."""
    batch_and_heads, values = state.shape[:2], _chunked(terms.values)
    pairs = _paired((terms.queries,), (terms.keys,), terms.log_decay)
    written = (pairs.keys[:, 0].mT @ values).unflatten(0, (*batch_and_heads, -1))
    decay = pairs.total.mT.unflatten(0, (*batch_and_heads, -1))
    starts, state = _walk(decay, written, state)
    read_within = pairs.products[:, 0, 0] @ values
    read = torch.baddbmm(read_within, pairs.queries[:, 0], starts.flatten(0, 2))
    return read.unflatten(0, (*batch_and_heads, -1)), state


def _walk(decay: Tensor, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """State before each chunk, [B, H, chunk, K, V], and after the last one, [B, H, K, V].

    Arguments:
        decay: Decay of the state over each whole chunk, [B, H, chunk, K or 1, 1].
        written: What each chunk adds to the state, [B, H, chunk, K, V].
        state: State before the first chunk, [B, H, K, V].
    """
    starts = []
    for chunk_decay, chunk_written in zip(decay.unbind(2), written.unbind(2), strict=True):
        starts.append(state)
        state = torch.addcmul(chunk_written, chunk_decay, state)
    return torch.stack(starts, dim=2), state


def _corrected(terms: Terms, alpha: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens read, [B, H, chunk, C, V], and the state after the last chunk, [B, H, K, V], for a
    recurrence with a rank-one correction: S decays, and beta (alpha^T S) is added to it.

    Arguments:
        terms: Inputs at each token.
        alpha: Vectors that read the state before a token, [B, H, T, K].
        beta: Vectors under which the correction is written, [B, H, T, K].
        state: State before the first chunk, [B, H, K, V].
    """
    batch_and_heads, values = state.shape[:2], _chunked(terms.values)
    # Alphas and queries read the same state, so they are rows of one matrix; betas and keys write it.
    pairs = _paired((alpha, terms.queries), (beta, terms.keys), terms.log_decay)
    products_with_beta, products_with_key = pairs.products.unbind(1)
    chunks = Chunks(
        reading=pairs.queries.flatten(1, 2),
        within=products_with_key.flatten(1, 2) @ values,
        resolvent=_resolvent(products_with_beta[:, 0]),
        decay=pairs.total.mT,
        written=pairs.keys[:, 1].mT @ values,
        beta=pairs.keys[:, 0].mT,
    )
    # B and H merged once here; batched products would do it at every step.
    rows = state.flatten(0, 1)
    by_row = Chunks(*(x.unflatten(0, (len(rows), -1)) for x in chunks))
    corrections, read, last = _walk_corrected(by_row, rows)
    read = torch.baddbmm(read.flatten(0, 1), products_with_beta[:, 1], corrections.flatten(0, 1))
    return read.unflatten(0, (*batch_and_heads, -1)), last.unflatten(0, batch_and_heads)


class Chunks(NamedTuple):
    """Matrices by which each chunk reads and updates the state S before it, each [row, chunk, ...]; row = one
    head of one prompt. u: what the correction of each token of the chunk reads, alpha^T S, [C, V]."""

    reading: Tensor
    """Alphas, then queries of the chunk, [2 C, K], which multiply S."""
    within: Tensor
    """What alphas and queries read from values of their own chunk, without corrections, [2 C, V]."""
    resolvent: Tensor
    """Matrix [C, C] that maps what alphas read without corrections to u."""
    decay: Tensor
    """Decay of S over the chunk, [K or 1, 1]."""
    written: Tensor
    """What the chunk's values add to the state after it, [K, V]."""
    beta: Tensor
    """Matrix [K, C] that maps u to what the corrections add to the state after the chunk."""


def _walk_corrected(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the corrections (u) and, without them, the queries read in each chunk, each [row, chunk, C, V];
    and the state after the last chunk, [row, K, V]. state: before the first chunk."""
    corrections, read = [], []
    for reading, within, resolvent, decay, written, beta in zip(*(x.unbind(1) for x in chunks), strict=True):
        read_by_alpha, read_by_query = torch.baddbmm(within, reading, state).chunk(2, dim=1)
        u = resolvent @ read_by_alpha
        state = torch.baddbmm(torch.addcmul(written, decay, state), beta, u)
        corrections.append(u)
        read.append(read_by_query)
    return torch.stack(corrections, dim=1), torch.stack(read, dim=1), state


def _paired(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], log_decay: Tensor) -> ChunkPairs:
    """Decayed queries and keys of all chunks, and their products within chunks (`pair`), from several kinds
    of queries and keys, each [B, H, T, K]; log_decay [B, H, T, K or 1]."""
    rows, columns = (torch.stack([_chunked(x) for x in kinds], dim=1) for kinds in (queries, keys))
    return pair(rows, columns, _chunked(log_decay))


def _resolvent(below: Tensor) -> Tensor:
    """(I - below)^-1 for strictly lower triangular matrices [chunk, C, C]; C a power of two.

    Recursively: inverses of diagonal blocks give those of blocks of twice the size. Roads not taken: a power
    series loses digits if keys repeat (sums of four terms double the error); a triangular solver takes chunks
    one by one and 1.7 times as long (measured for 256 chunks, one thread).
    """
    length = below.shape[-1]
    tiles = below.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    # Blocks of two are strictly lower triangular, so N^2 = 0 and (I - N)^-1 = I + N.
    inverse: Tensor = torch.eye(2, dtype=below.dtype, device=below.device) + tiles
    while (width := inverse.shape[-1]) < length:
        upper_left, lower_right = inverse.unflatten(1, (-1, 2)).unbind(2)
        tiles = below.unflatten(2, (-1, 2, width)).unflatten(1, (-1, 2, width))[:, :, 1, :, :, 0]
        # The inverse of [[A, 0], [-N, D]] has D^-1 N A^-1 at the lower left.
        lower_left = lower_right @ tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1) @ upper_left
        upper = torch.cat([upper_left, torch.zeros_like(upper_left)], dim=-1)
        inverse = torch.cat([upper, torch.cat([lower_left, lower_right], dim=-1)], dim=-2)
    return inverse.squeeze(1)
