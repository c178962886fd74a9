"""Small tensors on their way to where a pass is computed.

What the CPU makes for a pass - token ids, tables of angles - goes to a GPU in its turn, behind what that has
still to do: a copy that is waited for would leave it idle from the end of one pass until the next one's first
product is on its way.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x of the CPU on a device. CUDA takes what is in plain memory before it returns, so x may go at once."""
    return x.to(device, non_blocking=device.type == "cuda")
