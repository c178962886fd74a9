"""Exact conversion of stored numbers to float32, and a check that they are finite. Arrays need no torch.

numpy converts float16 number by number, measured nine times slower than the bit operations here. bfloat16 is
the upper half of a float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from ...store.arrays import Array

__all__ = ["as_float32", "as_tensor", "is_finite"]

_BLOCK = 1 << 17
"""Count of numbers that are converted at a time, so that intermediate values stay in the CPU cache."""
_SIGN_AND_NUMBER = np.int32(-0x70002000)
"""Mask of the bits that a float16, sign-extended to 32 bits and shifted left by 13, shares with the
float32."""
_EXPONENT = np.float32(2.0**112)
"""Factor between the exponent biases of float16 (15) and float32 (127)."""
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of infinity; NaNs are larger."""
_SIGN = 0x8000
"""Sign bit of a 16-bit float."""


def as_float32(rows: Array) -> npt.NDArray[np.float32]:
    """Convert finite rows of any stored dtype to float32, exactly; float32 rows are not copied."""
    if rows.dtype != np.float16 or not rows.size:
        return rows.astype(np.float32, copy=False)
    out = np.empty(rows.shape, np.float32)
    step = max(1, _BLOCK // (rows.size // len(rows)))
    # By block: each step below reads and writes the same numbers, so they should stay in the cache.
    for start in range(0, len(rows), step):
        # int16 to int32 repeats the sign bit, so that it is at bit 31 wherever the shift leaves the number.
        bits = rows[start : start + step].view(np.int16).astype(np.int32)
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, _SIGN_AND_NUMBER, out=bits)
        # The product also turns subnormal halves into normal floats, which the shifted bits alone would not.
        np.multiply(bits.view(np.float32), _EXPONENT, out=out[start : start + step])
    return out


def as_tensor(rows: npt.NDArray[Any], *, widen: bool = True) -> Tensor:
    """Convert an array to a tensor, which shares its memory if no conversion is needed.

    Arguments:
        rows: Array of any stored dtype.
        widen: Whether to convert to float32; otherwise the stored dtype is kept.
    """
    import torch

    # torch.from_numpy does not know the bfloat16 of ml_dtypes; as integers its bits pass unchanged.
    if rows.dtype.name == "bfloat16":
        tensor = torch.from_numpy(rows.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(rows)
    return tensor.to(torch.float32) if widen else tensor


def is_finite(rows: Array) -> bool:
    """Whether an array of any stored dtype contains neither NaN nor infinity."""
    infinity = _INFINITY.get(rows.dtype.name)
    if infinity is None or not rows.size:
        return bool(np.isfinite(rows).all())
    # As unsigned integers negative numbers are the largest, as signed ones the smallest; so two maxima cover
    # both signs.
    bits = rows.view(np.int16)
    return int(bits.max()) < infinity and int(bits.view(np.uint16).max()) < _SIGN | infinity
