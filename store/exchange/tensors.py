"""safetensors and npz files: read through memory maps, written block by block, including bfloat16.

The libraries of both formats need whole files in memory, which is too much for a run over a corpus, and the
numpy reader of safetensors has no bfloat16.

safetensors: 8 bytes of header length, a JSON header, the data. npz: a zip archive of npy files; numpy has no
bfloat16, so 2-byte values in npz are read as bfloat16 only on request.
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
from ..digest import raw_bytes
from ..errors import ConfigError, MizarrError, ShapeError, WeightsError
from ..files.mapped import mmap_of
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
"""Entry of a safetensors header that is no tensor but texts by name."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Codes of the plain floating-point dtypes in safetensors; weights of other dtypes are quantised."""
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
"""Numpy dtypes by safetensors code."""
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
"""Bits per number of all dtypes in the format, including those that numpy lacks."""
_MOST_HEADER = 100_000_000
"""Maximum bytes of a safetensors header, the limit of the reference implementation."""
_MOST_NPY_HEADER = 10_000
"""Maximum bytes of an npy header, numpy's limit."""
_DEFLATE = 1032
"""Maximum compression ratio of deflate (zlib, technical details)."""
_READ_BYTES = 1 << 20  # bytes per read of an archive member


@dataclass(frozen=True)
class Tensor:
    """One array to write to a file, given as consecutive blocks in C order, so that it need not fit into
    memory."""

    name: str
    """Name in the file."""
    dtype: np.dtype[Any]
    """Dtype in the file, to which the blocks are converted."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    blocks: Iterable[Array]
    """Consecutive parts of the array, of any shape; consumed once, so a generator may compute them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Parse and verify the header of a safetensors file.

    Returns:
        Entries by tensor name, and the offset of the data. Every entry has a dtype, a shape and a byte range
        of the matching length; the ranges cover the rest of the file without overlap or gap.

    Raises:
        WeightsError: Any other file.
    """
    header, start = _header(path)
    header.pop(METADATA, None)
    return header, start


def mapped_tensor(path: Path, entry: Mapping[str, Any], start: int, name: str) -> Array:
    """Memory-map one tensor of a safetensors file.

    Arguments:
        path: The file.
        entry: Entry of the tensor, from `read_header`.
        start: Offset of the data, from `read_header`.
        name: Name of the tensor, for messages.

    Raises:
        WeightsError: Numpy lacks the dtype.
    """
    if entry["dtype"] not in CODES:
        raise WeightsError(
            f"tensor {name!r} of {path} has dtype {entry['dtype']}, which numpy cannot hold; convert it to "
            f"one of {', '.join(CODES)}"
        )
    begin, end = entry["data_offsets"]
    if end == begin:  # mmap refuses length 0
        return np.empty(entry["shape"], CODES[entry["dtype"]])
    # Mapped as bytes and viewed: offsets in safetensors may be unaligned for the dtype.
    mapped = np.memmap(path, np.uint8, "r", offset=start + begin, shape=(end - begin,))
    tensor: Array = mapped.view(CODES[entry["dtype"]]).reshape(entry["shape"])
    return tensor


def read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Memory-map all tensors of a file by name, and return its metadata. WeightsError for an invalid file."""
    header, start = _header(path)
    metadata = {str(name): str(value) for name, value in header.pop(METADATA, {}).items()}
    return {name: mapped_tensor(path, entry, start, name) for name, entry in header.items()}, metadata


def write_safetensors(path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> None:
    """Write a new safetensors file, block by block.

    Arguments:
        path: The new file.
        tensors: Arrays in the order in which they are stored.
        metadata: Texts by name.

    Raises:
        ShapeError: A dtype that the format lacks, or blocks that do not have the size of their tensor.
        FileExistsError: The file exists.
    """
    codes = {dtype: code for code, dtype in CODES.items()}
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for tensor in tensors:
        if tensor.dtype.newbyteorder("<") not in codes:
            raise ShapeError(
                f"tensor {tensor.name!r} has dtype {tensor.dtype}, which safetensors cannot hold; convert it "
                f"to one of {', '.join(CODES)}"
            )
        # Offsets are relative to the end of the header, so they can be computed before it is written.
        header[tensor.name] = {
            "dtype": codes[tensor.dtype.newbyteorder("<")],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pads the header, so that the data are aligned for memory maps
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for block in _bytes(tensor):
                file.write(block)


@dataclass(frozen=True)
class NpyLayout:
    """Dtype, shape and position of one array in an npz file, as its npy header states them."""

    dtype: np.dtype[Any]
    """Dtype of the numbers, with their byte order."""
    shape: tuple[int, ...]
    """Shape of the array; () for a scalar."""
    order: Literal["C", "F"]
    """C for row-major, F for column-major."""
    start: int
    """Bytes of header before the data."""


def read_npz(path: Path) -> dict[str, Array]:
    """Read the arrays of an npz file by name, memory-mapped if uncompressed, after verifying checksums.

    Raises:
        ConfigError: The file is damaged, is no npz file, or contains Python objects.
    """
    with _opened_npz(path, ConfigError, "write it with np.savez, arrays by name") as (archive, file):
        return {name: _npy(archive, member, file, "r") for name, member in _members(archive, file).items()}


def npz_layouts(path: Path, error: type[MizarrError]) -> dict[str, NpyLayout]:
    """Read dtype and shape of each array in an npz file, by name, from the headers alone.

    Arguments:
        path: The file.
        error: Class of the error for a damaged file.
    """
    with _opened_npz(path, error, "fetch it again") as (archive, file):
        layouts = {}
        for name, member in _members(archive, file).items():
            with archive.open(member) as stream:
                layouts[name] = _layout(stream.read(_MOST_NPY_HEADER), member)
        return layouts


def npz_array(path: Path, name: str, error: type[MizarrError]) -> Array:
    """Read one array of an npz file after verifying its checksum; memory-mapped copy-on-write if
    uncompressed.

    Arguments:
        path: The file.
        name: Name of the array.
        error: Class of the error for a damaged file.
    """
    with _opened_npz(path, error, "fetch it again") as (archive, file):
        return _npy(archive, _members(archive, file)[name], file, "c")


def write_npz(path: Path, tensors: Sequence[Tensor]) -> None:
    """Write a new, uncompressed npz file, block by block; bfloat16 is widened to float32.

    Arguments:
        path: The new file.
        tensors: Arrays in the order in which they are stored.

    Raises:
        ShapeError: Blocks do not have the size of their tensor.
        FileExistsError: The file exists.
    """
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for tensor in tensors:
            dtype = np.dtype("<f4") if tensor.dtype == CODES["BF16"] else tensor.dtype.newbyteorder("<")
            # Blocks are streamed, so the size is not known in advance, and members over 2 GiB need ZIP64.
            with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as file:
                npy_header = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": tensor.shape,
                }
                # Version 2 has 4 bytes for the header length; version 1 is limited to 64 KiB.
                np.lib.format.write_array_header_2_0(file, npy_header)
                for block in _bytes(Tensor(tensor.name, dtype, tensor.shape, tensor.blocks)):
                    file.write(block)


def as_bfloat16(array: Array, name: str) -> Array:
    """Reinterpret 2-byte values as bfloat16 without a copy.

    Arguments:
        array: bfloat16, or raw 2-byte integers or voids (numpy writes bfloat16 to npy as void).
        name: Name of the array, for messages.

    Raises:
        ShapeError: Values of another size or kind.
    """
    if array.dtype == CODES["BF16"]:
        return array
    if array.dtype.itemsize != 2 or array.dtype.kind not in "uiV":
        raise ShapeError(
            f"array {name!r} has dtype {array.dtype} and cannot be read as bfloat16, which takes raw 2-byte "
            "values; leave out dtype='bfloat16'"
        )
    return array.view(CODES["BF16"])


def release(array: Array) -> None:
    """Free the memory that a memory-mapped array takes in this process; it is read again on access."""
    if (mapped := mmap_of(array)) is not None:
        # Read-only file maps: dropped pages are read again from the file.
        mapped.madvise(mmap.MADV_DONTNEED)


@contextmanager
def _opened_npz(
    path: Path, error: type[MizarrError], advice: str
) -> Iterator[tuple[zipfile.ZipFile, BinaryIO]]:
    """Context manager: open an npz file as (archive, raw file); exceptions about its content are raised as
    `error`."""
    require_content(path, error, advice)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            yield archive, file
    except MizarrError:
        raise
    # zlib, zipfile and numpy's header reader (which evaluates Python literals) raise many types on invalid
    # bytes.
    except Exception as reason:
        raise error(
            f"the npz file {path} cannot be read ({str(reason) or type(reason).__name__:.200}); {advice}"
        ) from reason


def _members(archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """Archive members by array name; ValueError for duplicates, encryption, or sizes the file cannot have."""
    size = file.seek(0, 2)
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        name = member.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"it has two arrays named {name!r:.80}")
        # Bit 0 of the general purpose flags marks encryption (APPNOTE 4.4.4).
        if member.flag_bits & 1:
            raise ValueError(f"its array {name!r:.80} is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"its array {name!r:.80} is compressed in another way than by np.savez_compressed"
            )
        # A zip bomb claims more than deflate can produce from its bytes.
        ratio = 1 if member.compress_type == zipfile.ZIP_STORED else _DEFLATE
        if member.compress_size > size or member.file_size > member.compress_size * ratio:
            raise ValueError(
                f"its array {name!r:.80} would have {member.file_size} bytes, more than the file can hold"
            )
        members[name] = member
    return members


def _layout(head: bytes, member: zipfile.ZipInfo) -> NpyLayout:
    """Parse the npy header of an archive member; ValueError for Python objects or an impossible length."""
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError(f"its array {member.filename!r:.80} holds Python objects instead of numbers")
    layout = NpyLayout(
        dtype, tuple(int(length) for length in shape), "F" if is_fortran else "C", stream.tell()
    )
    _require_lengths(shape)
    nbytes = math.prod(layout.shape) * dtype.itemsize
    if layout.start + nbytes != member.file_size:
        raise ValueError(
            f"its array {member.filename!r:.80} has {member.file_size - layout.start} bytes of numbers, and "
            f"{dtype} of shape {list(layout.shape)!s:.80} needs {nbytes}"
        )
    return layout


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: BinaryIO, mode: Literal["r", "c"]) -> Array:
    """Read the array of one archive member, verifying its checksum.

    Arguments:
        archive: The npz archive.
        member: The member.
        file: The raw file, for memory maps.
        mode: "r" for a read-only array, "c" for copy-on-write.
    """
    is_stored = member.compress_type == zipfile.ZIP_STORED
    parts = []
    # Also a member that is mapped below is read once, sequentially: zipfile verifies its checksum only so.
    with archive.open(member) as stream:
        data = stream.read(_READ_BYTES)
        layout = _layout(data, member)
        while data:
            if not is_stored:
                parts.append(data)
            data = stream.read(_READ_BYTES)
    if math.prod(layout.shape) * layout.dtype.itemsize == 0:  # mmap refuses length 0
        return np.empty(layout.shape, layout.dtype)
    if is_stored:
        offset = _data_offset(file, member) + layout.start
        shape = layout.shape or (1,)  # np.memmap has no scalars
        mapped: Array = np.memmap(file, layout.dtype, mode, offset, shape, layout.order)
        return mapped.reshape(layout.shape, order=layout.order)
    # bytearray, so that the array is writable without a further copy.
    content = bytearray(b"".join(parts))
    if len(content) != member.file_size:
        raise ValueError(f"its array {member.filename!r:.80} is cut short")
    flat: Array = np.frombuffer(content, layout.dtype, offset=layout.start)
    return flat.reshape(layout.shape, order=layout.order)


def _data_offset(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Offset in the zip file of a member's bytes, which follow its local header.

    That header may be longer than the copy in the central directory (APPNOTE 4.3.7), so it is read here.
    """
    # 30 bytes of fixed fields, of which the last two are the lengths of the name and of the extra field.
    file.seek(member.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    return int(member.header_offset + 30 + name_length + extra_length)


def _require_lengths(shape: Sequence[int]) -> None:
    """ValueError for impossible shapes; an axis of length 0 does not make other lengths valid."""
    if any(length < 0 for length in shape) or math.prod(length or 1 for length in shape) >= 1 << 60:
        raise ValueError(f"the impossible shape {list(shape)!s:.80}")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Parse and verify a safetensors header, including metadata; returns it and the offset of the data."""
    require_content(path, WeightsError)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        # Checked before reading: eight arbitrary bytes would otherwise be taken as a length.
        if not 0 < length <= min(size - 8, _MOST_HEADER):
            raise WeightsError(
                f"{path} is not a complete safetensors file: its header should have {length} bytes, and "
                f"{max(size - 8, 0)} follow; download it again"
            )
        text = file.read(length)
    try:
        header = json_value(text)
        if not isinstance(header, dict):
            raise ValueError(f"a header that is a JSON {type(header).__name__} instead of an object")
        metadata = header.get(METADATA) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError(f"an entry {METADATA} that is not a mapping of names to texts")
        data_bytes = _verified_data_length(
            {name: entry for name, entry in header.items() if name != METADATA}
        )
    except ValueError as error:
        raise WeightsError(
            f"{path} is not a valid safetensors file: found {error}; download it again"
        ) from error
    needed = 8 + length + data_bytes
    if needed != size:
        raise WeightsError(
            f"{path} is {'truncated' if size < needed else 'damaged'}: expected {needed} bytes, found "
            f"{size}; download it again"
        )
    return header, 8 + length


def _verified_data_length(entries: Mapping[str, Any]) -> int:
    """Verify the entries of a safetensors header; return how many bytes of data must follow it.

    Raises:
        ValueError: An entry is malformed, its range has another length than dtype and shape require, or
            ranges overlap or leave gaps.
    """
    ranges = []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if all(
                type(number) is int for number in (*shape, begin, end)
            ):
                pass
            case _:
                raise ValueError(f"tensor {name!r:.80} without dtype, shape and data_offsets")
        if dtype not in _BITS:
            raise ValueError(f"tensor {name!r:.80} of dtype {dtype!r:.40}, which the format does not have")
        _require_lengths(shape)
        bits = math.prod(shape) * _BITS[dtype]
        if not 0 <= begin <= end or bits != 8 * (end - begin):
            raise ValueError(
                f"bytes {begin} to {end} for tensor {name!r:.80}, which as {dtype} of shape {shape!s:.80} "
                f"needs {-(-bits // 8)} bytes"
            )
        ranges.append((begin, end, name))
    expected = 0
    # Overlapping ranges could hide data or expose the same bytes under two names; the format forbids them.
    for begin, end, name in sorted(ranges):
        if begin != expected:
            raise ValueError(
                f"tensor {name!r:.80} at byte {begin} instead of {expected}: tensors overlap or leave gaps"
            )
        expected = end
    return expected


def _bytes(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """Yield the blocks as little-endian bytes; ShapeError if their total size is not that of the tensor."""
    written = 0
    for block in tensor.blocks:
        ready = np.ascontiguousarray(block, tensor.dtype.newbyteorder("<"))
        written += ready.nbytes
        yield raw_bytes(ready)
    if written != tensor.nbytes:
        raise ShapeError(
            f"the blocks of tensor {tensor.name!r} have {written} bytes together, its shape {tensor.shape} "
            f"and dtype {tensor.dtype} need {tensor.nbytes}"
        )
