"""Effective attention of linear recurrences, normalised like a softmax pattern.

A recurrence that is linear in its values is a weighted sum of them, exactly: o_t = sum_s alpha[t, s] v_s. The
weights are signed and of any size (Ali et al., The Hidden Attention of Mamba Models, 2024). For plots and
comparisons with softmax patterns, negative weights are set to 0 and the rest is scaled to sum to 1.
"""

from __future__ import annotations

from torch import Tensor

_EPS = 1e-10
"""Added to sums of weights before division, as they may be 0."""


def effective_attention(alpha: Tensor) -> Tensor:
    """Positive part of signed weights alpha [..., query, source], scaled to sum to 1 over the sources of each
    query.

    The sum is 0 for a query without positive weights. The result times the values is not the output of the
    recurrence: only alpha @ v is. alpha must hold *all* sources of a query.
    """
    positive = alpha.relu()
    return positive / (positive.sum(-1, keepdim=True) + _EPS)
