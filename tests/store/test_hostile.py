"""Files somebody else made: whatever their bytes, an error of ours, and no memory they do not fill."""

import json
import math
import pickle
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from mizarr.store import open_store
from mizarr.store.catalog import Catalog
from mizarr.store.errors import MizarrError
from mizarr.store.files import LocalFolder
from mizarr.store.records import Record
from mizarr.store.runs.archived import read_archived
from mizarr.store.runs.committed import Committed
from mizarr.store.runs.coordinates import read_tokens
from mizarr.store.runs.entries import group_attributes
from mizarr.store.runs.shards import ShardLayout, crc32c, read_shard, shard_parts
from mizarr.store.runs.vocabularies import read_vocabulary, vocabulary_path
from mizarr.store.sealed import sealed, unsealed

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
BYTES = st.binary(max_size=300)
LAYOUT = ShardLayout("float32", (4,), 32, 8, layered=True)
PACKED = replace(LAYOUT, codec="zstd")
METADATA, PACKED_METADATA = (
    json.loads(layout.metadata((2, 64, 4), ("layer", "token", "hidden"), {"mizarr": {}}))
    for layout in (LAYOUT, PACKED)
)
READERS = [(LAYOUT, read_shard), (PACKED, read_archived)]
BUDGET = 64 << 20  # bytes; what was read is a few hundred


def refused_or_read(read, *arguments):
    """An error of ours, or an answer; and no allocation beyond the budget."""
    told = ""
    tracemalloc.start()
    try:
        read(*arguments)
    except MizarrError as error:
        told = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < BUDGET and "\n" not in told


def seals(fields):
    try:
        return sealed(fields)
    except ValueError:
        return b"{}"


NAMES = ["kind", "data", "content", "created", "label", "files", "segment", "cells", "key", "variable"]
RECORD_FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ANYTHING))
SOMETHING_SEALED = RECORD_FIELDS.map(seals) | ANYTHING.map(lambda v: json.dumps(v).encode()) | BYTES


@QUICK
@given(SOMETHING_SEALED)
@example(sealed({"kind": "result", "data": "../../etc", "content": "", "created": "", "label": ""}))
@example(b"[" * 100_000)
def test_records_notes_and_sealed_files(text):
    refused_or_read(Record.from_bytes, "0" * 64, text)
    refused_or_read(unsealed, "name", text, ("a",))


@QUICK
@given(SOMETHING_SEALED)
@example(b"[" * 100_000)
@example(b'{"format": 1e999}')
@example(b'{"format": [1]}')
@example(b"\xff\xfe")
def test_the_description_of_a_store(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("store")
    (folder / "store.json").write_bytes(text)
    refused_or_read(open_store, folder, "r")


@QUICK
@given(SOMETHING_SEALED)
@example(b"[" * 100_000)
def test_what_a_folder_of_a_run_says_of_itself(tmp_path_factory, text):
    root = tmp_path_factory.mktemp("run")
    data = f"data/ab/{'ab' * 32}"
    for name in ("zarr.json", "seg/0.abc.json", "coordinates/abc.json", "manifest.json", "provenance/1.json"):
        path = root / data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    files = LocalFolder(root, "process", read_only=True)
    refused_or_read(group_attributes, files, data)
    refused_or_read(read_tokens, files, data)
    refused_or_read(Committed(files, f"{data}/seg", 4).segments)
    refused_or_read(lambda: list(Catalog(files).records()))
    (root / "vocabularies").mkdir()
    (root / vocabulary_path("sha256:abc")).write_bytes(text)
    refused_or_read(read_vocabulary, files, "sha256:abc")


def changed(metadata, path, value):
    """A copy with one place set to something else."""
    copy = json.loads(json.dumps(metadata))
    place = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copy


def places(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield from places(inner, (*path, step))


SIZES = st.sampled_from([0, -1, 1, 2**31, 2**40, 2**63, 2**70, 1.5, "8", None, [], {}, True])


@pytest.mark.parametrize("metadata", [METADATA, PACKED_METADATA], ids=["plain", "zstd"])
@QUICK
@given(data=st.data())
def test_the_description_of_an_array_is_ours_or_none(metadata, data):
    path, value = data.draw(st.sampled_from(list(places(metadata)))), data.draw(SIZES | ANYTHING)
    found = []
    refused_or_read(lambda: found.append(ShardLayout.from_metadata(changed(metadata, path, value))))
    for layout in found:
        if layout is not None:
            assert layout.chunk_rows > 0 and layout.rows % layout.chunk_rows == 0
            assert all(size > 0 for size in (*layout.tail, layout.rows))


@QUICK
@given(ANYTHING)
def test_anything_at_all_is_no_description_of_an_array(value):
    assert ShardLayout.from_metadata(value) is None


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=4, max_size=4),
    st.binary(max_size=600),
    st.integers(0, 40),
)
@example([(2**64 - 1, 2**64 - 1)] * 4, b"", 32)
@example([(2**64 - 1, 2**64 - 1)] * 4, b"", 40)
@example([(2**64 - 1, 2**64 - 2)] * 4, b"x" * 600, 32)
@example([(0, 132)] * 4, b"x" * 600, 32)
@example([(2**63, 132)] * 4, b"x" * 600, 32)
def test_a_shard_with_an_index_somebody_made(tmp_path_factory, index, head, rows):
    raw = np.array(index, "<u8").tobytes()
    path = tmp_path_factory.mktemp("shard") / "a"
    path.write_bytes(head + raw + crc32c(raw).to_bytes(4, "little"))
    mapped = LocalFolder(path.parent).mapped("a")
    for layout, read in READERS:
        refused_or_read(lambda layout=layout, read=read: read(mapped, layout, rows)[:])


@QUICK
@given(BYTES, st.integers(0, 33))
def test_a_shard_of_any_bytes(tmp_path_factory, raw, rows):
    path = tmp_path_factory.mktemp("shard") / "a"
    path.write_bytes(raw)
    for layout, read in READERS:
        mapped = LocalFolder(path.parent).mapped("a")
        refused_or_read(lambda layout=layout, read=read, mapped=mapped: read(mapped, layout, rows)[:])


@pytest.mark.parametrize(("layout", "read"), READERS, ids=["plain", "zstd"])
@QUICK
@given(data=st.data())
def test_a_shard_with_any_byte_changed_is_refused(tmp_path_factory, layout, read, data):
    rows = np.arange(30 * 4, dtype="f4").reshape(30, 4)
    raw = bytearray(b"".join(bytes(part) for part in shard_parts("a", rows, layout)))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("shard") / "a"
    path.write_bytes(raw)
    with pytest.raises(MizarrError):
        read(LocalFolder(path.parent).mapped("a"), layout, 30)[:]


@QUICK
@given(st.binary(max_size=200), st.binary(min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_a_compressed_chunk_of_any_bytes_with_sound_sizes(tmp_path_factory, rest, flags, block):
    """Whoever makes a file can make its checksums: what is decoded is told, or is a chunk."""
    size = PACKED.chunk_bytes.to_bytes(4, "little")
    body = flags + size + block.to_bytes(4, "little") + (16 + len(rest)).to_bytes(4, "little") + rest
    chunk = body + crc32c(body).to_bytes(4, "little")
    index = np.full((PACKED.n_chunks, 2), 2**64 - 1, "<u8")
    index[0] = 0, len(chunk)
    told = index.tobytes()
    path = tmp_path_factory.mktemp("shard") / "a"
    path.write_bytes(chunk + told + crc32c(told).to_bytes(4, "little"))
    refused_or_read(lambda: read_archived(LocalFolder(path.parent).mapped("a"), PACKED, 8)[:])


def test_absent_chunks_beyond_what_a_file_can_fill_are_refused(tmp_path):
    """An index of 64 bytes that promises terabytes of fill."""
    layout = ShardLayout("float32", (2**20,), 2**22, 2**20, layered=True)
    raw = np.full((layout.n_chunks, 2), 2**64 - 1, "<u8").tobytes()
    (tmp_path / "a").write_bytes(raw + crc32c(raw).to_bytes(4, "little"))
    for kind, read in ((layout, read_shard), (replace(layout, codec="zstd"), read_archived)):
        with pytest.raises(MizarrError, match="claims a shard of"):
            read(LocalFolder(tmp_path).mapped("a"), kind, 2**22)
    assert math.prod(layout.tail) * layout.rows * 4 > 2**40


def test_no_file_of_a_store_is_ever_unpickled(tmp_path, monkeypatch):
    """Files that would run code if anything unpickled them, under every name a reader asks for."""

    class Runs:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    bomb = pickle.dumps(Runs())
    root, data = tmp_path / "store", f"data/ab/{'ab' * 32}"
    open_store(root)
    for name in (
        "zarr.json",
        "seg/0.a.json",
        "coordinates/a.json",
        "manifest/x.0.json",
        "token_id/zarr.json",
    ):
        path = root / data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bomb)
    (root / "keys/ab").mkdir(parents=True)
    (root / f"keys/ab/{'ab' * 32}.json").write_bytes(bomb)
    store = open_store(root)
    for ask in (lambda: list(store.records()), lambda: list(store.entries()), store.verify, store.runs):
        with suppress(MizarrError):
            ask()
    assert not (tmp_path / "ran").exists()
