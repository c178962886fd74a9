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
    """The sums of RWKV-4's average, A = sum of e^k v and B = sum of e^k, stored divided by e^exponent so that
    nothing overflows; all three have the same shape."""

    numerator: Tensor
    """A / e^exponent."""
    denominator: Tensor
    """B / e^exponent."""
    exponent: Tensor
    """Largest exponent k of the terms of the sums."""

    def plus(self, other: ScaledSums) -> ScaledSums:
        """A + A and B + B of two such sums, divided by e to the larger exponent of the two."""
        top = torch.maximum(self.exponent, other.exponent)
        scale_self, scale_other = (self.exponent - top).exp(), (other.exponent - top).exp()
        return ScaledSums(
            scale_self * self.numerator + scale_other * other.numerator,
            scale_self * self.denominator + scale_other * other.denominator,
            top,
        )

    def decayed(self, by: Tensor) -> ScaledSums:
        """Both sums times e^by, which changes only the exponent; by: logarithm of the decay,
        broadcastable."""
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
        """What each token reads, [B, 1, T, C], and the state after the last token, [B, 1, 3, C]. state:
        before the first token, of the same shape; None for an empty state."""
        terms = _terms_of(tokens)
        dtype = terms.exponent.dtype
        start = _empty_sums(terms) if state is None else ScaledSums(*state.to(dtype).unbind(2))
        before, after = self._sums_before(terms, start)
        total = self._with_current(before, terms)
        return total.numerator / total.denominator, torch.stack(after, dim=2)

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """Output of one token (T = 1) from a given state, [B, 1, 1, C].

        Arguments:
            tokens: inputs "k" and "v", each [B, 1, 1, C].
            before: state before the token, [B, 1, 3, C].
            after: unused, as the output depends on the state before the token and the token itself.
        """
        total = self._with_current(ScaledSums(*before.unsqueeze(3).unbind(2)), _terms_of(tokens))
        return total.numerator / total.denominator

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Weight of each source's value in what each query reads, per *channel*: alpha [B, C, T, stop -
        start], >= 0, with sum 1 over all sources, from an empty state.

        Arguments:
            tokens: inputs "k" and "v", each [B, 1, T, C].
            start: first source.
            stop: end of the sources, exclusive; None for all sources from `start` on.
        """
        terms = _terms_of(tokens)
        before, _ = self._sums_before(terms, _empty_sums(terms))
        total = self._with_current(before, terms)
        # Weights are exp of a difference of logarithms, so that no exponential overflows.
        log_denominator = (total.exponent + total.denominator.log()).squeeze(1).mT.unsqueeze(-1)
        positions = torch.arange(terms.exponent.shape[2], device=log_denominator.device)
        # Number of tokens between source and query, which is -1 for the query itself.
        between = positions[:, None] - 1 - positions[start:stop]
        decay, bonus = (x.to(log_denominator.dtype)[:, None, None] for x in (self.decay, self.bonus))
        offset = torch.where(between < 0, bonus, between * decay)
        exponent = terms.exponent.squeeze(1).mT[..., None, start:stop] + offset - log_denominator
        return exponent.masked_fill(between < -1, -torch.inf).exp()

    def _sums_before(self, terms: ScaledSums, state: ScaledSums) -> tuple[ScaledSums, ScaledSums]:
        """Sums before each token, [B, 1, T, C], and after the last token, [B, 1, C].

        Arguments:
            terms: each token as a sum of one term, [B, 1, T, C].
            state: sums before the first token, [B, 1, C].
        """
        length, decay = terms.exponent.shape[2], self.decay.to(terms.exponent.dtype)
        if length <= _CHUNK:
            return _walk(terms, state, decay)
        chunks = ScaledSums(
            *(F.pad(x, (0, 0, 0, -length % _CHUNK)).unflatten(2, (-1, _CHUNK))[:, 0] for x in terms)
        )
        within_chunk, of_chunk = _walk(chunks, _empty_sums(chunks), decay)
        chunk_starts, _ = _walk(ScaledSums(*(x.unsqueeze(1) for x in of_chunk)), state, decay * _CHUNK)
        offset = torch.arange(_CHUNK, dtype=decay.dtype, device=decay.device).unsqueeze(-1)
        # Sums before a token: those before its chunk, decayed, plus those of earlier tokens of the chunk.
        at_start = ScaledSums(*(x.transpose(1, 2) for x in chunk_starts))
        before = at_start.decayed(offset * decay).plus(within_chunk)
        before = ScaledSums(*(x.flatten(1, 2)[:, None, :length] for x in before))
        before_last, last_term = (ScaledSums(*(x[:, :, -1] for x in sums)) for sums in (before, terms))
        return before, before_last.decayed(decay).plus(last_term)

    def _with_current(self, before: ScaledSums, terms: ScaledSums) -> ScaledSums:
        """Sums that a token averages over: those before it, plus the token's own term with the bonus."""
        return before.plus(terms.decayed(self.bonus.to(terms.exponent.dtype)))


def _terms_of(tokens: Tokens) -> ScaledSums:
    """Each token as a sum of one term, [B, 1, T, C]: numerator v, denominator 1, exponent k."""
    tokens = widened(tokens)
    return ScaledSums(tokens["v"], torch.ones_like(tokens["v"]), tokens["k"])


def _empty_sums(like: ScaledSums) -> ScaledSums:
    """Sums of no terms, of the shape of `like` without its axis 2 (tokens)."""
    zero = torch.zeros_like(like.exponent[:, :, 0])
    return ScaledSums(zero, zero, torch.full_like(zero, _EMPTY))


def _walk(terms: ScaledSums, state: ScaledSums, decay: Tensor) -> tuple[ScaledSums, ScaledSums]:
    """Sums before each entry of `terms` along axis 2, and after the last entry, by a loop.

    Arguments:
        terms: what each entry adds to the sums.
        state: sums before the first entry.
        decay: logarithm of the decay from one entry to the next, [C].
    """
    before = []
    for term in zip(*(x.unbind(2) for x in terms), strict=True):
        before.append(state)
        state = state.decayed(decay).plus(ScaledSums(*term))
    if not before:
        return terms, state
    return ScaledSums(*(torch.stack(part, dim=2) for part in zip(*before, strict=True))), state
