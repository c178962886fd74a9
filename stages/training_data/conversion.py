"""Stored numbers as float32, and whether they are finite; exact, and without torch where none is asked for.

Border: arrays in, arrays out.

numpy widens float16 number by number: measured, nine times slower than by the bits, which is done here.
bfloat16 is the upper half of a float32.
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
"""Numbers widened at a time: what is between stays in the processor's cache."""
_SIGN_AND_NUMBER = np.int32(-0x70002000)
"""Of a float16 whose bits were widened with their sign and shifted by 13: the bits a float32 has for it."""
_EXPONENT = np.float32(2.0**112)
"""Between the exponent biases of float16 (15) and float32 (127)."""
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of infinity; those of NaN are above."""
_SIGN = 0x8000


def as_float32(rows: Array) -> npt.NDArray[np.float32]:
    """Finite rows of any stored dtype as float32, the same values; not copied where they are."""
    if rows.dtype != np.float16 or not rows.size:
        return rows.astype(np.float32, copy=False)
    out = np.empty(rows.shape, np.float32)
    step = max(1, _BLOCK // (rows.size // len(rows)))
    for start in range(0, len(rows), step):
        bits = rows[start : start + step].view(np.int16).astype(np.int32)
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, _SIGN_AND_NUMBER, out=bits)
        np.multiply(bits.view(np.float32), _EXPONENT, out=out[start : start + step])
    return out


def as_tensor(rows: npt.NDArray[Any], *, widen: bool = True) -> Tensor:
    """Rows as a tensor: float32, or in their stored dtype."""
    import torch

    if rows.dtype.name == "bfloat16":
        found = torch.from_numpy(rows.view(np.uint16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(rows)
    return found.to(torch.float32) if widen else found


def is_finite(rows: Array) -> bool:
    """Whether rows hold neither NaN nor infinity."""
    infinity = _INFINITY.get(rows.dtype.name)
    if infinity is None or not rows.size:
        return bool(np.isfinite(rows).all())
    # Negative numbers are the largest ones without a sign, and the smallest ones with it.
    bits = rows.view(np.int16)
    return int(bits.max()) < infinity and int(bits.view(np.uint16).max()) < _SIGN | infinity
