"""Whether autograd records an operation, so that its inputs must not be overwritten.

A pass saves memory and time by in-place operations. Under autograd the backward pass reads the tensors again,
so code checks `is_recorded` before it overwrites one. Without gradients the check costs one look at a flag.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_recorded(*tensors: Tensor) -> bool:
    """Whether autograd records operations on any of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
