"""Arrays and views as JSON: numbers in compact base64 blocks, everything else as it is.

Border: numpy values in, plain values out; knows no page. `core.js` reads a block back (`decode`).
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
"""Values above which float32 becomes float16: three digits of each are plenty to look at."""
_HALF = 65504.0  # the largest float16
_INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.int32)


def compact(values: Array) -> Array:
    """The array in the smallest dtype that a page can read and that still tells it, little-endian.

    Floats become float32, or float16 where they are more than `MANY` and none is too large for it; integers
    the narrowest kind that holds them all. OverflowError for integers beyond 32 bits.

    >>> [compact(np.array(values)).dtype.str for values in ([0, 255], [-1, 300], [0.1])]
    ['|u1', '<i2', '<f4']
    """
    array = np.asarray(values)
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    if array.dtype.kind in "iu":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        for kind in _INTEGERS:
            if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
                return array.astype(np.dtype(kind).newbyteorder("<"))
        raise OverflowError(f"expected integers of at most 32 bits, found {low} to {high}")
    array = array.astype("<f4")
    if array.size <= MANY:
        return array
    finite = array[np.isfinite(array)]
    return array.astype("<f2") if not finite.size or np.abs(finite).max() <= _HALF else array


def block(values: Array) -> dict[str, Any]:
    """An array as JSON holds it: dtype as numpy writes it, shape, and its bytes in C order as base64."""
    array = np.ascontiguousarray(compact(values))
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def plain(value: Any) -> Any:
    """Arrays as blocks, dataclasses as dicts, tuples as lists; a float that is no number becomes null."""
    if isinstance(value, np.ndarray):
        return block(value)
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in _on_page(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _on_page(value: Any) -> list[dataclasses.Field[Any]]:
    """Fields that a page embeds: all but those declared with metadata {"page": False}."""
    return [field for field in dataclasses.fields(value) if field.metadata.get("page", True)]


def listed(value: Any) -> Any:
    """What `json` prints: arrays and tuples as lists, numpy's numbers as Python's; one that is none as null.

    A function is asked for its value: what only a document needs is not worked out for a terminal.
    """
    value = value() if callable(value) else value
    value = value.values if hasattr(value, "dims") else value
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [listed(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size(value: Any) -> int:
    """Bytes a value takes on a page, to within what its tags take."""
    if isinstance(value, np.ndarray):
        return 4 * compact(value).nbytes // 3
    if isinstance(value, bytes):
        return 4 * len(value) // 3
    if isinstance(value, str):
        return len(value.encode()) + 4
    if dataclasses.is_dataclass(value):
        return sum(size(getattr(value, field.name)) for field in _on_page(value))
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    return 8
