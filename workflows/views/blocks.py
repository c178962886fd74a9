"""Conversion of arrays and views to JSON values: arrays become compact base64 blocks for a page's JavaScript.

`decode` of report/assets/core.js reads a block back. This module depends on no page.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...store.arrays import Array

__all__ = ["block", "compact", "listed", "plain", "size"]

MANY = 1 << 20
"""Arrays with more floats than this are embedded as float16, whose three digits are enough for display."""
_LARGEST_FLOAT16 = 65504.0
"""The largest finite float16."""
# Narrowest first. ARRAYS of core.js has no other integer dtypes: neither uint32 nor 64 bits.
_INTEGER_DTYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32)


def compact(values: Array) -> Array:
    """The array in the smallest dtype that JavaScript can read without visible loss, little-endian.

    Floats become float32; if there are more than `MANY`, float16, unless a value exceeds its range. Integers
    become the narrowest integer dtype that holds all of them, booleans uint8.

    Raises:
        OverflowError: An integer needs more than 32 bits.

    >>> [compact(np.array(values)).dtype.str for values in ([0, 255], [-1, 300], [0.1])]
    ['|u1', '<i2', '<f4']
    """
    array = np.asarray(values)
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    if array.dtype.kind in "iu":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        for dtype in _INTEGER_DTYPES:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return array.astype(np.dtype(dtype).newbyteorder("<"))
        # JavaScript numbers are doubles; its 64-bit arrays hold BigInt, which the scripts do not handle.
        raise OverflowError(
            f"a page can embed integers of at most 32 bits, found values from {low} to {high}; convert them "
            "to float"
        )
    array = array.astype("<f4")
    if array.size <= MANY:
        return array
    largest = np.abs(array[np.isfinite(array)]).max(initial=0.0)
    return array.astype("<f2") if largest <= _LARGEST_FLOAT16 else array


def block(values: Array) -> dict[str, Any]:
    """An array as a JSON object, which `decode` of core.js reads: dtype in numpy's notation, shape, data.

    The entry `data` holds the bytes of the values, in C order, as base64.
    """
    array = np.ascontiguousarray(compact(values))
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def plain(value: Any) -> Any:
    """Convert a value for embedding in a page: arrays to blocks, dataclasses to dicts, tuples to lists.

    NaN and infinity become None, since JSON has neither.
    """
    if isinstance(value, np.ndarray):
        return block(value)
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in _embedded_fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _embedded_fields(value: Any) -> list[dataclasses.Field[Any]]:
    """Fields of a dataclass that a page embeds: all but those declared with metadata {"page": False}."""
    return [field for field in dataclasses.fields(value) if field.metadata.get("page", True)]


def listed(value: Any) -> Any:
    """Convert a value of `View.json` for a JSON document: arrays to lists, numpy scalars to Python numbers.

    NaN and infinity become None. A function is called, and its return value is converted: values that only
    the JSON document needs are thus not computed for terminal output.
    """
    value = value() if callable(value) else value
    # An xarray object, recognised without importing xarray.
    value = value.values if hasattr(value, "dims") else value
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [listed(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size(value: Any) -> int:
    """Estimated number of bytes that a value takes on a page, without markup."""
    # Base64 writes three bytes as four characters.
    if isinstance(value, np.ndarray):
        return 4 * compact(value).nbytes // 3
    if isinstance(value, bytes):
        return 4 * len(value) // 3
    if isinstance(value, str):
        return len(value.encode()) + 4
    if dataclasses.is_dataclass(value):
        return sum(size(getattr(value, field.name)) for field in _embedded_fields(value))
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    # A number, bool or None as text.
    return 8
