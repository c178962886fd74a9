"""Copies of small tensors to the device of a pass, such as token ids and RoPE tables.

The copies are queued without waiting: a blocking copy would leave the GPU idle between the end of one pass
and the first kernel of the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy x from the CPU to a device, without blocking on CUDA. x may be freed at once: CUDA copies unpinned
    memory before the call returns."""
    return x.to(device, non_blocking=device.type == "cuda")
