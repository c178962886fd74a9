"""Short causal depthwise convolutions, over a token and the few before it.

Axes: [B, token, channel].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..history import History
from .mixer import upcast

__all__ = ["convolve"]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int, history: History) -> Tensor:
    """Convolve x along positions, with zeros before the first token.

    Arguments:
        x: [B, token, channel].
        weight: [channel, 1, size]; the last entry multiplies the token itself.
        bias: [channel] or None.
        layer: the layer.
        history: gives the previous tokens.

    Returns:
        [B, token, channel] in the dtype of x, summed in float32 as the reference kernels do.
    """
    *earlier, current = upcast(weight).squeeze(1).unbind(-1)
    total = upcast(x) * current
    if earlier:
        before = history.before(layer, "convolution", x, len(earlier))
        for offset, factor in enumerate(earlier):
            total = torch.addcmul(total, upcast(before[:, :, offset]), factor)
    return (total if bias is None else total + upcast(bias)).to(x.dtype)
