"""RWKV-4's recurrence: an average of values with exponentially decaying weights and a bonus for the current
token.

    o_t = (A_{t-1} + e^{u + k_t} v_t) / (B_{t-1} + e^{u + k_t})
    A_t = e^w A_{t-1} + e^{k_t} v_t        B_t = e^w B_{t-1} + e^{k_t}

per channel (Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023). Both sums are stored divided
by e^p, where p is the largest exponent so far, so nothing overflows. Adding two such sums is associative, and
a token is a sum of one term. So the scan runs over the tokens of all chunks at once, then over the sums of
chunks (Blelloch, Prefix Sums and Their Applications, 1990).

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
"""Tokens per chunk."""
_EMPTY = -1e38
"""Exponent of an empty sum: far below any other, but finite, as differences of exponents are computed."""


class ScaledSums(NamedTuple):
    """The sums A and B, stored divided by e^exponent."""

    numerator: Tensor
    """A / e^exponent."""
    denominator: Tensor
    """B / e^exponent."""
    exponent: Tensor
    """Largest exponent of the terms of the sums."""

    def plus(self, other: ScaledSums) -> ScaledSums:
        """Add two sums, with the larger exponent of the two, so that neither overflows."""
        top = torch.maximum(self.exponent, other.exponent)
        scale_self, scale_other = (self.exponent - top).exp(), (other.exponent - top).exp()
        return ScaledSums(
            scale_self * self.numerator + scale_other * other.numerator,
            scale_self * self.denominator + scale_other * other.denominator,
            top,
        )

    def decayed(self, by: Tensor) -> ScaledSums:
        """Both sums times e^by."""
        return self._replace(exponent=self.exponent + by)


@dataclass(frozen=True, eq=False)
class ExponentialAverage:
    """RWKV-4's recurrence (recurrence.Recurrence).

    Its inputs: "k" and "v", each [B, 1, T, C]. Its state [B, 1, 3, C]: A / e^p, B / e^p and p, which are (0,
    0, -1e38) for an empty state.
    """

    decay: Tensor
    """w < 0, [C]: added to the exponents of weights at every token."""
    bonus: Tensor
    """u, [C]: added to the exponent of the current token."""

    def __call__(self, tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """What tokens read, [B, 1, T, C], and the state after the last one, [B, 1, 3, C]."""
        single = _of_tokens(tokens)
        start = (
            _empty_sums(single) if state is None else ScaledSums(*state.to(single.exponent.dtype).unbind(2))
        )
        before, after = self._through(single, start)
        total = self._with_current(before, single)
        return total.numerator / total.denominator, torch.stack(after, dim=2)

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """What one token reads, [B, 1, 1, C], from the state before it, [B, 1, 3, C]; `after` is unused.
        See `Recurrence.read`."""
        total = self._with_current(ScaledSums(*before.unsqueeze(3).unbind(2)), _of_tokens(tokens))
        return total.numerator / total.denominator

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Weights alpha [B, C, T, stop - start], per *channel*; >= 0, with sum 1 over all sources.
        See `Recurrence.weights`."""
        single = _of_tokens(tokens)
        before, _ = self._through(single, _empty_sums(single))
        total = self._with_current(before, single)
        # Logarithm of the whole denominator: weights are exp of a difference, and no exponential overflows.
        whole = (total.exponent + total.denominator.log()).squeeze(1).mT.unsqueeze(-1)
        positions = torch.arange(single.exponent.shape[2], device=whole.device)
        # Number of tokens between source and query, which is -1 for the query itself.
        between = positions[:, None] - 1 - positions[start:stop]
        decay, bonus = (x.to(whole.dtype)[:, None, None] for x in (self.decay, self.bonus))
        offset = torch.where(between < 0, bonus, between * decay)
        exponent = single.exponent.squeeze(1).mT[..., None, start:stop] + offset - whole
        return exponent.masked_fill(between < -1, -torch.inf).exp()

    def _through(self, single: ScaledSums, state: ScaledSums) -> tuple[ScaledSums, ScaledSums]:
        """Sums before each token, [B, 1, T, C], and after the last one, [B, 1, C]."""
        length, decay = single.exponent.shape[2], self.decay.to(single.exponent.dtype)
        if length <= _CHUNK:
            return _walk(single, state, decay)
        chunks = ScaledSums(
            *(F.pad(x, (0, 0, 0, -length % _CHUNK)).unflatten(2, (-1, _CHUNK))[:, 0] for x in single)
        )
        inside, written = _walk(chunks, _empty_sums(chunks), decay)
        starts, _ = _walk(ScaledSums(*(x.unsqueeze(1) for x in written)), state, decay * _CHUNK)
        offset = torch.arange(_CHUNK, dtype=decay.dtype, device=decay.device).unsqueeze(-1)
        before = ScaledSums(*(x.transpose(1, 2) for x in starts)).decayed(offset * decay).plus(inside)
        before = ScaledSums(*(x.flatten(1, 2)[:, None, :length] for x in before))
        last, newest = (ScaledSums(*(x[:, :, -1] for x in sums)) for sums in (before, single))
        return before, last.decayed(decay).plus(newest)

    def _with_current(self, before: ScaledSums, single: ScaledSums) -> ScaledSums:
        """Sums that a token averages over: those before it, plus the token itself with the bonus."""
        return before.plus(single.decayed(self.bonus.to(single.exponent.dtype)))


def _of_tokens(tokens: Tokens) -> ScaledSums:
    """Each token as a sum of one term."""
    tokens = widened(tokens)
    return ScaledSums(tokens["v"], torch.ones_like(tokens["v"]), tokens["k"])


def _empty_sums(like: ScaledSums) -> ScaledSums:
    """Empty sums, shaped like the sums before the first of some tokens."""
    zero = torch.zeros_like(like.exponent[:, :, 0])
    return ScaledSums(zero, zero, torch.full_like(zero, _EMPTY))


def _walk(single: ScaledSums, state: ScaledSums, decay: Tensor) -> tuple[ScaledSums, ScaledSums]:
    """Loop along axis 2 of `single`: sums before each entry, and after the last one."""
    before = []
    for token in zip(*(x.unbind(2) for x in single), strict=True):
        before.append(state)
        state = state.decayed(decay).plus(ScaledSums(*token))
    if not before:
        return single, state
    return ScaledSums(*(torch.stack(part, dim=2) for part in zip(*before, strict=True))), state
