"""A short convolution between two multiplicative gates computed from the same token.

    B, C, x = W_in u        y = convolution of (B x)        out = W_out (C y)

(LFM2, Liquid AI, 2025.) There is no recurrent state: a token sees only the few before it.
"""

from __future__ import annotations

from torch import Tensor

from ...architectures.linear_mixers import ShortConvolutionSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from .convolution import convolve
from .mixer import LayerTensors, strip_prefix

__all__ = ["ShortConvolution"]


class ShortConvolution:
    """The short convolution of one layer (`PositionMixer`)."""

    def __init__(self, shape: ShortConvolutionSpec, tensors: LayerTensors) -> None:
        self.shape, self.weights = shape, strip_prefix(tensors, "conv.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """See `PositionMixer`."""
        w = self.weights
        into, out, inner = product(x, w["in"], w.get("in.bias")).chunk(3, dim=-1)
        into, out = taps("conv_in_gate", layer, into), taps("conv_out_gate", layer, out)
        inner = taps("conv_x", layer, into * inner)
        convolved = history.needed(convolve(inner, w["conv"], w.get("conv.bias"), layer, history))
        convolved = taps("conv_out", layer, convolved)
        return product(history.needed(out) * convolved, w["out"], w.get("out.bias"))
