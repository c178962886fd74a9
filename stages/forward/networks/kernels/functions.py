"""Elementwise functions that give the same bits at any place of a tensor.

torch splits a tensor between its threads and computes each part with vector instructions, except for a few
numbers at its end, for which it uses another exp. So the last bit of an activation depends on the number of
tokens in a pass and on the number of threads. `evenly` pads tensors so that no part has such a remainder.
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
"""Largest number of elements that vector instructions process per step (of which AVX-512 vectors hold 16)."""
_GRAIN, _SMALLER_GRAIN = 1 << 15, 1 << 14
"""Elements per thread from which torch uses further threads (at::internal::GRAIN_SIZE); GELU uses all threads
from half as many."""


def evenly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an elementwise function, with bits that depend on each element alone.

    Arguments:
        function: an elementwise function.
        x: values of any shape. Under autograd and on GPUs, whose kernels have no such remainder, the function
            is called directly.
    """
    if x.device.type != "cpu" or is_recorded(x):
        return function(x)
    if not x.is_contiguous() and x.shape[-1] % _STEP:
        x = x.contiguous()
    even = _even_part(x.numel())
    if even == x.numel():
        return function(x)
    flat = x.flatten()
    remainder = flat[even:]
    end = function(F.pad(remainder, (0, -len(remainder) % _STEP)))[: len(remainder)]
    return (torch.cat([function(flat[:even]), end]) if even else end).view(x.shape)


def _even_part(count: int) -> int:
    """Largest number of elements, at most `count`, that threads share without a remainder."""
    while (excess := count % _unit(count)) != 0:
        count -= excess
    return count


def _unit(count: int) -> int:
    """Number of which a tensor's size must be a multiple so that no thread's part has a remainder."""
    if count <= _SMALLER_GRAIN:
        return _STEP
    threads = torch.get_num_threads()
    return _STEP * math.lcm(threads, min(threads, -(-count // _GRAIN)))
