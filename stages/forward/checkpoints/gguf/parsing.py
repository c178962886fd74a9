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
    """One tensor of a GGUF file, memory-mapped and still quantised."""

    shape: tuple[int, ...]
    """Shape of the dequantised tensor, in torch's order."""
    kind: str
    """Tensor type of the GGUF format, e.g. "Q4_K"."""
    data: npt.NDArray[Any]
    """Memory-mapped numbers; for a quantised type, the bytes of the blocks, [..., byte of a row]."""

    @property
    def dtype(self) -> str:
        """Dtype of the dequantised tensor, as safetensors writes it, e.g. "F32"."""
        return self.kind if self.kind in _FLOATS else "F32"

    def plain(self, first: int | None = None) -> npt.NDArray[Any]:
        """Dequantise the tensor into newly allocated memory.

        Arguments:
            first: index on the first axis, to read this slice only; None for the whole tensor.

        Raises:
            ValueError: for a block type that the gguf package cannot dequantise.
        """
        import gguf

        data = self.data if first is None else self.data[first]
        if self.kind in _FLOATS:
            return np.array(data)
        shape = self.shape if first is None else self.shape[1:]
        dequantised = np.empty(shape, np.float32)
        # Blocks never cross rows, so that whole rows can be dequantised separately.
        block_rows, rows = data.reshape(-1, data.shape[-1]), dequantised.reshape(-1, shape[-1])
        # In steps, because the package's function holds all numbers of its argument twice.
        step = max(1, _AT_ONCE // max(1, shape[-1]))
        try:
            for start in range(0, len(rows), step):
                blocks = np.ascontiguousarray(block_rows[start : start + step])
                rows[start : start + step] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[self.kind])
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        return dequantised

    def release(self) -> None:
        """Release the pages of the file that were read.

        Mapped pages count as memory of the process while it lives; the system reads them again on demand.
        """
        mapping = getattr(self.data, "_mmap", None)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Advice only: pages of a read-only map come back from the file when they are read again.
            mapping.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Read the metadata of a GGUF file, and map its tensors.

    Arguments:
        path: a file that is not empty.

    Returns:
        (metadata by name, tensors by name).

    Raises:
        ValueError: for a damaged file; the message says what was found and expected.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, len(data))
        magic = cursor.take(4)
        if magic != MAGIC:
            raise ValueError(f"expected {MAGIC!r} as the first bytes of the file, found {magic!r}")
        version = cursor.integer("<I")
        if version not in _VERSIONS:
            # Version 3 in big-endian reads as 0x03000000.
            order = ", big-endian" if version & 0xFFFF == 0 else ""
            raise ValueError(f"expected GGUF version 2 or 3, little-endian, found version {version}{order}")
        n_tensors, n_fields = cursor.integer("<Q"), cursor.integer("<Q")
        fields = _metadata(cursor, n_fields)
        tensors = _tensor_infos(cursor, n_tensors)
        alignment = fields.get("general.alignment", _ALIGNMENT)
        # `type` instead of isinstance: True would pass as 1.
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"expected a power of two as general.alignment, found {alignment!r:.40}")
        # Rounded up: the data section begins at the next multiple of the alignment.
        start = -(-cursor.at // alignment) * alignment
    return fields, _mapped_tensors(path, tensors, start)


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
        """Skip `count` bytes, and return the offset of the first; ValueError if the file ends before them."""
        start = self.at
        if count > self.size - start:
            raise ValueError(
                f"expected {count} bytes at byte {start}, found only {self.size - start} until the end of "
                "the file"
            )
        self.at = start + count
        return start

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        start = self.move(count)
        return self.data[start : start + count]

    def integer(self, layout: str) -> int:
        """Read the next integer; `layout` is its format in `struct`, e.g. "<Q"."""
        return int(struct.unpack_from(layout, self.data, self.move(struct.calcsize(layout)))[0])

    def text(self) -> str:
        """Read the next string: its length in bytes, then UTF-8."""
        return self.take(self.integer("<Q")).decode()

    def texts(self, count: int) -> list[str]:
        """Read the next `count` strings: of each its length in bytes, then UTF-8."""
        # One loop without calls: a vocabulary has up to 262,144 strings.
        length_bytes = 8
        if count * length_bytes > self.size - self.at:
            raise ValueError(
                f"expected an array of {count} strings at byte {self.at}, found only "
                f"{self.size - self.at} bytes until the end of the file"
            )
        data, at, size, read_length = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = at + length_bytes
            at = start + read_length(data, at)[0] if start <= size else start
            if at > size:
                raise ValueError(f"expected a string that ends at byte {at}, found a file of {size} bytes")
            texts.append(data[start:at].decode())
        self.at = at
        return texts

    def numbers(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """Read the next `count` numbers of a numpy dtype."""
        numpy_dtype = np.dtype(dtype)
        start = self.move(count * numpy_dtype.itemsize)
        # From a copy of the bytes: an array that points into the mapping would prevent closing it.
        return np.frombuffer(self.data[start : self.at], numpy_dtype)


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    """Read `count` metadata fields, by name.

    Values are numbers or strings; arrays of numbers are numpy arrays, arrays of strings are lists.
    """
    # A count that is too large ends in an error of the cursor, because every field takes bytes.
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.text()
        if name in fields:
            raise ValueError(f"expected one value of {name!r:.80}, found two")
        fields[name] = _metadata_value(cursor, cursor.integer("<I"))
    return fields


def _metadata_value(cursor: _Cursor, value_type: int) -> Any:
    if value_type == _STRING:
        return cursor.text()
    if value_type in _NUMBERS:
        return cursor.numbers(_NUMBERS[value_type], 1).item()
    if value_type != _ARRAY:
        raise ValueError(f"expected a metadata value of a known type, found type {value_type}")
    entry_type, count = cursor.integer("<I"), cursor.integer("<Q")
    if entry_type in _NUMBERS:
        return cursor.numbers(_NUMBERS[entry_type], count)
    if entry_type != _STRING:
        raise ValueError(
            f"expected a metadata array of numbers or strings, found entries of type {entry_type}"
        )
    return cursor.texts(count)


@dataclass(frozen=True)
class _TensorInfo:
    """What a GGUF file says of one tensor: shape, type and offset."""

    shape: tuple[int, ...]
    """Shape of the dequantised tensor, in torch's order."""
    kind: str
    """Tensor type of the GGUF format, e.g. "Q4_K"."""
    block: tuple[int, int]
    """(numbers, bytes) of one block of this type."""
    offset: int
    """Offset within the data section, in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        numbers_per_block, bytes_per_block = self.block
        return math.prod(self.shape) // numbers_per_block * bytes_per_block


def _tensor_infos(cursor: _Cursor, count: int) -> dict[str, _TensorInfo]:
    """Read the list of `count` tensors, by name; offsets are not yet checked against the size of the file."""
    import gguf

    tensors: dict[str, _TensorInfo] = {}
    for _ in range(count):
        name = cursor.text()
        if name in tensors:
            raise ValueError(f"expected one tensor {name!r:.80}, found two")
        n_axes = cursor.integer("<I")
        if n_axes > _MOST_AXES:
            raise ValueError(f"expected at most {_MOST_AXES} axes of tensor {name!r:.80}, found {n_axes}")
        # The format counts axes from the innermost one.
        shape = tuple(reversed(cursor.numbers("<u8", n_axes).tolist()))
        kind = gguf.GGMLQuantizationType(cursor.integer("<I"))
        block = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN and not shape:
            raise ValueError(
                f"expected at least one axis of tensor {name!r:.80} of type {kind.name}, found none"
            )
        if shape and shape[-1] % block[0]:
            raise ValueError(
                f"expected rows of tensor {name!r:.80} with a multiple of {block[0]} numbers ({kind.name}), "
                f"found {shape[-1]}"
            )
        tensors[name] = _TensorInfo(shape, kind.name, block, cursor.integer("<Q"))
    return tensors


def _mapped_tensors(path: Path, tensors: dict[str, _TensorInfo], start: int) -> dict[str, StoredTensor]:
    """Map the tensors of a GGUF file into memory.

    Arguments:
        path: the file.
        tensors: shape, type and offset of each tensor, by name.
        start: offset of the data section in the file, in bytes.

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
                f"expected {info.nbytes} bytes of tensor {name!r:.80} at byte {first}, found a file of "
                f"{len(data)} bytes"
            )
        if first < end:
            raise ValueError(
                f"expected tensors that do not overlap, found {name!r:.80} from byte {first} on, before the "
                f"end of {previous!r:.80} at byte {end}"
            )
        end, previous = first + info.nbytes, name
    return {
        name: StoredTensor(info.shape, info.kind, _numbers_or_blocks(data, info, start + info.offset))
        for name, info in tensors.items()
    }


def _numbers_or_blocks(data: npt.NDArray[np.uint8], info: _TensorInfo, first: int) -> npt.NDArray[Any]:
    stored = data[first : first + info.nbytes]
    if info.kind in _PLAIN:
        return stored.view(_PLAIN[info.kind]).reshape(info.shape)
    numbers_per_block, bytes_per_block = info.block
    bytes_per_row = info.shape[-1] // numbers_per_block * bytes_per_block
    return stored.reshape((*info.shape[:-1], bytes_per_row))
