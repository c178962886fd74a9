"""Decayed products of queries and keys within chunks of tokens.

For s < t, the product of a query x_t and a key y_s is sum_n x_t(n) y_s(n) prod_{s<j<t} d_j(n). One matrix
product gives all pairs of a block if the decay is split between both sides, x_t prod_{j<t} d_j and y_s /
prod_{j<=s} d_j (Yang et al., Gated Linear Attention, 2023, section 4). But the divisor must not underflow, so
the block is the largest one in which it is safe. Two neighbouring blocks are then joined by a product of the
later one's queries with the earlier one's keys, each times the decay on its own side of the border. That step
has no division, so underflow is harmless: at worst blocks are single tokens, and any decay is exact,
including 0. One decay per head needs no split: it is a factor of each pair, from a table.

Decays are multiplied, or their logarithms summed from the start of a range. One sum is never subtracted from
another, which would lose the digits of the smaller.

Axes: chunk = one run of C tokens of one head of one prompt; I kinds of queries, J kinds of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FAR = 40.0
"""Largest sum of |log decay| in a block: a factor of 2e17."""


class ChunkPairs(NamedTuple):
    """Queries and keys of chunks with decays applied, and their products."""

    queries: Tensor
    """Queries [chunk, I, C, K], times the decay from the start of the chunk, so that they read the state
    before the chunk."""
    keys: Tensor
    """Keys [chunk, J, C, K], times the decay to the end of the chunk, so that they write the state after the
    chunk."""
    total: Tensor
    """Decay of the state over the whole chunk, [chunk, 1, K or 1]."""
    products: Tensor
    """Decayed products of queries and keys within the chunk, [chunk, J, I, query, source]; 0 unless source <
    query."""


def pair(queries: Tensor, keys: Tensor, log_decay: Tensor) -> ChunkPairs:
    """Queries and keys of chunks with their decays, and the decayed products of all pairs within a chunk.

    Arguments:
        queries: [chunk, I, C, K]; C a power of two.
        keys: [chunk, J, C, K].
        log_decay: natural logarithm of the decay, [chunk, C, K], or [chunk, C, 1] for one decay per head.
    """
    if log_decay.shape[-1] == 1:
        return _pair_by_table(queries, keys, log_decay.squeeze(-1))
    width = _safe_width(log_decay)
    blocks = (_cut(x, width) for x in (queries, keys, log_decay.unsqueeze(1)))
    pairs = _pair_blocks(*blocks)
    while pairs.queries.shape[2] < log_decay.shape[1]:
        pairs = _join_neighbours(pairs)
    return pairs


def _pair_by_table(queries: Tensor, keys: Tensor, log_decay: Tensor) -> ChunkPairs:
    """`pair` for one decay per head, log_decay [chunk, C], by a table of the decay between any two tokens.
    The table has an extra source before the chunk (its initial state) and an extra query after it (its final
    state)."""
    length = log_decay.shape[1]
    steps = F.pad(log_decay, (1, 0)).unsqueeze(-1).expand(-1, -1, length + 1)
    # Entry [t, s] sums log decays after source s and before query t; source 0 is the initial state.
    table = torch.where(_below(length + 1, log_decay), steps, 0.0).cumsum(1).exp()
    from_start, to_end = table[:, :-1, 0], table[:, -1, 1:]
    undecayed = queries.flatten(1, 2) @ keys.flatten(1, 2).mT
    decay = torch.where(_below(length, log_decay), table[:, :-1, 1:], 0.0)
    products = _by_kind(undecayed, queries.shape[1], keys.shape[1]) * decay[:, None, None]
    return ChunkPairs(
        queries * from_start[:, None, :, None], keys * to_end[:, None, :, None], table[:, -1:, :1], products
    )


def _safe_width(log_decay: Tensor) -> int:
    """Largest block length, a power of two, over which no product of decays is too small to divide by;
    log_decay [chunk, C, K]."""
    magnitude, width = log_decay.detach().abs(), log_decay.shape[1]
    while width > 1 and not bool(magnitude.unflatten(1, (-1, width)).sum(2).amax() <= _FAR):
        width //= 2
    return width


def _cut(x: Tensor, width: int) -> Tensor:
    """Chunks x [chunk, kind, C, K] cut into blocks of `width` tokens: [chunk C / width, kind, width, K]."""
    blocks: Tensor = x.unflatten(2, (-1, width)).transpose(1, 2).flatten(0, 1)
    return blocks


def _pair_blocks(queries: Tensor, keys: Tensor, log_decay: Tensor) -> ChunkPairs:
    """`pair` for blocks that are short enough to divide by their decays; log_decay [block, 1, width, K]."""
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


def _join_neighbours(pairs: ChunkPairs) -> ChunkPairs:
    """Blocks of twice the length: each joins two neighbouring blocks, an earlier (0) and a later one (1)."""
    (queries0, queries1), (keys0, keys1), (total0, total1), (products0, products1) = (
        x.unflatten(0, (-1, 2)).unbind(1) for x in pairs
    )
    across = _by_kind(queries1.flatten(1, 2) @ keys0.flatten(1, 2).mT, queries1.shape[1], keys0.shape[1])
    upper = torch.cat([products0, torch.zeros_like(products0)], dim=-1)
    return ChunkPairs(
        torch.cat([queries0, queries1 * total0.unsqueeze(1)], dim=2),
        torch.cat([keys0 * total1.unsqueeze(1), keys1], dim=2),
        total0 * total1,
        torch.cat([upper, torch.cat([across, products1], dim=-1)], dim=-2),
    )


def _by_kind(products: Tensor, queries: int, keys: int) -> Tensor:
    """Products of all queries and keys [chunk, I C, J C] -> [chunk, J, I, C, C]; queries: number I of kinds
    of queries; keys: number J of kinds of keys."""
    size = products.shape[2] // keys
    return products.view(len(products), queries, -1, keys, size).permute(0, 3, 1, 2, 4)


def _below(length: int, like: Tensor) -> Tensor:
    """Bool matrix [length, length], True below the diagonal, on the device of the tensor `like`."""
    return torch.ones(length, length, dtype=torch.bool, device=like.device).tril(-1)
