"""Matrix products of activations with weights: which of torch's two libraries, MKL or oneDNN, computes them.

For float32 on a CPU torch uses MKL, whose kernels are slower on processors of other makers than Intel.
oneDNN, which torch uses for bfloat16, has the same kernels for all. Measured on an AMD EPYC (Zen 4, two
cores), time of oneDNN relative to MKL: 0.83 to 0.93 for 2,048 rows and weights from 512 x 512 to 2048 x 8192,
0.34 to 0.74 for four rows of the larger ones; without AVX-512 0.84 to 1.02 and 0.37 to 0.86. It reads weights
in place.

oneDNN compiles code for every new size, which takes 0.6 ms, and the code fragments the memory of large
temporaries: after hundreds of different numbers of rows a process was 100 to 350 MB larger. So it is used for
powers of two only, such as full batches of full windows, and in the steps of a generation, which repeat the
same few sizes: there it shares weights of 576 x 576 and more among threads, which MKL does not (0.55 to 0.73
of MKL's time with two threads).

Both libraries sum a row in an order independent of the other rows if they get whole blocks of rows and
columns (on Intel processors MKL only in strict mode, tuning.py). Partial blocks, of the whole or of one
thread's share, use other kernels, so sizes are padded to whole blocks for any number of threads. A single row
is not padded: its kernel takes a third of the time of that for four rows, and generation always has a single
row. The two libraries differ in the last bits, so the choice depends on the length of a prompt alone; a
harvest batches prompts such that this holds, with at least `FEW_ROWS` rows.

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
"""Number of multiplications per prompt from which oneDNN saves more time than its compilation takes."""
_STEP_ROWS, _STEP_WEIGHTS = 64, 1 << 18
"""Largest number of rows, and smallest number of weights, with which oneDNN computes a step of a generation:
with fewer weights it is slower than MKL."""
_ROWS, _COLUMNS = 4, 16
"""Numbers of rows and columns in a block of MKL's matrix product."""
_ALIGNED = 4
"""In products with fewer than 16 columns, rows are padded to a multiple of this length: that kernel's order
of summation depends on the memory alignment of a row."""
_SPLIT = 1 << 11
"""Number of rows or columns from which even 192 threads get whole blocks: measured, 400 rows and 1,052
columns."""
_FEW = 16
"""Products of fewer rows than this take as long as this many, because reading the weights takes the time."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear map x weight^T + bias.

    Arguments:
        x: values [..., in].
        weight: matrix [out, in].
        bias: vector [out]; None for no bias.

    Returns:
        Product [..., out]. Under autograd torch's own product is used, as oneDNN's operator has no gradient.
    """
    if _wants_onednn(x, weight) and (onednn := _onednn()) is not None:
        out: Tensor = onednn(x, weight, bias, "none", [], "")
        return out
    if weight.shape[0] == 1 and x.device.type == "cpu" and not torch.is_grad_enabled():
        # Matrix times vector: MKL would use one kernel for four rows at a time and another for the remainder.
        dot = (x * weight[0]).sum(-1, keepdim=True)
        return dot if bias is None else dot + bias
    # For rows that are not contiguous torch would run a separate product per prompt.
    x = x.contiguous()
    return _in_full_blocks(x, weight, bias) if _is_chosen_by_size(x) else F.linear(x, weight, bias)


def batched_product(x: Tensor, y: Tensor) -> Tensor:
    """Batched product of x [n, row, in] and y [n, in, column], [n, row, column], with the same bits for any
    number of threads (several threads share a matrix if there are few)."""
    if not _is_chosen_by_size(x):
        return torch.bmm(x, y)
    rows, columns = x.shape[1], y.shape[2]
    if is_beside_others():
        more_rows, more_columns = -rows % _ROWS, -columns % _COLUMNS
    else:
        more_rows, more_columns = _to_whole(rows, _ROWS), _to_whole(columns, _COLUMNS)
    if not more_rows and not more_columns:
        return torch.bmm(x, y)
    padded: Tensor = torch.bmm(F.pad(x, (0, 0, 0, more_rows)), F.pad(y, (0, more_columns)))
    return padded[:, :rows, :columns].contiguous()


def _to_whole(count: int, block: int) -> int:
    """How many rows or columns to add to `count` for whole blocks, if a thread may get a partial block; else
    0."""
    return -count % block if _COLUMNS < count < _SPLIT else 0


def _is_chosen_by_size(x: Tensor) -> bool:
    """Whether a library would choose the kernel of a product of x, and with it the order of summation, by the
    sizes and the number of threads: float32 on a CPU, without gradients."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled()


def _in_full_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear map x weight^T + bias, [..., out], computed with zero padding to whole blocks of rows and
    columns, and to aligned rows.

    With some numbers of threads, one would get a partial block, which another kernel sums in another order.
    The padding depends on the sizes alone, so that results are equal for all numbers of threads.
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
    padded = F.linear(F.pad(flat, (0, wider, 0, more_rows)) if more_rows or wider else flat, weight, bias)
    out: Tensor = padded[:rows, :columns].contiguous().unflatten(0, x.shape[:-1])
    return out


def _wants_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is used for x weight^T where it is available: in large products of a power of two of
    rows, and in steps of a generation, which have one row per prompt."""
    if not _is_chosen_by_size(x) or weight.dtype != torch.float32:
        return False
    if x.dim() < 3 or is_beside_others():  # rows of several prompts, whose number depends on the batch
        return False
    rows, length = x.numel() // max(x.shape[-1], 1), x.shape[-2]
    if length == 1 and rows <= _STEP_ROWS:
        is_large = weight.numel() >= _STEP_WEIGHTS
    else:
        is_large = rows.bit_count() == 1 and max(length, _FEW) * weight.numel() >= _LARGE
    return is_large and bool(torch.backends.mkldnn.enabled)


@cache
def _onednn() -> Any:
    """oneDNN's product; None if torch's default is kept: on Intel processors, or without tuning."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    is_intel = processor_maker() in (None, "GenuineIntel")
    if not is_tuned() or is_intel or not has_both:
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
