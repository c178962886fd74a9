"""Runs that are kept compressed: the same keys, numbers and contents in other bytes, there and back."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
import zarr
from numcodecs import blosc

from mizarr.store import open_store
from mizarr.store.errors import ConfigError, CorruptEntry
from mizarr.store.runs import bfloat16  # noqa: F401 - teaches zarr the dtype
from mizarr.store.runs.archived import plain_measure, recoded
from mizarr.store.runs.shards import ShardLayout, crc32c, write_shards
from mizarr.workflows.cli import run

from .exchanged import cells_in, put_run

DTYPES = ["float32", "float16", "bfloat16", "int8"]


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture
def plain(tmp_path, dtype):
    store = open_store(tmp_path / "plain", durability="process")
    put_run(store, dtype)
    return store


@pytest.fixture
def archive(plain, tmp_path):
    store = open_store(tmp_path / "archive", durability="process")
    done = plain.copy_to(store, codec="zstd")
    assert len(done.copied) == len(list(plain.records()))
    assert not done.different
    return store


def only(store):
    (entry,) = store.entries()
    return entry


def contents(store):
    return {record.key: (record.label, record.content) for record in store.records()}


def tree(store):
    """Bytes of every file of its runs but notes and bookkeeping of now."""
    return {
        str(path.relative_to(store.path)): path.read_bytes()
        for path in (store.path / "data").rglob("*")
        if path.is_file()
    }


def test_an_archive_has_the_same_keys_contents_and_numbers(plain, archive, dtype):
    assert contents(archive) == contents(plain)
    there, here = only(archive), only(plain)
    xr.testing.assert_identical(there.open().load(), here.open().load())
    for variable, layer in cells_in(dtype):
        for n in range(len(here.segments)):
            assert there.segment_digest(variable, layer, n) == here.segment_digest(variable, layer, n)
    assert archive.verify() == []
    codecs = {
        codec["name"]
        for name in there.specs
        for codec in json.loads((archive.path / there.path / name / "zarr.json").read_bytes())["codecs"][0][
            "configuration"
        ]["codecs"]
    }
    assert "blosc" in codecs


def test_zarr_python_reads_an_archive_unaided(archive, plain, dtype):
    for variable in only(archive).specs:
        arrays = [
            zarr.open_array(store.path / only(store).path / variable, mode="r") for store in (archive, plain)
        ]
        found, expected = (np.asarray(array[:]) for array in arrays)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_rows_are_found_however_they_are_asked_for(archive, plain):
    """Of a segment that is full, twice: decoded, and as it was kept."""
    there, here = (only(store).shard("resid_post", 2, 1) for store in (archive, plain))
    some = np.array([True, False, False, True])
    for key in (3, -1, slice(1, 4), slice(None, None, 2), np.array([2, 0, 2]), np.array([-1]), some):
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(there[key]), np.asarray(here[key]))
    with pytest.raises(IndexError):
        there[np.array([4])]
    with pytest.raises(ValueError, match="read-only"):
        there[:2][0] = 1
    there.release_pages()
    np.testing.assert_array_equal(np.asarray(there), np.asarray(here))


def test_what_becomes_plain_again_is_every_byte_it_was(plain, archive, tmp_path):
    direct = open_store(tmp_path / "direct", durability="process")
    plain.copy_to(direct)
    back = open_store(tmp_path / "back", durability="process")
    archive.copy_to(back, codec="none")
    assert tree(back) == tree(direct)
    again = open_store(tmp_path / "again", durability="process")
    archive.copy_to(again)  # as it is
    assert tree(again) == tree(archive)


def test_an_archive_is_added_to_and_stays_one(plain, dtype, tmp_path):
    """Some cells are copied, the others computed there: contents are those of a run that is plain."""
    store = open_store(tmp_path / "some", durability="process")
    first = [record for record in plain.records() if record.label == "resid_post/0"]
    plain.copy_to(store, first, codec="zstd")
    put_run(store, dtype)
    assert contents(store) == contents(plain)
    xr.testing.assert_identical(only(store).open().load(), only(plain).open().load())
    assert only(store).layout("resid_post").codec == "zstd"
    assert only(store).layout("z").codec == ""
    assert store.verify() == []
    back = open_store(tmp_path / "back", durability="process")
    store.copy_to(back, codec="none")
    assert contents(back) == contents(plain)


@pytest.mark.parametrize("dtype", ["int8"])
def test_what_the_target_has_of_an_array_decides_how_the_rest_lies(plain, tmp_path):
    store = open_store(tmp_path / "some", durability="process")
    plain.copy_to(store, [record for record in plain.records() if record.label == "resid_post/0"])
    done = plain.copy_to(store, codec="zstd")
    assert not done.different
    assert [only(store).layout(name).codec for name in ("resid_post", "z")] == ["", "zstd"]
    assert contents(store) == contents(plain)
    assert store.verify() == []


@pytest.mark.parametrize("dtype", ["int8"])
def test_a_damaged_shard_is_found_withdrawn_and_written_again(archive, plain, dtype, tmp_path):
    expected = contents(archive)
    file = archive.path / only(archive).path / "resid_post/c/2/1/0"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 8
    file.chmod(0o644)
    file.write_bytes(raw)
    store = open_store(archive.path)
    with pytest.raises(CorruptEntry):
        np.asarray(only(store).shard("resid_post", 2, 1)[:])
    (damage,) = store.verify()
    store.quarantine(damage)
    assert ("resid_post/2", expected) not in contents(store).items()
    assert len(contents(store)) < len(expected)
    put_run(store, dtype)
    assert contents(store) == expected
    assert store.verify() == []


@pytest.mark.parametrize("dtype", ["int8"])
@pytest.mark.parametrize("lost", ["manifest/resid_post.2.json", "resid_post/zarr.json"])
def test_what_tells_of_an_archive_is_made_again_with_the_same_content(archive, dtype, lost):
    expected = contents(archive)
    (archive.path / only(archive).path / lost).unlink()
    for damage in archive.verify():
        archive.quarantine(damage)
    store = open_store(archive.path, durability="process")
    put_run(store, dtype)
    assert contents(store) == expected
    assert only(store).layout("resid_post").codec == "zstd"
    assert store.verify() == []


def test_no_flipped_bit_of_an_archived_shard_is_read_as_another_number(tmp_path):
    layout = ShardLayout("float32", (8,), 64, 16, layered=True, codec="zstd")
    rows = np.arange(60 * 8, dtype=np.float32).reshape(60, 8)
    store = open_store(tmp_path / "s", durability="process")
    write_shards(store.files, {"data/x": (rows, layout)})
    content = store.files.get("data/x")
    whole = b"".join(recoded(content, layout, layout.plain, "x"))
    rng = np.random.default_rng(0)
    for at in rng.choice(len(content), 300, replace=False):
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.integers(8)
        with pytest.raises(CorruptEntry):
            recoded(bytes(flipped), layout, layout.plain, "x")
    for size in (0, 10, len(content) // 2, len(content) - 1):
        with pytest.raises(CorruptEntry):
            plain_measure(content[:size], layout, "x")
    # The same bytes as if it had never been compressed.
    write_shards(store.files, {"data/y": (rows, layout.plain)})
    assert store.files.get("data/y") == whole


def test_a_chunk_that_promises_more_than_it_may_is_refused_before_it_is_decoded(tmp_path):
    layout = ShardLayout("float32", (8,), 16, 16, layered=False, codec="zstd")
    store = open_store(tmp_path / "s", durability="process")
    write_shards(store.files, {"data/x": (np.ones((16, 8), np.float32), layout)})
    content = store.files.get("data/x")
    body = bytearray(content[: -layout.index_bytes - 4])
    body[4:8] = (1 << 31).to_bytes(4, "little")
    forged = bytes(body) + crc32c(bytes(body)).to_bytes(4, "little") + content[-layout.index_bytes :]
    with pytest.raises(CorruptEntry, match="found a header that states"):
        plain_measure(forged, layout, "x")


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_a_copy_by_another_version_of_the_codec_goes_on(plain, tmp_path, monkeypatch):
    """What lies there is recorded as it lies, if it stands for the same."""
    store = open_store(tmp_path / "other", durability="process")
    compress = blosc.compress
    with monkeypatch.context() as patched:
        patched.setattr(blosc, "compress", lambda data, name, level, *how: compress(data, name, 9, *how))
        plain.copy_to(store, codec="zstd")
    shards = {name: text for name, text in tree(store).items() if "/c/" in name}
    records = [*(store.path / "keys").rglob("*.json"), *store.path.glob("data/*/*/manifest/*.*.json")]
    for path in [
        *records,
        *store.path.glob("data/*/*/manifest/embed.json"),
        *store.path.glob("data/*/*/seg/[0-9]*"),
    ]:
        path.unlink()
    store = open_store(store.path, durability="process")
    assert contents(store) == {}
    plain.copy_to(store, codec="zstd")
    assert contents(store) == contents(plain)
    assert shards == {name: text for name, text in tree(store).items() if "/c/" in name}
    assert store.verify() == []


def test_the_command_makes_an_archive_smaller_and_refuses_other_codecs(tmp_path, capsys):
    plain = open_store(tmp_path / "plain", durability="process")
    put_run(plain, "bfloat16")
    names = [str(tmp_path / name) for name in ("plain", "archive")]
    assert run(["copy", *names, "--codec", "zstd", "--quiet"]) == 0
    assert run(["verify", "--store", names[1]]) == 0
    assert contents(open_store(names[1])) == contents(plain)
    assert run(["copy", *names, "--codec", "gzip"]) == 2
    with pytest.raises(ConfigError, match="among zstd, none, found 'gzip'"):
        plain.copy_to(open_store(tmp_path / "x"), codec="gzip")
    capsys.readouterr()


def test_numbers_that_repeat_take_less_room(tmp_path):
    """Half the bytes of each number are zeros."""
    store = open_store(tmp_path / "s", durability="process")
    layout = ShardLayout.of("float32", (64,), 4096, layered=False)
    rows = np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32)
    rows = (rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    shards = {"data/a": (rows, layout), "data/b": (rows, replace(layout, codec="zstd"))}
    written = write_shards(store.files, shards)
    assert written["data/b"][0] < 0.5 * written["data/a"][0]


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_an_archive_in_memory_reads_the_same(plain):
    pytest.importorskip("obstore")
    store = open_store("memory://archive/x")
    plain.copy_to(store, codec="zstd")
    xr.testing.assert_identical(only(store).open().load(), only(plain).open().load())
    assert store.verify() == []
