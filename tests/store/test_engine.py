"""`xarray.open_dataset(FOLDER, engine="mizarr")`: lazily, in float32, without importing mizarr."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, open_store
from mizarr.store.errors import CorruptEntry, EntryNotFound
from mizarr.store.keys import ResultKey, RunKey
from mizarr.store.runs.entries import ArraySpec

VALUES = np.linspace(-3, 3, 3 * 5 * 4).reshape(3, 5, 4).astype(ml_dtypes.bfloat16)
RESID = ArraySpec(
    "resid_post", "blocks.{}.hook_resid_post", ("layer", "token", "hidden"), {"hidden": 4}, "bfloat16", 3
)

FRESH = """
import sys
import xarray
run = xarray.open_dataset(sys.argv[1], engine="mizarr")
assert "torch" not in sys.modules
states = run["resid_post"]
assert str(states.dtype) == "float32", states.dtype
assert not states.variable._in_memory
assert run.mi.prompt(1).sizes["position"] == 3
chunked = xarray.open_dataset(sys.argv[1], engine="mizarr", chunks={"token": 2})["resid_post"]
assert chunked.chunks is not None
print(float((states * states).sum()), float(chunked.sum()), states["layer"].values.tolist())
print(xarray.open_dataset(sys.argv[2], engine="mizarr")["logit"].values.tolist())
"""


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


@pytest.fixture
def run(store):
    """Folder of a run of two prompts in bfloat16."""
    tokens = PackedTokens.from_lists([[1, 2], [3, 4, 5]], ["a b", "c d e"])
    entry = store.create_entry(RunKey("m", tokens.digest, "none"), tokens, [RESID], segment_tokens=2)
    cells = [("resid_post", layer) for layer in range(3)]
    for n, part in enumerate(entry.segments):
        entry.write_segment(n, {cell: VALUES[cell[1], part.start : part.stop].copy() for cell in cells})
    entry.publish(cells)
    return entry.folder.path(entry.path)


@pytest.fixture
def result(store):
    """Folder of a result."""
    dataset = xr.Dataset({"logit": ("token", np.array([1.5, 2.5], np.float32))})
    record = store.put_result(ResultKey("lens", 1, {}, {}), dataset)
    return store.files.path(record.data)


def test_a_process_that_never_imports_mizarr_reads_runs_and_results(run, result):
    given = [sys.executable, "-c", FRESH, str(run), str(result)]
    done = subprocess.run(given, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    wide = VALUES.astype("f4")
    squares, total, layers = done.stdout.splitlines()[0].split(" ", maxsplit=2)
    assert float(squares) == pytest.approx(float((wide * wide).sum()), rel=1e-6)
    assert float(total) == pytest.approx(float(wide.sum()), abs=1e-5)
    assert layers == "[0, 1, 2]"
    assert done.stdout.splitlines()[1] == "[1.5, 2.5]"


def test_plain_open_zarr_gives_the_same_of_a_result(result):
    plain = xr.open_zarr(result / "dataset", consolidated=False)
    xr.testing.assert_equal(plain, xr.open_dataset(result, engine="mizarr"))
    told = xr.open_dataset(result / "dataset", engine="mizarr")
    xr.testing.assert_equal(plain, told)


def test_the_engine_gives_what_the_store_gives(store, run):
    (entry,) = store.entries()
    xr.testing.assert_identical(entry.open(chunks=None), xr.open_dataset(run, engine="mizarr"))
    less = xr.open_dataset(run, engine="mizarr", drop_variables="text")
    assert "text" not in less.coords and "text" in entry.open().coords


def test_another_path_is_refused_with_what_to_do(store, tmp_path):
    for place in (tmp_path, tmp_path / "none", store.files.root):
        with pytest.raises(EntryNotFound, match="opens the folder of a stored run or result"):
            xr.open_dataset(place, engine="mizarr")


def test_a_damaged_result_is_told(result):
    (result / "dataset" / "logit" / "zarr.json").write_text("{}")
    with pytest.raises(CorruptEntry, match=r"zarr\.json"):
        xr.open_dataset(result, engine="mizarr")
