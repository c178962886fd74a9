"""Products of activations with weights: which of the libraries that torch carries computes them.

In float32 on a CPU torch asks MKL, whose kernels for other makers' processors are not its best; oneDNN, which
torch asks for bfloat16, has the same ones for all. Measured on an AMD EPYC (Zen 4, two cores), oneDNN's time
over MKL's: 0.83 to 0.93 for 2,048 rows and weights from 512 x 512 to 2048 x 8192, 0.34 to 0.74 for four rows
of the larger ones; without AVX-512 0.84 to 1.02 and 0.37 to 0.86. It reads weights where they lie, without a
second copy.

For every size it meets it prepares code, which takes 0.6 ms, and keeps it among the memory that large
temporaries come from: hundreds of different numbers of rows left a process 100 to 350 MB larger. So it is
asked for powers of two alone, which full batches of full windows have, and single tokens in generation.

Either library sums a row in one order whatever stands in the others and however many threads share them, from
`FEW_ROWS` rows on, and of fewer where they are a multiple of `_TOGETHER`, to which they are filled up: MKL
takes so many rows at a time, and what is left over, up to three of all or of a thread's share, by a kernel of
its own. A single row stays one: its kernel takes a third of the time of that of four, and it is all there is
of a token that is generated. The two libraries differ: so the length of prompts decides which is asked, and a
harvest batches prompts so that it is their own length that decides.

MIZARR_TUNING=off leaves every product to torch; tests/benchmarks/bench_tuning.py measures the choice.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import FEW_ROWS
from .tuning import is_tuned

_LARGE = 1 << 26
"""Multiplications of one prompt from which asking oneDNN is worth its preparation."""
_FEW = 16
"""Rows that fewer take as long as: what takes time then is reading the weights."""


_TOGETHER = 4
"""Rows that MKL multiplies at a time."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> x weight^T + bias, [..., out].

    Where gradients are recorded it is torch's own, as oneDNN's has none.
    """
    if _wants_onednn(x, weight) and (onednn := _onednn()) is not None:
        made: Tensor = onednn(x, weight, bias, "none", [], "")
        return made
    if weight.shape[0] == 1 and x.device.type == "cpu" and not torch.is_grad_enabled():
        # A vector: MKL has kernels for four rows of x at a time, and others for what is left over.
        alone = (x * weight[0]).sum(-1, keepdim=True)
        return alone if bias is None else alone + bias
    if _are_few(x, weight):
        rows = x.reshape(-1, x.shape[-1])
        filled = F.pad(rows, (0, 0, 0, -len(rows) % _TOGETHER))
        return F.linear(filled, weight, bias)[: len(rows)].view(*x.shape[:-1], len(weight))
    # Of rows that do not adjoin torch makes a product for each prompt.
    return F.linear(x.contiguous(), weight, bias)


def _are_few(x: Tensor, weight: Tensor) -> bool:
    """Whether the sum of a row would depend on how many there are, or on the number of threads."""
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32 or torch.is_grad_enabled():
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    return 1 < rows < FEW_ROWS and rows % _TOGETHER != 0


def _wants_onednn(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32 or torch.is_grad_enabled():
        return False
    if x.dim() < 3:  # rows of several prompts, as many as it happens to be
        return False
    rows, length = x.numel() // max(x.shape[-1], 1), x.shape[-2]
    is_large = rows.bit_count() == 1 and max(length, _FEW) * weight.numel() >= _LARGE
    return is_large and bool(torch.backends.mkldnn.enabled)


@cache
def _onednn() -> Any:
    """oneDNN's product, where torch would ask MKL and MKL is not at home; else None."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    at_home = _processor_maker() in (None, "GenuineIntel")
    if not is_tuned() or at_home or not both:
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _processor_maker(told: Path = Path("/proc/cpuinfo")) -> str | None:
    """ "AuthenticAMD", "GenuineIntel", …, as Linux tells it; None where nobody does."""
    try:
        lines = told.read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), None)
