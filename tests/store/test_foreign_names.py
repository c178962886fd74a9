"""Names out of a foreign store lead nowhere but into the store they are read for; links lead nowhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.store import open_store
from mizarr.store.errors import CorruptEntry, MizarrError
from mizarr.store.files import open_folder
from mizarr.store.files.folder import checked
from mizarr.store.keys import ResultKey
from mizarr.store.runs.vocabularies import vocabulary_path
from mizarr.store.sealed import sealed, unsealed

SECRET = b"the victim's own file"
LEADING_OUT = [
    "../x",
    "a/../../x",
    "/etc/x",
    "a//x",
    "a/./x",
    "..",
    ".",
    "a/..",
    "a\\x",
    "a\x00x",
    "a\nx",
    "a/\x1bx",
]
DOORS = {
    "get": lambda folder, name: folder.get(name),
    "stat": lambda folder, name: folder.stat(name),
    "put": lambda folder, name: folder.put_new(name, b"x"),
    "mark": lambda folder, name: folder.mark(name, b"x"),
    "delete": lambda folder, name: folder.delete(name),
}


@pytest.mark.parametrize("name", LEADING_OUT)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_no_name_becomes_a_place_outside(name, door, place, tmp_path):
    with pytest.raises(CorruptEntry, match="lies outside of the store"):
        checked(name)
    address = str(tmp_path / "store") if place == "disk" else f"memory://names-{door}"
    store = open_store(address, durability="process")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptEntry, match="lies outside of the store"):
        DOORS[door](store.files, name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["", "a", "a/b.json", ".hidden", "a/..b", "a/b..", "ä/ö", "resid_post.2.json"]
)
def test_names_of_stores_are_taken(name):
    assert checked(name) == name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "store"
    store = open_store(root, durability="process")
    mizarr.capture("specimen", ["a prompt"], "blocks.0.hook_resid_post", store=store, progress=False)
    store.put_result(ResultKey("stage", 1, {}, {}), xr.Dataset({"x": ("i", np.arange(3.0))}))
    return root


def rewrite_manifest(root: Path, **fields: object) -> None:
    path = min(root.glob("data/*/*/manifest/*.json"))
    known = unsealed(str(path), path.read_bytes())
    path.write_bytes(sealed({name: value for name, value in {**known, **fields}.items() if name != "check"}))


def of_variable(root: Path) -> None:
    rewrite_manifest(root, variable="../../../../x")
    (root.parent / "x").mkdir()
    (root.parent / "x" / "zarr.json").write_bytes(SECRET)


def of_files(root: Path) -> None:
    path = min(root.glob("data/*/*/manifest/*.json"))
    listed = unsealed(str(path), path.read_bytes())["files"]
    rewrite_manifest(root, files={f"../../../../{name}": told for name, told in listed.items()})


def of_tokenizer(root: Path) -> None:
    (path,) = [path for path in root.glob("data/*/*/zarr.json") if "tokenizer" in path.read_text()]
    group = json.loads(path.read_text())
    group["attributes"]["mizarr"]["tokenizer"] = "../../../x"
    path.write_text(json.dumps(group))
    words = root / vocabulary_path("../../../x")
    words.resolve().parent.mkdir(parents=True, exist_ok=True)
    words.resolve().write_text(json.dumps([SECRET.decode()]))


def of_a_linked_note(root: Path) -> None:
    for path in root.glob("data/*/*/provenance/*"):
        path.unlink()
        path.symlink_to(root.parent / "victim.json")


def of_a_linked_folder(root: Path) -> None:
    for path in root.glob("data/*/*/provenance"):
        shutil.rmtree(path)
        path.symlink_to(root.parent / "victims", target_is_directory=True)


def of_a_linked_shard(root: Path) -> None:
    for path in root.glob("data/*/*/*/c/*/*"):
        if path.is_file():
            path.unlink()
            path.symlink_to(root.parent / "victim.json")


HOSTILE = [of_variable, of_files, of_tokenizer, of_a_linked_note, of_a_linked_folder, of_a_linked_shard]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.__name__)
def test_a_hostile_store_puts_nothing_outside_and_takes_nothing_along(hostile, made, tmp_path):
    there, here = tmp_path / "theirs", tmp_path / "ours"
    there.mkdir(), here.mkdir()
    shutil.copytree(made, there / "store")
    (there / "victim.json").write_bytes(SECRET)
    (there / "victims").mkdir()
    (there / "victims" / "0.json").write_bytes(SECRET)
    hostile(there / "store")
    before = {path for path in tmp_path.rglob("*") if "ours" not in path.parts}
    target = open_store(here / "store", durability="process")
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        before.add(there / "store" / name)
    try:
        source = open_store(there / "store", mode="r")
        source.copy_to(target)
    except MizarrError:
        pass
    after = {path for path in tmp_path.rglob("*") if "ours" not in path.parts}
    assert after <= before | {there / "store"}
    assert {path.name for path in here.iterdir()} == {"store"}
    held = [path for path in here.rglob("*") if path.is_file()]
    assert not any(SECRET in path.read_bytes() for path in held)
    assert not any(path.is_symlink() for path in here.rglob("*"))


def test_the_root_of_a_store_may_be_behind_a_link(made, tmp_path):
    (tmp_path / "link").symlink_to(made, target_is_directory=True)
    assert open_store(tmp_path / "link", mode="r").verify() == []
    assert open_folder(str(tmp_path / "link")).get("store.json") is not None


def test_what_lies_in_a_store_under_a_name_that_none_has_is_passed_over(made, tmp_path):
    shutil.copytree(made, tmp_path / "store")
    store = open_store(tmp_path / "store")
    whole = [record.key for record in store.records()]
    for folder in ("data", "keys", "pins", "annotations", *(record.data for record in store.records())):
        place = tmp_path / "store" / folder / "x\x1b[2J"
        place.mkdir(parents=True)
        (place / "a\\b.json").write_bytes(SECRET)
        place.with_name("y\x07.json").write_bytes(SECRET)
    again = open_store(tmp_path / "store")
    assert [record.key for record in again.records()] == whole and again.verify() == []
    assert again.usage() and again.pins() == {} and again.runs()
    again.copy_to(open_store(tmp_path / "copied"))
    assert not any(SECRET in path.read_bytes() for path in (tmp_path / "copied").rglob("*.json"))
    again.gc(grace=0)
