"""A store that was renamed or removed while it is open takes nothing; no half store is left in its place."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.pipeline import SourceNode, run
from mizarr.stages.forward.models.model import Model
from mizarr.store import Store, open_store
from mizarr.store.errors import StoreError
from mizarr.store.keys import ResultKey

HOOKS = "blocks.0.hook_resid_post"
KEY = ResultKey("stage", 1, {}, {})
RESULT = xr.Dataset({"x": ("i", np.arange(3.0))})


def renamed(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def removed(root: Path) -> None:
    shutil.rmtree(root)


def removed_and_an_empty_folder_in_its_place(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def without_its_description(root: Path) -> None:
    (root / "store.json").unlink()


WAYS = [renamed, removed, removed_and_an_empty_folder_in_its_place, without_its_description]


def computed() -> xr.Dataset:
    raise AssertionError("nothing is computed for a store that is gone")


def capture(store: Store) -> None:
    mizarr.capture("specimen", ["a prompt"], HOOKS, store=store, progress=False)


def imported(store: Store) -> None:
    path = Path(store.address).with_name("states.npz")
    np.savez(path, x=np.zeros((3, 4), np.float32))
    mizarr.import_activations(path, store=store, model="x", names={"x": HOOKS}, tokens=[[1, 2, 3]])


WRITERS: dict[str, Callable[[Store], object]] = {
    "capture": capture,
    "result": lambda store: store.put_result(KEY, RESULT),
    "run": lambda store: run(SourceNode("computed", 1, {}, computed), store),
    "annotation": lambda store: store.annotate("0" * 64, {"1": "a"}),
    "vocabulary": lambda store: store.put_vocabulary("0" * 64, ["a"]),
    "copy": lambda store: open_store(store.address + "-other").copy_to(store),
    "pickled": lambda store: pickle.loads(pickle.dumps(store)).put_result(KEY, RESULT),
    "import": imported,
}


def holdings(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.name.startswith("index.sqlite"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_store_that_is_gone_is_refused_before_anything_is_computed(writer, way, tmp_path, monkeypatch):
    root = tmp_path / "store"
    store = open_store(root, durability="process")
    other = open_store(f"{root}-other", durability="process")
    other.put_result(ResultKey("other", 1, {}, {}), RESULT)
    way(root)
    before = root.exists(), holdings(root)
    monkeypatch.setattr(Model, "forward", lambda *_: pytest.fail("a pass was computed"))
    with pytest.raises(StoreError, match=r"store\.json any more: it was renamed, removed or unmounted"):
        WRITERS[writer](store)
    assert (root.exists(), holdings(root)) == before


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_store_that_goes_while_something_is_computed_leaves_no_half_store(way, tmp_path):
    root = tmp_path / "store"
    store = open_store(root)
    with pytest.raises(StoreError, match=r"store\.json any more"):
        store.put_result(KEY, RESULT, confirm=lambda: way(root))
    assert not root.exists() or not list(root.glob("keys/*/*"))
    assert root.exists() == (way in (removed_and_an_empty_folder_in_its_place, without_its_description))


def test_what_was_renamed_opens_where_it_is_now(tmp_path):
    store = open_store(tmp_path / "store", durability="process")
    capture(store)
    renamed(tmp_path / "store")
    with pytest.raises(StoreError, match="open it at its new place"):
        capture(store)
    moved = open_store(tmp_path / "elsewhere")
    assert moved.verify() == [] and len(list(moved.entries())) == 1
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    capture(store)  # and where it is back, it is one again


READERS: dict[str, Callable[[Store], object]] = {
    "key": lambda store: store[KEY],
    "prefix": lambda store: store["ab"],
    "run": lambda store: store.entry("ab"),
    "record": lambda store: store.record(KEY),
    "planned": lambda store: run(SourceNode("computed", 1, {}, computed), store),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_is_told_that_the_store_is_gone(reader, way, tmp_path):
    open_store(tmp_path / "store", durability="process")
    store = open_store(tmp_path / "store", mode="r")
    way(tmp_path / "store")
    with pytest.raises(StoreError, match="open it at its new place"):
        READERS[reader](store)


def test_a_prefix_whose_description_was_deleted_is_refused():
    pytest.importorskip("obstore")
    store = open_store("memory://gone")
    store.files.delete("store.json")
    with pytest.raises(StoreError, match=r"store\.json any more"):
        store.put_result(KEY, RESULT)
    with pytest.raises(StoreError, match=r"store\.json any more"):
        pickle.loads(pickle.dumps(store)).put_result(KEY, RESULT)
    assert list(store.files.list("")) == []


def test_what_is_in_memory_stays_however_many_addresses_there_are():
    pytest.importorskip("obstore")
    stores = [open_store(f"memory://many-{i}") for i in range(40)]
    for i, store in enumerate(stores):
        store.put_result(ResultKey("stage", i, {}, {}), RESULT)
    for i, store in enumerate(stores):
        for seen in (store, open_store(f"memory://many-{i}"), pickle.loads(pickle.dumps(store))):
            assert [record.label for record in seen.records()] == [f"stage/{i}"]
            xr.testing.assert_identical(seen[ResultKey("stage", i, {}, {})].load(), RESULT)


def test_threads_that_open_one_address_in_memory_at_once_share_it():
    pytest.importorskip("obstore")
    with ThreadPoolExecutor(16) as pool:
        stores = list(pool.map(lambda _: open_store("memory://at-once"), range(64)))
    stores[0].put_result(KEY, RESULT)
    assert all(store.lookup(KEY) is not None for store in stores)


def test_the_command_line_says_so_in_a_line(tmp_path):
    """A run that goes on for long, whose store is renamed meanwhile."""
    code = (
        "import sys, pathlib\nfrom mizarr.stages.forward.capture import capture\n"
        "from mizarr.workflows.cli import main\n"
        "root = pathlib.Path(sys.argv[-1])\nmade = capture.CaptureNode.run\n"
        "def run(*a, **k):\n    root.rename(root.with_name('elsewhere'))\n    return made(*a, **k)\n"
        "capture.CaptureNode.run = run\nmain(sys.argv[1:])\n"
    )
    arguments = ["capture", "specimen", "--text", "a", "--hooks", HOOKS, "--store", str(tmp_path / "store")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "store.json any more" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
