"""Products of activations with weights: which of the libraries that torch carries computes them.

In float32 on a CPU torch asks MKL, whose kernels for other makers' processors are not its best; oneDNN, which
torch asks for bfloat16, has the same ones for all. Measured on an AMD EPYC (Zen 4, two cores), oneDNN's time
over MKL's: 0.83 to 0.93 for 2,048 rows and weights from 512 x 512 to 2048 x 8192, 0.34 to 0.74 for four rows
of the larger ones; without AVX-512 0.84 to 1.02 and 0.37 to 0.86. It reads weights where they lie, without a
second copy.

For every size it meets it prepares code, which takes 0.6 ms, and keeps it among the memory that large
temporaries come from: hundreds of different numbers of rows left a process 100 to 350 MB larger. So it is
asked for powers of two alone, which full batches of full windows have, and single tokens in generation.

Either library sums a row in one order whatever stands in the others, where it is given whole blocks of rows
and of columns; MKL on Intel's processors in its strict mode alone (tuning.py). Pieces of a block, of the
whole or of the share of a thread, go through kernels of their own: so sizes are filled up to whole blocks,
for any number of threads alike. A single row stays one: its kernel takes a third of the time of that of four,
and it is all there is of a token that is generated. The two libraries differ: so the length of prompts
decides which is asked, and a harvest batches prompts so that it is their own length that decides, `FEW_ROWS`
at least.

MIZARR_TUNING=off leaves every product to torch; tests/benchmarks/bench_tuning.py measures the choice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .company import is_beside_others
from .tuning import is_tuned, processor_maker

_LARGE = 1 << 26
"""Multiplications of one prompt from which asking oneDNN is worth its preparation."""
_ROWS, _COLUMNS = 4, 16
"""MKL's blocks: threads get whole ones, and the last what is left."""
_ALIGNED = 4
"""Numbers of a row whose first the kernel for few columns sums by where it lies in memory."""
_SPLIT = 1 << 11
"""Rows and columns from which even 192 threads are left with whole blocks: measured, 400 and 1,052."""
_FEW = 16
"""Rows that fewer take as long as: what takes time then is reading the weights."""


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
    # Of rows that do not adjoin torch makes a product for each prompt.
    x = x.contiguous()
    return _in_full_blocks(x, weight, bias) if _is_chosen_by_size(x) else F.linear(x, weight, bias)


def batched_product(x: Tensor, y: Tensor) -> Tensor:
    """Matrices x [n, row, in] with matrices y [n, in, column], [n, row, column]: as `product`, the same on
    any number of threads, which share one matrix where there are few."""
    if not _is_chosen_by_size(x):
        return torch.bmm(x, y)
    rows, columns = x.shape[1], y.shape[2]
    if is_beside_others():
        more_rows, more_columns = -rows % _ROWS, -columns % _COLUMNS
    else:
        more_rows, more_columns = _to_whole(rows, _ROWS), _to_whole(columns, _COLUMNS)
    if not more_rows and not more_columns:
        return torch.bmm(x, y)
    made: Tensor = torch.bmm(F.pad(x, (0, 0, 0, more_rows)), F.pad(y, (0, more_columns)))
    return made[:, :rows, :columns].contiguous()


def _to_whole(count: int, block: int) -> int:
    """What is missing to whole blocks, where threads may be left with less."""
    return -count % block if _COLUMNS < count < _SPLIT else 0


def _is_chosen_by_size(x: Tensor) -> bool:
    """Whether a library chooses the kernel, and with it the order of a sum, by sizes and threads."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled()


def _in_full_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with zeros to whole blocks of rows and columns, which are dropped, and whole widths.

    Some number of threads would leave one with a piece of a block, which kernels of their own sum in another
    order: a few rows, or a few columns; and a kernel for few columns sums a row by where it begins. It is
    asked of the sizes alone, so that all numbers of threads multiply alike.
    """
    rows, (columns, width) = x.numel() // max(x.shape[-1], 1), weight.shape
    more_rows = -rows % _ROWS if rows < _SPLIT else 0
    more_columns = _to_whole(columns, _COLUMNS)
    wider = -width % _ALIGNED if columns < _COLUMNS else 0
    is_alone = rows < 2 and not is_beside_others()
    if is_alone or not (more_rows or more_columns or wider):
        return F.linear(x, weight, bias)
    flat = x.flatten(0, -2)
    weight = F.pad(weight, (0, wider, 0, more_columns)) if more_columns or wider else weight
    bias = F.pad(bias, (0, more_columns)) if more_columns and bias is not None else bias
    made = F.linear(F.pad(flat, (0, wider, 0, more_rows)) if more_rows or wider else flat, weight, bias)
    found: Tensor = made[:rows, :columns].contiguous().unflatten(0, x.shape[:-1])
    return found


def _wants_onednn(x: Tensor, weight: Tensor) -> bool:
    if not _is_chosen_by_size(x) or weight.dtype != torch.float32:
        return False
    if x.dim() < 3 or is_beside_others():  # rows of several prompts, as many as it happens to be
        return False
    rows, length = x.numel() // max(x.shape[-1], 1), x.shape[-2]
    is_large = rows.bit_count() == 1 and max(length, _FEW) * weight.numel() >= _LARGE
    return is_large and bool(torch.backends.mkldnn.enabled)


@cache
def _onednn() -> Any:
    """oneDNN's product, where torch would ask MKL and MKL is not at home; else None."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    at_home = processor_maker() in (None, "GenuineIntel")
    if not is_tuned() or at_home or not both:
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
