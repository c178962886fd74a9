"""Digests of plain values, arrays and files that are equal on every machine, in every process, for years.

Accepted are JSON values, numpy arrays and files; never torch tensors, pickles, reprs or addresses. A value
without a canonical form is refused, because a guessed key could return somebody else's activations.

Canonical JSON: UTF-8, sorted keys, no spaces; floats as `float.hex()` strings with -0.0 folded into 0.0; no
NaN or infinity; integers within 2**53; enums by name; numpy dtypes by their Zarr name; sets sorted.

Two kinds of digest: `digest`, 64 hex digits, identifies a request; `content_digest` and the others,
"sha256:<hex>", identify bytes.
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
"""Largest integer in a key, up to which every JSON reader is exact."""
_HEX_FLOAT = re.compile(r"-?0x")
"""Start of the text that canonical JSON writes for a float."""
Buffer = bytes | bytearray | memoryview


def canonical_json(value: Any) -> str:
    """JSON text of a plain value that is equal for equal values: sorted keys, floats as hex, no spaces.

    Raises:
        TypeError: The value has no canonical form.
        ValueError: NaN, infinity, or an integer beyond 2**53.

    >>> canonical_json({"b": 1, "a": [0.5, None, True]})
    '{"a":["0x1.0000000000000p-1",null,true],"b":1}'
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def exact(value: float | str) -> Any:
    """Encode a float or text so that its canonical JSON differs from that of every other value.

    Canonical JSON by itself writes -0.0 as 0.0, writes 1.5 as the text "0x1.8p+0", which could also be given
    as a text, and refuses NaN and infinity. These few values become a mapping of one entry; all others stay
    as they are.

    Arguments:
        value: A built-in float or str.

    >>> exact(-0.0), exact(0.5), exact("0x1p+0")
    ({'float': '-0.0'}, 0.5, {'str': '0x1p+0'})
    """
    if isinstance(value, str):
        return {"str": value} if _HEX_FLOAT.match(value) else value
    is_folded = not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0)
    return {"float": repr(value)} if is_folded else value


def digest(kind: str, *parts: Any) -> str:
    """sha256 (64 hex digits) of plain values.

    Arguments:
        kind: Word for what is digested; the same values under another word have another digest.
        parts: Plain values: numbers, strings, lists, mappings.

    Raises:
        TypeError: A value has no canonical form.
        ValueError: NaN, infinity, or an integer beyond 2**53.
    """
    return hashlib.sha256(canonical_json([kind, *parts]).encode()).hexdigest()


def content_digest(*parts: Buffer) -> str:
    """`sha256:<hex>` of the concatenated buffers."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return f"sha256:{state.hexdigest()}"


def array_digest(array: npt.NDArray[Any]) -> str:
    """`sha256:<hex>` of an array's dtype, shape and bytes (C order, little-endian); TypeError unless it holds
    numbers."""
    name = _dtype_name(array.dtype)
    little = np.ascontiguousarray(array, array.dtype if name == "bfloat16" else array.dtype.newbyteorder("<"))
    # Dtype and shape first, so that equal bytes of another type or shape get another digest.
    state = hashlib.sha256(canonical_json(["array", name, list(array.shape)]).encode())
    state.update(raw_bytes(little))
    return f"sha256:{state.hexdigest()}"


def raw_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Bytes of a contiguous array, without a copy."""
    # By way of uint8, because `array.data` refuses bfloat16, which the buffer protocol lacks.
    return array.reshape(-1).view(np.uint8).data


def file_digest(path: Path) -> str:
    """`sha256:<hex>` of a file's content, read in blocks."""
    with path.open("rb") as file:
        return open_file_digest(file)


def open_file_digest(file: BufferedIOBase | RawIOBase) -> str:
    """`sha256:<hex>` of an open file from its current position to its end."""
    return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _plain(value: Any) -> Any:
    """Convert `value` to JSON values with a unique JSON text."""
    # Exact types first, most frequent ones in front: planning a run digests millions of values.
    kind = type(value)
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
    if isinstance(value, enum.Enum):  # before str and int: a StrEnum is both
        return value.name
    if isinstance(value, str):  # a subclass, such as numpy's str_
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
        # By canonical text: items of a set may be of types that cannot be compared.
        return sorted((_plain(item) for item in value), key=canonical_json)
    raise TypeError(
        f"a key can contain plain values only (numbers, strings, lists, mappings), found "
        f"{type(value).__name__} {value!r:.80}; convert it first"
    )


def _integer(value: int) -> int:
    """The integer, if every JSON reader keeps it exactly; ValueError otherwise."""
    if abs(value) > LARGEST:
        raise ValueError(f"a key can contain integers within 2**53 only, found {value}")
    return value


def _float(value: float) -> str:
    """A finite float as the text of its exact value, such as "0x1.8p+0"."""
    if not math.isfinite(value):
        raise ValueError(f"a key can contain finite numbers only, found {value}")
    return (value + 0.0).hex()  # -0.0 + 0.0 is 0.0


def _name(key: Any) -> str:
    """Name of a mapping item; TypeError for a name other than text."""
    if not isinstance(key, str):
        raise TypeError(f"mappings in a key can have text names only, found {key!r}")
    return key


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Zarr v3's name of a numeric dtype, without the byte order; TypeError for other dtypes."""
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise TypeError(
            f"only arrays of numbers can be digested, found dtype {dtype}; convert the array first"
        )
    return str(dtype.name)
