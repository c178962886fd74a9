"""Linear recurrences by chunks of tokens: matrix products over all chunks at once, then a walk from one
chunk to the next.

What tokens read of others of their chunk, and what a chunk leaves in the state, are products of the
matrices of pairs.py, made for all chunks at once. With a correction every token also writes what its alpha
reads, u_t = alpha_t^T S_{t-1}; in a chunk these solve a unit lower triangular system, so that they are
linear in the state before it and in its values (Yang et al., Parallelizing Linear Transformers with the
Delta Rule, 2024, section 3). Only what reads that state waits for the chunk before.

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
"""Tokens of a chunk."""


def by_chunks(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel for many tokens, of any decay (terms.Kernel)."""
    length = terms.values.shape[2]
    if terms.correction is None:
        read, state = _diagonal(terms, state)
    else:
        read, state = _corrected(terms, *terms.correction, state)
    return read.flatten(2, 3)[:, :, :length], state


def _chunked(x: Tensor) -> Tensor:
    """[B, H, T, width] -> [chunk, C, width], filled up with zeros: tokens that change nothing."""
    missing = -x.shape[2] % LENGTH
    filled = F.pad(x, (0, 0, 0, missing)) if missing else x
    return filled.reshape(-1, LENGTH, x.shape[3])


def _diagonal(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """What is read, [B, H, chunk, C, V], and the last state."""
    heads, values = state.shape[:2], _chunked(terms.values)
    pairs = _paired((terms.queries,), (terms.keys,), terms.log_decay)
    written = pairs.keys[:, 0].mT @ values
    decay, written = (x.unflatten(0, (*heads, -1)) for x in (pairs.total.mT, written))
    starts, state = _walk(decay, written, state)
    read = torch.baddbmm(pairs.products[:, 0, 0] @ values, pairs.queries[:, 0], starts.flatten(0, 2))
    return read.unflatten(0, (*heads, -1)), state


def _walk(decay: Tensor, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, H, chunk, K, V], and the one behind the last.

    decay: of whole chunks, [B, H, chunk, K or 1, 1]; written: what each adds, [B, H, chunk, K, V].
    """
    starts = []
    for left, new in zip(decay.unbind(2), written.unbind(2), strict=True):
        starts.append(state)
        state = torch.addcmul(new, left, state)
    return torch.stack(starts, dim=2), state


def _corrected(terms: Terms, alpha: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As _diagonal. Alphas and queries, which read the same, are rows of one matrix."""
    heads, values = state.shape[:2], _chunked(terms.values)
    pairs = _paired((alpha, terms.queries), (beta, terms.keys), terms.log_decay)
    of_beta, of_key = pairs.products.unbind(1)
    chunks = Chunks(
        pairs.queries.flatten(1, 2),
        of_key.flatten(1, 2) @ values,
        _resolvent(of_beta[:, 0]),
        pairs.total.mT,
        pairs.keys[:, 1].mT @ values,
        pairs.keys[:, 0].mT,
    )
    # B and H as one, which batched products would make of them at every step.
    rows = state.flatten(0, 1)
    corrections, read, last = _walk_corrected(
        Chunks(*(x.unflatten(0, (len(rows), -1)) for x in chunks)), rows
    )
    read = torch.baddbmm(read.flatten(0, 1), of_beta[:, 1], corrections.flatten(0, 1))
    return read.unflatten(0, (*heads, -1)), last.unflatten(0, heads)


class Chunks(NamedTuple):
    """What chunks do to the state S before them, each [row of B H, chunk, ...]."""

    reading: Tensor
    """[2 C, K]: alphas, then queries, of S."""
    beside: Tensor
    """[2 C, V]: what both read of values of the chunk, u left out."""
    resolvent: Tensor
    """[C, C]: of what alphas read so, u."""
    decay: Tensor
    """[K or 1, 1]: of S."""
    written: Tensor
    """[K, V]: what values add to the state behind."""
    beta: Tensor
    """[K, C]: what u adds to it."""


def _walk_corrected(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u and what queries read without it, [row, chunk, C, V], and the state behind the last, [row, K, V]."""
    corrections, read = [], []
    for reading, beside, resolvent, decay, written, beta in zip(*(x.unbind(1) for x in chunks), strict=True):
        found, of_query = torch.baddbmm(beside, reading, state).chunk(2, dim=1)
        u = resolvent @ found
        state = torch.baddbmm(torch.addcmul(written, decay, state), beta, u)
        corrections.append(u)
        read.append(of_query)
    return torch.stack(corrections, dim=1), torch.stack(read, dim=1), state


def _paired(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], log_decay: Tensor) -> ChunkPairs:
    rows, columns = (torch.stack([_chunked(x) for x in side], dim=1) for side in (queries, keys))
    return pair(rows, columns, _chunked(log_decay))


def _resolvent(below: Tensor) -> Tensor:
    """(I - below)^-1 of [chunk, C, C] strictly below the diagonal; C a power of two.

    From the inverses of blocks on the diagonal to those of twice their size. Series of powers lose digits
    where keys repeat (sums of four cost twice the error), and a solver of triangular systems, which goes
    through chunks one by one, takes 1.7 times as long (measured for 256 chunks, one thread).
    """
    length = below.shape[-1]
    tiles = below.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    made: Tensor = torch.eye(2, dtype=below.dtype, device=below.device) + tiles
    while (width := made.shape[-1]) < length:
        first, second = made.unflatten(1, (-1, 2)).unbind(2)
        tiles = below.unflatten(2, (-1, 2, width)).unflatten(1, (-1, 2, width))[:, :, 1, :, :, 0]
        corner = second @ tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1) @ first
        upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
        made = torch.cat([upper, torch.cat([corner, second], dim=-1)], dim=-2)
    return made.squeeze(1)
