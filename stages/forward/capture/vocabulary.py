"""Reductions of logits, computed block by block over the vocabulary: no pass holds [batch, position, vocab].

Input: the input of the LM head. Output: one row per token.

The width of a block does not depend on the batch, and sums over blocks are float64 in a fixed order
(reduced.py). So a stored value depends only on the logits of its token. Logits are float32: rounded if the
model computes in float64, exact if it computes in a narrower dtype.

Axes: batch, position, hidden; vocab in blocks; rank, 0 = largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..hooks.reductions import LOGSUMEXP, Reduction
from ..hooks.wants import Logits
from ..networks.loop import Network
from .reduced import folded
from .sizes import VOCABULARY

__all__ = ["reduce_logits"]

_BLOCK = VOCABULARY
_ROWS = 1 << 12
"""Tokens of a computed block that are sorted or exponentiated at a time."""
_LOW = (1 << 32) - 1
"""Mask of the low 32 bits of a sort key, which hold the token id, inverted."""
_NONE = -(1 << 63)
"""Sort key below that of every logit: an empty rank."""
_NAN = -(1 << 22)
"""float32 bits, as int32, of the NaN that sorts below every number."""


def reduce_logits(network: Network, x: Tensor, reductions: Iterable[Reduction]) -> dict[Reduction, Tensor]:
    """Compute reductions of logits without holding the logits of the whole vocabulary.

    Arguments:
        network: its LM head computes the logits.
        x: input of the LM head, [batch, position, hidden].
        reductions: top-k values, top-k ids, or logsumexp.

    Returns:
        Reduction -> [batch, position], or [batch, position, rank]. NaN counts as the smallest logit.
    """
    reductions = list(reductions)
    # One pass over the blocks serves every k: a smaller k is the first ranks of the largest.
    top, exp_sums = _TopLogits(max(reduction.ranks for reduction in reductions)), _ExpSums()
    for first_id, logits in _logit_blocks(network, x):
        if top.k:
            top.add(logits, first_id)
        if LOGSUMEXP in reductions:
            exp_sums.add(logits)
    values = {}
    for reduction in reductions:
        if reduction == LOGSUMEXP:
            values[reduction] = exp_sums.log()
        else:
            ranked = top.ids() if reduction.dtype == "int32" else top.values()
            values[reduction] = ranked[..., : reduction.ranks]
    return values


def _logit_blocks(network: Network, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Compute the logits of the vocabulary in blocks, soft-capped if the model's logits are.

    Yields:
        (first token id of the block, logits [batch, position, token of the block]).
    """
    for start in range(0, network.config.vocab_size, _BLOCK):
        block = range(start, min(start + _BLOCK, network.config.vocab_size))
        yield start, network.unembed(x, Logits(tokens=block)).float()


class _TopLogits:
    """The k largest logits so far, as int64 sort keys: logit in the high 32 bits, inverted id in the low."""

    def __init__(self, k: int) -> None:
        self.k, self._keys = k, torch.empty(0)

    def add(self, logits: Tensor, first_id: int) -> None:
        """Add the logits of some tokens.

        Arguments:
            logits: [batch, position, token of the block].
            first_id: token id of the first column; larger than every id of earlier blocks.
        """
        width = logits.shape[-1]
        ids = torch.arange(first_id, first_id + width, device=logits.device)
        rows = logits.reshape(-1, width)
        if not self._keys.numel():
            top = [_sort_keys(part, ids).topk(min(self.k, width)).values for part in rows.split(_ROWS)]
            self._keys = torch.cat(top).view(*logits.shape[:-1], -1)
            return
        keys = self._keys.flatten(0, -2)
        is_full = keys.shape[-1] == self.k
        if is_full:
            # In most rows no later block changes the top k; on a tie the smaller id stays.
            changed = (~(rows.amax(-1) <= _logit(keys[:, -1]))).nonzero().squeeze(-1)
        else:
            changed = torch.arange(len(rows), device=rows.device)
            wider = min(self.k, keys.shape[-1] + width)
            keys = torch.cat([keys, keys.new_full((len(keys), wider - keys.shape[-1]), _NONE)], dim=-1)
        for part in changed.split(_ROWS):
            block_keys = _sort_keys(rows[part], ids).topk(min(self.k, width)).values
            keys[part] = torch.cat([keys[part], block_keys], dim=-1).topk(keys.shape[-1]).values
        self._keys = keys.view(*logits.shape[:-1], -1)

    def ids(self) -> Tensor:
        """Token ids of the k largest logits, int32 [batch, position, rank]."""
        return (_LOW - (self._keys & _LOW)).int()

    def values(self) -> Tensor:
        """The k largest logits, descending, float32 [batch, position, rank]."""
        return _logit(self._keys)


def _logit(keys: Tensor) -> Tensor:
    """Recover the float32 logits from the sort keys that `_sort_keys` makes."""
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _sort_keys(logits: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that sort like the logits, and on ties put the smaller token id first.

    Arguments:
        logits: float32 [row, token].
        ids: token ids [token].
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 equals 0, but its bits differ
    bits = bits.masked_fill(logits.isnan(), _NAN)
    # IEEE floats are sign and magnitude: flipping the other bits of negative ones makes the order that of
    # ints.
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.long() << 32) | (_LOW - ids)


class _ExpSums:
    """Sum of exp(logit) over the logits so far, in float64 and divided by exp(largest logit so far)."""

    def __init__(self) -> None:
        self._top, self._sum = torch.empty(0), torch.empty(0)

    def add(self, logits: Tensor) -> None:
        """Add the logits of some tokens, [batch, position, token]."""
        if not self._top.numel():
            self._top = logits.new_full(logits.shape[:-1], -torch.inf, dtype=torch.float64)
            self._sum = torch.zeros_like(self._top)
        top = torch.maximum(self._top, logits.amax(-1).double())
        base = top.masked_fill(top == -torch.inf, 0.0)  # -inf minus -inf would be NaN
        rows, bases = logits.reshape(-1, logits.shape[-1]).split(_ROWS), base.reshape(-1, 1).split(_ROWS)
        added = [folded((part.double() - at).exp()) for part, at in zip(rows, bases, strict=True)]
        self._sum = self._sum * (self._top - base).exp() + torch.cat(added).view(base.shape)
        self._top = top

    def log(self) -> Tensor:
        """Natural log of the sum of exp over all logits, float32 [batch, position]."""
        return (self._top + self._sum.log()).float()
