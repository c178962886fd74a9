"""What stands before the LM head of an encoder: a dense map, an activation, a norm (`HeadTransform`).

Devlin et al., BERT, 2019, and its reference code.

Axes: [..., embedding], as wide as what the head reads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..architectures.architecture import HeadTransform
from ..hooks.taps import Taps
from .kernels.products import product
from .mlp import ACTIVATIONS
from .norms import apply_norm, normalise
from .weights import Weights

__all__ = ["BEFORE_HEAD", "transformed"]

BEFORE_HEAD = (
    *("ln_final_scale", "ln_final_normalized", "final_norm"),
    *("head_pre_act", "head_post_act", "head_scale", "head_normalized", "head_out"),
)
"""Hook points between the last stream and the LM head."""


def transformed(
    x: Tensor, weights: Weights[Any], shape: HeadTransform, norm_type: str, taps: Taps | None = None
) -> Tensor:
    """States [..., hidden] -> what the head reads [..., embedding]; taps: None where nobody looks."""
    dense, norm, act = weights.transform, weights.transform_norm, ACTIVATIONS[shape.activation]
    assert dense is not None  # whoever has a transform has both
    assert norm is not None
    x = product(x, dense.weight, dense.bias)
    if taps is None:
        return apply_norm(act(x), norm, norm_type, shape.eps)
    x = taps("head_post_act", None, act(taps("head_pre_act", None, x)))
    return taps("head_out", None, normalise(x, norm, norm_type, shape.eps, taps, "head", None))
