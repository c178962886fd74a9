"""Metrics on next-token logits, and their gradients.

Border: logits as numpy arrays or DataArrays with the vocabulary on the last axis; no model, no torch. All
numbers are float64: the KL of nearly equal distributions is a difference of nearly equal numbers.

Axes: any leading axes, vocab last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...store.arrays import Floats
from ...store.errors import PromptError

__all__ = [
    "TokenChange",
    "kl_divergence",
    "kl_gradient",
    "log_probability_gradient",
    "log_softmax",
    "logit_difference",
    "probability",
    "probability_gradient",
    "top_changed",
]


def log_softmax(logits: Any) -> Floats:
    """Log-probabilities in nats, float64 [..., vocab]."""
    shifted = np.asarray(logits, np.float64)
    # The largest logit is subtracted first, so that exp cannot overflow.
    shifted = shifted - shifted.max(-1, keepdims=True)
    logprobs: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logprobs


def kl_divergence(baseline: Any, other: Any) -> Floats:
    """KL(softmax(baseline) || softmax(other)) in nats, float64 [...]; leading axes broadcast.

    Arguments:
        baseline: Logits [..., vocab].
        other: Logits [..., vocab].
    """
    p, q = log_softmax(baseline), log_softmax(other)
    divergence: Floats = (np.exp(p) * (p - q)).sum(-1)
    # Over the whole vocabulary KL is never negative but for rounding (about 1e-15 of the terms).
    return np.maximum(divergence, 0.0)


def kl_gradient(baseline: Any, other: Any) -> Floats:
    """Gradient of KL(softmax(baseline) || softmax(other)) with respect to `other`, float64 [..., vocab].

    Arguments:
        baseline: Logits [..., vocab].
        other: Logits [..., vocab].
    """
    # d/dz KL(p || softmax(z)) = softmax(z) - p.
    gradient: Floats = np.exp(log_softmax(other)) - np.exp(log_softmax(baseline))
    return gradient


def logit_difference(logits: Any, token: int, other: int) -> Floats:
    """Difference of two tokens' logits, logits[token] - logits[other], float64 [...].

    Arguments:
        logits: Logits [..., vocab].
        token: Id of the token.
        other: Id of the token whose logit is subtracted.

    Raises:
        PromptError: An id is outside the vocabulary.
    """
    values = np.asarray(logits, np.float64)
    _check(values, token, other)
    difference: Floats = values[..., token] - values[..., other]
    return difference


def probability(logits: Any, token: int) -> Floats:
    """Probability of a token, softmax(logits)[token], float64 [...].

    Arguments:
        logits: [..., vocab].
        token: token id.

    Raises:
        PromptError: for an id outside the vocabulary.
    """
    _check(np.asarray(logits), token)
    values: Floats = np.exp(log_softmax(logits)[..., token])
    return values


def log_probability_gradient(logits: Any, token: int) -> Floats:
    """Gradient of log softmax(logits)[token] with respect to logits: onehot - softmax, float64 [..., vocab].

    Arguments:
        logits: [..., vocab].
        token: token id.

    Raises:
        PromptError: for an id outside the vocabulary.
    """
    _check(np.asarray(logits), token)
    gradient: Floats = -np.exp(log_softmax(logits))
    # 1 - p of the token itself cancels for p near 1; the sum of the other probabilities does not.
    other_gradients = np.delete(gradient, token, axis=-1)
    gradient[..., token] = -other_gradients.sum(-1)
    return gradient


def probability_gradient(logits: Any, token: int) -> Floats:
    """Gradient of softmax(logits)[token] with respect to logits, float64 [..., vocab].

    Arguments:
        logits: [..., vocab].
        token: token id.

    Raises:
        PromptError: for an id outside the vocabulary.
    """
    # dp/dz = p d(log p)/dz, which keeps the accuracy of the gradient of the logarithm.
    gradient: Floats = probability(logits, token)[..., None] * log_probability_gradient(logits, token)
    return gradient


@dataclass(frozen=True)
class TokenChange:
    """A token's probability without and with an intervention."""

    token_id: int
    """Id of the token."""
    baseline: float
    """Probability in the run without the intervention."""
    other: float
    """Probability in the run with the intervention."""

    @property
    def difference(self) -> float:
        """Change of the probability, other - baseline: positive if the token became more likely."""
        return self.other - self.baseline


def top_changed(baseline: Any, other: Any, k: int = 10) -> list[TokenChange]:
    """The k tokens with the largest absolute change of probability; the lower token id wins ties.

    Arguments:
        baseline: Logits [vocab] without the intervention.
        other: Logits [vocab] with the intervention.
        k: Number of tokens.
    """
    p, q = np.exp(log_softmax(baseline)), np.exp(log_softmax(other))
    # Stable, so that ties are resolved by token id on every platform.
    order = np.argsort(-np.abs(p - q), kind="stable")[:k]
    return [TokenChange(int(i), float(p[i]), float(q[i])) for i in order]


def _check(logits: npt.NDArray[Any], *tokens: int) -> None:
    """Raise PromptError if a token id is outside the vocabulary, the last axis of the logits."""
    # A negative id would silently count from the end of the vocabulary.
    size = logits.shape[-1] if logits.ndim else 0
    for token in tokens:
        if not 0 <= token < size:
            raise PromptError(f"expected a token id from 0 to {size - 1}, found {token}")
