"""Short causal depthwise convolutions, over a token and the few before it, and the mixer made of one.

Axes: [B, token, channel].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...architectures.linear_mixers import ShortConvolutionSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from .mixer import LayerTensors, strip_prefix, upcast

__all__ = ["ShortConvolution", "convolve"]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int, history: History) -> Tensor:
    """Causal depthwise convolution of x along positions, with zeros before the first token.

    Arguments:
        x: values [B, token, channel].
        weight: kernel [channel, 1, size]; its last entry multiplies the token itself.
        bias: bias [channel]; None for no bias.
        layer: number of the layer.
        history: gives the previous tokens.

    Returns:
        Values [B, token, channel] in the dtype of x, summed in float32 as in the CUDA kernels of
        causal-conv1d.
    """
    *earlier_factors, factor_of_token = upcast(weight).squeeze(1).unbind(-1)
    total = upcast(x) * factor_of_token
    if earlier_factors:
        previous = history.before(layer, "convolution", x, len(earlier_factors))
        for offset, factor in enumerate(earlier_factors):
            total = torch.addcmul(total, upcast(previous[:, :, offset]), factor)
    return (total if bias is None else total + upcast(bias)).to(x.dtype)


class ShortConvolution:
    """A short causal convolution between two multiplicative gates that are computed from the same token.

        B, C, x = W_in u        y = convolution of (B x)        out = W_out (C y)

    (LFM2, Liquid AI, 2025.) There is no recurrent state: a token sees only the few before it.
    """

    def __init__(self, spec: ShortConvolutionSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, strip_prefix(tensors, "conv.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        w = self.weights
        in_gate, out_gate, inner = product(x, w["in"], w.get("in.bias")).chunk(3, dim=-1)
        in_gate, out_gate = taps("conv_in_gate", layer, in_gate), taps("conv_out_gate", layer, out_gate)
        inner = taps("conv_x", layer, in_gate * inner)
        convolved = history.needed(convolve(inner, w["conv"], w.get("conv.bias"), layer, history))
        convolved = taps("conv_out", layer, convolved)
        return product(history.needed(out_gate) * convolved, w["out"], w.get("out.bias"))
