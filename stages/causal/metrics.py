"""What an intervention did, in numbers: metrics on next-token logits.

Border: logits as numpy arrays or DataArrays, the vocabulary on the last axis; knows no model. Computed in
float64, as a KL of nearly equal distributions is a difference of nearly equal numbers. Never imports torch.

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
    """Log-probabilities, nats, float64 [..., vocab]."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    found: Floats = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return found


def kl_divergence(baseline: Any, other: Any) -> Floats:
    """KL(softmax(baseline) || softmax(other)) in nats, [...]; leading axes broadcast. No term is left out, so
    it is never negative beyond rounding, and exact to about 1e-15 of its terms."""
    p, q = log_softmax(baseline), log_softmax(other)
    found: Floats = (np.exp(p) * (p - q)).sum(-1)
    return np.maximum(found, 0.0)


def kl_gradient(baseline: Any, other: Any) -> Floats:
    """Gradient of KL(softmax(baseline) || softmax(other)) with respect to `other`: q - p, [..., vocab]."""
    found: Floats = np.exp(log_softmax(other)) - np.exp(log_softmax(baseline))
    return found


def logit_difference(logits: Any, token: int, other: int) -> Floats:
    """logits[token] - logits[other], float64 [...]. Raises PromptError for ids beyond the vocabulary."""
    wide = np.asarray(logits, np.float64)
    _check(wide, token, other)
    found: Floats = wide[..., token] - wide[..., other]
    return found


def probability(logits: Any, token: int) -> Floats:
    """softmax(logits)[token], float64 [...]. Raises PromptError for an id outside of the vocabulary."""
    _check(np.asarray(logits), token)
    found: Floats = np.exp(log_softmax(logits)[..., token])
    return found


def log_probability_gradient(logits: Any, token: int) -> Floats:
    """Gradient of log softmax(logits)[token]: 1 at the token, less the probabilities, [..., vocab]."""
    _check(np.asarray(logits), token)
    found: Floats = -np.exp(log_softmax(logits))
    # 1 - p of the token itself, without the difference of nearly equal numbers.
    others = np.delete(found, token, axis=-1)
    found[..., token] = -others.sum(-1)
    return found


def probability_gradient(logits: Any, token: int) -> Floats:
    """Gradient of softmax(logits)[token]: p times that of its logarithm, [..., vocab]."""
    found: Floats = probability(logits, token)[..., None] * log_probability_gradient(logits, token)
    return found


@dataclass(frozen=True)
class TokenChange:
    """A token whose probability an intervention changed."""

    token_id: int
    baseline: float
    other: float

    @property
    def difference(self) -> float:
        """other - baseline: above 0 where the token became likelier."""
        return self.other - self.baseline


def top_changed(baseline: Any, other: Any, k: int = 10) -> list[TokenChange]:
    """The k tokens whose probability changed most, largest absolute change first, ties by token id.

    baseline, other: logits [vocab].
    """
    p, q = np.exp(log_softmax(baseline)), np.exp(log_softmax(other))
    order = np.argsort(-np.abs(p - q), kind="stable")[:k]
    return [TokenChange(int(i), float(p[i]), float(q[i])) for i in order]


def _check(logits: npt.NDArray[Any], *tokens: int) -> None:
    size = logits.shape[-1] if logits.ndim else 0
    for token in tokens:
        if not 0 <= token < size:
            raise PromptError(f"expected a token id in 0..{size - 1}, found {token}")
