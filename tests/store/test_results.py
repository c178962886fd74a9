"""Derived results: what goes in comes out, the first one stands, nothing half-written is seen."""

import itertools
import subprocess
import sys
import time
import warnings
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr

from mizarr.store import open_store, results
from mizarr.store.errors import CorruptEntry, ReadOnlyStore, ShapeError, StoreFull
from mizarr.store.keys import ResultKey
from tests.memory import PEAK, printed

KEY = ResultKey("lens", 1, {"k": 2}, {"resid": "sha256:ab"})


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


def labelled(scale=1.0):
    return xr.Dataset(
        {
            "logit": (
                ("layer", "token"),
                np.array([[1.5, np.nan, -0.0], [0.0, np.inf, 7]], np.float32) * np.float32(scale),
                {"units": "logits", "long_name": "logit of the target"},
            ),
            "rank": (("layer", "token"), np.array([[0, 1, 2], [2, 1, 0]], np.int32)),
            "hit": (("token",), np.array([True, False, True])),
        },
        coords={
            "layer": [0, 5],
            "token": np.array(["The", " é", ""]),
            "note": ("token", np.array(["a", "bb", "\U0001f600"], object)),
            "scale": 2.5,
        },
        attrs={"model": "tiny", "shape": (2, 3), "share": np.float32(0.5)},
    )


def test_a_result_comes_back_with_values_coords_and_attributes(store):
    record = store.put_result(KEY, labelled())
    found = store.open_result(KEY)
    for name, variable in labelled().variables.items():
        assert found[name].dims == variable.dims
        if variable.dtype.kind in "OU":
            assert found[name].values.tolist() == variable.values.tolist(), name
        else:
            np.testing.assert_array_equal(found[name].values, variable.values)
    assert (
        found["logit"].dtype == np.float32 and found["rank"].dtype == np.int32 and found["hit"].dtype == bool
    )
    assert np.signbit(found["logit"].values[0, 2])
    assert found["logit"].attrs == {"units": "logits", "long_name": "logit of the target"}
    assert found.attrs == {"model": "tiny", "shape": [2, 3], "share": 0.5}
    assert set(found.coords) == {"layer", "token", "note", "scale"}
    assert float(found["rank"].sel(layer=5, token=" é")) == 1
    assert store.lookup(KEY) == record and record.kind == "result" and record.label == "lens/1"
    assert store[record.key[:8]].identical(found)


def test_a_unit_of_seconds_stays_a_number(store):
    store.put_result(KEY, xr.Dataset({"wall": ("run", np.array([1.0, 2.0]), {"units": "seconds"})}))
    found = store.open_result(KEY)["wall"]
    assert found.dtype == np.float64 and found.attrs == {"units": "seconds"}


def test_plain_xarray_reads_a_result(store):
    record = store.put_result(KEY, labelled())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = xr.open_zarr(store.path / record.data / "dataset", consolidated=False)
    np.testing.assert_array_equal(plain["logit"].values, labelled()["logit"].values)
    assert plain["note"].values.tolist() == ["a", "bb", "\U0001f600"]


def test_opening_reads_no_values(store, monkeypatch):
    record = store.put_result(KEY, xr.Dataset({"x": ("a", np.arange(5.0))}))
    chunk = store.path / record.data / "dataset" / "x" / "c" / "0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    found = store.open_result(KEY)
    assert found["x"].shape == (5,)
    with pytest.raises(CorruptEntry, match=r"x of .*verify --quarantine"):
        found["x"].load()


def test_a_chunk_that_is_gone_is_damage_and_not_zeros(store):
    record = store.put_result(KEY, xr.Dataset({"x": ("a", np.arange(5.0))}))
    (store.path / record.data / "dataset" / "x" / "c" / "0").unlink()
    with pytest.raises(CorruptEntry, match="found no file"):
        store.open_result(KEY)


def test_scalars_and_empty_arrays_are_results_too(store):
    store.put_result(KEY, xr.Dataset({"s": np.float32(3), "e": ("q", np.zeros(0, np.float32)), "n": "hello"}))
    found = store.open_result(KEY).load()
    assert (float(found["s"]), found["e"].shape, str(found["n"].values)) == (3.0, (0,), "hello")


def test_content_depends_on_what_was_computed_and_not_on_how_it_lies_on_disk(store):
    base = labelled()
    record = store.put_result(KEY, base)

    versions = itertools.count(2)

    def content(dataset):
        return store.put_result(ResultKey("lens", next(versions)), dataset).content

    assert content(base) == record.content
    assert content(base.chunk({"token": 2})) == record.content
    assert content(base.assign_coords(token=base.token.astype("<U40"))) == record.content
    assert content(base[["hit", "rank", "logit"]]) == record.content
    assert content(labelled(scale=2)) != record.content
    assert content(base.rename(logit="logits")) != record.content
    assert content(base.transpose("token", "layer")) != record.content
    assert content(base.assign(rank=base["rank"].astype("i8"))) != record.content
    assert content(base.assign_attrs(model="other")) != record.content
    assert content(base.reset_coords("scale")) != record.content
    assert content(base.assign_coords(layer=[0, 6])) != record.content


def test_variables_and_labels_come_back_by_name_however_a_folder_is_listed(store):
    names = list("qwertyuiopasdfgh")
    labels = {f"of_{name}": ("x", np.arange(3.0)) for name in names}
    store.put_result(KEY, xr.Dataset({name: ("x", np.arange(3.0)) for name in names}, labels, {"about": 1}))
    for _ in range(5):
        found = store.open_result(KEY)
        assert list(found.data_vars) == sorted(names) and list(found.coords) == sorted(labels)
        assert found.attrs == {"about": 1}


def test_chunked_results_of_any_chunking_come_back_equal(store):
    values = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    lazy = da.from_array(values, chunks=((3, 1, 3), (2, 3), 3))
    record = store.put_result(KEY, xr.Dataset({"x": (("a", "b", "c"), lazy)}))
    np.testing.assert_array_equal(store.open_result(KEY)["x"].values, values)
    again = store.put_result(ResultKey("eager", 1), xr.Dataset({"x": (("a", "b", "c"), values)}))
    assert again.content == record.content


def test_a_large_chunked_result_streams_and_opens_chunked(store):
    script = f"""
import sys
import dask.array as da, numpy as np, xarray as xr, dask
from mizarr.store import open_store
from mizarr.store.keys import ResultKey
store = open_store(sys.argv[1], durability="process")
store.put_result(ResultKey("small", 1), xr.Dataset({{"x": ("a", da.zeros(4, chunks=2))}}))
before = {PEAK}
x = da.arange(100_000_000, chunks=1_000_000, dtype="f4")
with dask.config.set(scheduler="synchronous"):
    store.put_result(ResultKey("big", 1), xr.Dataset({{"x": ("a", x)}}))
print(({PEAK} - before) >> 20)
"""
    extra = printed(script, str(store.path))
    assert extra < 190, f"{extra} MiB extra for a result of 381 MiB"
    found = store.open_result(ResultKey("big", 1))
    assert found.chunks["a"][0] == 1_000_000 and found.sizes["a"] == 100_000_000


def test_text_stays_text_whether_a_result_opens_whole_or_chunked(store, monkeypatch):
    words = np.array(["so", "far", "and no farther"])
    dataset = xr.Dataset({"word": ("n", words)}, coords={"label": ("n", words[::-1])})
    key = ResultKey("texts", 1, {}, {})
    store.put_result(key, dataset)
    whole = store.open_result(key)
    monkeypatch.setattr(results, "_ONE_CHUNK_BYTES", 0)
    chunked = store.open_result(key)
    for found in (whole, chunked):
        assert {found[name].dtype.kind for name in ("word", "label")} == {"T"}
        assert found["word"].values.tolist() == words.tolist()
        assert found["label"].values.tolist() == words[::-1].tolist()
    assert chunked["word"].chunks == ((3,),)
    assert whole["word"].chunks is None


def test_the_first_result_stands_and_the_second_attempt_leaves_only_a_note(store, caplog):
    first = store.put_result(KEY, labelled())
    second = store.put_result(KEY, labelled(scale=2), provenance={"try": 2})
    assert second == first
    assert len(list((store.path / "data").glob("*/*"))) == 1
    assert "not deterministic" in caplog.text
    notes = store.provenance(KEY)
    assert [("nondeterministic" in note) for note in notes] == [False, True]
    np.testing.assert_array_equal(store.open_result(KEY)["logit"].values, labelled()["logit"].values)


def test_provenance_says_what_was_asked_of_what_with_which_versions(store):
    store.put_result(KEY, labelled(), provenance={"seconds": 1.25})
    (note,) = store.provenance(KEY)
    assert note["request"]["inputs"] == {"resid": "sha256:ab"} and note["seconds"] == 1.25
    assert note["versions"]["numpy"] == np.__version__


def test_a_failing_computation_leaves_nothing_behind(store):
    def fail(block):
        raise RuntimeError("boom")

    lazy = da.ones(4, chunks=2).map_blocks(fail, dtype=float, meta=np.empty(0))
    with pytest.raises(RuntimeError, match="boom"):
        store.put_result(KEY, xr.Dataset({"x": ("a", lazy)}))
    assert store.lookup(KEY) is None and not list((store.path / "data").glob("*/*"))


@pytest.mark.parametrize("chunks", [None, {"token": 2}])
def test_a_full_disk_is_told_as_such_and_cleaned_up(store, monkeypatch, chunks):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    dataset = labelled() if chunks is None else labelled().chunk(chunks)
    monkeypatch.setattr(*((Path, "write_bytes") if chunks is None else (xr.Dataset, "to_zarr")), full)
    with pytest.raises(StoreFull, match="mizarr gc"):
        store.put_result(KEY, dataset)
    assert not list((store.path / "data").glob("*/*"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.array(["2020-01-01"], "M8[ns]"), "units"),
        (np.array(["a", 1, "b"], object), "1 .int."),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.zeros(2, np.longdouble), "dtype float128"),
    ],
)
def test_values_without_a_portable_form_are_refused_by_name(store, values, said):
    with pytest.raises(ShapeError, match=f"'when'.*{said}"):
        store.put_result(KEY, xr.Dataset({"when": ("a", values)}))


def test_bfloat16_is_refused_with_the_cast_to_make(store):
    import ml_dtypes

    with pytest.raises(ShapeError, match="float32"):
        store.put_result(KEY, xr.Dataset({"x": ("a", np.zeros(2, ml_dtypes.bfloat16))}))


def test_a_read_only_store_refuses_results(store):
    reader = open_store(store.path, mode="r")
    with pytest.raises(ReadOnlyStore, match="mode='a'"):
        reader.put_result(KEY, labelled())


def test_a_result_whose_folder_is_gone_is_corrupt_not_missing(store):
    import shutil

    record = store.put_result(KEY, labelled())
    shutil.rmtree(store.path / record.data)
    with pytest.raises(CorruptEntry, match=record.short):
        store.open_result(KEY)


def test_many_processes_storing_one_result_agree_on_one(store):
    script = """
import sys, time
import numpy as np, xarray as xr
from mizarr.store import open_store
from mizarr.store.keys import ResultKey
store = open_store(sys.argv[1], durability="process")
time.sleep(max(0, float(sys.argv[2]) - time.time()))
record = store.put_result(ResultKey("race", 1), xr.Dataset({"x": ("a", np.arange(10.0))}))
print(record.data)
"""
    start = str(time.time() + 4)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(store.path), start], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    told = {run.communicate()[0].strip() for run in runs}
    assert len(told) == 1
    assert [str(p.relative_to(store.path)) for p in (store.path / "data").glob("*/*")] == list(told)
