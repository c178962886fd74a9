"""Shards: the one file that knows bytes on disk.

A shard holds one layer of one segment. It is the raw array, cut into inner chunks of about 1 MiB that follow
each other, each with its crc32c behind it, and behind them the index of the Zarr v3 `sharding_indexed` codec:
(offset, bytes) of every chunk as little-endian u64, chunks that hold nothing as 2**64 - 1 twice, then the
crc32c of that index. So a shard is written from where the rows lie and read through `mmap`, and is still an
ordinary Zarr array to every other reader, who checks the same checksums. Nothing is compressed unless told:
float32 gains a tenth, and what is compressed cannot be mapped (archived.py).

Knows one array and one file; which segment or run they belong to is known elsewhere.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..digest import Buffer, content_digest
from ..errors import REPAIR, CorruptEntry, ShapeError
from ..files import Folder, Mapped
from .zarr_metadata import CRC32C, LITTLE_ENDIAN, array_metadata

CHUNK_BYTES = 1 << 20
"""Smaller chunks cost other readers 3x in time; larger ones ruin the lookup of one prompt."""
MOST_BYTES = 8 << 30
"""Of the rows of a shard that is copied whole: absent chunks take no room; ours are a quarter GiB."""
ABSENT = 2**64 - 1
"""Offset, and bytes, of a chunk that is not there."""
CODECS = ("zstd",)
"""Names of the ways to compress a shard."""
_ZEROS = bytes(CHUNK_BYTES)
SUM_BYTES = 4
"""Of the checksum behind a chunk."""
_LEVEL = 1  # of zstd; 3 and 5 gain a hundredth more, at a fifth of the speed in bfloat16
_BLOCK_BYTES = 1 << 18  # of a chunk compressed at a time; Blosc's own choice loses a third of what is gained

Written = tuple[int, str]
"""Size in bytes and "sha256:…" of a file."""
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype("<f8"),
    "int8": np.dtype("i1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}


@dataclass(frozen=True)
class ShardLayout:
    """How the rows of a segment lie in a shard.

    dtype: name of the stored dtype. tail: axes after the packed one, e.g. (hidden,). rows: rows of a whole
    segment; chunk_rows: of one inner chunk, dividing it. layered: whether the array has a layer axis in
    front. codec: how chunks are compressed, "" for not at all.
    """

    dtype: str
    tail: tuple[int, ...]
    rows: int
    chunk_rows: int
    layered: bool
    codec: str = ""

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
    def whole(cls, dtype: str, rows: int) -> ShardLayout:
        """The layout of a row of numbers that is one chunk, so that it can be mapped as one array."""
        return cls(dtype, (), rows, rows, layered=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ShardLayout | None:
        """The layout an array's `zarr.json` declares; None unless its chunks are little-endian bytes, raw or
        compressed as here, each with its crc32c.
        """
        try:
            (sharding,) = metadata["codecs"]
            inner = sharding["configuration"]
            outer = metadata["chunk_grid"]["configuration"]["chunk_shape"]
            layered = metadata["dimension_names"][0] == "layer" and len(outer) > 1
            steps = [codec["name"] for codec in inner["codecs"]]
            layout = cls(
                metadata["data_type"],
                tuple(outer[1 + layered :]),
                outer[layered],
                inner["chunk_shape"][layered],
                layered,
                CODECS[0] if "blosc" in steps else "",
            )
            ours = json.loads(
                layout.metadata(metadata["shape"], metadata["dimension_names"], metadata["attributes"])
            )
        except (
            KeyError,
            ValueError,
            TypeError,
            IndexError,
            ZeroDivisionError,
            OverflowError,
            AttributeError,
        ):
            return None
        sizes = (layout.rows, layout.chunk_rows, *layout.tail)
        if not all(isinstance(size, int) and size > 0 for size in sizes) or layout.rows % layout.chunk_rows:
            return None
        return layout if ours == metadata else None

    @property
    def plain(self) -> ShardLayout:
        """The same without a codec."""
        return replace(self, codec="")

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
        """Of the rows of one inner chunk."""
        return self.chunk_rows * math.prod(self.tail) * self.native.itemsize

    @property
    def stored_bytes(self) -> int:
        """Of one inner chunk as it lies in the file, its checksum included."""
        return self.chunk_bytes + SUM_BYTES

    @property
    def n_chunks(self) -> int:
        """Inner chunks of a whole segment."""
        return self.rows // self.chunk_rows

    @property
    def index_bytes(self) -> int:
        """Of the index at the end of a shard, checksum included."""
        return 16 * self.n_chunks + 4

    def file_bytes(self, rows: int) -> int:
        """Size of a plain shard that holds `rows` rows."""
        return -(-rows // self.chunk_rows) * self.stored_bytes + self.index_bytes

    def path(self, variable: str, layer: int | None, segment: int) -> str:
        """Name of a shard within its run's folder, as Zarr's default chunk keys spell it."""
        place = [segment, *[0] * len(self.tail)]
        return "/".join([variable, "c", *map(str, place if layer is None else [layer, *place])])

    def metadata(self, shape: Sequence[int], dims: Sequence[str], attributes: Mapping[str, Any]) -> bytes:
        """The `zarr.json` of an array laid out so; missing shards read as NaN, or 0 for integers.

        shape, dims: of the whole array, layer axis included where there is one.
        """
        front = [1] if self.layered else []
        sharding = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [*front, self.chunk_rows, *self.tail],
                "codecs": [LITTLE_ENDIAN, *_compressing(self), CRC32C],
                "index_codecs": [LITTLE_ENDIAN, CRC32C],
                "index_location": "end",
            },
        }
        return array_metadata(
            self.dtype,
            shape,
            [*front, self.rows, *self.tail],
            [sharding],
            dims=dims,
            fill_value="NaN" if math.isnan(self.fill) else 0,
            attributes=attributes,
        )


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
        for name, parts in files.items():
            if name in made:
                written[name] = sum(memoryview(part).nbytes for part in parts), digests[name].result()
            else:
                written[name] = folder.measure(name)
    return written


def shard_parts(name: str, rows: Array, layout: ShardLayout) -> list[Buffer]:
    """The bytes of a shard, end to end; rows as for `write_shards`, and not copied."""
    _check_rows(name, rows, layout)
    data = rows.reshape(-1).view(np.uint8)
    if layout.codec:
        starts = range(0, len(data), layout.chunk_bytes)
        whole = (
            data[at : at + layout.chunk_bytes].tobytes().ljust(layout.chunk_bytes, b"\0") for at in starts
        )
        return coded_parts(whole, layout)
    index = _index(len(rows), layout).tobytes()
    parts: list[Buffer] = []
    for start in range(0, len(data), layout.chunk_bytes):
        chunk = data[start : start + layout.chunk_bytes]
        parts.append(chunk.data)
        checksum = crc32c(chunk)
        short = layout.chunk_bytes - len(chunk)
        for at in range(0, short, CHUNK_BYTES):
            zeros = _ZEROS[: min(CHUNK_BYTES, short - at)]
            parts.append(zeros)
            checksum = crc32c(zeros, checksum)
        parts.append(checksum.to_bytes(SUM_BYTES, "little"))
    return [*parts, index + crc32c(index).to_bytes(SUM_BYTES, "little")]


def raw_parts(chunks: Iterable[bytes], count: int, layout: ShardLayout) -> list[Buffer]:
    """The bytes of a plain shard of whole chunks, `count` of them."""
    parts: list[Buffer] = []
    for chunk in chunks:
        parts.append(chunk)
        parts.append(crc32c(chunk).to_bytes(SUM_BYTES, "little"))
    index = _index(count * layout.chunk_rows, layout).tobytes()
    return [*parts, index + crc32c(index).to_bytes(SUM_BYTES, "little")]


def coded_parts(chunks: Iterable[bytes], layout: ShardLayout) -> list[Buffer]:
    """The bytes of a compressed shard of whole chunks."""
    from numcodecs import blosc

    parts: list[Buffer] = []
    index = np.full((layout.n_chunks, 2), np.uint64(ABSENT), "<u8")
    at = 0
    for number, chunk in enumerate(chunks):
        numbers = np.frombuffer(chunk, layout.native if layout.native.kind in "fi" else np.uint16)
        packed = blosc.compress(numbers, b"zstd", _LEVEL, blosc.SHUFFLE, _BLOCK_BYTES)
        packed += crc32c(packed).to_bytes(SUM_BYTES, "little")
        parts.append(packed)
        index[number] = at, len(packed)
        at += len(packed)
    told = index.tobytes()
    return [*parts, told + crc32c(told).to_bytes(SUM_BYTES, "little")]


def _compressing(layout: ShardLayout) -> list[dict[str, Any]]:
    """What the description of an array says of the codec, as Zarr names it."""
    if not layout.codec:
        return []
    how = {"cname": "zstd", "clevel": _LEVEL, "shuffle": "shuffle", "typesize": layout.native.itemsize}
    return [{"name": "blosc", "configuration": {**how, "blocksize": _BLOCK_BYTES}}]


class ShardRows:
    """Rows of a shard, read-only: [rows, *tail]; no row is handed out before its chunk was checked.

    Indexed along the rows: by a number or a range within one chunk, which gives a view of the mapped file;
    by a longer range, numbers or a mask, which copies. `np.asarray` copies all unless they are one chunk.
    Every access raises CorruptEntry where a chunk is not what its checksum says. A chunk is checked when it
    is touched first, and each time unless `remembers`, which says that a change of the file would be seen.
    Safe for any number of threads.
    """

    def __init__(
        self,
        chunks: Array,
        rows: int,
        what: str = "",
        *,
        checks: tuple[Array, Array] | None = None,
        mapped: Mapped | None = None,
        stored_bytes: int = 0,
    ) -> None:
        """chunks: [chunk, row, *tail]. checks: bytes [chunk, byte] and checksums [chunk], None where there is
        nothing to check. what: these rows, as an error names them. mapped: the file they lie in, and
        stored_bytes: of a chunk there.
        """
        self.remembers = True
        self.shape: tuple[int, ...] = (rows, *chunks.shape[2:])
        self.dtype = chunks.dtype
        self._chunks, self._what, self._checks = chunks, what, checks
        self._mapped, self._stored_bytes = mapped, stored_bytes
        self._length = chunks.shape[1]
        self._pending = np.full(len(chunks), checks is not None)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Of all rows, as an array has them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        held = self[:]
        return held.astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def __getitem__(self, key: int | np.integer[Any] | slice | npt.NDArray[Any]) -> Array:
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            first, offset = divmod(start, self._length)
            if start < stop <= (first + 1) * self._length:
                return self._chunk(first)[offset : offset + stop - start]
            out = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
            for at, block in self.blocks(start, stop):
                out[at : at + len(block)] = block
            return out
        if isinstance(key, slice):
            return self._gather(np.arange(len(self))[key])
        if isinstance(key, int | np.integer):
            number, offset = divmod(range(len(self))[key], self._length)
            row: Array = self._chunk(number)[offset]
            return row
        return self._gather(np.flatnonzero(key) if key.dtype == bool else key)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """The rows of a range as views, chunk by chunk, each with its place from `start`.

        Meant to be copied one by one: what was just checked is still in the processor's cache.
        """
        if start < stop:
            self._fetch(range(start // self._length, (stop - 1) // self._length + 1))
        done = start
        while done < stop:
            number, offset = divmod(done, self._length)
            upto = min(stop, (number + 1) * self._length)
            yield done - start, self._chunk(number)[offset : offset + upto - done]
            done = upto

    @property
    def is_fetched(self) -> bool:
        """Whether rows are fetched from elsewhere when they are read first, rather than mapped."""
        return self._mapped is not None and not self._mapped.is_whole

    def let_go(self) -> None:
        """Take the pages of a mapped shard out of this process's memory; they stay in the system's cache, and
        come back when the rows are read.
        """
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.data.madvise(mmap.MADV_DONTNEED)

    def _gather(self, rows: npt.NDArray[Any]) -> Array:
        if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"expected rows below {len(self)}, found {rows.min()} to {rows.max()}")
        number, offset = np.divmod(np.where(rows < 0, rows + len(self), rows), self._length)
        if self._pending.any():
            needed = np.unique(number)
            self._fetch(needed)
            for one in needed:
                self._chunk(one)
        gathered: Array = self._chunks[number, offset]
        return gathered

    def _fetch(self, numbers: Iterable[int]) -> None:
        """Have chunks that are not there yet read from where the file lies, neighbours in one request."""
        if self._mapped is None or self._mapped.is_whole or self._checks is None:
            return
        data, sums = self._checks
        absent = [n for n in numbers if self._pending[n] and crc32c(data[n]) != int(sums[n])]
        ranges: list[tuple[int, int]] = []
        for number in absent:
            start = number * self._stored_bytes
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, (number + 1) * self._stored_bytes))
        if ranges:
            self._mapped.fetch(ranges)

    def _chunk(self, number: int) -> Array:
        """One chunk [row, *tail], checked unless it was."""
        if self._pending[number]:
            self._fetch((number,))
            self._check(number)
            self._pending[number] = not self.remembers
        chunk: Array = self._chunks[number]
        return chunk

    def _check(self, number: int) -> None:
        if self._checks is None:
            return
        data, sums = self._checks
        expected, found = int(sums[number]), crc32c(data[number])
        if expected != found:
            rows = range(number * self._length, min((number + 1) * self._length, len(self)))
            raise CorruptEntry(
                f"{self._what}: expected rows {rows.start} to {rows.stop - 1} with crc32c {expected:08x}, "
                f"found {found:08x}; {REPAIR}"
            )


def read_shard(mapped: Mapped, layout: ShardLayout, rows: int, what: str = "") -> ShardRows:
    """The rows of a shard, [rows, *tail]; what: these rows, as an error names them beside the file.

    Views of the mapped file when its chunks lie in order, as ours do; copied, and checked at once, otherwise.
    Raises CorruptEntry when the file is cut short or its index is not intact.
    """
    what = f"{mapped.where} ({what})" if what else mapped.where
    expect_room(layout, rows, what)
    data, size = mapped.data, mapped.size
    if size < layout.index_bytes:
        raise CorruptEntry(f"{what}: expected at least {layout.index_bytes} bytes, found {size}; {REPAIR}")
    end = size - layout.index_bytes
    if not mapped.is_whole and not index_is_sound(data, end, layout):
        mapped.fetch([(end, size)])
    if not index_is_sound(data, end, layout):
        raise CorruptEntry(f"{what}: its shard index is not what its crc32c says; {REPAIR}")
    index = np.frombuffer(data, "<u8", 2 * layout.n_chunks, end).reshape(-1, 2)
    is_ours = size == layout.file_bytes(rows) and np.array_equal(index, _index(rows, layout))
    if not mapped.is_whole and not is_ours:
        mapped.fetch([(0, end)])  # nothing tells one chunk from bytes that are not there
    if not is_ours:
        return ShardRows(_in_order(data, end, index, layout, what).reshape(1, -1, *layout.tail), rows)
    held = -(-rows // layout.chunk_rows)
    chunks, checks = _chunks_at(data, layout, held, 0), _checks_at(data, layout, held, 0)
    return ShardRows(chunks, rows, what, checks=checks, mapped=mapped, stored_bytes=layout.stored_bytes)


def expect_room(layout: ShardLayout, rows: int, what: str) -> None:
    """CorruptEntry for more rows than a shard of this layout has: its description is of another array."""
    if rows > layout.rows:
        raise CorruptEntry(f"{what}: expected a shard of at least {rows} rows, found {layout.rows}; {REPAIR}")


def index_is_sound(data: mmap.mmap | bytes, end: int, layout: ShardLayout) -> bool:
    """Whether the index that begins at `end` is what its crc32c says."""
    index = np.frombuffer(data, np.uint8, layout.index_bytes - SUM_BYTES, end)
    return data[end + index.nbytes : end + layout.index_bytes] == crc32c(index).to_bytes(SUM_BYTES, "little")


def _chunks_at(mapped: mmap.mmap, layout: ShardLayout, held: int, offset: int) -> Array:
    """As many chunks in a row, mapped: [chunk, row, *tail]; numbers of eight bytes may lie unaligned."""
    strides = (layout.stored_bytes, layout.native.itemsize)
    numbers = layout.chunk_rows * math.prod(layout.tail)
    flat: Array = np.ndarray((held, numbers), layout.native, mapped, offset, strides)
    return flat.reshape(held, layout.chunk_rows, *layout.tail)  # each chunk is in one row: nothing is copied


def _checks_at(mapped: mmap.mmap, layout: ShardLayout, held: int, offset: int) -> tuple[Array, Array] | None:
    """Bytes and checksums of as many chunks in a row, mapped; None where there are none."""
    if not held:
        return None
    strides = (layout.stored_bytes, 1)
    data: Array = np.ndarray((held, layout.chunk_bytes), np.uint8, mapped, offset, strides)
    sums: Array = np.ndarray((held,), "<u4", mapped, offset + layout.chunk_bytes, strides[:1])
    return data, sums


def _in_order(
    mapped: mmap.mmap, end: int, index: npt.NDArray[np.uint64], layout: ShardLayout, what: str
) -> Array:
    """The chunks of a shard as another writer may lay it out: in any order, or absent (fill value)."""
    if layout.n_chunks * layout.chunk_bytes > MOST_BYTES:
        raise CorruptEntry(
            f"{what}: expected at most {MOST_BYTES} bytes of rows, found a layout that promises "
            f"{layout.n_chunks * layout.chunk_bytes}; {REPAIR}"
        )
    held = np.full((layout.n_chunks, layout.chunk_rows, *layout.tail), layout.fill, layout.native)
    for n, (offset, length) in enumerate(index.tolist()):
        if offset == length == ABSENT:
            continue
        if length != layout.stored_bytes or offset + length > end:
            raise CorruptEntry(f"{what}: its shard index does not describe what lies before it; {REPAIR}")
        one = _chunks_at(mapped, layout, 1, offset)
        held[n] = ShardRows(one, layout.chunk_rows, what, checks=_checks_at(mapped, layout, 1, offset))[:]
    held.flags.writeable = False
    return held


def _index(rows: int, layout: ShardLayout) -> npt.NDArray[np.uint64]:
    """(offset, bytes) of each inner chunk, those past the last row absent."""
    index = np.full((layout.n_chunks, 2), np.uint64(ABSENT), "<u8")
    held = -(-rows // layout.chunk_rows)
    index[:held, 0] = np.arange(held, dtype=np.uint64) * np.uint64(layout.stored_bytes)
    index[:held, 1] = layout.stored_bytes
    return index


def _check_rows(name: str, rows: Array, layout: ShardLayout) -> None:
    if rows.dtype != layout.native or rows.shape[1:] != layout.tail or len(rows) > layout.rows:
        raise ShapeError(
            f"{name}: expected {layout.dtype} of shape [0..{layout.rows}, {', '.join(map(str, layout.tail))}]"
            f", found {rows.dtype} of shape {list(rows.shape)}"
        )
    if not rows.flags.c_contiguous:
        raise ShapeError(f"{name}: expected rows in C order; make them contiguous before they are written")


def crc32c(data: Array | bytes, before: int = 0) -> int:
    """Castagnoli's checksum of bytes, in one row, that follow those `before` is the checksum of."""
    import google_crc32c

    return int(google_crc32c.extend(before, data))
