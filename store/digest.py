"""Plain values and bytes -> digests that mean the same on every machine, in every process, in ten years.

Border: JSON values, numpy arrays and files; never a torch tensor, a pickle, a repr or an address. What cannot
be written down canonically is refused, because a key that is guessed is a key that returns somebody else's
activations.

Canonical JSON: UTF-8, sorted keys, no spaces; floats as `float.hex()` strings with -0.0 folded into 0.0; no
NaN or infinity; integers within 2**53; enums by name; numpy dtypes by their Zarr name; sets sorted. Two kinds
of digest come out: `digest`, 64 hex digits, names a request; `content_digest` and its kin, "sha256:<hex>",
name bytes.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
from collections.abc import Mapping
from io import BufferedIOBase, RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 2**53
"""Largest integer of a key: every JSON reader keeps it exactly."""
_HEX_FLOAT = re.compile(r"-?0x")
"""Start of the text that canonical JSON writes for a float."""
Buffer = bytes | bytearray | memoryview


def canonical_json(value: Any) -> str:
    """The one spelling of a plain value.

    Raises TypeError for what has none, ValueError for NaN, infinity and integers beyond 2**53.

    >>> canonical_json({"b": 1, "a": [0.5, None, True]})
    '{"a":["0x1.0000000000000p-1",null,true],"b":1}'
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def exact(value: float | str) -> Any:
    """A float or a text as canonical JSON tells it from every other, floats from texts included.

    Canonical JSON by itself folds -0.0 into 0.0, writes 1.5 as a text that is a text, too, and refuses NaN
    and infinity. Those few become a mapping of one entry; all others are themselves.

    Args:
        value: a built-in float or str.

    >>> exact(-0.0), exact(0.5), exact("0x1p+0")
    ({'float': '-0.0'}, 0.5, {'str': '0x1p+0'})
    """
    if isinstance(value, str):
        return {"str": value} if _HEX_FLOAT.match(value) else value
    is_folded = not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0)
    return {"float": repr(value)} if is_folded else value


def digest(kind: str, *parts: Any) -> str:
    """64 hex digits for plain values; equal parts of another kind digest to something else."""
    return hashlib.sha256(canonical_json([kind, *parts]).encode()).hexdigest()


def content_digest(*parts: Buffer) -> str:
    """`sha256:<hex>` of bytes, laid end to end."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return f"sha256:{state.hexdigest()}"


def array_digest(array: npt.NDArray[Any]) -> str:
    """`sha256:<hex>` of dtype, shape and bytes (C order, little-endian) of numbers; else TypeError."""
    name = _dtype_name(array.dtype)
    little = np.ascontiguousarray(array, array.dtype if name == "bfloat16" else array.dtype.newbyteorder("<"))
    state = hashlib.sha256(canonical_json(["array", name, list(array.shape)]).encode())
    state.update(little.reshape(-1).view(np.uint8).data)
    return f"sha256:{state.hexdigest()}"


def file_digest(path: Path) -> str:
    """`sha256:<hex>` of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return open_file_digest(file)


def open_file_digest(file: BufferedIOBase | RawIOBase) -> str:
    """`sha256:<hex>` of the bytes of a file that is open, from where it is on."""
    return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _plain(value: Any) -> Any:
    """`value` as JSON values whose JSON text is unique."""
    kind = type(value)  # exactly, and most often first: a plan asks this of millions of values
    if kind is int:
        return _integer(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    if kind is dict:
        return {_name(key): _plain(item) for key, item in value.items()}
    if kind is float:
        return _float(value)
    if isinstance(value, enum.Enum):  # before str and int: a StrEnum is an enum, too
        return value.name
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | np.integer):
        return _integer(int(value))
    if isinstance(value, float | np.floating):
        return _float(float(value))
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.dtype):
        return _dtype_name(value)
    if isinstance(value, Mapping):
        return {_name(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=canonical_json)
    raise TypeError(
        f"expected plain values (numbers, strings, lists, mappings), found {type(value).__name__} "
        f"{value!r:.80}; its identity cannot be established, so it has no place in a key"
    )


def _integer(value: int) -> int:
    if abs(value) > LARGEST:
        raise ValueError(
            f"expected integers within 2**53, which every JSON reader keeps exactly, found {value}"
        )
    return value


def _float(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value}")
    return (value + 0.0).hex()  # -0.0 + 0.0 is 0.0


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"expected names as mapping keys, found {key!r}")
    return key


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """The name Zarr v3 gives a dtype of numbers, the same for either byte order; else TypeError."""
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise TypeError(f"expected a dtype of numbers, found {dtype}; its bytes do not say what it holds")
    return str(dtype.name)
