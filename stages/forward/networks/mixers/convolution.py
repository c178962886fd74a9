"""Short causal convolutions: each channel by itself, over a token and the few before it.

Axes: [B, token, channel].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..history import History
from .mixer import upcast

__all__ = ["convolve"]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int, history: History) -> Tensor:
    """x [B, token, channel] convolved by weight [channel, 1, size], whose last entry is of the token itself.

    Tokens before the first are zeros. Summed in float32 whatever the dtype, as kernels do.
    """
    *earlier, own = upcast(weight).squeeze(1).unbind(-1)
    found = upcast(x) * own
    if earlier:
        before = history.before(layer, "convolution", x, len(earlier))
        for place, factor in enumerate(earlier):
            found = torch.addcmul(found, upcast(before[:, :, place]), factor)
    return (found if bias is None else found + upcast(bias)).to(x.dtype)
