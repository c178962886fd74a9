"""Whether a step is being recorded, so that its inputs must stay what they are.

A pass saves memory and time by writing over tensors nobody else has seen. Under autograd somebody has: the
backward pass reads them again. Whoever overwrites asks here first; without gradients the answer is one look
at a flag.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_recorded(*tensors: Tensor) -> bool:
    """Whether autograd keeps what is computed of one of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
