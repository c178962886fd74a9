"""Shards: one raw file each, and an ordinary Zarr array to everybody else."""

import errno
import hashlib
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given, strategies as st

import mizarr.store.runs.bfloat16  # noqa: F401 - teaches zarr the dtype
from mizarr.store.digest import content_digest
from mizarr.store.errors import CorruptEntry, ReadOnlyStore, ShapeError, StoreFull
from mizarr.store.files import LocalFolder
from mizarr.store.runs import shards
from mizarr.store.runs.shards import DTYPES, ShardLayout, read_shard, write_shards

DTYPE_NAMES = ["float32", "float16", "bfloat16", "int32"]
LAYERED = ("layer", "token", "hidden")


def values(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape) * 100
    return numbers.astype(DTYPES[dtype])


@pytest.fixture
def folder(tmp_path):
    return LocalFolder(tmp_path, "process")


@pytest.fixture
def small_chunks(monkeypatch):
    """Inner chunks of 64 bytes, so that small arrays have many."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    monkeypatch.setattr(shards, "_ZEROS", bytes(64))


def write_shard(folder, name, rows, layout):
    """One shard; returns its size and digest."""
    return write_shards(folder, {name: (rows, layout)})[name]


def write_array(folder, name, layout, layers):
    """Write layer -> segment -> rows as one layered array; returns its path."""
    length = layout.rows * 3
    metadata = layout.metadata((len(layers), length, *layout.tail), LAYERED[: 2 + len(layout.tail)], {})
    folder.put_new(f"{name}/zarr.json", metadata)
    for layer, segments in enumerate(layers):
        for n, rows in segments.items():
            write_shard(folder, layout.path(name, layer, n), rows, layout)
    return folder.path(name)


def same(one, other):
    np.testing.assert_array_equal(np.asarray(one).view("u1"), np.asarray(other).view("u1"))


# -- bytes


def test_a_shard_is_chunks_each_with_its_checksum_then_the_index_then_its_checksum(folder, small_chunks):
    layout = ShardLayout.of("float32", (4,), 12, layered=False)  # 4 rows a chunk, 3 chunks
    rows = values((6, 4), "float32")
    size, digest = write_shard(folder, "a", rows, layout)
    first, second = rows[:4].tobytes(), rows[4:].tobytes() + bytes(32)
    index = struct.pack("<6Q", 0, 68, 68, 68, 2**64 - 1, 2**64 - 1)
    expected = b"".join(part + struct.pack("<I", crc32c(part)) for part in (first, second, index))
    raw = folder.path("a").read_bytes()
    assert raw == expected
    assert (size, digest) == (len(raw), content_digest(raw))


def crc32c(data):
    """Castagnoli, bit by bit, as RFC 3720 has it."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@given(
    dtype=st.sampled_from(DTYPE_NAMES),
    tail=st.lists(st.integers(1, 5), max_size=2).map(tuple),
    most=st.integers(1, 70),
    data=st.data(),
)
def test_any_number_of_rows_of_any_shape_comes_back_bit_for_bit(tmp_path_factory, dtype, tail, most, data):
    folder = LocalFolder(tmp_path_factory.mktemp("shards"), "process")
    rows = values((data.draw(st.integers(1, most)), *tail), dtype)
    layout = ShardLayout.of(dtype, tail, most, layered=False)
    write_shard(folder, "a", rows, layout)
    again = read_shard(folder.mapped("a"), layout, len(rows))
    assert again.dtype == rows.dtype
    same(again, rows)


def test_reading_maps_the_file_and_cannot_change_it(folder):
    layout = ShardLayout.of("float32", (2,), 4, layered=False)
    write_shard(folder, "a", values((4, 2), "float32"), layout)
    again = read_shard(folder.mapped("a"), layout, 4)[:]
    assert not again.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        again[0] = 1


# -- layout


@pytest.mark.parametrize(
    ("hidden", "dtype", "rows"), [(512, "float32", 512), (1024, "bfloat16", 512), (768, "float32", 256)]
)
def test_inner_chunks_are_the_power_of_two_below_a_mebibyte(hidden, dtype, rows):
    layout = ShardLayout.of(dtype, (hidden,), 2**15, layered=True)
    assert layout.chunk_rows == rows
    assert layout.chunk_bytes <= shards.CHUNK_BYTES
    assert layout.rows == 2**15


def test_a_few_rows_are_one_chunk():
    assert ShardLayout.of("float32", (64,), 100, layered=True).chunk_rows == 128


@given(st.integers(1, 5000), st.integers(1, 4000))
def test_exact_shards_are_whole_chunks_of_a_sensible_size_or_refused(rows, hidden):
    most = min(rows, ShardLayout.of("float32", (hidden,), 1 << 20, layered=True).chunk_rows)
    best = max(size for size in range(1, most + 1) if rows % size == 0)
    if best < most // 4:
        with pytest.raises(ShapeError, match=f"power of two, e.g. {1 << rows.bit_length() - 1},"):
            ShardLayout.of("float32", (hidden,), rows, layered=True, exact=True)
        return
    layout = ShardLayout.of("float32", (hidden,), rows, layered=True, exact=True)
    assert (layout.rows, layout.chunk_rows) == (rows, best)


def test_unknown_dtypes_are_refused_by_name():
    with pytest.raises(ShapeError, match="float8"):
        ShardLayout.of("float8", (2,), 4, layered=False)


@pytest.mark.parametrize("layered", [True, False])
@pytest.mark.parametrize("tail", [(), (3,), (2, 5)])
def test_the_layout_is_read_back_from_the_metadata(layered, tail):
    layout = ShardLayout.of("bfloat16", tail, 64, layered)
    dims = [*(["layer"] if layered else []), "token", *"abc"[: len(tail)]]
    shape = [*([2] if layered else []), 100, *tail]
    metadata = json.loads(layout.metadata(shape, dims, {"units": "1"}))
    assert ShardLayout.from_metadata(metadata) == layout


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["codecs"][0]["configuration"]["codecs"].append(
            {"name": "zstd", "configuration": {"level": 1}}
        ),
        lambda m: m["codecs"][0]["configuration"]["codecs"].pop(),  # without its crc32c
        lambda m: m["codecs"][0]["configuration"]["codecs"][0]["configuration"].update(endian="big"),
        lambda m: m["codecs"][0]["configuration"].update(index_location="start"),
        lambda m: m["codecs"].__setitem__(0, {"name": "bytes", "configuration": {"endian": "little"}}),
        lambda m: m["chunk_key_encoding"].update(name="v2"),
        lambda m: m.update(data_type="float8_e4m3"),
    ],
)
def test_arrays_that_are_not_raw_little_endian_chunks_have_no_layout(change):
    layout = ShardLayout.of("float32", (3,), 64, layered=True)
    metadata = json.loads(layout.metadata((2, 100, 3), LAYERED, {}))
    change(metadata)
    assert ShardLayout.from_metadata(metadata) is None


# -- other readers and writers


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_full_partial_and_missing_shards_read_back_equal_through_plain_zarr(folder, small_chunks, dtype):
    layout = ShardLayout.of(dtype, (4,), 16, layered=True)
    assert layout.n_chunks > 1
    layers = [
        {0: values((16, 4), dtype, 1), 1: values((16, 4), dtype, 2), 2: values((5, 4), dtype, 3)},
        {1: values((16, 4), dtype, 4)},
    ]
    array = zarr.open_array(write_array(folder, "a", layout, layers), mode="r")
    assert array.shards == (1, 16, 4)
    for layer, segments in enumerate(layers):
        for n in range(3):
            rows = segments.get(n, np.empty((0, 4), layout.native))
            got = array[layer, n * 16 : (n + 1) * 16]
            same(got[: len(rows)], rows)
            # Rows past the last: zeros up to the end of its chunk, then the fill value.
            rest = got[-(-len(rows) // layout.chunk_rows) * layout.chunk_rows :].astype("f4")
            np.testing.assert_array_equal(rest, np.full_like(rest, layout.fill))


def test_the_metadata_is_what_zarr_itself_would_write(tmp_path):
    layout = ShardLayout.of("float32", (512,), 2**14, layered=True)
    ours = layout.metadata((4, 2**15, 512), LAYERED, {"units": "1"})
    zarr.create_array(
        tmp_path / "a", shape=(4, 2**15, 512), dtype="float32", chunks=(1, 512, 512), shards=(1, 2**14, 512),
        compressors=zarr.codecs.Crc32cCodec(), fill_value=np.nan, dimension_names=LAYERED,
        attributes={"units": "1"},
    )  # fmt: skip
    assert ours == (tmp_path / "a" / "zarr.json").read_bytes()


@pytest.mark.parametrize("count", [16, 11, 3])
def test_shards_that_zarr_wrote_are_read_too(tmp_path, small_chunks, count):
    layout = ShardLayout.of("float32", (4,), 16, layered=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "zarr.json").write_bytes(layout.metadata((1, 16, 4), LAYERED, {}))
    rows = values((count, 4), "float32")
    zarr.open_array(tmp_path / "a", mode="r+")[0, :count] = rows
    same(read_shard(LocalFolder(tmp_path).mapped(layout.path("a", 0, 0)), layout, count), rows)


def test_chunks_in_another_order_are_read_by_their_index(tmp_path, small_chunks):
    layout = ShardLayout.of("int32", (4,), 12, layered=False)
    rows = values((12, 4), "int32")
    first, middle, last = (
        part + struct.pack("<I", crc32c(part)) for part in (rows[at : at + 4].tobytes() for at in (0, 4, 8))
    )
    index = struct.pack("<6Q", 136, 68, 2**64 - 1, 2**64 - 1, 0, 68)
    (tmp_path / "a").write_bytes(last + middle + first + index + struct.pack("<I", crc32c(index)))
    again = read_shard(LocalFolder(tmp_path).mapped("a"), layout, 12)
    same(again[:4], rows[:4])
    assert (again[4:8] == 0).all()  # absent
    same(again[8:], rows[8:])


# -- refusals and failures


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((3, 4), "f8"),
        np.zeros((3, 4), ">f4"),
        np.zeros((3, 5), "f4"),
        np.zeros((17, 4), "f4"),
        np.zeros((4, 3), "f4").T,
        np.zeros(4, "f4"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(folder, wrong):
    with pytest.raises(ShapeError, match="expected"):
        write_shard(folder, "a", wrong, ShardLayout.of("float32", (4,), 16, layered=False))
    assert list(folder.root.iterdir()) == []


def test_whoever_comes_second_gets_the_digest_of_what_stands(folder):
    layout = ShardLayout.of("float32", (4,), 16, layered=False)
    first = write_shard(folder, "a", values((3, 4), "float32", 1), layout)
    assert write_shard(folder, "a", values((3, 4), "float32", 2), layout) == first
    same(read_shard(folder.mapped("a"), layout, 3), values((3, 4), "float32", 1))


@pytest.mark.parametrize("keep", [0, 3, 20, 100, -1])
def test_a_file_cut_short_is_corrupt(folder, small_chunks, keep):
    layout = ShardLayout.of("float32", (4,), 16, layered=False)
    write_shard(folder, "a", values((16, 4), "float32"), layout)
    raw = folder.path("a").read_bytes()
    folder.path("a").write_bytes(raw[:keep])
    with pytest.raises(CorruptEntry, match="verify"):
        read_shard(folder.mapped("a"), layout, 16)


def test_a_flipped_bit_in_the_index_is_corrupt(folder, small_chunks):
    layout = ShardLayout.of("float32", (4,), 16, layered=False)
    write_shard(folder, "a", values((16, 4), "float32"), layout)
    raw = bytearray(folder.path("a").read_bytes())
    raw[-12] ^= 1
    folder.path("a").write_bytes(raw)
    with pytest.raises(CorruptEntry, match="index"):
        read_shard(folder.mapped("a"), layout, 16)


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EROFS, ReadOnlyStore)]
)
def test_a_failing_disk_leaves_no_file_behind(folder, monkeypatch, code, error):
    written = []

    def full(handle, parts):
        if written:
            raise OSError(code, os.strerror(code))
        written.append(os.write(handle, parts[0][:40]))
        return 40

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(error):
        write_shard(
            folder, "d/a", values((16, 4), "float32"), ShardLayout.of("float32", (4,), 16, layered=False)
        )
    assert written == [40]
    assert list(folder.path("d").iterdir()) == []


def test_a_kernel_that_takes_a_little_at_a_time_gets_it_all(folder, small_chunks, monkeypatch):
    takes = iter(range(1, 10_000))
    monkeypatch.setattr(os, "writev", lambda handle, parts: os.write(handle, parts[0][: next(takes)]))
    layout = ShardLayout.of("float32", (4,), 32, layered=False)
    rows = values((19, 4), "float32")
    _, digest = write_shard(folder, "a", rows, layout)
    same(read_shard(folder.mapped("a"), layout, 19), rows)
    assert digest == f"sha256:{hashlib.sha256(folder.path('a').read_bytes()).hexdigest()}"


def test_nan_payloads_and_signed_zeros_survive(folder):
    bits = np.array([0x7FC1, 0xFFFF, 0x8000, 0x7F80, 0x0001], "u2").view(ml_dtypes.bfloat16).reshape(5, 1)
    layout = ShardLayout.of("bfloat16", (1,), 5, layered=False)
    write_shard(folder, "a", bits, layout)
    same(read_shard(folder.mapped("a"), layout, 5), bits)


# -- checks


def damaged(folder, layout, at, rows=16):
    """A shard of 16 rows in chunks of 4, whose byte `at` was flipped."""
    write_shard(folder, "a", values((rows, 4), layout.dtype), layout)
    raw = bytearray(folder.path("a").read_bytes())
    raw[at] ^= 0x10
    folder.path("a").write_bytes(raw)
    return read_shard(folder.mapped("a"), layout, rows, "segment 3 of resid_post.1 in run abc")


READS = {
    "a row": (lambda rows, at: rows[at]),
    "a range": (lambda rows, at: rows[at : at + 1]),
    "a range over chunks": (lambda rows, at: rows[max(0, at - 5) : at + 1]),
    "a stepped range": (lambda rows, at: rows[at::2]),
    "numbers": (lambda rows, at: rows[np.array([at])]),
    "a mask": (lambda rows, at: rows[np.arange(16) == at]),
    "all": (lambda rows, at: np.asarray(rows)),
    "blocks": (lambda rows, at: list(rows.blocks(at, at + 1))),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("chunk", range(4))
def test_no_read_returns_a_row_of_a_damaged_chunk_and_others_are_read(folder, small_chunks, read, chunk):
    layout = ShardLayout.of("float32", (4,), 16, layered=False)
    for inside in (0, 63, 64, 67):  # of the rows, or of the checksum itself
        rows = damaged(folder, layout, 68 * chunk + inside)
        with pytest.raises(CorruptEntry, match=rf"resid_post\.1 .*rows {4 * chunk} to .*verify --quarantine"):
            read(rows, 4 * chunk + 1)
        same(rows[4 * chunk - 4], values((16, 4), "float32")[4 * chunk - 4])
        folder.delete("a")


def test_damage_in_the_padding_of_the_last_chunk_is_damage(folder, small_chunks):
    rows = damaged(folder, ShardLayout.of("float32", (4,), 16, layered=False), 68 + 40, rows=6)
    with pytest.raises(CorruptEntry, match="rows 4 to 5"):
        rows[5]


def test_a_shard_without_rows_is_an_index_of_absent_chunks(folder):
    layout = ShardLayout.of("float32", (4,), 16, layered=False)
    size, _ = write_shard(folder, "a", np.zeros((0, 4), "f4"), layout)
    rows = read_shard(folder.mapped("a"), layout, 0)
    assert size == layout.index_bytes == layout.file_bytes(0)
    assert rows.shape == (0, 4)
    assert rows[:].shape == (0, 4)


@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, "float64", "int64"])
def test_every_index_gives_what_numpy_gives_over_many_chunks(folder, small_chunks, dtype):
    layout = ShardLayout.of(dtype, (3,), 40, layered=False)
    expected = values((37, 3), dtype)
    write_shard(folder, "a", expected, layout)
    rows = read_shard(folder.mapped("a"), layout, 37)
    picked = np.array([36, 0, 5, 5, -1, 17])
    for key in (0, 36, -1, slice(None), slice(3, 9), slice(8, 8), slice(30, 99), slice(35, 2, -3), picked):
        same(rows[key], np.ascontiguousarray(expected[key]))
    same(rows[expected[:, 0].astype("f4") > 0], expected[expected[:, 0].astype("f4") > 0])
    for wrong in (37, -38, np.array([37]), np.array([-38])):
        with pytest.raises(IndexError):
            rows[wrong]


def test_plain_zarr_refuses_a_flipped_byte(folder, small_chunks):
    layout = ShardLayout.of("float32", (4,), 16, layered=True)
    place = write_array(folder, "a", layout, [{0: values((16, 4), "float32")}])
    path = folder.path(layout.path("a", 0, 0))
    raw = bytearray(path.read_bytes())
    raw[70] ^= 1
    path.write_bytes(raw)
    array = zarr.open_array(place, mode="r")
    same(array[0, :4], values((16, 4), "float32")[:4])
    with pytest.raises(ValueError, match="checksum"):
        array[0, 4:8]
