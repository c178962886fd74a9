"""Files of named arrays: safetensors and npz, read by mapping and written block by block, bfloat16 included.

Border: names, dtypes, shapes and bytes; what an array means is told by whoever reads or writes it. The
libraries of both formats want whole files in memory (and safetensors' numpy reader has no bfloat16), which a
run of a corpus is not.

The format of safetensors: 8 bytes of header length, the header as JSON, the data. npz: a zip of npy files;
numpy has no bfloat16, so there an array of 2-byte values is taken for one only when that is said.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

import ml_dtypes
import numpy as np

from ..arrays import Array
from ..errors import ConfigError, ShapeError, WeightsError

__all__ = [
    "FLOATS",
    "Tensor",
    "as_bfloat16",
    "mapped_tensor",
    "npy_header",
    "read_header",
    "read_npz",
    "read_safetensors",
    "release",
    "seek_member",
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
    """Entries of a safetensors file by tensor name, and where its data begin; WeightsError unless the file
    is whole.
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


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an npz file by name, memory-mapped where it is not compressed.

    Raises ConfigError for another file, and for arrays of Python objects.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return {
                info.filename.removesuffix(".npy"): _npy(archive, info, file)
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
    except (OSError, ValueError, EOFError, struct.error, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"expected an npz file of named arrays at {path}, found one that cannot be read ({error}); write "
            "it with np.savez, arrays by name"
        ) from error


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


def npy_header(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """(dtype, shape, in Fortran order) of the npy file that begins here; leaves the file where data begin."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    return dtype, shape, is_fortran


def seek_member(file: IO[bytes], member: zipfile.ZipInfo) -> None:
    """Go to the bytes of a member of a zip file, whose own header may be longer than the list of members
    says.
    """
    file.seek(member.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    file.seek(member.header_offset + 30 + name + extra)


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: BinaryIO) -> Array:
    """The array of one member of an npz file."""
    if member.compress_type != zipfile.ZIP_STORED:
        with archive.open(member) as packed:
            read: Array = np.lib.format.read_array(packed, allow_pickle=False)
            return read
    seek_member(file, member)
    dtype, shape, is_fortran = npy_header(file)
    if dtype.hasobject:
        raise ValueError(f"{member.filename} holds Python objects")
    if math.prod(shape) == 0:  # nothing can be mapped of an empty array
        return np.empty(shape, dtype)
    order: Literal["C", "F"] = "F" if is_fortran else "C"
    return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape, order=order)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise WeightsError(
                f"{path} is no complete safetensors file: expected a header of {length} bytes, found "
                f"{max(size - 8, 0)}; fetch it again"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise WeightsError(f"{path} is no safetensors file: its header is not JSON ({error})") from error
    ends = (entry["data_offsets"][1] for name, entry in header.items() if name != METADATA)
    needed = 8 + length + max(ends, default=0)
    if needed != size:
        raise WeightsError(
            f"{path} is {'truncated' if size < needed else 'damaged'}: expected {needed} bytes, found "
            f"{size}; fetch it again"
        )
    return header, 8 + length


def _bytes(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """The blocks as little-endian bytes; ShapeError if together they are not the tensor."""
    done = 0
    for block in tensor.blocks:
        ready = np.ascontiguousarray(block, tensor.dtype.newbyteorder("<"))
        done += ready.nbytes
        yield ready.reshape(-1).view(np.uint8).data
    if done != tensor.nbytes:
        raise ShapeError(f"expected {tensor.nbytes} bytes of {tensor.name!r}, found {done}")
