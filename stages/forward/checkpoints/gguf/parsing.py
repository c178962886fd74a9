"""The bytes of a GGUF file: its metadata, and where its tensors lie, every length within the file.

The reader of the format's own package believes every length: a file of 100 bytes that speaks of an array of
2**40 numbers keeps it busy until memory ends, and sums that exceed 64 bits wrap to places before the data.
Here no more is read than there is, and every tensor has a range of its own. The kinds of blocks, and what
they stand for, are the package's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Border: a path in, plain values and mapped arrays out. Never imports torch.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MAGIC", "StoredTensor", "read_gguf"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Dtypes by the format's numbers of value types."""
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4  # GGML_MAX_DIMS
_AT_ONCE = 1 << 20  # numbers that are dequantised at once
_ALIGNMENT = 32  # bytes, where general.alignment says no other
_PLAIN = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
"""Dtypes of tensors that are no blocks."""
_FLOATS = ("F64", "F32", "F16")
"""Kinds whose numbers are floats as they lie there."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    shape: tuple[int, ...]
    """Of its numbers, as torch has it: rows first."""
    kind: str
    """Its type in the format ("Q4_K")."""
    data: npt.NDArray[Any]
    """Mapped: numbers, or of blocks the bytes of each row."""

    @property
    def dtype(self) -> str:
        """Of the plain numbers, by its code in safetensors."""
        return self.kind if self.kind in _FLOATS else "F32"

    def plain(self, first: int | None = None) -> npt.NDArray[Any]:
        """The numbers, in memory of their own; first: of one index along the first axis alone. Raises
        ValueError for a kind of blocks that the format's package cannot dequantise."""
        import gguf

        data = self.data if first is None else self.data[first]
        if self.kind in _FLOATS:
            return np.array(data)
        shape = self.shape if first is None else self.shape[1:]
        numbers = np.empty(shape, np.float32)
        stored, rows = data.reshape(-1, data.shape[-1]), numbers.reshape(-1, shape[-1])
        # Not at once: the package would hold all numbers twice.
        step = max(1, _AT_ONCE // max(1, shape[-1]))
        try:
            for start in range(0, len(rows), step):
                part = np.ascontiguousarray(stored[start : start + step])
                rows[start : start + step] = gguf.dequantize(part, gguf.GGMLQuantizationType[self.kind])
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        return numbers

    def release(self) -> None:
        """Have the system take back the pages of the file that were read, which count as memory of the
        process for as long as it lives; they are read again when they are wanted."""
        mapping = getattr(self.data, "_mmap", None)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors of a file by name.

    path: of a file that is not empty.
    Raises ValueError, saying what was found, for a file that is damaged.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, len(data))
        magic = cursor.take(4)
        if magic != MAGIC:
            raise ValueError(f"{magic!r} where {MAGIC!r} was expected")
        version = cursor.integer("<I")
        if version not in _VERSIONS:
            order = ", big-endian" if version & 0xFFFF == 0 else ""
            raise ValueError(f"version {version}{order}, where 2 or 3 was expected, little-endian")
        n_tensors, n_fields = cursor.integer("<Q"), cursor.integer("<Q")
        fields = _fields(cursor, n_fields)
        places = _places(cursor, n_tensors)
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment!r:.40}, where a power of two was expected")
        start = -(-cursor.at // alignment) * alignment
    return fields, _mapped(path, places, start)


@dataclass
class _Cursor:
    """A place in the bytes of a file, which moves as they are read and never beyond their end."""

    data: mmap.mmap
    """The whole file."""
    size: int
    """Bytes of the file."""
    at: int = 0
    """Bytes before the next one."""

    def move(self, count: int) -> int:
        """Go on by so many bytes; where they begin. ValueError where the file ends before."""
        start = self.at
        if count > self.size - start:
            raise ValueError(
                f"a length of {count} bytes at byte {start}, behind which are {self.size - start}"
            )
        self.at = start + count
        return start

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start = self.move(count)
        return self.data[start : start + count]

    def integer(self, layout: str) -> int:
        """The next integer; layout: as of `struct`."""
        return int(struct.unpack_from(layout, self.data, self.move(struct.calcsize(layout)))[0])

    def text(self) -> str:
        """The next text: its length, then UTF-8."""
        return self.take(self.integer("<Q")).decode()

    def texts(self, count: int) -> list[str]:
        """The next texts, as `text` reads each; one loop without calls, as vocabularies have 262,144."""
        if count * 8 > self.size - self.at:
            raise ValueError(
                f"an array of {count} texts at byte {self.at}, behind which the file is too short"
            )
        data, at, size, length_at = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0] if start <= size else start
            if at > size:
                raise ValueError(f"a text that ends at byte {at}, in a file of {size} bytes")
            texts.append(data[start:at].decode())
        self.at = at
        return texts

    def numbers(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """The next numbers of one dtype: as many bytes in memory as in the file."""
        kind = np.dtype(dtype)
        start = self.move(count * kind.itemsize)
        # Of a copy: an array of the mapping itself would not let it be closed.
        return np.frombuffer(self.data[start : self.at], kind)


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    """Values by name: numbers, texts, arrays of numbers as numpy's, of texts as lists. A count too large ends
    at the end of the file, as each value takes bytes.
    """
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.text()
        if name in fields:
            raise ValueError(f"two values of {name!r:.80}")
        fields[name] = _value(cursor, cursor.integer("<I"))
    return fields


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind in _NUMBERS:
        return cursor.numbers(_NUMBERS[kind], 1).item()
    if kind != _ARRAY:
        raise ValueError(f"a value of type {kind}, which the format does not have")
    inner, count = cursor.integer("<I"), cursor.integer("<Q")
    if inner in _NUMBERS:
        return cursor.numbers(_NUMBERS[inner], count)
    if inner != _STRING:
        raise ValueError(f"an array of values of type {inner}, where numbers or texts were expected")
    return cursor.texts(count)


@dataclass(frozen=True)
class _Place:
    """What the list of tensors says of one."""

    shape: tuple[int, ...]
    """Of its numbers, rows first."""
    kind: str
    """Its type in the format."""
    block: tuple[int, int]
    """Numbers of one block, and its bytes."""
    offset: int
    """Bytes of the data before it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return math.prod(self.shape) // self.block[0] * self.block[1]


def _places(cursor: _Cursor, count: int) -> dict[str, _Place]:
    """Tensors by name, not yet compared with the length of the file."""
    import gguf

    places: dict[str, _Place] = {}
    for _ in range(count):
        name = cursor.text()
        if name in places:
            raise ValueError(f"two tensors {name!r:.80}")
        n_axes = cursor.integer("<I")
        if n_axes > _MOST_AXES:
            raise ValueError(f"{n_axes} axes of {name!r:.80}, where {_MOST_AXES} at most were expected")
        shape = tuple(reversed(cursor.numbers("<u8", n_axes).tolist()))
        kind = gguf.GGMLQuantizationType(cursor.integer("<I"))
        block = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN and not shape:
            raise ValueError(f"no axis of {name!r:.80}, whose numbers lie in blocks ({kind.name})")
        if shape and shape[-1] % block[0]:
            raise ValueError(
                f"rows of {shape[-1]} numbers in {name!r:.80}, no multiple of {block[0]} ({kind.name})"
            )
        places[name] = _Place(shape, kind.name, block, cursor.integer("<Q"))
    return places


def _mapped(path: Path, places: dict[str, _Place], start: int) -> dict[str, StoredTensor]:
    """The tensors of a file, mapped.

    start: bytes of the file before the data.
    Raises ValueError for a range that is not in the file, or overlaps another.
    """
    data = np.memmap(path, np.uint8, "r")
    end, before = start, ""
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        first = start + place.offset
        # An axis of size 0 excuses no other: numpy has no array of such shapes.
        if math.prod(size or 1 for size in place.shape) >= 1 << 60 or first + place.nbytes > len(data):
            raise ValueError(
                f"{place.nbytes} bytes at byte {first} for {name!r:.80}, in a file of {len(data)} bytes"
            )
        if first < end:
            raise ValueError(f"{name!r:.80} at byte {first}, before the end of {before!r:.80} at byte {end}")
        end, before = first + place.nbytes, name
    return {
        name: StoredTensor(place.shape, place.kind, _array(data, place, start + place.offset))
        for name, place in places.items()
    }


def _array(data: npt.NDArray[np.uint8], place: _Place, first: int) -> npt.NDArray[Any]:
    numbers = data[first : first + place.nbytes]
    if place.kind in _PLAIN:
        return numbers.view(_PLAIN[place.kind]).reshape(place.shape)
    return numbers.reshape((*place.shape[:-1], place.shape[-1] // place.block[0] * place.block[1]))
