"""Parser of GGUF files: metadata and tensors, with every length checked against the size of the file.

The reader of the `gguf` package trusts every length: a file of 100 bytes that announces an array of 2**40
numbers fills the memory, and offsets that exceed 64 bits wrap around to before the data. This parser reads no
more than there is, and gives every tensor a range of its own. Block types and their dequantisation are the
package's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Never
imports torch.
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
"""numpy dtypes by the format's value type numbers."""
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4  # GGML_MAX_DIMS
_AT_ONCE = 1 << 20  # numbers that are dequantised per call
_ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
_PLAIN = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
"""numpy dtypes of unquantised tensor types."""
_FLOATS = ("F64", "F32", "F16")
"""Tensor types that are plain floats."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    shape: tuple[int, ...]
    """Shape of the numbers in torch's order: rows first."""
    kind: str
    """Tensor type of the format, e.g. "Q4_K"."""
    data: npt.NDArray[Any]
    """Memory-mapped numbers, or the bytes of each row's blocks."""

    @property
    def dtype(self) -> str:
        """Dtype of the dequantised numbers, by its code in safetensors."""
        return self.kind if self.kind in _FLOATS else "F32"

    def plain(self, first: int | None = None) -> npt.NDArray[Any]:
        """The dequantised numbers, in newly allocated memory.

        Arguments:
            first: index on the first axis, to read that slice only; None for all.

        Raises:
            ValueError: for a block type that the gguf package cannot dequantise.
        """
        import gguf

        data = self.data if first is None else self.data[first]
        if self.kind in _FLOATS:
            return np.array(data)
        shape = self.shape if first is None else self.shape[1:]
        numbers = np.empty(shape, np.float32)
        # Blocks never cross rows, so that whole rows can be dequantised separately.
        stored, rows = data.reshape(-1, data.shape[-1]), numbers.reshape(-1, shape[-1])
        # In steps, because the package's function holds all numbers of its argument twice.
        step = max(1, _AT_ONCE // max(1, shape[-1]))
        try:
            for start in range(0, len(rows), step):
                part = np.ascontiguousarray(stored[start : start + step])
                rows[start : start + step] = gguf.dequantize(part, gguf.GGMLQuantizationType[self.kind])
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        return numbers

    def release(self) -> None:
        """Release the pages of the file that were read.

        Mapped pages count as memory of the process while it lives; the system reads them again on demand.
        """
        mapping = getattr(self.data, "_mmap", None)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Advice only: pages of a read-only map come back from the file when they are read again.
            mapping.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Read metadata and tensors of a file.

    Arguments:
        path: a file that is not empty.

    Returns:
        Metadata by name, and tensors by name.

    Raises:
        ValueError: for a damaged file; the message says what was found and expected.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, len(data))
        magic = cursor.take(4)
        if magic != MAGIC:
            raise ValueError(f"{magic!r} where {MAGIC!r} was expected")
        version = cursor.integer("<I")
        if version not in _VERSIONS:
            # Version 3 in big-endian reads as 0x03000000.
            order = ", big-endian" if version & 0xFFFF == 0 else ""
            raise ValueError(f"version {version}{order}, where 2 or 3 was expected, little-endian")
        n_tensors, n_fields = cursor.integer("<Q"), cursor.integer("<Q")
        fields = _fields(cursor, n_fields)
        tensors = _tensor_infos(cursor, n_tensors)
        alignment = fields.get("general.alignment", _ALIGNMENT)
        # `type` instead of isinstance: True would pass as 1.
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment!r:.40}, where a power of two was expected")
        # Rounded up: the data section begins at the next multiple of the alignment.
        start = -(-cursor.at // alignment) * alignment
    return fields, _mapped(path, tensors, start)


@dataclass
class _Cursor:
    """A read position in the bytes of a file, which never moves past their end."""

    data: mmap.mmap
    """The whole file."""
    size: int
    """Size of the file in bytes."""
    at: int = 0
    """Offset of the next byte."""

    def move(self, count: int) -> int:
        """Skip `count` bytes and return the offset of the first; ValueError if the file ends before."""
        start = self.at
        if count > self.size - start:
            raise ValueError(
                f"a length of {count} bytes at byte {start}, after which the file has {self.size - start}"
            )
        self.at = start + count
        return start

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        start = self.move(count)
        return self.data[start : start + count]

    def integer(self, layout: str) -> int:
        """The next integer, with a layout of `struct`."""
        return int(struct.unpack_from(layout, self.data, self.move(struct.calcsize(layout)))[0])

    def text(self) -> str:
        """The next string: its length, then UTF-8."""
        return self.take(self.integer("<Q")).decode()

    def texts(self, count: int) -> list[str]:
        """The next strings, each as `text` reads it."""
        # One loop without calls: a vocabulary has up to 262,144 strings.
        if count * 8 > self.size - self.at:
            raise ValueError(
                f"an array of {count} texts at byte {self.at}, after which the file is too short"
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
        """The next numbers of one dtype."""
        kind = np.dtype(dtype)
        start = self.move(count * kind.itemsize)
        # From a copy of the bytes: an array that points into the mapping would prevent closing it.
        return np.frombuffer(self.data[start : self.at], kind)


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    """Metadata by name: numbers, strings, numeric arrays as numpy arrays, string arrays as lists."""
    # A count that is too large ends in an error of the cursor, because every field takes bytes.
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
class _TensorInfo:
    """Entry of the file's list of tensors."""

    shape: tuple[int, ...]
    """Shape of the numbers, rows first."""
    kind: str
    """Tensor type of the format."""
    block: tuple[int, int]
    """(numbers, bytes) of one block."""
    offset: int
    """Offset within the data section, in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return math.prod(self.shape) // self.block[0] * self.block[1]


def _tensor_infos(cursor: _Cursor, count: int) -> dict[str, _TensorInfo]:
    """Entries of the list of tensors, by name; not yet checked against the size of the file."""
    import gguf

    tensors: dict[str, _TensorInfo] = {}
    for _ in range(count):
        name = cursor.text()
        if name in tensors:
            raise ValueError(f"two tensors {name!r:.80}")
        n_axes = cursor.integer("<I")
        if n_axes > _MOST_AXES:
            raise ValueError(f"{n_axes} axes of {name!r:.80}, where {_MOST_AXES} at most were expected")
        # The format counts axes from the innermost one.
        shape = tuple(reversed(cursor.numbers("<u8", n_axes).tolist()))
        kind = gguf.GGMLQuantizationType(cursor.integer("<I"))
        block = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN and not shape:
            raise ValueError(f"no axis of {name!r:.80}, whose numbers lie in blocks ({kind.name})")
        if shape and shape[-1] % block[0]:
            raise ValueError(
                f"rows of {shape[-1]} numbers in {name!r:.80}, no multiple of {block[0]} ({kind.name})"
            )
        tensors[name] = _TensorInfo(shape, kind.name, block, cursor.integer("<Q"))
    return tensors


def _mapped(path: Path, tensors: dict[str, _TensorInfo], start: int) -> dict[str, StoredTensor]:
    """Map the tensors of a file.

    Arguments:
        path: the file.
        tensors: entries of its list of tensors.
        start: offset of the data section.

    Raises:
        ValueError: for a tensor beyond the end of the file, or one that overlaps another.
    """
    data = np.memmap(path, np.uint8, "r")
    end, previous = start, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        first = start + info.offset
        # `size or 1`: numpy refuses such shapes even where another axis has length 0.
        if math.prod(size or 1 for size in info.shape) >= 1 << 60 or first + info.nbytes > len(data):
            raise ValueError(
                f"{info.nbytes} bytes at byte {first} for {name!r:.80}, in a file of {len(data)} bytes"
            )
        if first < end:
            raise ValueError(
                f"{name!r:.80} at byte {first}, before the end of {previous!r:.80} at byte {end}"
            )
        end, previous = first + info.nbytes, name
    return {
        name: StoredTensor(info.shape, info.kind, _array(data, info, start + info.offset))
        for name, info in tensors.items()
    }


def _array(data: npt.NDArray[np.uint8], info: _TensorInfo, first: int) -> npt.NDArray[Any]:
    numbers = data[first : first + info.nbytes]
    if info.kind in _PLAIN:
        return numbers.view(_PLAIN[info.kind]).reshape(info.shape)
    return numbers.reshape((*info.shape[:-1], info.shape[-1] // info.block[0] * info.block[1]))
