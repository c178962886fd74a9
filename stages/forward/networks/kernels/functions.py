"""Functions of single numbers, so that each gives the same bits wherever in a tensor it stands.

torch hands a tensor to its threads in parts, and each part to vector instructions, but for a few numbers at
its end, for which it has another exp. So an activation's last bit depends on how many tokens share a pass and
how many threads there are. Here no part has such an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gradients import is_recorded

__all__ = ["evenly"]

_STEP = 64
"""Numbers that vector instructions take in one turn, at most: two vectors of 512 bits of 16 each."""
_GRAIN, _SMALLER_GRAIN = 1 << 15, 1 << 14
"""Numbers from which torch uses further threads: one for each so many (at::internal::GRAIN_SIZE), and of GELU
all of them from half of that."""


def evenly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of a function of single numbers, whatever else is in x; as it is where gradients are
    recorded, and on other devices, whose kernels have no such ends."""
    if x.device.type != "cpu" or is_recorded(x):
        return function(x)
    if not x.is_contiguous() and x.shape[-1] % _STEP:
        x = x.contiguous()
    even = _even_part(x.numel())
    if even == x.numel():
        return function(x)
    flat = x.flatten()
    rest = flat[even:]
    made = function(F.pad(rest, (0, -len(rest) % _STEP)))[: len(rest)]
    return (torch.cat([function(flat[:even]), made]) if even else made).view(x.shape)


def _even_part(count: int) -> int:
    """The most of these numbers that threads share without an end."""
    while (left := count % _unit(count)) != 0:
        count -= left
    return count


def _unit(count: int) -> int:
    """What the size of a tensor is a multiple of if no thread's part of it has an end."""
    if count <= _SMALLER_GRAIN:
        return _STEP
    threads = torch.get_num_threads()
    return _STEP * math.lcm(threads, min(threads, -(-count // _GRAIN)))
