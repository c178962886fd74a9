"""Shards: the one file that knows bytes on disk.

A shard holds one layer of one segment. It is the raw array, cut into inner chunks of about 1 MiB that follow
each other, and behind
them the index of the Zarr v3 `sharding_indexed` codec: (offset, bytes) of every chunk as little-endian u64,
chunks that hold nothing as 2**64 - 1 twice, then the crc32c of that index. So a shard is written with one
`writev` and read through `mmap`, and is still an ordinary Zarr array to every other reader. Inner chunks
carry no checksum of their own, which would break their alignment; integrity lives in the manifest. Nothing is
compressed: float activations gain at most a tenth, for several times the time.

Knows one array and one file; which segment or run they belong to is known elsewhere.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .digest import Buffer, content_digest, file_digest
from .errors import CorruptEntry, ShapeError
from .files import Folder

CHUNK_BYTES = 1 << 20
"""Smaller chunks cost other readers 3x in time; larger ones ruin the lookup of one prompt."""
_ABSENT = 2**64 - 1
_ZEROS = bytes(CHUNK_BYTES)
_REPAIR = "run `mizarr verify`, which sets it aside for recomputation"

Array = npt.NDArray[Any]
Written = tuple[int, str]
"""Size in bytes and "sha256:…" of a file."""
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype("<f8"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}


@dataclass(frozen=True)
class ShardLayout:
    """How the rows of a segment lie in a shard.

    dtype: name of the stored dtype. tail: axes after the packed one, e.g. (hidden,). rows: rows of a whole
    segment; chunk_rows: of one inner chunk, dividing it. layered: whether the array has a layer axis in
    front.
    """

    dtype: str
    tail: tuple[int, ...]
    rows: int
    chunk_rows: int
    layered: bool

    @classmethod
    def of(
        cls, dtype: str, tail: Sequence[int], rows: int, layered: bool, *, exact: bool = False
    ) -> ShardLayout:
        """The layout for segments of at most `rows` rows: inner chunks of at most 1 MiB, a power of two rows.

        exact: shards must be `rows` long, as segment follows segment on Zarr's regular grid; then the inner
        chunk is a divisor of `rows`, and ShapeError is raised if only tiny ones divide it. Otherwise shards
        are rounded up to whole chunks.
        """
        if dtype not in DTYPES:
            raise ShapeError(f"expected a stored dtype among {', '.join(DTYPES)}, found {dtype!r}")
        row_bytes = math.prod(tail) * DTYPES[dtype].itemsize
        most = 1 << max(0, (CHUNK_BYTES // max(row_bytes, 1)).bit_length() - 1)
        if not exact:
            chunk = min(most, 1 << max(0, rows - 1).bit_length())
            return cls(dtype, tuple(tail), -(-rows // chunk) * chunk, chunk, layered)
        chunk = next(size for size in range(min(most, rows), 0, -1) if rows % size == 0)
        if chunk < min(most, rows) // 4:
            raise ShapeError(
                f"segments of {rows} rows divide into chunks of {chunk} rows only, which is slow to read; "
                f"choose a power of two, e.g. {1 << rows.bit_length() - 1}, or a multiple of {most}"
            )
        return cls(dtype, tuple(tail), rows, chunk, layered)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ShardLayout | None:
        """The layout an array's `zarr.json` declares; None unless its chunks are raw little-endian bytes."""
        try:
            (sharding,) = metadata["codecs"]
            inner = sharding["configuration"]
            outer = metadata["chunk_grid"]["configuration"]["chunk_shape"]
            layered = metadata["dimension_names"][0] == "layer" and len(outer) > 1
            layout = cls(
                metadata["data_type"],
                tuple(outer[1 + layered :]),
                outer[layered],
                inner["chunk_shape"][layered],
                layered,
            )
            ours = json.loads(
                array_metadata(layout, metadata["shape"], metadata["dimension_names"], metadata["attributes"])
            )
        except (KeyError, ValueError, TypeError, IndexError):
            return None
        ours["fill_value"] = metadata["fill_value"]  # decides nothing about bytes that are there
        return layout if ours == metadata else None

    @property
    def native(self) -> np.dtype[Any]:
        """The numpy dtype of the rows."""
        return DTYPES[self.dtype]

    @property
    def fill(self) -> float:
        """What an absent row reads as."""
        return 0 if self.native.kind == "i" else math.nan

    @property
    def chunk_bytes(self) -> int:
        """Of one inner chunk."""
        return self.chunk_rows * math.prod(self.tail) * self.native.itemsize

    @property
    def n_chunks(self) -> int:
        """Inner chunks of a whole segment."""
        return self.rows // self.chunk_rows

    @property
    def index_bytes(self) -> int:
        """Of the index at the end of a shard, checksum included."""
        return 16 * self.n_chunks + 4

    def file_bytes(self, rows: int) -> int:
        """Size of a shard that holds `rows` rows."""
        return -(-rows // self.chunk_rows) * self.chunk_bytes + self.index_bytes

    def path(self, variable: str, layer: int | None, segment: int) -> str:
        """Name of a shard within its run's folder, as Zarr's default chunk keys spell it."""
        place = [segment, *[0] * len(self.tail)]
        return "/".join([variable, "c", *map(str, place if layer is None else [layer, *place])])


def array_metadata(
    layout: ShardLayout, shape: Sequence[int], dims: Sequence[str], attributes: Mapping[str, Any]
) -> bytes:
    """The `zarr.json` of an array laid out so; missing shards read as NaN, or 0 for integers.

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
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [1, *outer] if layout.layered else outer},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "NaN" if math.isnan(layout.fill) else 0,
        "codecs": [sharding],
        "attributes": dict(attributes),
        "dimension_names": list(dims),
        "storage_transformers": [],
    }
    return json.dumps(metadata, indent=1).encode()


def write_shards(
    folder: Folder,
    shards: Mapping[str, tuple[Array, ShardLayout]],
    *,
    threads: int = 2,
    handed_over: Callable[[], None] = lambda: None,
) -> dict[str, Written]:
    """Write shards under their final names, each complete or not at all; returns size and "sha256:…" of each.

    shards: name -> rows [rows, *tail], the dtype of the layout, C order. The first writer of a name wins;
    whoever finds the file there gets *its* digest.
    threads: that digest, and as many that write. handed_over: called when what is left is waiting for the
    disk. Raises ShapeError, StoreFull, ReadOnlyStore.
    """
    files = {name: shard_parts(name, rows, layout) for name, (rows, layout) in shards.items()}
    # sha256, write and fsync all release the GIL.
    with ThreadPoolExecutor(max(1, min(threads, len(files)))) as pool:
        digests = {name: pool.submit(content_digest, *parts) for name, parts in files.items()}

        def only_the_disk_is_left() -> None:
            wait(digests.values())
            handed_over()

        made = folder.put_all(files, threads=threads, handed_over=only_the_disk_is_left)
        written = {}
        for name, (rows, layout) in shards.items():
            if name in made:
                written[name] = layout.file_bytes(len(rows)), digests[name].result()
            else:
                target = folder.path(name)
                written[name] = target.stat().st_size, file_digest(target)
    return written


def shard_parts(name: str, rows: Array, layout: ShardLayout) -> list[Buffer]:
    """The bytes of a shard, end to end; rows as for `write_shards`, and not copied."""
    _check_rows(name, rows, layout)
    index = _index(len(rows), layout).tobytes()
    padding = layout.file_bytes(len(rows)) - layout.index_bytes - rows.nbytes
    zeros = [_ZEROS[: min(CHUNK_BYTES, padding - at)] for at in range(0, padding, CHUNK_BYTES)]
    return [_bytes_of(rows), *zeros, index + _crc32c(index)]


def read_shard(path: Path, layout: ShardLayout, rows: int) -> Array:
    """The rows of a shard, read-only: [rows, *tail].

    Memory-mapped when its chunks lie in order, as ours do; copied otherwise.
    Raises CorruptEntry when the file is cut short or its index is not intact; the data are left to `verify`.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < layout.index_bytes:
            raise CorruptEntry(
                f"{path}: expected at least {layout.index_bytes} bytes, found {size}; {_REPAIR}"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    index = np.frombuffer(mapped, "<u8", 2 * layout.n_chunks, size - layout.index_bytes).reshape(-1, 2)
    if size != layout.file_bytes(rows) or not np.array_equal(index, _index(rows, layout)):
        return _gather(path, mapped, index, layout, rows)
    held: Array = np.frombuffer(mapped, layout.native, rows * math.prod(layout.tail))
    return held.reshape(rows, *layout.tail)


def let_go(rows: Array) -> None:
    """Take the pages of a mapped shard out of this process's memory; they stay in the system's cache, and
    come back when the rows are read. Nothing happens to rows that are not mapped."""
    holder: Any = rows
    while holder is not None and not isinstance(holder, mmap.mmap):
        holder = holder.obj if isinstance(holder, memoryview) else getattr(holder, "base", None)
    if holder is not None and hasattr(mmap, "MADV_DONTNEED"):
        holder.madvise(mmap.MADV_DONTNEED)


def _gather(
    path: Path, mapped: mmap.mmap, index: npt.NDArray[np.uint64], layout: ShardLayout, rows: int
) -> Array:
    """The rows of a shard as another writer may lay it out: chunks in any order, or absent (fill value)."""
    held = np.full((layout.rows, *layout.tail), layout.fill, layout.native)
    end = len(mapped) - layout.index_bytes
    intact = mapped[end + index.nbytes :] == _crc32c(index.tobytes())
    for n, (offset, length) in enumerate(index.tolist()):
        if offset == length == _ABSENT:
            continue
        if not intact or length != layout.chunk_bytes or offset + length > end:
            raise CorruptEntry(f"{path}: its shard index does not describe what lies before it; {_REPAIR}")
        chunk = np.frombuffer(mapped, layout.native, layout.chunk_rows * math.prod(layout.tail), offset)
        held[n * layout.chunk_rows : (n + 1) * layout.chunk_rows] = chunk.reshape(-1, *layout.tail)
    held.flags.writeable = False
    return held[:rows]


def _index(rows: int, layout: ShardLayout) -> npt.NDArray[np.uint64]:
    """(offset, bytes) of each inner chunk, those past the last row absent."""
    index = np.full((layout.n_chunks, 2), np.uint64(_ABSENT), "<u8")
    held = -(-rows // layout.chunk_rows)
    index[:held, 0] = np.arange(held, dtype=np.uint64) * np.uint64(layout.chunk_bytes)
    index[:held, 1] = layout.chunk_bytes
    return index


def _check_rows(name: str, rows: Array, layout: ShardLayout) -> None:
    if rows.dtype != layout.native or rows.shape[1:] != layout.tail or not 0 < len(rows) <= layout.rows:
        raise ShapeError(
            f"{name}: expected {layout.dtype} of shape [1..{layout.rows}, {', '.join(map(str, layout.tail))}]"
            f", found {rows.dtype} of shape {list(rows.shape)}"
        )
    if not rows.flags.c_contiguous:
        raise ShapeError(f"{name}: expected rows in C order; make them contiguous before they are written")


def _bytes_of(rows: Array) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def _crc32c(data: bytes) -> bytes:
    import google_crc32c

    return int(google_crc32c.value(data)).to_bytes(4, "little")
