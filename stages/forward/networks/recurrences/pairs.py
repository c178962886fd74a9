"""How much of a key is left where a later query reads it: products of decays between the tokens of a chunk.

For s < t a query x_t and a key y_s meet as sum_n x_t(n) y_s(n) prod_{s<j<t} d_j(n). One matrix product
gives all pairs of a block of tokens if the decay is divided between both sides, x_t prod_{j<t} d_j and y_s
/ prod_{j<=s} d_j (Yang et al., Gated Linear Attention, 2023, section 4); but the divisor must stay far from
what a float can hold. So the block is the largest one in which it does, and two neighbours become one of
twice their length by another product, of queries of the later with keys of the earlier, each times the
decay on its own side of the border between them. There nothing is divided, and what underflows is nothing:
at worst blocks are single tokens, and any decay is exact, 0 included. One decay a head needs neither: it is
a factor of each pair, from a table.

Decays are multiplied, or their logarithms added up from where they begin; never is one sum taken from
another, which would cost the digits of the larger one.

Axes: chunk = one run of C tokens of one head of one prompt; I kinds of queries, J kinds of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FAR = 40.0
"""The most that logarithms of decays may add up to in a block: a factor of 2e17, to either side."""


class ChunkPairs(NamedTuple):
    """Queries and keys of chunks, and how they meet."""

    queries: Tensor
    """[chunk, I, C, K], times the decay since before the chunk: what they read of the state before it."""
    keys: Tensor
    """[chunk, J, C, K], times the decay until after the chunk: what they leave in the state behind it."""
    total: Tensor
    """[chunk, 1, K or 1]: the decay of the whole chunk."""
    products: Tensor
    """[chunk, J, I, query, source] within the chunk, 0 unless source < query."""


def pair(queries: Tensor, keys: Tensor, log_decay: Tensor) -> ChunkPairs:
    """queries [chunk, I, C, K], keys [chunk, J, C, K], log_decay [chunk, C, K or 1]; C a power of two."""
    if log_decay.shape[-1] == 1:
        return _by_table(queries, keys, log_decay.squeeze(-1))
    width = _safe_width(log_decay)
    pairs = _of_blocks(_cut(queries, width), _cut(keys, width), _cut(log_decay.unsqueeze(1), width))
    while pairs.queries.shape[2] < log_decay.shape[1]:
        pairs = _joined(pairs)
    return pairs


def _by_table(queries: Tensor, keys: Tensor, log_decay: Tensor) -> ChunkPairs:
    """One decay a head. The table has a source before the chunk, for its state, and a query behind it."""
    length = log_decay.shape[1]
    steps = F.pad(log_decay, (1, 0)).unsqueeze(-1).expand(-1, -1, length + 1)
    # Entry [t, s] adds up what decays behind source s and before query t; s counts from the one before.
    table = torch.where(_below(length + 1, log_decay), steps, 0.0).cumsum(1).exp()
    before, behind = table[:, :-1, 0], table[:, -1, 1:]
    met = queries.flatten(1, 2) @ keys.flatten(1, 2).mT
    left = torch.where(_below(length, log_decay), table[:, :-1, 1:], 0.0)
    products = _by_kind(met, queries.shape[1], keys.shape[1]) * left[:, None, None]
    return ChunkPairs(
        queries * before[:, None, :, None], keys * behind[:, None, :, None], table[:, -1:, :1], products
    )


def _safe_width(log_decay: Tensor) -> int:
    """The most tokens, a power of two, over which no decay is too far from 1 to divide by."""
    far, width = log_decay.detach().abs(), log_decay.shape[1]
    while width > 1 and not bool(far.unflatten(1, (-1, width)).sum(2).amax() <= _FAR):
        width //= 2
    return width


def _cut(x: Tensor, width: int) -> Tensor:
    """[chunk, kind, C, K] -> blocks [chunk C / width, kind, width, K]."""
    made: Tensor = x.unflatten(2, (-1, width)).transpose(1, 2).flatten(0, 1)
    return made


def _of_blocks(queries: Tensor, keys: Tensor, log_decay: Tensor) -> ChunkPairs:
    """Blocks short enough to divide by their decays; log_decay [block, 1, width, K]."""
    decay, kinds = log_decay.exp(), (queries.shape[1], keys.shape[1])
    if decay.shape[2] == 1:
        return ChunkPairs(
            queries, keys, decay.squeeze(2), queries.new_zeros(len(queries), *kinds[::-1], 1, 1)
        )
    until = decay.cumprod(2)
    total = until[:, :, -1:]
    queries = queries * torch.cat([torch.ones_like(total), until[:, :, :-1]], dim=2)
    keys = keys / until
    products = _by_kind(queries.flatten(1, 2) @ keys.flatten(1, 2).mT, *kinds).tril(-1)
    return ChunkPairs(queries, keys * total, total.squeeze(2), products)


def _joined(pairs: ChunkPairs) -> ChunkPairs:
    """Each two neighbouring blocks as one."""
    (earlier, queries), (keys, later), (first, second), (before, behind) = (
        x.unflatten(0, (-1, 2)).unbind(1) for x in pairs
    )
    met = _by_kind(queries.flatten(1, 2) @ keys.flatten(1, 2).mT, queries.shape[1], keys.shape[1])
    upper = torch.cat([before, torch.zeros_like(before)], dim=-1)
    return ChunkPairs(
        torch.cat([earlier, queries * first.unsqueeze(1)], dim=2),
        torch.cat([keys * second.unsqueeze(1), later], dim=2),
        first * second,
        torch.cat([upper, torch.cat([met, behind], dim=-1)], dim=-2),
    )


def _by_kind(met: Tensor, queries: int, keys: int) -> Tensor:
    """[chunk, I C, J C] -> [chunk, J, I, C, C]."""
    return met.view(len(met), queries, -1, keys, met.shape[2] // keys).permute(0, 3, 1, 2, 4)


def _below(length: int, like: Tensor) -> Tensor:
    """Bool [length, length], True below the diagonal."""
    return torch.ones(length, length, dtype=torch.bool, device=like.device).tril(-1)
