"""Upkeep: damage is found and mended where it is, and gc never takes what somebody needs."""

import json
import os
import shutil
import time

import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.errors import EntryNotFound, ReadOnlyStore
from mizarr.store.runs.entries import ArraySpec

SPECS = [
    ArraySpec(name, f"blocks.*.hook_{name}", ("layer", "token", "hidden"), {"hidden": 2}, "float32", 2)
    for name in ("resid_post", "mlp_out")
]
CELLS = [(spec.variable, layer) for spec in SPECS for layer in (0, 1)]
TOKENS = PackedTokens.from_lists([[1, 2, 3], [4, 5, 6, 7, 8], [9]], texts=["a", "b", "c"])
DAY = 24 * 3600.0


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


def harvest(store, tokens=TOKENS, model="m"):
    """Compute what is missing, as a capture does; returns the entry, the records and the cells computed."""
    entry = store.create_entry(RunKey(model, tokens.digest, "none"), tokens, SPECS, segment_tokens=4)
    computed = []
    for n, cells in entry.missing(CELLS).items():
        at = entry.segments[n]
        ids = tokens.ids[at.start : at.stop].astype("f4")
        rows = {(v, layer): np.stack([ids, ids * 0 + layer + len(v)], 1) for v, layer in cells}
        entry.write_segment(n, rows)
        computed += [(n, cell) for cell in cells]
    return entry, entry.publish(CELLS), computed


def result(store, name, inputs=None, size=10):
    key = ResultKey(name, 1, {}, inputs or {})
    return store.put_result(key, xr.Dataset({"x": ("a", np.arange(size) + sum(map(ord, name)) * 1.0)}))


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)


def age(path, seconds):
    """Make a file, or all below a folder, look `seconds` older."""
    then = time.time() - seconds
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then))


def age_all(store, seconds):
    age(store.path, seconds)
    store.index.clear()


def test_a_sound_store_verifies(store):
    harvest(store)
    result(store, "pca")
    seen = []
    assert store.verify(progress=lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_flipped_bytes_are_pinned_to_their_file_and_mended_alone(store):
    entry, before, _ = harvest(store)
    path = store.path / entry.path / "resid_post/c/1/1/0"
    good = path.read_bytes()
    flip(path)
    assert store.verify(quick=True) == []
    (damage,) = store.verify()
    assert (damage.data, damage.file) == (entry.path, "resid_post/c/1/1/0")
    assert damage.expected.startswith("sha256:") and damage.found.startswith("sha256:")

    store.quarantine(damage)
    assert store.verify() == []
    assert store.lookup(entry.key("resid_post", 1)) is None
    assert store.lookup(entry.key("resid_post", 0)) is not None
    assert store.lookup(entry.key("mlp_out", 1)) is not None
    aside = [p for p in (store.path / "quarantine").rglob("*") if p.is_file()]
    assert any(p.name == "0" and p.read_bytes() != good for p in aside)

    _again, after, computed = harvest(store)
    assert computed == [(1, ("resid_post", 1))]
    assert {r.key: r.content for r in after} == {r.key: r.content for r in before}
    assert path.read_bytes() == good and store.verify() == []
    np.testing.assert_array_equal(
        store.entry(entry.digest).open()["resid_post"].sel(layer=1)[:, 0].values, TOKENS.ids.astype("f4")
    )


def test_truncated_and_missing_shards_are_found_quickly(store):
    entry, _, _ = harvest(store)
    first, second = (store.path / entry.path / f"mlp_out/c/0/{n}/0" for n in (0, 2))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    found = store.verify(quick=True)
    assert [damage.file for damage in found] == ["mlp_out/c/0/0/0", "mlp_out/c/0/2/0"]
    assert found[0].found.endswith(" bytes") and found[1].found == "missing"
    for damage in found:
        store.quarantine(damage)
    _, _, computed = harvest(store)
    assert computed == [(0, ("mlp_out", 0)), (2, ("mlp_out", 0))] and store.verify() == []


def test_an_open_dataset_sees_the_mended_values_after_reopening(store):
    entry, _, _ = harvest(store)
    opened = entry.open(chunks="segment")
    assert opened["resid_post"].sum().values > 0  # maps every shard
    path = store.path / entry.path / "resid_post/c/0/0/0"
    flip(path)
    store.quarantine(store.verify()[0])
    harvest(store)
    fresh = store.entry(entry.digest).open(chunks="segment").mi.numpy("resid_post", 0, 0)
    assert fresh[:, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["seg", "manifest"])
def test_damaged_bookkeeping_costs_a_commit_and_no_data(store, name):
    entry, before, _ = harvest(store)
    victim = sorted(p for p in (store.path / entry.path / name).glob("*.json") if p.name != "zarr.json")[0]
    victim.write_text("{ torn")
    (damage,) = store.verify()
    assert damage.file == f"{name}/{victim.name}" and damage.found == "unreadable"
    store.quarantine(damage)
    _, after, _ = harvest(store)
    assert {r.key: r.content for r in after} == {r.key: r.content for r in before}
    assert store.verify() == []


def test_a_damaged_array_description_is_written_again(store):
    entry, before, _ = harvest(store)
    path = store.path / entry.path / "mlp_out/zarr.json"
    path.write_text(path.read_text().replace('"f', '"g', 1))
    (damage,) = store.verify()
    assert damage.file == "mlp_out/zarr.json"
    store.quarantine(damage)
    assert store.lookup(entry.key("mlp_out", 0)) is None and store.lookup(entry.key("resid_post", 0))
    _, after, computed = harvest(store)
    assert computed == [] and {r.content for r in after} == {r.content for r in before}
    assert store.verify() == []


def test_damaged_labels_withdraw_the_run(store):
    entry, before, _ = harvest(store)
    flip(store.path / entry.path / "token_id/c/0")
    (damage,) = store.verify()
    store.quarantine(damage)
    assert list(store.records()) == [] and list(store.entries()) == []
    _, after, computed = harvest(store)
    assert len(computed) == 12 and {r.content for r in after} == {r.content for r in before}


def test_a_damaged_result_is_withdrawn_and_computed_again(store):
    record = result(store, "pca")
    flip(store.path / record.data / "dataset/x/c/0")
    (damage,) = store.verify()
    assert damage.file == "dataset/x/c/0"
    store.quarantine(damage)
    assert store.lookup(record.key) is None and store.verify() == []
    assert result(store, "pca").content == record.content


def test_a_key_that_cannot_be_read_or_leads_nowhere_is_damage(store):
    torn, lost = result(store, "torn"), result(store, "lost")
    (store.path / torn.path).write_text("{")
    shutil.rmtree(store.path / lost.data)
    found = {damage.file: damage for damage in store.verify()}
    assert set(found) == {f"{torn.key}.json", "manifest.json"}
    for damage in found.values():
        store.quarantine(damage)
    assert store.verify() == [] and list(store.records()) == []
    assert result(store, "torn").content == torn.content


def test_a_read_only_store_verifies_and_does_not_quarantine(store):
    entry, _, _ = harvest(store)
    flip(store.path / entry.path / "resid_post/c/0/0/0")
    reader = open_store(store.path, mode="r")
    (damage,) = reader.verify()
    with pytest.raises(ReadOnlyStore):
        reader.quarantine(damage)


def test_gc_without_a_quota_removes_leftovers_only(store):
    entry, records, _ = harvest(store)
    kept = result(store, "pca")
    stray = store.path / entry.path / "resid_post/c/0/0/.0.123.abcd"
    stray.write_bytes(b"x" * 100)
    attempt = store.path / "data/ab" / ("ab" + "0" * 62 + ".1234")
    (attempt / "dataset").mkdir(parents=True)
    (attempt / "dataset/zarr.json").write_text("{}")
    age_all(store, 2 * DAY)
    fresh = store.path / entry.path / "resid_post/c/0/1/.0.124.abcd"
    fresh.write_bytes(b"somebody is writing this")
    look = store.gc(dry_run=True)
    assert look.dry_run and attempt.exists() and stray.exists()
    report = store.gc()
    assert (report.removed, report.leftovers) == (look.removed, look.leftovers)
    assert report.removed == (str(attempt.relative_to(store.path)),)
    assert report.leftovers == (str(stray.relative_to(store.path)),) and report.bytes == 102
    assert not stray.exists() and not attempt.exists() and fresh.exists()
    assert store.verify() == [] and len(list(store.records())) == len(records) + 1
    assert store.open_result(kept)["x"].size == 10


def test_an_unfinished_run_stays_until_it_is_old(store):
    entry = store.create_entry(RunKey("m", TOKENS.digest, "none"), TOKENS, SPECS, segment_tokens=4)
    entry.write_segment(0, {("resid_post", 0): np.zeros((4, 2), "f4")})
    assert store.gc().removed == ()
    age_all(store, 2 * DAY)
    assert store.gc().removed == (entry.path,)
    assert list(store.entries()) == []


def test_quota_takes_the_least_recently_used_first(store):
    old, used, new = (result(store, name, size=1000) for name in ("old", "used", "new"))
    age_all(store, 2 * DAY)
    store.index._used.clear()
    store.open_result(used)
    age(store.path / old.data, 3 * DAY)
    each = store.usage()[0].bytes
    report = store.gc(quota=2 * each + 100)
    assert report.removed == (old.data,) and report.over_quota == 0
    assert store.lookup(old.key) is None
    report = store.gc(quota=each + 100)
    assert report.removed == (new.data,)
    assert [r.key for r in store.records()] == [used.key] and store.verify() == []


def test_what_is_pinned_and_all_it_was_made_from_stays(store):
    entry, records, _ = harvest(store)
    middle = result(store, "middle", {"resid": records[0].content})
    top = result(store, "top", {"m": middle.content})
    loose = result(store, "loose", {"m": middle.content})
    age_all(store, 2 * DAY)
    store.pin("figure", top)
    report = store.gc(quota=0)
    assert report.removed == (loose.data,) and report.over_quota == report.kept_bytes > 0
    assert {r.key for r in store.records()} == {r.key for r in [*records, middle, top]}
    assert store.verify() == []
    store.unpin("figure")
    assert set(store.gc(quota=0).removed) == {entry.path, middle.data, top.data}
    assert list(store.records()) == [] and store.verify() == []


def test_what_is_new_stays_with_its_inputs(store):
    _entry, records, _ = harvest(store)
    age_all(store, 2 * DAY)
    result(store, "new", {"resid": records[0].content})
    assert store.gc(quota=0).removed == ()


def test_what_is_leased_or_claimed_stays(store):
    entry, _records, _ = harvest(store)
    read = result(store, "read")
    age_all(store, 2 * DAY)
    with store.lease(read), entry.claim(0) as mine:
        assert mine
        assert store.gc(grace=0, quota=0).removed == ()
    assert set(store.gc(quota=0, grace=DAY).removed) == {entry.path, read.data}


def test_a_reader_during_gc_meets_a_miss_and_never_a_torn_entry(store, monkeypatch):
    record = result(store, "x")
    age_all(store, 2 * DAY)
    steps = []
    delete = type(store.files).delete

    def watched(self, name):
        delete(self, name)
        whole = (store.path / record.data / "dataset/x/c/0").exists()
        steps.append((name, store.lookup(record.key) is None, whole))

    monkeypatch.setattr(type(store.files), "delete", watched)
    store.gc(quota=0)
    assert steps[0] == (record.path, True, True)
    assert all(missed for _, missed, _ in steps)


def test_usage_lists_folders_by_size(store):
    harvest(store)
    big = result(store, "big", size=100_000)
    first, second = store.usage()
    assert first.data == big.data and first.kind == "result" and first.labels == ("big/1",)
    assert first.bytes > 800_000 and second.kind == "activation" and len(second.labels) == 4


def test_lineage_walks_back_to_the_run(store):
    _, records, _ = harvest(store)
    middle = result(store, "middle", {"resid": records[0].content, "gone": "sha256:00"})
    top = result(store, "top", {"m": middle.content})
    tree = store.lineage(top.content)
    assert tree["label"] == "top/1" and tree["request"]["stage"] == "top"
    assert tree["inputs"]["m"]["inputs"]["gone"] == {"content": "sha256:00"}
    run = tree["inputs"]["m"]["inputs"]["resid"]
    assert run["label"] == records[0].label and run["request"]["model"] == "m"
    json.dumps(tree)
    with pytest.raises(EntryNotFound, match="mizarr ls"):
        store.lineage("sha256:11")
