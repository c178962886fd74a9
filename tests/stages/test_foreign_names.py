"""Names in files of models and dictionaries lead below the folder they are read for, and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.layers.files import resolve as resolve_dictionary
from mizarr.stages.forward.models import files
from mizarr.stages.forward.models.download import _write_reference
from mizarr.stages.forward.models.files import repository_folder, resolve
from mizarr.store import open_store
from mizarr.store.errors import MizarrError, ModelNotFound, ShapeError, WeightsError
from mizarr.store.exchange.outside import path_below
from mizarr.store.keys import ResultKey
from mizarr.workflows.browse.site import Limits, _Frontier

from ..random_dictionaries import draw, write_config, write_plt

SPECIMEN = Path(files.__file__).parents[1] / files.SPECIMEN
COMMIT = "c" * 40
LEADING_OUT = [
    "../victim",
    "a/../../victim",
    "/victim",
    "..",
    ".",
    "",
    "a//b",
    "a\\b",
    "a\x00b",
    "a\nb",
    "\x1b",
]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The cache of the hub with one model, whose repository also holds transcoders; a victim beside both."""
    cache = tmp_path / "outside" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(SPECIMEN, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "sub").mkdir()
    write_plt(snapshot / "sub", 0, draw(0))
    for place in (cache.parent, cache, repository, repository / "snapshots"):  # wherever ".." leads
        shutil.copytree(SPECIMEN, place / "victim")
        write_plt(place / "victim", 0, draw(0))
    return repository


def of_an_index(name: object, hub: Path) -> None:
    snapshot = hub / "snapshots" / COMMIT
    (snapshot / "model.safetensors").rename(snapshot / "shard.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert resolve("org/name").weight_files


def of_an_index_of_torch(name: object, hub: Path) -> None:
    snapshot = hub / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    (snapshot / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert resolve("org/name").weight_files


def of_a_reference_of_the_cache(name: object, hub: Path) -> None:
    (hub / "refs" / "main").write_text(str(name))
    resolve("org/name")


def of_a_reference_of_a_dictionary(name: object, hub: Path) -> None:
    (hub / "refs" / "main").write_text(str(name))
    resolve_dictionary("org/name/sub")


def of_a_revision(name: object, hub: Path) -> None:
    resolve("org/name", str(name) or "..")


def of_a_revision_that_is_noted(name: object, hub: Path) -> None:
    _write_reference(repository_folder("org/name"), str(name), COMMIT)


def of_a_folder_of_a_dictionary(name: object, hub: Path) -> None:
    resolve_dictionary(f"org/name/sub/{name}/../../../../victim")


def of_a_listed_file(name: object, hub: Path) -> None:
    write_config(hub / "list", transcoders=[f"{name}/layer_0.safetensors" if name else ""])
    Dictionary.from_pretrained(hub / "list")


def of_a_listed_file_of_the_hub(name: object, hub: Path) -> None:
    write_config(hub / "list", transcoders=[f"hf://org/name/sub/../../{name}/../layer_0.safetensors"])
    Dictionary.from_pretrained(hub / "list")


def of_a_listed_revision(name: object, hub: Path) -> None:
    write_config(hub / "list", transcoders=[f"hf://org/name/layer_0.safetensors?revision=../{name}"])
    Dictionary.from_pretrained(hub / "list")


def of_a_variable(name: object, hub: Path) -> None:
    store = open_store(hub.parents[1] / "store", durability="process")
    dataset = xr.Dataset({str(name): ("i", np.arange(3.0))})
    try:
        store.put_result(ResultKey("stage", 1, {}, {}), dataset)
    finally:
        assert list(store.records()) == [] and store.verify() == []


DOORS: list[Callable[[object, Path], None]] = [
    of_an_index,
    of_an_index_of_torch,
    of_a_reference_of_the_cache,
    of_a_reference_of_a_dictionary,
    of_a_revision,
    of_a_revision_that_is_noted,
    of_a_folder_of_a_dictionary,
    of_a_listed_file,
    of_a_listed_file_of_the_hub,
    of_a_listed_revision,
    of_a_variable,
]


@pytest.mark.parametrize("name", LEADING_OUT, ids=repr)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_no_name_of_a_file_leads_out_of_its_folder(door, name, hub, tmp_path, monkeypatch):
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(hub)}
    opened: list[str] = []
    whole = Path.open

    def noted(self: Path, *arguments, **options):
        opened.append(str(self.resolve()))
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", noted)
    with pytest.raises(MizarrError) as refused:
        door(name, hub)
    assert str(refused.value).count("\n") == 0 and not any(
        character in str(refused.value) for character in "\x00\x1b"
    )
    assert not any("victim" in path for path in opened)
    after = {path for path in tmp_path.rglob("*") if not path.is_relative_to(hub)}
    assert {path for path in after - before if "store" not in path.parts} == set()


@pytest.mark.parametrize("name", [*LEADING_OUT, 3, None, ["a"]], ids=repr)
def test_the_one_way_from_names_to_paths_refuses_what_leads_out(name, tmp_path):
    with pytest.raises(
        WeightsError, match=r"expected index\.json to name a file inside the folder .*, found"
    ):
        path_below(tmp_path, name, WeightsError, "index.json")


@pytest.mark.parametrize("name", ["a", "a/b.safetensors", "layer_0/l0_9/params.npz", ".a", "a..b", "ä"])
def test_names_below_are_taken(name, tmp_path):
    assert path_below(tmp_path, name, WeightsError, "index.json") == tmp_path / name


def test_what_the_cache_holds_is_found_by_every_kind_of_revision(hub):
    (hub / "refs" / "refs" / "pr").mkdir(parents=True)
    (hub / "refs" / "refs" / "pr" / "1").write_text(COMMIT)
    for revision in (None, "main", "refs/pr/1", COMMIT):
        assert resolve("org/name", revision).revision == COMMIT
    assert resolve_dictionary("org/name/sub@refs/pr/1").directory.name == "sub"
    with pytest.raises(ModelNotFound, match="of org/name at revision 'v2'"):
        resolve("org/name", "v2")


@pytest.mark.parametrize("name", ["a/b", "../x", ".x", "zarr.json", "", "x" * 201, "x\ud800", "x\x7f", 1])
def test_a_variable_that_no_folder_can_hold_is_refused_before_it_is_computed(name, tmp_path):
    store = open_store(tmp_path / "store", durability="process")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ShapeError, match="cannot be stored; rename it to 1 to"):
        store.put_result(ResultKey("stage", 1, {}, {}), xr.Dataset({name: ("i", np.arange(3.0))}))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["c", "ä", "x:y", "a b", "x" * 200, "x.json"])
def test_variables_of_any_other_name_are_stored(name, tmp_path):
    store = open_store(tmp_path / "store", durability="process")
    dataset = xr.Dataset({name: ("i", np.arange(3.0))})
    store.put_result(ResultKey("stage", 1, {}, {}), dataset)
    xr.testing.assert_identical(store[ResultKey("stage", 1, {}, {})].load(), dataset)
    assert store.verify() == []


@pytest.mark.parametrize("address", ["../x.html", "a/../../x", "/x.html", "run/\x1b"])
def test_a_site_writes_no_page_outside_its_folder(address):
    assert not _Frontier(Limits()).admits(address, "index.html")
