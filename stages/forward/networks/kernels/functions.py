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
    """Apply an elementwise function so that each result's bits depend on its element alone, independent of
    its index in the tensor.

    Arguments:
        function: an elementwise function.
        x: values of any shape. Under autograd and on GPUs, which compute all elements alike, the function is
            called directly.
    """
    if x.device.type != "cpu" or is_recorded(x):
        return function(x)
    if not x.is_contiguous() and x.shape[-1] % _STEP:
        x = x.contiguous()
    n_even = _largest_even_size(x.numel())
    if n_even == x.numel():
        return function(x)
    flat = x.flatten()
    remainder = flat[n_even:]
    padded = F.pad(remainder, (0, -len(remainder) % _STEP))
    end = function(padded)[: len(remainder)]
    return (torch.cat([function(flat[:n_even]), end]) if n_even else end).view(x.shape)


def _largest_even_size(count: int) -> int:
    """Largest number of elements, at most `count`, that torch's threads share without a remainder of a
    vector."""
    while (excess := count % _even_multiple(count)) != 0:
        count -= excess
    return count


def _even_multiple(count: int) -> int:
    """Number of which a tensor's size, about `count` elements, must be a multiple so that no thread's part
    has a remainder of a vector."""
    if count <= _SMALLER_GRAIN:
        return _STEP
    threads = torch.get_num_threads()
    return _STEP * math.lcm(threads, min(threads, -(-count // _GRAIN)))
