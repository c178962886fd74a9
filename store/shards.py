"""Shards: the one file that knows bytes on disk.

A shard holds one layer of one segment. It is the raw array, cut into inner chunks of about 1 MiB that follow each other, and behind
them the index of the Zarr v3 `sharding_indexed` codec: (offset, bytes) of every chunk as little-endian u64, chunks that hold nothing as
2**64 - 1 twice, then the crc32c of that index. So a shard is written with one `writev` and read through `mmap`, and is still an
ordinary Zarr array to every other reader. Inner chunks carry no checksum of their own, which would break their alignment; integrity
lives in the manifest. Nothing is compressed: float activations gain at most a tenth, for several times the time.

Knows one array and one file; which segment or run they belong to is known elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .digest import file_digest
from .errors import CorruptEntry, ShapeError
from .files import Folder

CHUNK_BYTES = 1 << 20
"""Smaller chunks cost other readers 3x in time; larger ones ruin the lookup of one prompt."""
_ABSENT = np.uint64(2**64 - 1)
_ZEROS = bytes(CHUNK_BYTES)
_IOV_MAX = 64

Array = npt.NDArray[Any]
DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float64": np.dtype("<f8"), "int32": np.dtype("<i4"), "int64": np.dtype("<i8")}


@dataclass(frozen=True)
class ShardLayout:
    """How the rows of a segment lie in a shard.

    dtype: name of the stored dtype. tail: axes after the packed one, e.g. (hidden,). rows: rows of a whole segment; chunk_rows: of one
    inner chunk, dividing it. layered: whether the array has a layer axis in front.
    """

    dtype: str
    tail: tuple[int, ...]
    rows: int
    chunk_rows: int
    layered: bool

    @classmethod
    def of(cls, dtype: str, tail: Sequence[int], rows: int, layered: bool) -> ShardLayout:
        """The layout for segments of at most `rows` rows: inner chunks of a power of two rows, nearest below 1 MiB."""
        if dtype not in DTYPES:
            raise ShapeError(f"expected a stored dtype among {', '.join(DTYPES)}, found {dtype!r}")
        row_bytes = math.prod(tail) * DTYPES[dtype].itemsize
        chunk = 1 << max(0, (CHUNK_BYTES // max(row_bytes, 1)).bit_length() - 1)
        chunk = min(chunk, 1 << max(0, rows - 1).bit_length())
        return cls(dtype, tuple(tail), -(-rows // chunk) * chunk, chunk, layered)

    @property
    def native(self) -> np.dtype[Any]:
        """The numpy dtype of the rows."""
        return DTYPES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * math.prod(self.tail) * self.native.itemsize

    @property
    def n_chunks(self) -> int:
        """Inner chunks of a whole segment."""
        return self.rows // self.chunk_rows

    @property
    def index_bytes(self) -> int:
        return 16 * self.n_chunks + 4

    def file_bytes(self, rows: int) -> int:
        """Size of a shard that holds `rows` rows."""
        return -(-rows // self.chunk_rows) * self.chunk_bytes + self.index_bytes

    def path(self, variable: str, layer: int | None, segment: int) -> str:
        """Name of a shard within its run's folder, as Zarr's default chunk keys spell it."""
        place = [segment, *[0] * len(self.tail)]
        return "/".join([variable, "c", *map(str, place if layer is None else [layer, *place])])


def array_metadata(layout: ShardLayout, shape: Sequence[int], dims: Sequence[str], attributes: Mapping[str, Any]) -> bytes:
    """The `zarr.json` of an array laid out so; missing shards read as NaN.

    shape, dims: of the whole array, layer axis included where there is one.
    """
    inner = [layout.chunk_rows, *layout.tail]
    outer = [layout.rows, *layout.tail]
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *inner] if layout.layered else inner,
            "codecs": [little],
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": layout.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, *outer] if layout.layered else outer}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "NaN",
        "codecs": [sharding],
        "attributes": dict(attributes),
        "dimension_names": list(dims),
        "storage_transformers": [],
    }
    return json.dumps(metadata, indent=1).encode()


def write_shard(folder: Folder, name: str, rows: Array, layout: ShardLayout) -> tuple[int, str]:
    """Write one shard under its final name, complete or not at all; returns its size and "sha256:…".

    rows: [rows, *tail], the dtype of the layout, C order. The first writer wins; whoever finds the file there gets *its* digest.
    Raises ShapeError, StoreFull, ReadOnlyStore.
    """
    _check_rows(name, rows, layout)
    with folder.writing(name):
        target = folder.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            digest = _write_synced(temporary, rows, layout, sync=folder.durability == "disk")
            os.link(temporary, target)
        except FileExistsError:
            digest = file_digest(target)
        finally:
            temporary.unlink(missing_ok=True)
    return target.stat().st_size, digest


def read_shard(path: Path, layout: ShardLayout, rows: int) -> Array:
    """The rows of a shard, read-only and memory-mapped, [rows, *tail].

    Raises CorruptEntry when the file is not the raw array with a contiguous index behind it.
    """
    expected = layout.file_bytes(rows)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected:
            raise CorruptEntry(f"{path}: expected {expected} bytes, found {size}; run `mizarr verify`, which sets it aside for recomputation")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    index = np.frombuffer(mapped, "<u8", 2 * layout.n_chunks, size - layout.index_bytes).reshape(-1, 2)
    if not np.array_equal(index, _index(rows, layout)):
        raise CorruptEntry(f"{path}: its shard index does not describe contiguous chunks; run `mizarr verify`")
    held: Array = np.frombuffer(mapped, layout.native, rows * math.prod(layout.tail))
    return held.reshape(rows, *layout.tail)


def _write_synced(path: Path, rows: Array, layout: ShardLayout, *, sync: bool) -> str:
    index = _index(len(rows), layout).tobytes()
    padding = layout.file_bytes(len(rows)) - layout.index_bytes - rows.nbytes
    parts = [_bytes_of(rows), *(_ZEROS[: min(CHUNK_BYTES, padding - at)] for at in range(0, padding, CHUNK_BYTES)), index + _crc32c(index)]
    state = hashlib.sha256()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for part in parts:
            state.update(part)
        _write_all(handle, parts)
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)
    return f"sha256:{state.hexdigest()}"


def _write_all(handle: int, parts: Sequence[bytes | memoryview]) -> None:
    """Every byte of every part, however little the kernel takes at a time (at most 2 GiB)."""
    waiting = [memoryview(part) for part in parts if len(part)]
    while waiting:
        written = os.writev(handle, waiting[:_IOV_MAX])
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = waiting[0][written:]


def _index(rows: int, layout: ShardLayout) -> npt.NDArray[np.uint64]:
    """(offset, bytes) of each inner chunk, those past the last row absent."""
    index = np.full((layout.n_chunks, 2), _ABSENT, "<u8")
    held = -(-rows // layout.chunk_rows)
    index[:held, 0] = np.arange(held, dtype=np.uint64) * np.uint64(layout.chunk_bytes)
    index[:held, 1] = layout.chunk_bytes
    return index


def _check_rows(name: str, rows: Array, layout: ShardLayout) -> None:
    if rows.dtype != layout.native or rows.shape[1:] != layout.tail or not 0 < len(rows) <= layout.rows:
        raise ShapeError(
            f"{name}: expected {layout.dtype} of shape [1..{layout.rows}, {', '.join(map(str, layout.tail))}], "
            f"found {rows.dtype} of shape {list(rows.shape)}"
        )
    if not rows.flags.c_contiguous:
        raise ShapeError(f"{name}: expected rows in C order; make them contiguous before they are written")


def _bytes_of(rows: Array) -> memoryview:
    return memoryview(rows.reshape(-1).view(np.uint8))


def _crc32c(data: bytes) -> bytes:
    import google_crc32c

    return int(google_crc32c.value(data)).to_bytes(4, "little")
