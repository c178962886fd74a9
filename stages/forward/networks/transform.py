"""The transform before the head of an encoder: dense map, activation, perhaps a norm (`HeadTransform`).

Devlin et al., BERT, 2019, and its reference code.

Axes: [..., embedding], the width of the head's input.
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
"""Hook points between the final residual stream and the LM head."""


def transformed(
    x: Tensor, weights: Weights[Any], shape: HeadTransform, norm_type: str, taps: Taps | None = None
) -> Tensor:
    """Input of the head of an encoder, [..., embedding], from states [..., hidden]: norm(act(dense map)), or
    act(dense map) in a transform without norm.

    Arguments:
        x: states after the final norm, if there is one.
        weights: weights of the network, which hold the transform's dense map and norm.
        shape: activation function and epsilon of the transform.
        norm_type: kind of the transform's norm: "rms", "gemma_rms" or "layer".
        taps: hook points of the transform; None to compute it without them.
    """
    dense, norm, act = weights.transform, weights.transform_norm, ACTIVATIONS[shape.activation]
    assert dense is not None  # models with a transform have it
    x = product(x, dense.weight, dense.bias)
    x = act(x) if taps is None else taps("head_post_act", None, act(taps("head_pre_act", None, x)))
    if norm is None or shape.eps is None:
        return x
    if taps is None:
        return apply_norm(x, norm, norm_type, shape.eps)
    return taps("head_out", None, normalise(x, norm, norm_type, shape.eps, taps, "head", None))
