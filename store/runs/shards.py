"""Shards: the byte format of the array files, and the only module that knows it.

A shard file holds one layer of one segment, in the format of the Zarr v3 codec `sharding_indexed`:

    inner chunk 0 | its crc32c | inner chunk 1 | its crc32c | … | index | crc32c of the index

An inner chunk has about 1 MiB of rows. The index has (offset, bytes) of every chunk as little-endian u64; an
absent chunk has 2**64 - 1 twice. As chunks are uncompressed and in order, a shard is written straight from
the array in memory and read through `mmap`, and other Zarr readers still see an ordinary array with
checksums. Compression is optional (`archived.py`): it saves a tenth of float32 and rules out memory maps.
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
"""Target size of an inner chunk. Smaller chunks cost other readers 3x in time; larger ones slow down the
lookup of a single prompt."""
MOST_BYTES = 8 << 30
"""Limit on the bytes of a shard that must be copied as a whole, because absent chunks let a small file claim
any size. Shards written by mizarr have at most a quarter of a GiB."""
ABSENT = 2**64 - 1
"""Index value (offset and length) marking an absent chunk."""
CODECS = ("zstd",)
"""Names of the compression codecs that users can choose."""
_ZEROS = bytes(CHUNK_BYTES)
SUM_BYTES = 4
"""Bytes of the checksum after each chunk."""
_ZSTD_LEVEL = 1  # levels 3 and 5 save 1 % more at a fifth of the speed (bfloat16)
_BLOCK_BYTES = 1 << 18  # Blosc's block within a chunk; its default block size loses a third of the savings

FileChecksum = tuple[int, str]
"""Size in bytes and checksum "sha256:…" of a file."""
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
    """Layout of a shard, the file with one layer of one segment of an array: dtype, shape, chunks, codec."""

    dtype: str
    """Name of the stored dtype, a key of `DTYPES`."""
    tail: tuple[int, ...]
    """Shape of one row, e.g. (hidden,)."""
    rows: int
    """Rows of a full shard, the last of which may be padding."""
    chunk_rows: int
    """Rows of an inner chunk; divides `rows`."""
    layered: bool
    """Whether the array has a layer axis before the axis of rows."""
    codec: str = ""
    """Compression codec, one of `CODECS`; "" for none."""

    @classmethod
    def of(
        cls, dtype: str, tail: Sequence[int], rows: int, layered: bool, *, exact: bool = False
    ) -> ShardLayout:
        """Choose the layout for segments of at most `rows` rows, with inner chunks of at most 1 MiB.

        Arguments:
            dtype: Name of the stored dtype.
            tail: Shape of one row.
            rows: Rows of the longest segment.
            layered: Whether the array has a layer axis.
            exact: Whether shards must have exactly `rows` rows, because several segments follow each other on
                Zarr's regular grid; the inner chunk is then a divisor of `rows`. Otherwise the chunk is a
                power of two and the shard is rounded up to whole chunks.

        Raises:
            ShapeError: The dtype is unknown, or `rows` has only tiny divisors.
        """
        if dtype not in DTYPES:
            raise ShapeError(f"expected a storage dtype among {', '.join(DTYPES)}, found {dtype!r}")
        # Largest power of two of rows within CHUNK_BYTES, at least one row.
        row_bytes = math.prod(tail) * DTYPES[dtype].itemsize
        most_chunk_rows = 1 << max(0, (CHUNK_BYTES // max(row_bytes, 1)).bit_length() - 1)
        # A single segment has no neighbour on Zarr's grid, so its shard may be longer than the rows.
        if not exact:
            chunk_rows = min(most_chunk_rows, 1 << max(0, rows - 1).bit_length())
            n_chunks = -(-rows // chunk_rows)
            return cls(dtype, tuple(tail), n_chunks * chunk_rows, chunk_rows, layered)
        largest = min(most_chunk_rows, rows)
        chunk_rows = next(size for size in range(largest, 0, -1) if rows % size == 0)
        # A prime segment length, for example, would give chunks of one row: a checksum and an index entry per
        # row.
        if chunk_rows < largest // 4:
            raise ShapeError(
                f"segment_tokens={rows} has no suitable divisor: segments divide into chunks of {chunk_rows} "
                "rows only, which are slow to read; choose a power of two, e.g. "
                f"{1 << rows.bit_length() - 1}, or a multiple of {most_chunk_rows}"
            )
        return cls(dtype, tuple(tail), rows, chunk_rows, layered)

    @classmethod
    def whole(cls, dtype: str, rows: int) -> ShardLayout:
        """Layout of a one-dimensional array as a single chunk, so that it can be memory-mapped as one array.

        Arguments:
            dtype: Name of the stored dtype.
            rows: Length of the array.
        """
        return cls(dtype, (), rows, rows, layered=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ShardLayout | None:
        """Parse the layout from an array's `zarr.json`.

        Returns:
            None unless the array has the form that mizarr writes: sharded, little-endian, uncompressed or
            with zstd, a crc32c after each chunk.
        """
        try:
            (sharding,) = metadata["codecs"]
            inner = sharding["configuration"]
            outer = metadata["chunk_grid"]["configuration"]["chunk_shape"]
            layered = metadata["dimension_names"][0] == "layer" and len(outer) > 1
            steps = [codec["name"] for codec in inner["codecs"]]
            # Any other value than ours in the remaining fields is found by the comparison of the whole
            # document below.
            layout = cls(
                metadata["data_type"],
                tuple(outer[1 + layered :]),
                outer[layered],
                inner["chunk_shape"][layered],
                layered,
                CODECS[0] if "blosc" in steps else "",
            )
            canonical = json.loads(
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
        # Type and range are checked because the file may come from anybody: bools pass as ints in arithmetic,
        # and a chunk of 0 rows divides by zero.
        sizes = (layout.rows, layout.chunk_rows, *layout.tail)
        if not all(isinstance(size, int) and size > 0 for size in sizes) or layout.rows % layout.chunk_rows:
            return None
        return layout if canonical == metadata else None

    @property
    def plain(self) -> ShardLayout:
        """This layout without compression."""
        return replace(self, codec="")

    @property
    def native(self) -> np.dtype[Any]:
        """Numpy dtype of the stored numbers."""
        return DTYPES[self.dtype]

    @property
    def fill(self) -> float:
        """Value of rows that are not stored: 0 for integers, else NaN."""
        return 0 if self.native.kind == "i" else math.nan

    @property
    def chunk_bytes(self) -> int:
        """Uncompressed bytes of the rows of one inner chunk."""
        return self.chunk_rows * math.prod(self.tail) * self.native.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of one uncompressed inner chunk in the file, with its checksum."""
        return self.chunk_bytes + SUM_BYTES

    @property
    def n_chunks(self) -> int:
        """Number of inner chunks in a full shard."""
        return self.rows // self.chunk_rows

    @property
    def index_bytes(self) -> int:
        """Size in bytes of the shard index, including its checksum."""
        return 16 * self.n_chunks + 4

    def file_bytes(self, rows: int) -> int:
        """File size of an uncompressed shard that holds `rows` rows."""
        return -(-rows // self.chunk_rows) * self.stored_bytes + self.index_bytes

    def path(self, variable: str, layer: int | None, segment: int) -> str:
        """Path of a shard relative to the run's folder, by Zarr's default chunk key encoding.

        Arguments:
            variable: Name of the array.
            layer: Layer number; None without a layer axis.
            segment: Number of the segment.
        """
        # An index per axis: a shard spans the whole length of all axes after that of the rows.
        layer_index = [] if layer is None else [layer]
        indices = [*layer_index, segment, *[0] * len(self.tail)]
        return "/".join([variable, "c", *map(str, indices)])

    def metadata(self, shape: Sequence[int], dims: Sequence[str], attributes: Mapping[str, Any]) -> bytes:
        """Content of the `zarr.json` of an array with this layout; missing shards read as `fill`.

        Arguments:
            shape: Shape of the whole array, layer axis included.
            dims: Names of the array's dimensions.
            attributes: Attributes of the array, as plain JSON values.
        """
        front = [1] if self.layered else []
        sharding = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [*front, self.chunk_rows, *self.tail],
                "codecs": [LITTLE_ENDIAN, *_compression_codecs(self), CRC32C],
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


def file_checksum(*parts: Buffer) -> FileChecksum:
    """Size in bytes and checksum "sha256:…" of a file that consists of these buffers."""
    return sum(memoryview(part).nbytes for part in parts), content_digest(*parts)


def write_shards(
    folder: Folder,
    shards: Mapping[str, tuple[Array, ShardLayout]],
    *,
    threads: int = 2,
    handed_over: Callable[[], None] = lambda: None,
) -> dict[str, FileChecksum]:
    """Write shards under their final names, each complete or not at all.

    The first writer of a name wins. If the file exists, its own checksum is returned, so that two writers
    whose values differ in the last bits record the same file.

    Arguments:
        folder: The store's files.
        shards: Path -> (rows [rows, ...] in C order, in the layout's dtype; layout).
        threads: Number of threads that compute checksums, and again as many that write.
        handed_over: Called when all work of the processor is done and only the disk is waited for.

    Returns:
        Path -> size and checksum of the file.

    Raises:
        ShapeError: Rows do not fit their layout.
        StoreFull: The disk or quota is full.
        ReadOnlyStore: The store cannot be written.
    """
    files = {name: shard_parts(name, rows, layout) for name, (rows, layout) in shards.items()}
    # sha256 (1.7 GB/s) takes about as long as a synced write. Both release the GIL, so they overlap here.
    with ThreadPoolExecutor(max(1, min(threads, len(files)))) as pool:
        digests = {name: pool.submit(content_digest, *parts) for name, parts in files.items()}

        def hand_over_after_checksums() -> None:
            wait(digests.values())
            handed_over()

        created = folder.put_all(files, threads=threads, handed_over=hand_over_after_checksums)
        checksums = {}
        for name, parts in files.items():
            # Reading our own file back would cost as much as writing it.
            if name in created:
                checksums[name] = sum(memoryview(part).nbytes for part in parts), digests[name].result()
            else:
                checksums[name] = folder.measure(name)
    return checksums


def shard_parts(name: str, rows: Array, layout: ShardLayout) -> list[Buffer]:
    """Make the content of a shard file, as buffers to write one after another: rows, checksums, index.

    Uncompressed rows are not copied: the buffers are views of them.

    Arguments:
        name: Path of the shard, for messages.
        rows: [rows, ...] in C order, in the dtype of the layout.
        layout: Layout of the shard.

    Raises:
        ShapeError: The rows do not fit the layout.
    """
    _check_rows(name, rows, layout)
    # Views, not copies: a shard of 64 MiB is written from where the model's output lies.
    data = rows.reshape(-1).view(np.uint8)
    starts = range(0, len(data), layout.chunk_bytes)
    chunks = [data[start : start + layout.chunk_bytes] for start in starts]
    # Zarr's chunks have a fixed size, so the last one is padded with zeros.
    if layout.codec:
        return coded_parts((chunk.tobytes().ljust(layout.chunk_bytes, b"\0") for chunk in chunks), layout)
    parts: list[Buffer] = []
    for chunk in chunks:
        parts.append(chunk.data)
        checksum = crc32c(chunk)
        padding = layout.chunk_bytes - len(chunk)
        for start in range(0, padding, CHUNK_BYTES):
            zeros = _ZEROS[: min(CHUNK_BYTES, padding - start)]
            parts.append(zeros)
            checksum = crc32c(zeros, checksum)
        parts.append(checksum.to_bytes(SUM_BYTES, "little"))
    return [*parts, with_crc32c(_index(len(rows), layout).tobytes())]


def raw_parts(chunks: Sequence[bytes], layout: ShardLayout) -> list[Buffer]:
    """Make the content of an uncompressed shard file, as buffers to write one after another.

    Arguments:
        chunks: Rows of the first inner chunks, each of full size; the rest of the shard is absent.
        layout: Layout of the shard.
    """
    parts: list[Buffer] = []
    for chunk in chunks:
        # Two buffers: a joined copy of every chunk would double the memory of a shard.
        parts += [chunk, crc32c(chunk).to_bytes(SUM_BYTES, "little")]
    return [*parts, with_crc32c(_index(len(chunks) * layout.chunk_rows, layout).tobytes())]


def coded_parts(chunks: Iterable[bytes], layout: ShardLayout) -> list[Buffer]:
    """Make the content of a compressed shard file, as buffers to write one after another.

    Arguments:
        chunks: Uncompressed rows of the first inner chunks, each of full size.
        layout: Layout of the shard.
    """
    from numcodecs import blosc

    parts: list[Buffer] = []
    index = np.full((layout.n_chunks, 2), np.uint64(ABSENT), "<u8")
    offset = 0
    for number, chunk in enumerate(chunks):
        # Blosc's byte shuffle needs the item size; it does not know bfloat16, which shuffles like any 2-byte
        # type.
        numbers = np.frombuffer(chunk, layout.native if layout.native.kind in "fi" else np.uint16)
        # Byte shuffle groups exponent bytes, which are alike in neighbours; that is where the saving comes
        # from.
        encoded = with_crc32c(blosc.compress(numbers, b"zstd", _ZSTD_LEVEL, blosc.SHUFFLE, _BLOCK_BYTES))
        parts.append(encoded)
        index[number] = offset, len(encoded)
        offset += len(encoded)
    return [*parts, with_crc32c(index.tobytes())]


def _compression_codecs(layout: ShardLayout) -> list[dict[str, Any]]:
    """Compression codec as listed in `zarr.json` under `codecs`; empty without compression."""
    if not layout.codec:
        return []
    settings = {
        "cname": "zstd",
        "clevel": _ZSTD_LEVEL,
        "shuffle": "shuffle",
        "typesize": layout.native.itemsize,
    }
    return [{"name": "blosc", "configuration": {**settings, "blocksize": _BLOCK_BYTES}}]


class ShardRows:
    """Rows of a memory-mapped shard file as a read-only array-like, [rows, ...]. Safe for all threads.

    An integer or a slice within one chunk gives a view of the mapped file; longer slices, integer arrays and
    masks copy. No row is returned before the checksum of its chunk was verified, on the first access (or on
    each access, see `checks_once`). A mismatch raises CorruptEntry.
    """

    checks_once: bool
    """Whether a verified chunk stays verified, because the file's stamp would reveal a later change."""

    def __init__(
        self,
        chunks: Array,
        rows: int,
        label: str = "",
        *,
        checks: tuple[Array, Array] | None = None,
        mapped: Mapped | None = None,
        stored_bytes: int = 0,
    ) -> None:
        """
        Arguments:
            chunks: [chunk, row, ...], a strided view of the mapped file.
            rows: Number of valid rows; the rest is padding.
            label: Names these rows in error messages.
            checks: Bytes [chunk, byte] and stored crc32c [chunk]; None if there is nothing to verify.
            mapped: The file that `chunks` is a view of.
            stored_bytes: Bytes from the start of one chunk to the next in that file.
        """
        self.checks_once = True
        self.shape: tuple[int, ...] = (rows, *chunks.shape[2:])
        self.dtype = chunks.dtype
        self._chunks, self._label, self._checks = chunks, label, checks
        self._mapped, self._stored_bytes = mapped, stored_bytes
        self._chunk_rows = chunks.shape[1]
        # Set to False per chunk after verification. Threads may race here: both verify, which is harmless.
        self._pending = np.full(len(chunks), checks is not None)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all rows, decoded into one array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        rows = self[:]
        return rows.astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def __getitem__(self, key: int | np.integer[Any] | slice | npt.NDArray[Any]) -> Array:
        # The common case of one prompt: within one chunk it is a view, without a copy.
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            number, offset = divmod(start, self._chunk_rows)
            if start < stop <= (number + 1) * self._chunk_rows:
                return self._chunk(number)[offset : offset + stop - start]
            out = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
            for position, block in self.blocks(start, stop):
                out[position : position + len(block)] = block
            return out
        if isinstance(key, slice):
            return self._gather(np.arange(len(self))[key])
        if isinstance(key, int | np.integer):
            number, offset = divmod(range(len(self))[key], self._chunk_rows)
            row: Array = self._chunk(number)[offset]
            return row
        return self._gather(np.flatnonzero(key) if key.dtype == bool else key)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Yield a range of rows, one chunk at a time, as (offset from `start`, view of the rows).

        Copy each block before the next one: its checksum was just computed, so it is still in the CPU cache.

        Arguments:
            start: First row.
            stop: End of the range (exclusive).
        """
        if start < stop:
            self._fetch(range(start // self._chunk_rows, (stop - 1) // self._chunk_rows + 1))
        row = start
        while row < stop:
            number, offset = divmod(row, self._chunk_rows)
            end = min(stop, (number + 1) * self._chunk_rows)
            yield row - start, self._chunk(number)[offset : offset + end - row]
            row = end

    @property
    def is_fetched(self) -> bool:
        """Whether rows are downloaded from a bucket on first access instead of mapped from a local file."""
        return self._mapped is not None and not self._mapped.is_whole

    def release_pages(self) -> None:
        """Free the memory that the mapped file takes in this process.

        The pages stay in the page cache of the system and are mapped again on the next access.
        """
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.data.madvise(mmap.MADV_DONTNEED)

    def _chunk_and_offset(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Number of the chunk with each row, and the row's offset in it. IndexError for a row out of
        range."""
        # Checked here because an index into the chunk view could reach padding rows after the last valid one.
        if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(
                f"{self._label or 'shard'}: expected row numbers below {len(self)}, found {rows.min()} to "
                f"{rows.max()}"
            )
        return np.divmod(np.where(rows < 0, rows + len(self), rows), self._chunk_rows)

    def _gather(self, rows: npt.NDArray[Any]) -> Array:
        """Copy single rows, given by number, [len(rows), ...]."""
        chunk_of_row, offset = self._chunk_and_offset(rows)
        if self._pending.any():
            chunk_numbers = np.unique(chunk_of_row)
            self._fetch(chunk_numbers)
            for number in chunk_numbers:
                self._chunk(number)  # verifies its checksum
        gathered: Array = self._chunks[chunk_of_row, offset]
        return gathered

    def _fetch(self, numbers: Iterable[int]) -> None:
        """Download chunks that are not present yet; adjacent chunks in one request."""
        if self._mapped is None or self._mapped.is_whole or self._checks is None:
            return
        data, sums = self._checks
        # Absent bytes are zeros, so presence is decided by the checksum.
        absent = [n for n in numbers if self._pending[n] and crc32c(data[n]) != int(sums[n])]
        ranges: list[tuple[int, int]] = []
        for number in absent:
            start = number * self._stored_bytes
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            # One request for adjacent chunks: in an object store the latency of a request costs more than its
            # bytes.
            ranges.append((start, (number + 1) * self._stored_bytes))
        if ranges:
            self._mapped.fetch(ranges)

    def _chunk(self, number: int) -> Array:
        """Rows of one chunk, [row, ...], after verifying its checksum if that is still pending."""
        if self._pending[number]:
            self._fetch((number,))
            self._check(number)
            self._pending[number] = not self.checks_once
        chunk: Array = self._chunks[number]
        return chunk

    def _check(self, number: int) -> None:
        """Raise CorruptEntry unless a chunk matches its checksum."""
        if self._checks is None:
            return
        data, sums = self._checks
        expected, actual = int(sums[number]), crc32c(data[number])
        if expected != actual:
            rows = range(number * self._chunk_rows, min((number + 1) * self._chunk_rows, len(self)))
            raise CorruptEntry(
                f"{self._label}: rows {rows.start} to {rows.stop - 1} are damaged: expected crc32c "
                f"{expected:08x}, found {actual:08x}; {REPAIR}"
            )


def read_shard(mapped: Mapped, layout: ShardLayout, rows: int, label: str = "") -> ShardRows:
    """Open an uncompressed shard file as an array-like [rows, ...].

    Rows are views of the mapped file if its chunks lie in order, as mizarr writes them. A shard that another
    program laid out differently is copied and verified at once.

    Arguments:
        mapped: The shard file.
        layout: Layout of the file, as the array's `zarr.json` describes it.
        rows: Number of valid rows; the rest of the shard is padding.
        label: Names these rows in error messages, in addition to the file.

    Raises:
        CorruptEntry: The file is cut short or its index is damaged.
    """
    label = f"{mapped.where} ({label})" if label else mapped.where
    expect_room(layout, rows, label)
    fetch_index(mapped, layout)
    data, size = mapped.data, mapped.size
    index, end_of_chunks = read_index(data, size, layout, label)
    # Other writers may order, omit or append chunks; only mizarr's own order allows one strided view over the
    # file.
    is_in_order = size == layout.file_bytes(rows) and np.array_equal(index, _index(rows, layout))
    if not mapped.is_whole and not is_in_order:
        # In another order, nothing distinguishes chunks that were not downloaded from zeros.
        mapped.fetch([(0, end_of_chunks)])
    if not is_in_order:
        ordered = _ordered_copy(data, end_of_chunks, index, layout, label)
        return ShardRows(ordered.reshape(1, -1, *layout.tail), rows)
    n_chunks = -(-rows // layout.chunk_rows)
    chunks, checks = _chunk_views(data, layout, n_chunks, 0), _check_views(data, layout, n_chunks, 0)
    return ShardRows(chunks, rows, label, checks=checks, mapped=mapped, stored_bytes=layout.stored_bytes)


def expect_room(layout: ShardLayout, rows: int, label: str) -> None:
    """Check that a shard is long enough for the rows of its segment.

    Arguments:
        layout: Layout of the shard, as the array's `zarr.json` describes it.
        rows: Number of rows that the segment has, computed from the run's tokens.
        label: Names the shard in error messages.

    Raises:
        CorruptEntry: The segment has more rows, so the `zarr.json` belongs to another array.
    """
    if rows > layout.rows:
        raise CorruptEntry(
            f"{label}: zarr.json describes shards of {layout.rows} rows, too few for the {rows} rows of this "
            f"segment; {REPAIR}"
        )


def fetch_index(mapped: Mapped, layout: ShardLayout) -> None:
    """Download the index at the end of a shard file in a bucket, unless it is present already.

    Arguments:
        mapped: The shard file.
        layout: Layout of the shard.
    """
    start = mapped.size - layout.index_bytes
    # Bytes that are not present read as zeros, which fail the checksum.
    if not mapped.is_whole and start >= 0 and not _has_valid_index(mapped.data, start, layout):
        mapped.fetch([(start, mapped.size)])


def read_index(
    data: mmap.mmap | bytes, size: int, layout: ShardLayout, label: str
) -> tuple[npt.NDArray[np.uint64], int]:
    """Parse and verify the index of a shard.

    Arguments:
        data: Content of the file.
        size: Size of the file in bytes.
        layout: Layout of the shard.
        label: Names the shard in error messages.

    Returns:
        (offset, bytes) of each chunk, [chunk, 2]; and the offset of the index, where the chunks end.

    Raises:
        CorruptEntry: The file is cut short, or the index does not match its checksum.
    """
    if size < layout.index_bytes:
        raise CorruptEntry(
            f"{label}: the file is cut short: expected at least {layout.index_bytes} bytes, found {size}; "
            f"{REPAIR}"
        )
    index_start = size - layout.index_bytes
    if not _has_valid_index(data, index_start, layout):
        raise CorruptEntry(f"{label}: the shard index does not match its crc32c; {REPAIR}")
    return np.frombuffer(data, "<u8", 2 * layout.n_chunks, index_start).reshape(-1, 2), index_start


def _has_valid_index(data: mmap.mmap | bytes, start: int, layout: ShardLayout) -> bool:
    """Whether the index of a shard file, which begins at byte `start`, matches its crc32c."""
    stored = bytes(data[start : start + layout.index_bytes])
    return stored == with_crc32c(stored[:-SUM_BYTES])


def _chunk_views(mapped: mmap.mmap, layout: ShardLayout, count: int, offset: int) -> Array:
    """View of `count` consecutive chunks of a mapped file from byte `offset` on, [chunk, row, ...].

    8-byte numbers may be unaligned, as each chunk is followed by a checksum of 4 bytes; numpy allows that.
    """
    strides = (layout.stored_bytes, layout.native.itemsize)
    numbers = layout.chunk_rows * math.prod(layout.tail)
    flat: Array = np.ndarray((count, numbers), layout.native, mapped, offset, strides)
    # Reshaping the inner axis keeps the view, as each chunk is contiguous.
    return flat.reshape(count, layout.chunk_rows, *layout.tail)


def _check_views(
    mapped: mmap.mmap, layout: ShardLayout, count: int, offset: int
) -> tuple[Array, Array] | None:
    """Views of `count` consecutive chunks from byte `offset` on: their bytes [chunk, byte] and checksums
    [chunk]; None if `count` is 0."""
    if not count:
        return None
    strides = (layout.stored_bytes, 1)
    data: Array = np.ndarray((count, layout.chunk_bytes), np.uint8, mapped, offset, strides)
    sums: Array = np.ndarray((count,), "<u4", mapped, offset + layout.chunk_bytes, strides[:1])
    return data, sums


def _ordered_copy(
    mapped: mmap.mmap, end_of_chunks: int, index: npt.NDArray[np.uint64], layout: ShardLayout, label: str
) -> Array:
    """Copy of a shard's chunks in the order of their numbers, [chunk, row, ...], read-only.

    For shards that another program wrote: their chunks may lie in the file in any order. Chunks that the
    index marks as absent are filled with the fill value.

    Arguments:
        mapped: The shard file.
        end_of_chunks: Offset in bytes at which no chunk may continue.
        index: (offset, bytes) of each chunk.
        layout: Layout of the file.
        label: Names the shard in error messages.

    Raises:
        CorruptEntry: The shard would be too large, the index names bytes outside of the file, or a checksum
            does not match.
    """
    # Before np.full allocates what a manipulated zarr.json claims.
    if layout.n_chunks * layout.chunk_bytes > MOST_BYTES:
        raise CorruptEntry(
            f"{label}: zarr.json claims a shard of {layout.n_chunks * layout.chunk_bytes} bytes, more than "
            f"the allowed {MOST_BYTES}; {REPAIR}"
        )
    chunks = np.full((layout.n_chunks, layout.chunk_rows, *layout.tail), layout.fill, layout.native)
    for n, (offset, length) in enumerate(index.tolist()):
        if offset == length == ABSENT:
            continue
        if length != layout.stored_bytes or offset + length > end_of_chunks:
            raise CorruptEntry(f"{label}: the shard index names bytes outside of the file; {REPAIR}")
        chunk, checks = _chunk_views(mapped, layout, 1, offset), _check_views(mapped, layout, 1, offset)
        chunks[n] = ShardRows(chunk, layout.chunk_rows, label, checks=checks)[:]
    chunks.flags.writeable = False
    return chunks


def _index(rows: int, layout: ShardLayout) -> npt.NDArray[np.uint64]:
    """Index of a shard as mizarr writes it, [chunk, 2]: offset and bytes of each chunk, or the number ABSENT
    twice for chunks after the last of `rows` rows."""
    index = np.full((layout.n_chunks, 2), np.uint64(ABSENT), "<u8")
    count = -(-rows // layout.chunk_rows)
    index[:count, 0] = np.arange(count, dtype=np.uint64) * np.uint64(layout.stored_bytes)
    index[:count, 1] = layout.stored_bytes
    return index


def _check_rows(name: str, rows: Array, layout: ShardLayout) -> None:
    """Raise ShapeError unless rows have the dtype and shape of the layout, in C order."""
    if rows.dtype != layout.native or rows.shape[1:] != layout.tail or len(rows) > layout.rows:
        raise ShapeError(
            f"{name}: expected {layout.dtype} of shape [0..{layout.rows}, {', '.join(map(str, layout.tail))}]"
            f", found {rows.dtype} of shape {list(rows.shape)}"
        )
    # A silent copy here would double the memory of a segment, which was reserved exactly.
    if not rows.flags.c_contiguous:
        raise ShapeError(f"{name}: expected rows in C order, found another order; use np.ascontiguousarray")


def crc32c(data: Array | bytes, before: int = 0) -> int:
    """CRC-32C checksum (Castagnoli) of bytes.

    Arguments:
        data: The bytes, or an array of them.
        before: Checksum of the bytes that precede them, to be continued; 0 for none.
    """
    import google_crc32c

    return int(google_crc32c.extend(before, data))


def with_crc32c(data: bytes) -> bytes:
    """The bytes followed by their CRC-32C (4 bytes, little-endian), as Zarr's codec `crc32c` stores them."""
    return data + crc32c(data).to_bytes(SUM_BYTES, "little")
