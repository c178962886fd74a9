"""A store: what makes a folder one, and how runs and results are found in it."""

import json
import pickle
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.errors import (
    ConfigError,
    EntryNotFound,
    PromptError,
    ReadOnlyStore,
    ShapeError,
    StoreFormatError,
)
from mizarr.store.runs.entries import ArraySpec
from mizarr.store.sealed import sealed
from mizarr.store.store import default_segment_tokens, requested_store

DIMS = ("layer", "token", "hidden")


def spec(hidden=2, dtype="float32", variable="resid_post", layers=2):
    return ArraySpec(variable, f"blocks.*.hook_{variable}", DIMS, {"hidden": hidden}, dtype, layers)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(path):
    return open_store(path, durability="process")


def tokens_of(*prompts):
    return PackedTokens.from_lists(prompts)


def harvest(store, tokens, model="m", layers=(0, 1), segment_tokens=4):
    entry = store.create_entry(
        RunKey(model, tokens.digest, "none"), tokens, [spec()], segment_tokens=segment_tokens
    )
    cells = [("resid_post", layer) for layer in layers]
    for n, at in enumerate(entry.segments):
        ids = tokens.ids[at.start : at.stop].astype("f4")
        entry.write_segment(n, {cell: np.stack([ids, ids * 0 + cell[1]], 1) for cell in cells})
    return entry, entry.publish(cells)


def files_in(path):
    return {str(p.relative_to(path)): p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}


def test_an_opened_folder_is_a_store_of_this_format(path):
    open_store(path)
    assert json.loads((path / "store.json").read_text())["format"] == 1
    assert open_store(str(path)).path == path


@pytest.mark.parametrize("text", [b'{"format": 2, "digest": "sha256"}', sealed({"format": 2, "more": [1]})])
def test_a_store_of_a_later_format_is_refused_in_one_line(path, text):
    open_store(path)
    (path / "store.json").write_bytes(text)
    for mode in ("a", "r"):
        with pytest.raises(
            StoreFormatError, match=r"of format version 1, found version 2.*upgrade"
        ) as refused:
            open_store(path, mode=mode)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", [b"{}", b'{"format": 1, "digest": "sha256"}'])
def test_a_damaged_description_is_mended_by_that_of_another_store(path, tmp_path, text):
    open_store(path).put_vocabulary("sha256:ab", ["a"])
    open_store(tmp_path / "another")
    (path / "store.json").write_bytes(text)
    with pytest.raises(StoreFormatError, match="copy this file from another store of this version"):
        open_store(path)
    (path / "store.json").write_bytes((tmp_path / "another" / "store.json").read_bytes())
    assert open_store(path).vocabulary("sha256:ab") == ["a"]


def test_a_refused_request_takes_its_new_store_away_again(path):
    def refused(store):
        assert store.index.last_used() == {} and store.files.now() and (path / "store.json").exists()
        raise ConfigError("refused")

    with pytest.raises(ConfigError), requested_store(path) as store:
        refused(store)
    assert not path.exists()
    open_store(path)
    with pytest.raises(ConfigError), requested_store(path) as store:
        refused(store)
    assert (path / "store.json").exists()  # it was there before


def test_a_new_store_that_holds_something_stays_when_the_request_fails(path):
    def failing(store):
        store.put_vocabulary("sha256:ab", ["a"])
        raise ConfigError("refused")

    with pytest.raises(ConfigError), requested_store(path) as store:
        failing(store)
    assert open_store(path, mode="r").vocabulary("sha256:ab") == ["a"]


def test_a_folder_with_other_things_is_not_adopted(path):
    path.mkdir()
    (path / "thesis.tex").write_text("dear diary")
    with pytest.raises(StoreFormatError, match=r"thesis\.tex"):
        open_store(path)
    assert [p.name for p in path.iterdir()] == ["thesis.tex"]


def test_an_unreadable_description_is_no_store(path):
    open_store(path)
    (path / "store.json").write_text("[]")
    with pytest.raises(StoreFormatError, match=r"store\.json"):
        open_store(path)


def test_reading_needs_a_store_that_is_there(path):
    with pytest.raises(StoreFormatError, match=r"no store\.json"):
        open_store(path, mode="r")
    assert not path.exists()


def test_an_address_is_not_taken_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address in ("ftp://bucket/store", "file:///x", "s3://", "s3://b/../c", "s3://b//c"):
        with pytest.raises(StoreFormatError, match=r"a store as a folder|s3://BUCKET/PREFIX"):
            open_store(address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"mode": "w"}, {"durability": "maybe"}])
def test_unknown_modes_are_refused(path, wrong):
    with pytest.raises(ValueError, match="expected"):
        open_store(path, **wrong)


def test_processes_creating_one_store_and_one_entry_agree(path):
    script = """
import sys, time
import numpy as np
from mizarr.store import PackedTokens, RunKey, open_store
from mizarr.store.runs.entries import ArraySpec
tokens = PackedTokens.from_lists([[1, 2, 3], [4, 5]], texts=["a", sys.argv[3]])
spec = ArraySpec("resid_post", "h", ("layer", "token", "hidden"), {"hidden": 2}, "float32", 1)
time.sleep(max(0, float(sys.argv[2]) - time.time()))
store = open_store(sys.argv[1], durability="process")
entry = store.create_entry(RunKey("m", tokens.digest, "none"), tokens, [spec], segment_tokens=2)
for n, at in enumerate(entry.segments):
    rows = np.stack([tokens.ids[at.start:at.stop]] * 2, 1).astype("f4")
    entry.write_segment(n, {("resid_post", 0): rows})
print(entry.publish([("resid_post", 0)])[0].content)
"""
    start = str(time.time() + 4)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path), start, text], stdout=subprocess.PIPE, text=True
        )
        for text in ("b", "b", "other label")
    ]
    told = {run.communicate()[0].strip() for run in runs}
    assert len(told) == 1 and told.pop().startswith("sha256:")
    store = open_store(path, mode="r")
    assert store.verify() == []
    (entry,) = store.entries()
    assert entry.open()["resid_post"].values[0, :, 0].tolist() == [1, 2, 3, 4, 5]
    assert entry.tokens.texts[1] in ("b", "other label")


def test_a_read_only_store_reads_everything_and_leaves_no_trace(store, path):
    tokens = tokens_of([1, 2, 3, 4, 5], [6])
    entry, (record, _) = harvest(store, tokens)
    key = ResultKey("s", 1)
    store.put_result(key, xr.Dataset({"x": ("a", [1.0, 2.0])}))
    store.index.close()
    before = files_in(path)
    reader = open_store(path, mode="r")
    assert reader.lookup(key).content == store.lookup(key).content
    assert reader.open_result(key)["x"].values.tolist() == [1, 2]
    assert reader[record.key[:10]]["resid_post"].values[0, :, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert reader.entry(entry.digest).open()["resid_post"].sizes["layer"] == 2
    assert reader.verify() == [] and reader.gc(grace=0, dry_run=True).removed == ()
    with reader.lease(record):
        pass
    for write in (
        lambda: harvest(reader, tokens_of([9])),
        lambda: reader.put_result(ResultKey("t", 1), xr.Dataset()),
        lambda: reader.pin("p", record),
        lambda: reader.gc(grace=0),
    ):
        with pytest.raises(ReadOnlyStore):
            write()
    assert files_in(path) == before


def test_a_folder_without_write_permission_is_told_as_read_only(store, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.link", denied)
    with pytest.raises(ReadOnlyStore, match="mode='r'"):
        store.put_result(ResultKey("t", 1), xr.Dataset({"x": 1}))


def test_a_store_travels_to_another_process(store):
    harvest(store, tokens_of([1, 2]))
    far = pickle.loads(pickle.dumps(store))
    assert far == store and len(list(far.entries())) == 1


def test_keys_are_found_by_unique_prefix_only(store):
    made = [store.put_result(ResultKey("s", i), xr.Dataset({"x": i})) for i in range(40)]
    assert [record.key for record in store.records()] == sorted(record.key for record in made)
    assert store.record(made[3].key) == made[3]
    first = next(p for p in "0123456789abcdef" if sum(r.key.startswith(p) for r in made) > 1)
    with pytest.raises(EntryNotFound, match="more digits"):
        store[first]
    with pytest.raises(EntryNotFound, match="mizarr ls"):
        store["zz"]
    with pytest.raises(KeyError, match="compute it first"):
        store[ResultKey("never", 1)]
    assert store.lookup(ResultKey("never", 1)) is None


def test_activations_are_found_by_their_own_key(store):
    entry, records = harvest(store, tokens_of([3, 1, 2]))
    assert [record.label for record in records] == ["resid_post/0", "resid_post/1"]
    part = store[entry.key("resid_post", 1)]
    assert part["layer"].values.tolist() == [1] and part["resid_post"].values[0, :, 1].tolist() == [1, 1, 1]
    assert store.entry(entry.run).digest == entry.digest == store.entry(entry.digest[:9]).digest
    assert store.entry(entry.run, "float32").digest == entry.digest
    assert store[entry.digest[:20]].identical(entry.open())
    with pytest.raises(EntryNotFound, match="capture it first"):
        store.entry(entry.run, "bfloat16")


def test_more_layers_are_added_to_a_run_and_nothing_is_stored_twice(store):
    tokens = tokens_of([1, 2, 3], [4])
    entry, _ = harvest(store, tokens, layers=(0,))
    again, _ = harvest(store, tokens, layers=(1,))
    assert again.digest == entry.digest and len(list(store.entries())) == 1
    assert again.missing([("resid_post", 0), ("resid_post", 1)]) == {}
    assert store.entry(entry.digest).open()["layer"].values.tolist() == [0, 1]


def test_an_entry_keeps_its_segments(store):
    tokens = tokens_of([1, 2, 3, 4, 5, 6, 7])
    first = store.create_entry(RunKey("m", tokens.digest, "none"), tokens, [spec()], segment_tokens=4)
    again = store.create_entry(RunKey("m", tokens.digest, "none"), tokens, [spec()], segment_tokens=2)
    assert first.segments == again.segments == [range(4), range(4, 7)]


def test_tokens_other_than_those_of_the_key_are_refused(store):
    tokens = tokens_of([1, 2])
    with pytest.raises(PromptError, match="prompts of its key"):
        store.create_entry(RunKey("m", tokens.digest, "none"), tokens_of([1, 3]), [spec()])
    with pytest.raises(ShapeError):
        store.create_entry(RunKey("m", tokens.digest, "none"), tokens, [])


def test_attributes_of_a_run_are_provenance_and_change_no_digest(tmp_path):
    tokens, contents = tokens_of([1, 2, 3]), []
    for name in ("gpt2", "/home/me/gpt2"):
        store = open_store(tmp_path / name.strip("/").replace("/", "_"), durability="process")
        run = RunKey("m", tokens.digest, "none")
        store.create_entry(run, tokens, [spec()], segment_tokens=4, attrs={"model": name})
        _, (record, _) = harvest(store, tokens)
        assert store.provenance(record)[0]["model"] == name
        assert "model" not in store[record.key].attrs
        contents.append((record.key, record.content))
    assert contents[0] == contents[1]


def test_a_later_subset_of_prompts_is_a_hit(store, path):
    tokens = tokens_of([1, 2, 3], [4], [5, 6], [4])
    entry, _ = harvest(store, tokens)
    run, subset = RunKey("m", "", "none"), tokens_of([5, 6], [1, 2, 3])
    run = replace(run, prompt=subset.digest)
    found, rows = store.find_prompts(run, subset, "float32", [("resid_post", 1)])
    assert found.digest == entry.digest and rows == [2, 0]
    part = found.open(chunks=None).mi.prompts(rows)
    assert part["resid_post"].sel(layer=1)[:, 0].values.tolist() == [5, 6, 1, 2, 3]
    assert store.find_prompts(run, tokens_of([1, 2, 3], [7]), "float32") is None
    assert store.find_prompts(run, subset, "bfloat16") is None
    assert store.find_prompts(replace(run, model="other"), subset, "float32") is None
    assert store.find_prompts(run, subset, "float32", [("mlp_out", 0)]) is None
    (path / "index.sqlite").unlink()
    fresh = open_store(path)
    assert fresh.find_prompts(run, subset, "float32") is None
    fresh.rebuild_index()
    assert fresh.find_prompts(run, subset, "float32")[1] == [2, 0]


def test_an_index_that_lies_is_not_believed(store):
    entry, _ = harvest(store, tokens_of([1, 2, 3], [4]))
    wanted = tokens_of([4, 4])
    family = family_of(store, entry)
    store.index.add_prompts(family, entry.path, [wanted.prompt_digest(0)])
    assert store.find_prompts(replace(entry.run, prompt=wanted.digest), wanted, "float32") is None


def family_of(store, entry):
    from mizarr.store.store import _family

    return _family(entry.run, entry.dtype)


def test_segments_make_files_near_64_mib_and_small_runs_one_segment():
    small = tokens_of([1, 2, 3], [4, 5])
    assert default_segment_tokens(small, [spec(hidden=2048)]) == 8
    large = PackedTokens(np.zeros(200_000, np.int32), np.full(200, 1000))
    assert default_segment_tokens(large, [spec(hidden=2048, dtype="bfloat16")]) == 16384
    assert default_segment_tokens(large, [spec(hidden=2048)]) == 8192
    corpus = PackedTokens(np.zeros(10_000_000, np.int32), np.full(10_000, 1000))
    assert default_segment_tokens(corpus, [spec(hidden=2048, dtype="bfloat16")]) == 65536
    pattern = ArraySpec("pattern", "p", ("layer", "pair", "head"), {"head": 32}, "float32", 2)
    assert default_segment_tokens(large, [pattern]) == 1024  # 500.5 pairs a token, 64 KiB


def test_vocabularies_are_kept_by_tokenizer(store):
    store.put_vocabulary("sha256:ab", ["<s>", "é", " the"])
    assert store.vocabulary("sha256:ab") == ["<s>", "é", " the"]
    assert store.vocabulary("sha256:cd") is None


def test_pins_name_keys(store):
    record = store.put_result(ResultKey("s", 1), xr.Dataset({"x": 1}))
    store.pin("figure-3", record.key[:12])
    store.pin("figure-3", record)
    assert store.pins() == {"figure-3": record.key}
    other = store.put_result(ResultKey("s", 2), xr.Dataset({"x": 2}))
    with pytest.raises(ValueError, match="remove it first"):
        store.pin("figure-3", other)
    with pytest.raises(ValueError, match="name of a pin"):
        store.pin("../escape", other)
    store.unpin("figure-3")
    assert store.pins() == {}
    with pytest.raises(EntryNotFound, match="no pin"):
        store.unpin("figure-3")


def test_a_corpus_opens_in_milliseconds(store):
    tokens = PackedTokens(np.arange(60_000, dtype=np.int32) % 100, np.full(6_000, 10))
    entry, _ = harvest(store, tokens, segment_tokens=1 << 14)
    entry.open(chunks=None)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        store.entry(entry.digest).open(chunks=None)
        times.append(time.perf_counter() - start)
    assert (
        min(times) < 0.1
    )  # the target is 0.01 on a quiet machine; this only guards against reading the data
