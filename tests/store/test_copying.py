"""Copying and merging stores: what arrives is bit for bit what was recorded, and the first stays."""

import json
import secrets
import shutil

import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.errors import CorruptEntry, ReadOnlyStore
from mizarr.store.files import LocalFolder
from mizarr.store.runs.entries import ArraySpec
from mizarr.workflows.cli import run

VARIABLES = ("resid_post", "mlp_out")
CELLS = [(name, layer) for name in VARIABLES for layer in (0, 1)]
TOKENS = PackedTokens.from_lists([[1, 2, 3], [4, 5, 6, 7, 8], [9]], texts=["a", "b", "c"])


@pytest.fixture(params=["folder", "memory"])
def there(request, tmp_path):
    """Where nothing is yet."""
    if request.param == "folder":
        return str(tmp_path / "target")
    pytest.importorskip("obstore")
    return f"memory://{secrets.token_hex(4)}/x"


@pytest.fixture(params=["bfloat16", "int8"])
def dtype(request):
    """What runs are stored in."""
    return request.param


@pytest.fixture
def arrays(dtype):
    """Keys of the run: those of the cells, and in int8 of their scales."""
    return len(CELLS) * (1 + (dtype == "int8"))


def harvest(store, dtype, cells=CELLS, seed=0, segment_tokens=4):
    specs = [
        ArraySpec(name, f"blocks.*.hook_{name}", ("layer", "token", "hidden"), {"hidden": 3}, dtype, 2)
        for name in VARIABLES
    ]
    entry = store.create_entry(
        RunKey("m", TOKENS.digest, "none"), TOKENS, specs, segment_tokens=segment_tokens,
        attrs={"model": "m", "tokenizer": "sha256:" + "7" * 64},
    )  # fmt: skip
    written = np.float32 if dtype == "int8" else entry.layout("mlp_out").native
    for n, missing in entry.missing(cells).items():
        rows = {
            (variable, layer): np.random.default_rng([seed, n, layer, len(variable)])
            .standard_normal((len(entry.segments[n]), 3))
            .astype(written)
            for variable, layer in missing
        }
        entry.write_segment(n, rows)
    return entry, entry.publish(cells)


def result(store, name, shift=0.0, inputs=None):
    key = ResultKey(name, 1, {}, inputs or {})
    data = {"x": ("a", np.arange(10) + shift), "word": ("a", np.array([f"w{n}" for n in range(10)], object))}
    return store.put_result(key, xr.Dataset(data), provenance={"seconds": 1.5})


@pytest.fixture
def store(tmp_path, dtype):
    made = open_store(tmp_path / "source", durability="process")
    made.put_vocabulary("sha256:" + "7" * 64, ["x", "y"])
    _, records = harvest(made, dtype)
    result(made, "pca", inputs={"states": records[0].content})
    result(made, "mean")
    return made


def shown(store):
    return [(r.key, r.content, r.label) for r in store.records()]


def test_a_copy_holds_the_same_keys_numbers_labels_and_lineage(store, there, arrays):
    done = store.copy_to(open_store(there))
    target = open_store(there, mode="r")
    assert len(done.copied) == arrays + 2 and not done.different and not done.present
    assert shown(target) == shown(store)
    for record in store.records():
        xr.testing.assert_identical(target[record.key].load(), store[record.key].load())
        if record.kind == "activation":  # scales are read as what they belong to
            assert list(store[record.key].data_vars) == [
                record.label.partition("/")[0].removesuffix("__scale")
            ]
        assert target.provenance(record.key) == store.provenance(record.key)
    assert target.verify() == []
    assert target.vocabulary("sha256:" + "7" * 64) == ["x", "y"]
    pca = next(r for r in store.records() if r.label == "pca/1")
    assert target.lineage(pca.content) == store.lineage(pca.content)
    assert next(target.entries()).open().text.values.tolist() == ["a", "b", "c"]


def test_there_and_back_again_is_the_same_bytes(store, there, tmp_path):
    store.copy_to(open_store(there))
    back = open_store(tmp_path / "back")
    open_store(there, mode="r").copy_to(back)
    assert shown(back) == shown(store) and back.verify() == []
    for name in store.files.list("data"):
        if "/seg/" not in name:  # records are one per array in a copy
            assert back.files.get(name) == store.files.get(name), name


def test_a_copied_run_is_complete_and_is_added_to(store, there, dtype):
    target = open_store(there)
    store.copy_to(target, [r for r in store.records() if r.label.startswith("resid_post")])
    (entry,) = target.entries()
    assert sorted(entry.published()) == [("resid_post", 0), ("resid_post", 1)]
    assert set(entry.missing(CELLS)[0]) == {("mlp_out", 0), ("mlp_out", 1)}
    harvest(target, dtype)
    assert shown(target) == [each for each in shown(store) if "/1" not in each[2] or "_" in each[2]]
    found = target.find_prompts(RunKey("m", "other", "none"), TOKENS.select([1]), dtype, CELLS)
    assert found is not None and found[1] == [1]


def test_a_copy_that_is_cut_off_shows_nothing_half_and_resumes(store, there, monkeypatch, arrays):
    target, calls = open_store(there), []
    real = type(target.files).put_new

    def dies(self, name, data):
        calls.append(name)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return real(self, name, data)

    monkeypatch.setattr(type(target.files), "put_new", dies)
    with pytest.raises(KeyboardInterrupt):
        store.copy_to(target)
    monkeypatch.undo()
    assert target.verify() == []
    first = len(list(target.records()))
    done = store.copy_to(open_store(there))
    assert len(done.copied) + len(done.present) == arrays + 2 and len(done.present) == first
    assert shown(open_store(there)) == shown(store) and open_store(there).verify() == []


def begun_with_other_texts(store, target, where, monkeypatch):
    """A copy of the run as somebody else captured it, with other texts, killed after some of its labels."""
    other = open_store(where, durability="process")
    texts = PackedTokens.from_lists([[1, 2, 3], [4, 5, 6, 7, 8], [9]], texts=["x", "y", "z"])
    spans = [np.arange(9, dtype=np.int32) + n for n in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(__name__ + ".TOKENS", PackedTokens(texts.ids, texts.row_size, texts.texts, *spans))
        harvest(other, store.entry("").dtype)
    real, calls = type(target.files).put_new, []

    def dies(self, name, data):
        if name.endswith("char_end/zarr.json"):
            raise KeyboardInterrupt
        calls.append(name)
        return real(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(type(target.files), "put_new", dies)
        with pytest.raises(KeyboardInterrupt):
            other.copy_to(target)
    assert calls and list(target.records()) == [] and list(target.entries()) == []
    return other


def test_labels_that_a_killed_copy_began_are_in_nobodys_way(store, there, tmp_path, monkeypatch, arrays):
    """Whoever comes next brings ids and sizes; of the texts, half there, nothing is read."""
    target = open_store(there)
    other = begun_with_other_texts(store, target, tmp_path / "other", monkeypatch)
    done = store.copy_to(target)
    assert len(done.copied) == arrays + 2 and not done.different
    assert target.verify() == [] and shown(open_store(there)) == shown(store)
    run = open_store(there).entry("").open()
    assert "text" not in run.coords and "char_start" not in run.coords
    xr.testing.assert_identical(run.token_id.load(), store.entry("").open().token_id.load())
    assert len(other.copy_to(target).present) == arrays


def test_a_run_is_captured_where_a_copy_of_it_was_killed(store, there, tmp_path, monkeypatch, dtype):
    target = open_store(there)
    begun_with_other_texts(store, target, tmp_path / "other", monkeypatch)
    harvest(target, dtype)
    assert target.verify() == []
    run = open_store(there).entry("").open().load()
    assert "char_start" not in run.coords
    assert run.identical(store.entry("").open().load().drop_vars("text"))


def test_a_run_that_somebody_else_describes_meanwhile_is_added_to(
    store, tmp_path, monkeypatch, dtype, arrays
):
    """As two merges do at once: their groups differ in what people are told, not in how the run is cut."""
    target = open_store(tmp_path / "target", durability="process")
    real, group = LocalFolder.put_new, f"{store.entry('').path}/zarr.json"

    def put_new(self, name, data):
        if self.root == target.files.root and name == group and not target.files.size(group):
            attributes = json.loads(data)["attributes"]
            assert attributes.pop("tokenizer") and attributes.pop("mizarr")
            real(self, name, store.entry("")._group_metadata(attributes))
        return real(self, name, data)

    monkeypatch.setattr(LocalFolder, "put_new", put_new)
    done = store.copy_to(target)
    assert len(done.copied) == arrays + 2 and not done.different and target.verify() == []


def test_what_is_collected_while_it_is_copied_is_as_if_it_had_gone_before(store, there, arrays):
    target, records = open_store(there), list(store.records())
    gone = store.entry("").path

    def collect(done):
        for record in records:
            if record.data == gone:
                store.files.delete(record.path)
        store.files.remove_tree(gone)

    some = sorted(records, key=lambda record: record.data == gone)  # the results first
    done = store.copy_to(target, some, collect)
    assert len(done.copied) == 2 and not done.different
    assert target.verify() == [] and {r.kind for r in target.records()} == {"result"}


def test_the_first_stays_where_contents_differ_and_that_is_told(store, tmp_path, dtype, arrays):
    target = open_store(tmp_path / "target")
    harvest(target, dtype, seed=9)
    kept = result(target, "mean", shift=1.0)
    before = shown(target)
    done = store.copy_to(target)
    assert len(done.different) == arrays + 1 and len(done.copied) == 1
    assert set(before) <= set(shown(target)) and target.verify() == []
    assert float(target[kept.key]["x"][0]) == 1.0


def test_a_run_cut_in_other_segments_stays_as_it_is(store, tmp_path, dtype, arrays):
    target = open_store(tmp_path / "target")
    harvest(target, dtype, segment_tokens=2, cells=CELLS[:1])
    done = store.copy_to(target, [r for r in store.records() if "_" in r.label])
    assert len(done.different) == arrays and target.verify() == []


def test_a_damaged_source_is_refused_and_nothing_of_it_shows(store, there):
    entry = next(store.entries())
    path = store.path / entry.path / "mlp_out/c/0/1/0"
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptEntry, match="mlp_out/c/0/1/0"):
        store.copy_to(open_store(there))
    held = {r.label for r in open_store(there).records()}
    assert "mlp_out/0" not in held
    assert open_store(there).verify() == []


def test_a_target_that_is_read_only_or_the_store_itself(store, there, arrays):
    open_store(there)
    with pytest.raises(ReadOnlyStore):
        store.copy_to(open_store(there, mode="r"))
    assert len(store.copy_to(store).present) == arrays + 2


def test_names_that_lead_out_of_the_store_are_refused(store, there, tmp_path):
    """A manifest somebody made, sound by its own check, that names a file elsewhere."""
    from mizarr.store.sealed import sealed, unsealed

    (tmp_path / "secret").write_bytes(b"secret")
    record = next(r for r in store.records() if r.label == "mean/1")
    path = store.path / record.data / "manifest.json"
    told = unsealed("x", path.read_bytes(), ("content", "files"))
    told["files"]["../../../../secret"] = [6, "sha256:" + "0" * 64]
    path.write_bytes(sealed(told))
    with pytest.raises(CorruptEntry, match="outside of its folder"):
        store.copy_to(open_store(there))
    with pytest.raises(CorruptEntry, match="outside of its folder"):
        open_store(store.path)[record.key]
    assert any("unreadable" in str(damage) for damage in store.verify())


def test_the_commands_copy_choose_and_merge(store, tmp_path, capsys, arrays):
    def said(*arguments):
        assert run([*map(str, arguments), "--quiet"]) == 0
        return capsys.readouterr()

    digest, mean = next(store.entries()).digest, next(r for r in store.records() if r.label == "mean/1")
    source = store.path
    said("copy", source, tmp_path / "runs", "--runs", digest[:8])
    assert len(shown(open_store(tmp_path / "runs"))) == arrays
    said("copy", source, tmp_path / "one", "--results", mean.key[:8])
    assert shown(open_store(tmp_path / "one")) == [(mean.key, mean.content, "mean/1")]
    other = open_store(tmp_path / "other")
    result(other, "third")
    result(other, "mean", shift=2.0)
    told = said("merge", source, tmp_path / "other", tmp_path / "all")
    assert f"{mean.key[:12]} is in the target with other content" in told.err
    assert len(shown(open_store(tmp_path / "all"))) == arrays + 3
    found = json.loads(said("copy", source, tmp_path / "all", "--json").out)
    assert len(found[0]["present"]) == arrays + 2 and found[0]["bytes"] == 0
    assert run(["copy", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()
    assert run(["copy", str(source), str(tmp_path / "y"), "--runs", "zzzz"]) == 2
    assert not (tmp_path / "y").exists()


def test_copying_writes_nothing_to_its_source(store, tmp_path):
    shutil.copytree(store.path, tmp_path / "before")
    open_store(store.path, mode="r").copy_to(open_store(tmp_path / "target"))
    before, after = LocalFolder(tmp_path / "before"), store.files
    assert sorted(before.list("")) == sorted(after.list(""))
