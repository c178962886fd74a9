"""Entries: segments are committed whole, resumed, claimed, and published when nothing is missing."""

import json
import os
import pickle
import resource
import shutil
import threading
import time

import numpy as np
import pytest
import zarr
from hypothesis import given, strategies as st

import mizarr.store.runs.bfloat16  # noqa: F401 - teaches zarr the dtype
from mizarr.store import PackedTokens, RunKey
from mizarr.store.digest import file_digest
from mizarr.store.errors import (
    CorruptEntry,
    EntryNotFound,
    ReadOnlyStore,
    ShapeError,
    StoreFull,
)
from mizarr.store.files import LocalFolder
from mizarr.store.runs.entries import ArraySpec, Entry
from tests.memory import PEAK, printed

TOKENS = PackedTokens.from_lists([[1, 2, 3], [4] * 10, [5], [6] * 7])  # 21 tokens
RESID = ArraySpec(
    "resid_post", "blocks.*.hook_resid_post", ("layer", "token", "hidden"), {"hidden": 6}, "float32", 3
)
EMBED = ArraySpec("embed", "hook_embed", ("token", "hidden"), {"hidden": 6}, "float32", None)
PATTERN = ArraySpec(
    "pattern", "blocks.*.attn.hook_pattern", ("layer", "pair", "head"), {"head": 2}, "float32", 3
)
CELLS = [("resid_post", 0), ("resid_post", 2), ("embed", None), ("pattern", 1)]


def create(folder, tokens=TOKENS, specs=(RESID, EMBED, PATTERN), segment_tokens=8, **options):
    run = RunKey("m", tokens.digest, "none")
    return Entry.create(folder, run, tokens, specs, segment_tokens=segment_tokens, **options)


def rows_of(entry, cell, n, seed=0):
    """Numbers that depend on cell, segment and seed only."""
    shape = (entry.rows(cell[0], n), *entry.spec(cell[0]).tail)
    numbers = np.random.default_rng([seed, n, *repr(cell).encode()]).standard_normal(shape)
    return numbers.astype(entry.layout(cell[0]).native)


def fill(entry, cells=CELLS, segments=None, seed=0):
    for n in range(len(entry.segments)) if segments is None else segments:
        entry.write_segment(n, {cell: rows_of(entry, cell, n, seed) for cell in cells})


def recorded(entry):
    """What the segment records on disk say: path of a shard -> its size and digest."""
    names = [name for name in entry.folder.list(f"{entry.path}/seg") if name.endswith(".json")]
    return {
        path: tuple(file) for n in names for path, file in json.loads(entry.folder.get(n))["files"].items()
    }


@pytest.fixture
def folder(tmp_path):
    return LocalFolder(tmp_path, "process")


@pytest.fixture
def entry(folder):
    return create(folder)


# -- shape


def test_segments_cover_the_tokens_without_gaps(entry):
    assert entry.segments == [range(8), range(8, 16), range(16, 21)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 20))
def test_each_token_owns_a_row_of_its_prompts_matrix(sizes, segment_tokens):
    tokens = PackedTokens.from_lists([[1] * size for size in sizes])
    entry = Entry(
        LocalFolder("/nowhere", read_only=True),
        RunKey("m", tokens.digest, "n"),
        "float32",
        tokens,
        segment_tokens,
    )
    triangle = [position + 1 for size in sizes for position in range(size)]
    square = [size for size in sizes for _ in range(size)]
    for axis, owned in (("pair", triangle), ("square", square)):
        rows = [sum(owned[at.start : at.stop]) for at in entry.segments]
        assert np.diff(entry.bounds(axis)).tolist() == rows
        assert entry.bounds(axis)[-1] == sum(owned)


def test_an_entry_keeps_the_segments_and_layout_it_was_made_with(folder, entry, monkeypatch):
    fill(entry)
    monkeypatch.setattr(
        "mizarr.store.runs.shards.CHUNK_BYTES", 16
    )  # as a later version of mizarr might have it
    again = create(folder, segment_tokens=4)
    assert again.segments == entry.segments
    assert again.missing(CELLS) == {}
    np.testing.assert_array_equal(again.shard("resid_post", 2, 1), rows_of(entry, ("resid_post", 2), 1))


def test_arrays_are_added_to_an_entry_later(folder):
    entry = create(folder, specs=[RESID])
    create(folder, specs=[EMBED])
    assert set(create(folder, specs=[RESID]).specs) == {"embed", "resid_post"}
    assert entry.spec("embed") == EMBED


def test_an_array_declared_otherwise_is_refused(folder, entry):
    wider = ArraySpec("resid_post", "h", RESID.dims, {"hidden": 7}, "float32", 3)
    with pytest.raises(ShapeError, match="already stores variable 'resid_post'"):
        create(folder, specs=[wider])


def test_arrays_of_two_dtypes_are_two_entries(folder, entry):
    half = ArraySpec("resid_post", "h", RESID.dims, {"hidden": 6}, "bfloat16", 3)
    with pytest.raises(ShapeError, match="one storage dtype"):
        create(folder, specs=[half, EMBED])
    assert create(folder, specs=[half]).path != entry.path


def test_segments_that_do_not_divide_into_chunks_are_refused(folder):
    tokens = PackedTokens.from_lists([[1] * 20_000])
    wide = ArraySpec("resid_post", "h", RESID.dims, {"hidden": 512}, "float32", 3)
    with pytest.raises(ShapeError, match=r"power of two, e\.g\. 4096"):
        create(folder, tokens, [wide], segment_tokens=4999)
    assert not list(folder.list(""))  # a second try is not held to the first
    assert len(create(folder, tokens, [wide], segment_tokens=2500).segments) == 8


# -- commit and resume


def test_what_is_committed_is_no_longer_missing(entry):
    assert entry.missing(CELLS) == dict.fromkeys(range(3), CELLS)
    fill(entry, [("resid_post", 0)], [1])
    assert entry.missing(CELLS) == {0: CELLS, 1: CELLS[1:], 2: CELLS}
    fill(entry)
    assert entry.missing(CELLS) == {}
    assert entry.missing([("resid_post", 1)]) == {n: [("resid_post", 1)] for n in range(3)}


def test_another_process_sees_what_was_committed(folder, entry):
    fill(entry, segments=[0, 2])
    again = pickle.loads(pickle.dumps(entry))
    assert again.missing(CELLS) == {1: CELLS}
    assert Entry.load(folder, entry.path, TOKENS).missing(CELLS) == {1: CELLS}


def test_a_committed_shard_is_what_was_written_and_digested(entry):
    fill(entry)
    for variable, layer in CELLS:
        for n in range(3):
            got = entry.shard(variable, layer, n)
            np.testing.assert_array_equal(got, rows_of(entry, (variable, layer), n))
            path = entry.folder.path(f"{entry.path}/{entry.layout(variable).path(variable, layer, n)}")
            assert entry.segment_digest(variable, layer, n) == file_digest(path)
    assert len(recorded(entry)) == 3 * len(CELLS)


def test_shards_without_a_record_are_not_committed_and_then_taken_as_they_are(entry, monkeypatch):
    real = LocalFolder.put_new
    monkeypatch.setattr(
        LocalFolder, "put_new", lambda self, name, data: "/seg/" in name or real(self, name, data)
    )
    fill(entry, seed=1)  # killed before the record
    monkeypatch.undo()
    assert entry.missing(CELLS) == dict.fromkeys(range(3), CELLS)
    fill(entry, seed=2)
    np.testing.assert_array_equal(entry.shard("embed", None, 0), rows_of(entry, ("embed", None), 0, seed=1))
    path = entry.folder.path(f"{entry.path}/embed/c/0/0")
    assert entry.segment_digest("embed", None, 0) == file_digest(path)


def test_writers_of_one_segment_converge_on_the_first(entry):
    gate = threading.Barrier(4)

    def write(seed):
        gate.wait()
        fill(create(entry.folder), seed=seed)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entry.missing(CELLS) == {}
    for path, (size, digest) in recorded(entry).items():
        whole = entry.folder.path(f"{entry.path}/{path}")
        assert (whole.stat().st_size, file_digest(whole)) == (size, digest)
    assert not list(entry.folder.root.rglob(".*"))  # no temporary file is left


def test_passes_that_overlap_agree_on_the_shards_they_share(entry):
    fill(entry, CELLS[:2], [0])
    fill(entry, CELLS[1:], [0], seed=1)
    np.testing.assert_array_equal(entry.shard(*CELLS[1], 0), rows_of(entry, CELLS[1], 0))
    assert entry.missing(CELLS) == {1: CELLS, 2: CELLS}


@pytest.mark.parametrize(
    ("cell", "n", "rows", "says"),
    [
        (("resid_post", 0), 0, np.zeros((7, 6), "f4"), r"\[8, 6\]"),
        (("resid_post", 0), 2, np.zeros((8, 6), "f4"), r"\[5, 6\]"),
        (("resid_post", 0), 0, np.zeros((8, 6), "f8"), "float64"),
        (("resid_post", 0), 0, np.zeros((6, 8), "f4").T, "contiguous"),
        (("resid_post", 3), 0, np.zeros((8, 6), "f4"), "layers 0 to 2"),
        (("resid_post", None), 0, np.zeros((8, 6), "f4"), "layers 0 to 2"),
        (("embed", 0), 0, np.zeros((8, 6), "f4"), "no layer axis"),
        (("embed", None), 3, np.zeros((8, 6), "f4"), "segments 0 to 2"),
        (("pattern", 1), 0, np.zeros((8, 2), "f4"), r"\[21, 2\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(entry, cell, n, rows, says):
    good = {("resid_post", 1): np.zeros((8, 6), "f4")} if n == 0 else {}
    with pytest.raises(ShapeError, match=says):
        entry.write_segment(n, {**good, cell: rows})
    assert not list(entry.folder.path(entry.path).glob("*/c"))


def test_a_full_disk_keeps_what_was_committed_and_resumes(entry, monkeypatch):
    fill(entry, segments=[0])
    real, budget = os.writev, [3]

    def writev(handle, parts):
        budget[0] -= 1
        if budget[0] < 0:
            raise OSError(28, os.strerror(28))
        return real(handle, parts)

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(StoreFull, match="resumes"):
        fill(entry, segments=[1])
    assert entry.missing(CELLS) == {1: CELLS, 2: CELLS}
    assert not list(entry.folder.root.rglob(".*"))
    monkeypatch.undo()
    fill(entry, segments=entry.missing(CELLS))
    assert len(entry.publish(CELLS)) == 4


def test_a_file_size_limit_leaves_no_torn_shard(entry):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # the kernel takes 100 bytes, then no more
    try:
        with pytest.raises(StoreFull, match="exceeds the largest size allowed"):
            fill(entry, segments=[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in entry.folder.path(entry.path).glob("*/c/**/*") if path.is_file()]
    assert entry.missing(CELLS) == dict.fromkeys(range(3), CELLS)


def test_a_read_only_store_refuses_segments_and_claims(entry):
    reader = Entry.load(LocalFolder(entry.folder.root, read_only=True), entry.path, TOKENS)
    with pytest.raises(ReadOnlyStore, match="mode='a'"):
        fill(reader)
    with pytest.raises(ReadOnlyStore, match="mode='a'"):
        reader.claim(0).acquire()
    assert reader.missing(CELLS) == dict.fromkeys(range(3), CELLS)


def test_a_truncated_record_is_corrupt_and_says_which(entry):
    fill(entry)
    (path,) = entry.folder.path(f"{entry.path}/seg").glob("1.*.json")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptEntry, match=path.name):
        create(entry.folder).missing(CELLS)


def test_a_truncated_temporary_file_is_nobodys_shard(entry):
    shard = entry.folder.path(f"{entry.path}/embed/c/0/0")
    shard.parent.mkdir(parents=True)
    (shard.parent / ".0.4711.abcd").write_bytes(b"half a shard")
    assert entry.missing([("embed", None)])[0] == [("embed", None)]
    fill(entry)
    np.testing.assert_array_equal(entry.shard("embed", None, 0), rows_of(entry, ("embed", None), 0))


# -- publish


def test_only_complete_arrays_are_published(folder, entry):
    fill(entry, CELLS[:1])
    fill(entry, CELLS[1:], [0, 1])
    (record,) = entry.publish(CELLS)
    assert record.label == "resid_post/0"
    assert entry.published() == [("resid_post", 0)]
    assert entry.content("resid_post", 0) == record.content
    for cell in CELLS[1:]:
        with pytest.raises(EntryNotFound, match="capture"):
            entry.content(*cell)


def test_publishing_again_changes_nothing(entry):
    fill(entry)
    first = entry.publish(CELLS)
    time.sleep(1.1)  # records know seconds
    assert create(entry.folder).publish(CELLS) == first


def test_content_is_that_of_the_values(tmp_path):
    contents = []
    for name, seed, layer in [("a", 0, 0), ("b", 0, 0), ("c", 1, 0)]:
        entry = create(LocalFolder(tmp_path / name, "process"))
        fill(entry, [("resid_post", layer)], seed=seed)
        contents.append(entry.publish([("resid_post", layer)])[0].content)
    assert contents[0] == contents[1] != contents[2]


def test_a_manifest_names_every_shard_with_size_and_digest(entry):
    fill(entry)
    entry.publish(CELLS)
    manifest = json.loads(entry.folder.get(f"{entry.path}/manifest/resid_post.2.json"))
    assert list(manifest["files"]) == [f"resid_post/c/2/{n}/0" for n in range(3)]
    for path, (size, digest) in manifest["files"].items():
        whole = entry.folder.path(f"{entry.path}/{path}")
        assert (whole.stat().st_size, file_digest(whole)) == (size, digest)


# -- read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("segment_tokens", [1, 7, 8, 32])
def test_plain_zarr_reads_tokens_and_pairs(folder, dtype, segment_tokens):
    specs = [ArraySpec(s.variable, s.hook, s.dims, s.sizes, dtype, s.layers) for s in (RESID, EMBED, PATTERN)]
    entry = create(folder, specs=specs, segment_tokens=segment_tokens)
    fill(entry)
    group = zarr.open_group(folder.path(entry.path), mode="r")
    segments = range(len(entry.segments))
    for variable, layer in CELLS[:3]:
        whole = np.concatenate([rows_of(entry, (variable, layer), n) for n in segments])
        array = group[variable]
        np.testing.assert_array_equal(array[:] if layer is None else array[layer], whole)
    assert np.isnan(group["resid_post"][1].astype("f4")).all()  # not captured
    stored = group["pattern"][1]
    bounds = group["pattern"].attrs.get("pair_bounds", [0, 6 + 55 + 1 + 28])
    assert bounds == entry.bounds("pair").tolist()
    length = group["pattern"].shards[1]
    for n in segments:
        rows = rows_of(entry, ("pattern", 1), n)
        np.testing.assert_array_equal(stored[n * length : n * length + bounds[n + 1] - bounds[n]], rows)


def test_unknown_variables_are_named_with_the_nearest(entry):
    with pytest.raises(EntryNotFound, match="most similar is 'resid_post'"):
        entry.shard("resid_pots", 0, 0)


def test_a_shard_that_is_not_there_says_which(entry):
    with pytest.raises(EntryNotFound, match=r"segment 1 of resid_post\.0"):
        entry.shard("resid_post", 0, 1)
    with pytest.raises(EntryNotFound, match=r"segment 1 of resid_post\.0"):
        entry.segment_digest("resid_post", 0, 1)


def test_a_shard_written_anew_is_mapped_anew(entry):
    fill(entry)
    old = np.array(entry.shard("embed", None, 0))
    path = entry.folder.path(f"{entry.path}/embed/c/0/0")
    path.rename(path.with_name("aside"))
    next(iter(entry.folder.path(f"{entry.path}/seg").glob("0.*.json"))).unlink()  # quarantined
    assert entry.missing(CELLS) == {0: CELLS}
    fill(entry, segments=[0], seed=1)
    assert not np.array_equal(entry.shard("embed", None, 0), old)
    assert entry.segment_digest("embed", None, 0) == file_digest(path)


def test_an_array_stored_again_with_a_codec_is_damage(entry):
    fill(entry)
    expected = [rows_of(entry, ("resid_post", 2), n) for n in range(3)]
    place = entry.folder.path(f"{entry.path}/resid_post")
    array = zarr.open_array(place, mode="r")
    values, shape, attributes = array[:], array.shape, array.attrs.asdict()
    zarr.create_array(
        place, shape=shape, dtype="float32", chunks=(1, 4, 6), shards=(1, 8, 6), fill_value=np.nan,
        compressors=zarr.codecs.ZstdCodec(level=1), attributes=attributes, dimension_names=RESID.dims,
        overwrite=True,
    )[:] = values  # fmt: skip
    with pytest.raises(CorruptEntry, match="other codecs"):
        entry.shard("resid_post", 2, 0)
    with pytest.raises(CorruptEntry, match="other codecs"):
        entry.write_segment(0, {("resid_post", 1): expected[0]})


# -- claims


def test_a_claimed_segment_is_not_claimed_twice(entry):
    other = create(entry.folder)
    with entry.claim(1) as mine:
        assert mine
        with other.claim(1) as theirs, other.claim(2) as free:
            assert (theirs, free) == (False, True)
        with other.claim(1) as theirs:  # a loser's release frees nothing
            assert not theirs
    with other.claim(1) as theirs:
        assert theirs


def test_a_claim_is_kept_alive_and_an_abandoned_one_taken_over(folder):
    entry = create(folder, claim_ttl=0.3)
    with entry.claim(0):
        time.sleep(0.8)
        with entry.claim(0) as second:
            assert not second
    path = folder.path(f"{entry.path}/seg/0.claim")
    path.write_bytes(b"of a dead process")
    assert not entry.claim(0).acquire()
    os.utime(path, (1, 1))
    with entry.claim(0) as mine:
        assert mine


def test_releasing_a_claim_that_was_taken_over_frees_nothing(folder):
    entry = create(folder)
    paused = entry.claim(0)
    assert paused.acquire()
    path = folder.path(f"{entry.path}/seg/0.claim")
    os.utime(path, (1, 1))
    with entry.claim(0) as mine:
        assert mine
        paused.release()
        assert path.exists()
    assert not path.exists()


# -- scale


def test_each_record_is_read_once_however_often_one_asks(folder, monkeypatch):
    tokens = PackedTokens.from_lists([[1] * 300])
    fill(create(folder, tokens, [EMBED], segment_tokens=1), [("embed", None)])
    entry = create(folder, tokens, [EMBED], segment_tokens=1)
    read = []
    real = LocalFolder.get
    monkeypatch.setattr(
        "mizarr.store.files.stamps._SETTLED_SECONDS", -1
    )  # as if they were written a while ago
    monkeypatch.setattr(LocalFolder, "get", lambda self, name: (read.append(name), real(self, name))[1])
    for _ in range(3):
        assert entry.missing([("embed", None)]) == {}
    assert len([name for name in read if "/seg/" in name]) == 300
    monkeypatch.setattr(LocalFolder, "stamps", None)  # a digest that is known is not looked up
    assert all(entry.segment_digest("embed", None, n).startswith("sha256:") for n in range(300))


def test_reading_everything_keeps_little_of_it_in_memory(folder, tmp_path):
    """96 MiB in 12 shards, read whole by a process that may keep 16 MiB of them."""
    tokens = PackedTokens.from_lists([[1] * 4096] * 12)
    wide = ArraySpec("wide", "hook", ("token", "hidden"), {"hidden": 512}, "float32", None)
    entry = create(folder, tokens, [wide], segment_tokens=4096)
    fill(entry, [("wide", None)])
    entry.publish([("wide", None)])
    script = f"""
import sys
from pathlib import Path
import numpy as np
from mizarr.store import PackedTokens
from mizarr.store.runs import entries, mapped
from mizarr.store.files import LocalFolder
mapped.RESIDENT = int(sys.argv[3])
tokens = PackedTokens.from_lists([[1] * 4096] * 12)
entry = entries.Entry.load(LocalFolder(Path(sys.argv[1])), sys.argv[2], tokens)
before = {PEAK}
total = sum(float(np.abs(entry.shard("wide", None, n)[:]).max()) for n in range(12))
assert total > 0
print(({PEAK} - before) >> 20)
"""
    bounded, unbounded = (printed(script, str(folder.path("")), entry.path, str(n << 20)) for n in (16, 1024))
    assert bounded < 16 + 16 + 20  # what may stay, the absolute values of one shard, room
    assert unbounded > 90  # so it is the bound that does it


# -- what is remembered is not stale


def test_a_shard_changed_in_place_is_checked_again(entry, monkeypatch):
    monkeypatch.setattr("mizarr.store.files.stamps._SETTLED_SECONDS", -1)  # as if it was written a while ago
    fill(entry)
    path = entry.folder.path(f"{entry.path}/embed/c/0/0")
    stat = path.stat()
    assert len(entry.shard("embed", None, 0)[:])  # checked, and remembered as such
    raw = bytearray(path.read_bytes())
    raw[1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    with pytest.raises(CorruptEntry, match=r"embed .*crc32c"):
        entry.shard("embed", None, 0)[:]


def test_what_was_just_written_is_checked_at_every_read(entry):
    """Within a tick of the clock a change does not show in the file's times."""
    fill(entry)
    path = entry.folder.path(f"{entry.path}/embed/c/0/0")
    rows = entry.shard("embed", None, 0)
    assert len(rows[:])
    with path.open("r+b") as file:
        file.write(bytes([path.read_bytes()[0] ^ 1]))
    with pytest.raises(CorruptEntry):
        rows[:]


@pytest.mark.parametrize("settled", [2.0, -1])
def test_a_run_made_anew_in_other_segments_is_not_read_as_the_old_one(folder, monkeypatch, settled):
    monkeypatch.setattr("mizarr.store.files.stamps._SETTLED_SECONDS", settled)
    tokens = PackedTokens.from_lists([[1] * 24])
    old = create(folder, tokens, [EMBED], segment_tokens=6)
    fill(old, [("embed", None)])
    assert len(old.shard("embed", None, 1)) == 6
    shutil.rmtree(folder.path(old.path))
    with pytest.raises(EntryNotFound):
        old.shard("embed", None, 1)
    new = create(folder, tokens, [EMBED], segment_tokens=8)
    fill(new, [("embed", None)])
    for one in (old, pickle.loads(pickle.dumps(old))):
        with pytest.raises(EntryNotFound, match=r"created again in segments of 8 tokens .* open it again"):
            one.shard("embed", None, 1)
    np.testing.assert_array_equal(new.shard("embed", None, 1), rows_of(new, ("embed", None), 1))
