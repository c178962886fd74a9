"""The attention a linear recurrence amounts to, made to look like a pattern.

A recurrence that is linear in its values weighs them: o_t = sum_s alpha[t, s] v_s, exactly. Its weights are
signed and of any size (Ali et al., The Hidden Attention of Mamba Models, 2024); to be drawn and compared
beside softmax patterns they lose what is negative and are scaled to sum to 1.
"""

from __future__ import annotations

from torch import Tensor

_NOTHING = 1e-10
"""Added to sums of weights, which may be 0."""


def effective_attention(alpha: Tensor) -> Tensor:
    """Weights [..., query, source] over *all* sources -> max(alpha, 0), scaled to a sum of 1 for each query.

    The sum is 0 where no weight is positive. What was negative is gone, so that only alpha @ v is what is
    read, and not the product with these.
    """
    positive = alpha.relu()
    return positive / (positive.sum(-1, keepdim=True) + _NOTHING)
