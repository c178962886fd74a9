"""Linear recurrences by chunks of tokens: matrix products over all chunks at once, then a walk from one
chunk to the next.

What a chunk reads and what it does to the state is linear in the state before it and in its values. With
the products of pairs.py, the corrections u_t = alpha_t^T S_{t-1} of a chunk solve a unit lower triangular
system (Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3; Peng et al.,
RWKV-7, 2025), which leaves four matrices for each chunk,

    o = reading S + mixing v        S' = transition S + writing v

all of them made at once. Only S' depends on the chunk before.

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


class Map(NamedTuple):
    """What chunks do."""

    reading: Tensor
    """[chunk, C, K]."""
    mixing: Tensor
    """[chunk, query, source]."""
    transition: Tensor
    """[chunk, K, K]; [chunk, K, 1] where it is diagonal."""
    writing: Tensor
    """[chunk, K, C]."""


def by_chunks(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel for many tokens, of any decay (terms.Kernel)."""
    length = terms.values.shape[2]
    values = chunked(terms.values)
    chunks = _diagonal(terms) if terms.correction is None else _corrected(terms, terms.correction)
    written = (chunks.writing @ values).unflatten(0, (*state.shape[:2], -1))
    starts, state = walk(chunks.transition.unflatten(0, (*state.shape[:2], -1)), written, state)
    read = torch.baddbmm(chunks.mixing @ values, chunks.reading, starts.flatten(0, 2))
    return read.unflatten(0, (*state.shape[:2], -1)).flatten(2, 3)[:, :, :length], state


def chunked(x: Tensor) -> Tensor:
    """[B, H, T, width] -> [chunk, C, width], filled up with zeros: tokens that change nothing."""
    missing = -x.shape[2] % LENGTH
    filled = F.pad(x, (0, 0, 0, missing)) if missing else x
    return filled.reshape(-1, LENGTH, x.shape[3])


def _diagonal(terms: Terms) -> Map:
    pairs = _paired((terms.queries,), (terms.keys,), terms.log_decay)
    return Map(pairs.queries[:, 0], pairs.products[:, 0, 0], pairs.total.mT, pairs.keys[:, 0].mT)


def _corrected(terms: Terms, correction: tuple[Tensor, Tensor]) -> Map:
    alpha, beta = correction
    pairs = _paired((terms.queries, alpha), (terms.keys, beta), terms.log_decay)
    (query_key, query_beta), (alpha_key, alpha_beta) = (row.unbind(1) for row in pairs.products.unbind(1))
    queries, alphas = pairs.queries.unbind(1)
    keys, betas = pairs.keys.unbind(1)
    width = queries.shape[-1]
    # Of the state before the chunk and of its values at once: u = solved [S; v].
    solved = torch.linalg.solve_triangular(
        -alpha_beta, torch.cat([alphas, alpha_key], dim=-1), upper=False, unitriangular=True
    )
    total = torch.diag_embed(pairs.total.squeeze(1).expand(-1, width))
    read = torch.baddbmm(torch.cat([queries, query_key], dim=-1), query_beta, solved)
    left = torch.baddbmm(torch.cat([total, keys.mT], dim=-1), betas.mT, solved)
    return Map(read[..., :width], read[..., width:], left[..., :width], left[..., width:])


def _paired(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], log_decay: Tensor) -> Pairs:
    sides = (torch.stack([chunked(x) for x in side], dim=1) for side in (queries, keys))
    return pair(*sides, chunked(log_decay))


def walk(transition: Tensor, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, H, chunk, K, V], and the one behind the last."""
    starts = []
    diagonal = transition.shape[-1] == 1
    for step, new in zip(transition.unbind(2), written.unbind(2), strict=True):
        starts.append(state)
        state = torch.addcmul(new, step, state) if diagonal else new + step @ state
    return torch.stack(starts, dim=2), state
