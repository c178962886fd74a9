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

from .pairs import Pairs, pair
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


def chunked(x: Tensor) -> Tensor:
    """[B, H, T, width] -> [chunk, C, width], filled up with zeros: tokens that change nothing."""
    missing = -x.shape[2] % LENGTH
    filled = F.pad(x, (0, 0, 0, missing)) if missing else x
    return filled.reshape(-1, LENGTH, x.shape[3])


def _diagonal(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """What is read, [B, H, chunk, C, V], and the last state."""
    heads, values = state.shape[:2], chunked(terms.values)
    pairs = _paired((terms.queries,), (terms.keys,), terms.log_decay)
    written = pairs.keys[:, 0].mT @ values
    decay, written = (x.unflatten(0, (*heads, -1)) for x in (pairs.total.mT, written))
    starts, state = walk(decay, written, state)
    read = torch.baddbmm(pairs.products[:, 0, 0] @ values, pairs.queries[:, 0], starts.flatten(0, 2))
    return read.unflatten(0, (*heads, -1)), state


def walk(decay: Tensor, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, H, chunk, K, V], and the one behind the last.

    decay: of whole chunks, [B, H, chunk, K or 1, 1]; written: what each adds, [B, H, chunk, K, V].
    """
    starts = []
    for left, new in zip(decay.unbind(2), written.unbind(2), strict=True):
        starts.append(state)
        state = torch.addcmul(new, left, state)
    return torch.stack(starts, dim=2), state


def _corrected(terms: Terms, alpha: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As _diagonal. Alphas and queries, which read the same, go as rows of one matrix."""
    heads, values = state.shape[:2], chunked(terms.values)
    pairs = _paired((alpha, terms.queries), (beta, terms.keys), terms.log_decay)
    of_beta, of_key = pairs.products.unbind(1)
    (alphas, queries), (betas, keys) = pairs.queries.unbind(1), pairs.keys.unbind(1)
    found, read = (of_key.flatten(1, 2) @ values).chunk(2, dim=1)
    solved = _resolvent(of_beta[:, 0]) @ torch.cat([alphas, found], dim=-1)
    alphas, found = solved.split([alphas.shape[-1], found.shape[-1]], dim=-1)
    chunks = Chunks(
        torch.cat([alphas, queries], dim=1),
        torch.cat([found, read], dim=1),
        pairs.total.mT,
        keys.mT @ values,
        betas.mT,
    )
    # Both leading axes as one, which batched products would make of them at every step.
    rows = state.flatten(0, 1)
    both, last = _walk_corrected(Chunks(*(x.unflatten(0, (len(rows), -1)) for x in chunks)), rows)
    found, read = both.flatten(0, 1).chunk(2, dim=1)
    read = torch.baddbmm(read, of_beta[:, 1], found)
    return read.unflatten(0, (*heads, -1)), last.unflatten(0, heads)


class Chunks(NamedTuple):
    """What chunks do to a state S: they read `beside + reading S`, the first half of which is u, and leave
    `decay S + written + beta u`. Each [row of B H, chunk, ...]."""

    reading: Tensor
    """[2 C, K]."""
    beside: Tensor
    """[2 C, V]: what they read of their own values."""
    decay: Tensor
    """[K or 1, 1]."""
    written: Tensor
    """[K, V]."""
    beta: Tensor
    """[K, C]."""


def _walk_corrected(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """What each chunk reads, [row, chunk, 2 C, V], and the state behind the last, [row, K, V]."""
    read = []
    for reading, beside, decay, written, beta in zip(*(x.unbind(1) for x in chunks), strict=True):
        both = torch.baddbmm(beside, reading, state)
        read.append(both)
        state = torch.baddbmm(torch.addcmul(written, decay, state), beta, both[:, : both.shape[1] // 2])
    return torch.stack(read, dim=1), state


def _paired(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], log_decay: Tensor) -> Pairs:
    rows, columns = (torch.stack([chunked(x) for x in side], dim=1) for side in (queries, keys))
    return pair(rows, columns, chunked(log_decay))


def _resolvent(below: Tensor) -> Tensor:
    """(I - below)^-1 of [chunk, C, C] strictly below the diagonal; C a power of two.

    From the inverses of blocks on the diagonal to those of twice their size. A solver of triangular systems
    goes through chunks one by one, and a series of powers loses its digits where keys repeat.
    """
    length = below.shape[-1]
    made = below.new_ones(len(below), length, 1, 1)
    for width in (1 << n for n in range(length.bit_length() - 1)):
        first, second = made.unflatten(1, (-1, 2)).unbind(2)
        tiles = below.unflatten(2, (-1, 2, width)).unflatten(1, (-1, 2, width))[:, :, 1, :, :, 0]
        corner = second @ tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1) @ first
        upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
        made = torch.cat([upper, torch.cat([corner, second], dim=-1)], dim=-2)
    return made.squeeze(1)
