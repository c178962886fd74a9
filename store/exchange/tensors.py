"""Files of named arrays: safetensors and npz, read by mapping and written block by block, bfloat16 included.

Border: names, dtypes, shapes and bytes; what an array means is told by whoever reads or writes it. The
libraries of both formats want whole files in memory (and safetensors' numpy reader has no bfloat16), which a
run of a corpus is not.

The format of safetensors: 8 bytes of header length, the header as JSON, the data. npz: a zip of npy files;
numpy has no bfloat16, so there an array of 2-byte values is taken for one only when that is said.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np

from ..arrays import Array
from ..errors import ConfigError, MizarrError, ShapeError, WeightsError
from .outside import json_value, require_content

__all__ = [
    "FLOATS",
    "Tensor",
    "as_bfloat16",
    "mapped_tensor",
    "npz_array",
    "npz_layouts",
    "read_header",
    "read_npz",
    "read_safetensors",
    "release",
    "write_npz",
    "write_safetensors",
]

METADATA = "__metadata__"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Plain floating-point numbers, as safetensors spells them; weights of other kinds are quantised."""
CODES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "BOOL": np.dtype("bool"),
}
"""Dtypes of safetensors by their codes."""
_BITS = {code: 8 * dtype.itemsize for code, dtype in CODES.items()} | {
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "C64": 64,
}
"""Bits of one number of every dtype that the format has, those that numpy lacks among them."""
_MOST_HEADER = 100_000_000
"""Bytes of a header of safetensors; the format's own library reads no longer one."""
_MOST_NPY_HEADER = 10_000
"""Bytes of a header of npy; numpy reads no longer one."""
_DEFLATE = 1032
"""Bytes that deflate makes of one byte at most (zlib, technical details)."""
_AT_ONCE = 1 << 20  # bytes of a member that are read at once


@dataclass(frozen=True)
class Tensor:
    """One array to write: blocks follow each other in C order and together have this shape."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Iterable[Array]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries of a safetensors file by tensor name, and where its data begin.

    Every entry has a dtype, a shape and a range of bytes that is as long as these say; ranges follow each
    other without overlap or gap, and end where the file does. Raises WeightsError for any other file.
    """
    header, start = _header(path)
    header.pop(METADATA, None)
    return header, start


def mapped_tensor(path: Path, entry: Mapping[str, Any], start: int, name: str) -> Array:
    """One tensor of a safetensors file, memory-mapped; WeightsError for a dtype numpy cannot hold.

    entry, start: as `read_header` gives them.
    """
    if entry["dtype"] not in CODES:
        raise WeightsError(
            f"expected {name!r} as one of {', '.join(CODES)}, found {entry['dtype']}; convert the file"
        )
    first, end = entry["data_offsets"]
    if end == first:  # nothing can be mapped of an empty array
        return np.empty(entry["shape"], CODES[entry["dtype"]])
    mapped = np.memmap(path, np.uint8, "r", offset=start + first, shape=(end - first,))
    found: Array = mapped.view(CODES[entry["dtype"]]).reshape(entry["shape"])
    return found


def read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """All tensors of a file by name, memory-mapped, and its metadata. Raises WeightsError."""
    header, start = _header(path)
    metadata = {str(name): str(value) for name, value in header.pop(METADATA, {}).items()}
    return {name: mapped_tensor(path, entry, start, name) for name, entry in header.items()}, metadata


def write_safetensors(path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> None:
    """A new file of these tensors, block by block. Raises ShapeError for a dtype the format does not have."""
    codes = {dtype: code for code, dtype in CODES.items()}
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for tensor in tensors:
        if tensor.dtype.newbyteorder("<") not in codes:
            raise ShapeError(f"expected {tensor.name!r} as one of {', '.join(CODES)}, found {tensor.dtype}")
        header[tensor.name] = {
            "dtype": codes[tensor.dtype.newbyteorder("<")],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of eight, so that they can be mapped
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for block in _bytes(tensor):
                file.write(block)


@dataclass(frozen=True)
class NpyLayout:
    """Where the array of one member of an npz file lies, as its header says."""

    dtype: np.dtype[Any]
    """Of its numbers."""
    shape: tuple[int, ...]
    """Sizes of its axes."""
    order: Literal["C", "F"]
    """C for rows after each other, F for columns."""
    start: int
    """Bytes of the member before the numbers."""


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an npz file by name, memory-mapped where it is not compressed, with their checksums
    compared.

    Raises ConfigError for another file, for one that is damaged, and for arrays of Python objects.
    """
    with _opened_npz(path, ConfigError, "write it with np.savez, arrays by name") as (archive, file):
        return {name: _npy(archive, member, file, "r") for name, member in _members(archive, file).items()}


def npz_layouts(path: Path, error: type[MizarrError]) -> dict[str, NpyLayout]:
    """Arrays of an npz file by name, from their headers.

    error: class of what is raised for a file that is damaged.
    """
    with _opened_npz(path, error, "fetch it again") as (archive, file):
        layouts = {}
        for name, member in _members(archive, file).items():
            with archive.open(member) as stream:
                layouts[name] = _layout(stream.read(_MOST_NPY_HEADER), member)
        return layouts


def npz_array(path: Path, name: str, error: type[MizarrError]) -> Array:
    """One array of an npz file: mapped where it is not compressed, with its checksum compared. Writing to it
    changes no file.

    error: class of what is raised for a file that is damaged.
    """
    with _opened_npz(path, error, "fetch it again") as (archive, file):
        return _npy(archive, _members(archive, file)[name], file, "c")


def write_npz(path: Path, tensors: Sequence[Tensor]) -> None:
    """A new, uncompressed npz file of these arrays, block by block; bfloat16 is widened to float32."""
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for tensor in tensors:
            dtype = np.dtype("<f4") if tensor.dtype == CODES["BF16"] else tensor.dtype.newbyteorder("<")
            with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as file:
                about = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": tensor.shape,
                }
                np.lib.format.write_array_header_2_0(file, about)
                for block in _bytes(Tensor(tensor.name, dtype, tensor.shape, tensor.blocks)):
                    file.write(block)


def as_bfloat16(array: Array, name: str) -> Array:
    """An array of 2-byte values read as bfloat16, nothing copied; ShapeError for other values."""
    if array.dtype == CODES["BF16"]:
        return array
    if array.dtype.itemsize != 2 or array.dtype.kind not in "uiV":
        raise ShapeError(f"expected {name!r} as raw 2-byte values to read as bfloat16, found {array.dtype}")
    return array.view(CODES["BF16"])


def release(array: Array) -> None:
    """Let go of the pages a mapped array has brought into memory; they come back when they are read."""
    found: Any = array
    while isinstance(found, np.ndarray):
        found = found.base
    if isinstance(found, mmap.mmap):
        found.madvise(mmap.MADV_DONTNEED)


@contextmanager
def _opened_npz(
    path: Path, error: type[MizarrError], advice: str
) -> Iterator[tuple[zipfile.ZipFile, BinaryIO]]:
    """The archive in a file, and the file itself; `error` for whatever its members turn out not to be."""
    require_content(path, error, advice)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            yield archive, file
    except MizarrError:
        raise
    # Whatever zlib, zipfile and numpy's reader of headers (a parser of Python) raise for bytes of any kind.
    except Exception as reason:
        raise error(
            f"expected an npz file of named arrays at {path}, found one that cannot be read "
            f"({str(reason) or type(reason).__name__:.200}); {advice}"
        ) from reason


def _members(archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """Members with an array by the array's name; ValueError for lengths that the file is too short for."""
    size = file.seek(0, 2)
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        name = member.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"two arrays {name!r:.80}")
        if member.flag_bits & 1:
            raise ValueError(f"{name!r:.80} is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name!r:.80} is compressed in another way than np.savez_compressed does")
        ratio = 1 if member.compress_type == zipfile.ZIP_STORED else _DEFLATE
        if member.compress_size > size or member.file_size > member.compress_size * ratio:
            raise ValueError(f"{name!r:.80} would have {member.file_size} bytes, more than the file can hold")
        members[name] = member
    return members


def _layout(head: bytes, member: zipfile.ZipInfo) -> NpyLayout:
    """What the header of an npy member says; ValueError where the member is not as long as that."""
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError(f"{member.filename!r:.80} holds Python objects")
    layout = NpyLayout(
        dtype, tuple(int(length) for length in shape), "F" if is_fortran else "C", stream.tell()
    )
    _require_lengths(shape)
    nbytes = math.prod(layout.shape) * dtype.itemsize
    if layout.start + nbytes != member.file_size:
        raise ValueError(
            f"{member.filename!r:.80} has {member.file_size - layout.start} bytes of numbers, not the "
            f"{nbytes} of {dtype} {list(layout.shape)!s:.80}"
        )
    return layout


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: BinaryIO, mode: Literal["r", "c"]) -> Array:
    """The array of one member of an npz file.

    mode: "r" for an array that cannot be written to, "c" for one whose changes stay in memory.
    """
    is_stored = member.compress_type == zipfile.ZIP_STORED
    parts = []
    with archive.open(member) as stream:  # without a seek, after which zipfile compares no checksum
        part = stream.read(_AT_ONCE)
        layout = _layout(part, member)
        while part:
            if not is_stored:
                parts.append(part)
            part = stream.read(_AT_ONCE)
    if math.prod(layout.shape) * layout.dtype.itemsize == 0:  # nothing can be mapped of an empty array
        return np.empty(layout.shape, layout.dtype)
    if is_stored:
        offset = _data_offset(file, member) + layout.start
        shape = layout.shape or (1,)  # numpy maps no scalar
        mapped: Array = np.memmap(file, layout.dtype, mode, offset, shape, layout.order)
        return mapped.reshape(layout.shape, order=layout.order)
    whole = bytearray(b"".join(parts))
    if len(whole) != member.file_size:
        raise ValueError(f"{member.filename!r:.80} is cut short")
    flat: Array = np.frombuffer(whole, layout.dtype, offset=layout.start)
    return flat.reshape(layout.shape, order=layout.order)


def _data_offset(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a member of a zip file begin: its own header, which precedes them, may be longer
    than the list of members says (APPNOTE 4.3.7).
    """
    file.seek(member.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(member.header_offset + 30 + name + extra)


def _require_lengths(shape: Sequence[int]) -> None:
    """ValueError unless these are sizes of axes that some array has; an axis of size 0 excuses no other."""
    if any(length < 0 for length in shape) or math.prod(length or 1 for length in shape) >= 1 << 60:
        raise ValueError(f"expected sizes of axes, found {list(shape)!s:.80}")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file, metadata included, every entry checked; and where the data begin."""
    require_content(path, WeightsError)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(size - 8, _MOST_HEADER):
            raise WeightsError(
                f"{path} is no complete safetensors file: expected a header of {length} bytes, found "
                f"{max(size - 8, 0)}; fetch it again"
            )
        text = file.read(length)
    try:
        header = json_value(text)
        if not isinstance(header, dict):
            raise ValueError(f"a header that is no object but {type(header).__name__}")
        metadata = header.get(METADATA) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError(f"a {METADATA} that is not texts by name")
        ends = _checked_ranges({name: entry for name, entry in header.items() if name != METADATA})
    except ValueError as error:
        raise WeightsError(f"{path} is no safetensors file: found {error}; fetch it again") from error
    needed = 8 + length + ends
    if needed != size:
        raise WeightsError(
            f"{path} is {'truncated' if size < needed else 'damaged'}: expected {needed} bytes, found "
            f"{size}; fetch it again"
        )
    return header, 8 + length


def _checked_ranges(entries: Mapping[str, Any]) -> int:
    """Where the last range of some entries ends; ValueError for an entry that is none, for a range of another
    length than dtype and shape say, and for ranges that overlap or leave a gap.
    """
    ranges = []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [first, end]} if all(
                type(number) is int for number in (*shape, first, end)
            ):
                pass
            case _:
                raise ValueError(f"an entry {name!r:.80} without dtype, shape and data_offsets")
        if dtype not in _BITS:
            raise ValueError(f"{name!r:.80} of dtype {dtype!r:.40}, which the format does not have")
        _require_lengths(shape)
        bits = math.prod(shape) * _BITS[dtype]
        if not 0 <= first <= end or bits != 8 * (end - first):
            raise ValueError(
                f"bytes {first} to {end} for {name!r:.80}, which as {dtype} of shape {shape!s:.80} has "
                f"{-(-bits // 8)}"
            )
        ranges.append((first, end, name))
    here = 0
    for first, end, name in sorted(ranges):
        if first != here:
            raise ValueError(
                f"{name!r:.80} at byte {first}, where {here} was expected: ranges overlap or leave gaps"
            )
        here = end
    return here


def _bytes(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """The blocks as little-endian bytes; ShapeError if together they are not the tensor."""
    done = 0
    for block in tensor.blocks:
        ready = np.ascontiguousarray(block, tensor.dtype.newbyteorder("<"))
        done += ready.nbytes
        yield ready.reshape(-1).view(np.uint8).data
    if done != tensor.nbytes:
        raise ShapeError(f"expected {tensor.nbytes} bytes of {tensor.name!r}, found {done}")
