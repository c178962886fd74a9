"""Reductions of logits, made a block of the vocabulary at a time: no pass holds [batch, position, vocab].

Border: what the LM head reads in, a row for each token out; which are asked, and where they go, the harvest
says.

Blocks are as wide whatever the batch, and what is added over them is float64 in a fixed order (reduced.py):
so what is stored depends on a token's logits alone. These are rounded to float32 where a model computes in
float64, and are what it gives where it computes in less.

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

__all__ = ["of_logits"]

_BLOCK = VOCABULARY
_ROWS = 1 << 12
"""Tokens whose block is looked at together, once it is computed."""
_LOW = (1 << 32) - 1
_NONE = -(1 << 63)
"""Below every logit: nothing yet."""
_NAN = -(1 << 22)
"""Bits of a NaN that, in order, comes below every number."""


def of_logits(network: Network, x: Tensor, asked: Iterable[Reduction]) -> dict[Reduction, Tensor]:
    """What is asked of the logits of x [batch, position, hidden]: [batch, position] or [batch, position,
    rank]; NaN counts as the smallest logit."""
    wanted = list(asked)
    largest, sums = _Largest(max(each.ranks for each in wanted)), _ExpSums()
    for start, logits in _blocks(network, x):
        if largest.k:
            largest.add(logits, start)
        if LOGSUMEXP in wanted:
            sums.add(logits)
    found = {}
    for reduction in wanted:
        if reduction == LOGSUMEXP:
            found[reduction] = sums.log()
        else:
            made = largest.ids() if reduction.dtype == "int32" else largest.values()
            found[reduction] = made[..., : reduction.ranks]
    return found


def _blocks(network: Network, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Logits [batch, position, block] with the first id of each block, soft-capped as the model's are."""
    for start in range(0, network.config.vocab_size, _BLOCK):
        block = range(start, min(start + _BLOCK, network.config.vocab_size))
        yield start, network.unembed(x, Logits(tokens=block)).float()


class _Largest:
    """The k largest so far, as whole numbers in the same order: of a logit's bits above, of its id below."""

    def __init__(self, k: int) -> None:
        self.k, self._held = k, torch.empty(0)

    def add(self, logits: Tensor, first: int) -> None:
        """Meet a block of logits [batch, position, block]; first: id of its first column, larger than any
        before."""
        width = logits.shape[-1]
        ids = torch.arange(first, first + width, device=logits.device)
        rows = logits.reshape(-1, width)
        if not self._held.numel():
            found = [_orders(part, ids).topk(min(self.k, width)).values for part in rows.split(_ROWS)]
            self._held = torch.cat(found).view(*logits.shape[:-1], -1)
            return
        held = self._held.flatten(0, -2)
        is_full = held.shape[-1] == self.k
        if is_full:  # of most rows no later block has anything: of equal logits the first one stays
            changed = (~(rows.amax(-1) <= _logit(held[:, -1]))).nonzero().squeeze(-1)
        else:
            changed = torch.arange(len(rows), device=rows.device)
            wider = min(self.k, held.shape[-1] + width)
            held = torch.cat([held, held.new_full((len(held), wider - held.shape[-1]), _NONE)], dim=-1)
        for some in changed.split(_ROWS):
            made = _orders(rows[some], ids).topk(min(self.k, width)).values
            held[some] = torch.cat([held[some], made], dim=-1).topk(held.shape[-1]).values
        self._held = held.view(*logits.shape[:-1], -1)

    def ids(self) -> Tensor:
        """Ids of tokens, int32 [batch, position, rank]."""
        return (_LOW - (self._held & _LOW)).int()

    def values(self) -> Tensor:
        """Logits, float32 [batch, position, rank]."""
        return _logit(self._held)


def _logit(orders: Tensor) -> Tensor:
    """The logits in what `_orders` gives."""
    bits = (orders >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _orders(logits: Tensor, ids: Tensor) -> Tensor:
    """Whole numbers as large as logits [row, column] are, equal ones larger for smaller ids [column]."""
    bits = (logits + 0.0).view(torch.int32)  # -0 equals 0, but its bits do not
    bits = bits.masked_fill(logits.isnan(), _NAN)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # in order, as the numbers are
    return (bits.long() << 32) | (_LOW - ids)


class _ExpSums:
    """Sums of exp of the logits so far, over exp of the largest of them, in float64."""

    def __init__(self) -> None:
        self._top, self._sum = torch.empty(0), torch.empty(0)

    def add(self, logits: Tensor) -> None:
        """Meet a block of logits [batch, position, block]."""
        if not self._top.numel():
            self._top = logits.new_full(logits.shape[:-1], -torch.inf, dtype=torch.float64)
            self._sum = torch.zeros_like(self._top)
        top = torch.maximum(self._top, logits.amax(-1).double())
        base = top.masked_fill(top == -torch.inf, 0.0)
        rows, bases = logits.reshape(-1, logits.shape[-1]).split(_ROWS), base.reshape(-1, 1).split(_ROWS)
        added = [folded((part.double() - at).exp()) for part, at in zip(rows, bases, strict=True)]
        self._sum = self._sum * (self._top - base).exp() + torch.cat(added).view(base.shape)
        self._top = top

    def log(self) -> Tensor:
        """Natural log of the sum of exp of all logits met, float32 [batch, position]."""
        return (self._top + self._sum.log()).float()
