"""RWKV-4's recurrence: an average of values, whose weights fade with distance and favour the reader.

    o_t = (A_{t-1} + e^{u + k_t} v_t) / (B_{t-1} + e^{u + k_t})
    A_t = e^w A_{t-1} + e^{k_t} v_t        B_t = e^w B_{t-1} + e^{k_t}

for each channel by itself (Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023). Both sums
are kept over e^p, where p is the largest exponent met, so nothing overflows. Everything done to such a sum
is one operation, the sum of two: a token is a sum of itself. So tokens go through all chunks at once, then
the sums of chunks from one to the next (Blelloch, Prefix Sums and Their Applications, 1990).

Axes: as in recurrence.py, with one head and C channels; chunk = run of tokens of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrence import Tokens, widened

_CHUNK = 32
"""Tokens of a chunk."""
_NOWHERE = -1e38
"""The exponent of a sum of nothing: far below any other, and not infinite, as differences are taken of it."""


class ScaledSums(NamedTuple):
    """A and B, over e^exponent."""

    numerator: Tensor
    denominator: Tensor
    exponent: Tensor

    def plus(self, other: ScaledSums) -> ScaledSums:
        """The sums of both, over the larger exponent of the two, so that neither overflows."""
        top = torch.maximum(self.exponent, other.exponent)
        mine, others = (self.exponent - top).exp(), (other.exponent - top).exp()
        return ScaledSums(
            mine * self.numerator + others * other.numerator,
            mine * self.denominator + others * other.denominator,
            top,
        )

    def faded(self, by: Tensor) -> ScaledSums:
        """Both times e^by."""
        return self._replace(exponent=self.exponent + by)


@dataclass(frozen=True, eq=False)
class ExponentialAverage:
    """RWKV-4's recurrence (recurrence.Recurrence).

    Its tokens: "k" and "v", each [B, 1, T, C]. Its state, [B, 1, 3, C]: numerator A and denominator B over
    e^exponent, and the exponent, (0, 0, -1e38) for an empty one.
    """

    decay: Tensor
    """[C]: w < 0, how much the exponents of weights fall with every token."""
    bonus: Tensor
    """[C]: u, added to the exponent of the token that reads."""

    def __call__(self, tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is read [B, 1, T, C], and the state behind the last token [B, 1, 3, C]."""
        own = _of_tokens(tokens)
        start = _nothing(own) if state is None else ScaledSums(*state.to(own.exponent.dtype).unbind(2))
        before, after = self._through(own, start)
        total = self._seen(before, own)
        return total.numerator / total.denominator, torch.stack(after, dim=2)

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """What one token reads [B, 1, 1, C] of the state before it [B, 1, 3, C]; none of the one after."""
        total = self._seen(ScaledSums(*before.unsqueeze(3).unbind(2)), _of_tokens(tokens))
        return total.numerator / total.denominator

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """alpha [B, C, T, stop - start]: each *channel* has its own; >= 0, sum 1 over all sources."""
        own = _of_tokens(tokens)
        before, _ = self._through(own, _nothing(own))
        total = self._seen(before, own)
        whole = (total.exponent + total.denominator.log()).squeeze(1).mT.unsqueeze(-1)
        place = torch.arange(own.exponent.shape[2], device=whole.device)
        between = place[:, None] - 1 - place[start:stop]
        decay, bonus = (x.to(whole.dtype)[:, None, None] for x in (self.decay, self.bonus))
        faded = torch.where(between < 0, bonus, between * decay)
        exponent = own.exponent.squeeze(1).mT[..., None, start:stop] + faded - whole
        return exponent.masked_fill(between < -1, -torch.inf).exp()

    def _through(self, own: ScaledSums, state: ScaledSums) -> tuple[ScaledSums, ScaledSums]:
        """The sums before each token, [B, 1, T, C], and those behind the last, [B, 1, C]."""
        length, decay = own.exponent.shape[2], self.decay.to(own.exponent.dtype)
        if length <= _CHUNK:
            return _walk(own, state, decay)
        chunks = ScaledSums(
            *(F.pad(x, (0, 0, 0, -length % _CHUNK)).unflatten(2, (-1, _CHUNK))[:, 0] for x in own)
        )
        inside, written = _walk(chunks, _nothing(chunks), decay)
        starts, _ = _walk(ScaledSums(*(x.unsqueeze(1) for x in written)), state, decay * _CHUNK)
        place = torch.arange(_CHUNK, dtype=decay.dtype, device=decay.device).unsqueeze(-1)
        before = ScaledSums(*(x.transpose(1, 2) for x in starts)).faded(place * decay).plus(inside)
        before = ScaledSums(*(x.flatten(1, 2)[:, None, :length] for x in before))
        last, newest = (ScaledSums(*(x[:, :, -1] for x in sums)) for sums in (before, own))
        return before, last.faded(decay).plus(newest)

    def _seen(self, before: ScaledSums, own: ScaledSums) -> ScaledSums:
        """The sums that a token averages over: those before it, and itself with the bonus."""
        return before.plus(own.faded(self.bonus.to(own.exponent.dtype)))


def _of_tokens(tokens: Tokens) -> ScaledSums:
    """Each token as sums of itself."""
    tokens = widened(tokens)
    return ScaledSums(tokens["v"], torch.ones_like(tokens["v"]), tokens["k"])


def _nothing(like: ScaledSums) -> ScaledSums:
    """Empty sums before the tokens of others."""
    zero = torch.zeros_like(like.exponent[:, :, 0])
    return ScaledSums(zero, zero, torch.full_like(zero, _NOWHERE))


def _walk(own: ScaledSums, state: ScaledSums, decay: Tensor) -> tuple[ScaledSums, ScaledSums]:
    """From sums to sums along axis 2 of own: those before each, and those behind the last."""
    before = []
    for token in zip(*(x.unbind(2) for x in own), strict=True):
        before.append(state)
        state = state.faded(decay).plus(ScaledSums(*token))
    if not before:
        return own, state
    return ScaledSums(*(torch.stack(part, dim=2) for part in zip(*before, strict=True))), state
