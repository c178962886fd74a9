"""Fetching dictionaries from a hub, here a small server of our own: what one dictionary reads, and no
more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.download import fetch, files_to_fetch
from mizarr.stages.forward.models.download import fetch as fetch_model
from mizarr.store.errors import DownloadError, ModelNotFound

from ...random_dictionaries import draw, write_config, write_npz, write_plt, write_saelens
from ..forward.models.test_download import hub  # noqa: F401 - a fixture


def held(folder: Path) -> dict[str, bytes]:
    """The files of a folder as a repository holds them."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def test_what_is_fetched_is_found(hub, source: Path):  # noqa: F811
    for layer in range(2):
        write_plt(source, layer, draw(layer))
    write_config(source)
    (source / "README.md").write_text("# a card")
    hub.files = held(source)
    found = fetch("org/name", progress=False)
    assert found.listing == ("config.yaml", "layer_0.safetensors", "layer_1.safetensors")
    assert Dictionary.from_pretrained("org/name").layers == (0, 1)
    assert Dictionary.from_pretrained("org/name").layout.scan == "org/name"
    hub.asked.clear()
    fetch("org/name", progress=False)
    assert [path for path in hub.asked if "/resolve/" in path] == []


def test_of_many_folders_one_is_fetched(hub, source: Path):  # noqa: F811
    for layer in range(2):
        name = f"blocks.{layer}.hook_resid_post"
        write_saelens(source / name, draw(layer), metadata={"hook_name": name})
        (source / name / "sparsity.safetensors").write_bytes(b"0" * 9)
    hub.files = held(source)
    fetch("org/name/blocks.1.hook_resid_post", progress=False)
    dictionary = Dictionary.from_pretrained("org/name/blocks.1.hook_resid_post")
    assert dictionary.layers == (1,)
    assert dictionary.layout.scan == "org/name//blocks.1.hook_resid_post"
    assert [path for path in hub.asked if "blocks.0" in path or "sparsity" in path] == []
    with pytest.raises(ModelNotFound, match=r"features fetch org/name/blocks\.0\.hook"):
        Dictionary.from_pretrained("org/name/blocks.0.hook_resid_post")


def test_files_that_a_list_refers_to_are_fetched_too(hub, source: Path, tmp_path: Path):  # noqa: F811
    name = "layer_0/width_16k/average_l0_9/params.npz"
    write_npz(source / name, draw())
    hub.files = held(source)
    write_config(tmp_path / "list", transcoders=[f"hf://org/name/{name}"])
    with pytest.raises(ModelNotFound, match="mizarr features fetch"):
        Dictionary.from_pretrained(tmp_path / "list")
    fetch(tmp_path / "list", progress=False)
    assert Dictionary.from_pretrained(tmp_path / "list").layers == (0,)
    write_config(tmp_path / "list", transcoders=["hf://org/name/layer_0/other.npz"])
    with pytest.raises(DownloadError, match="which has no such file; correct the entry"):
        fetch(tmp_path / "list", progress=False)


def test_a_repository_of_many_dictionaries_of_a_layer_asks_for_one():
    sizes = {
        f"layer_{layer}/width_{w}/average_l0_9/params.npz": 1 for layer in (0, 10) for w in ("16k", "65k")
    }
    with pytest.raises(
        DownloadError, match=r"holds 2 dictionaries of one layer: .*example org/name/layer_0/width_16k"
    ):
        files_to_fetch(sizes, "", "org/name")
    chosen = files_to_fetch(sizes, "layer_10/width_65k", "org/name/layer_10/width_65k")
    assert list(chosen) == ["layer_10/width_65k/average_l0_9/params.npz"]


def test_a_repository_without_dictionaries_is_refused_before_anything_is_fetched(hub):  # noqa: F811
    hub.files = {"pytorch_model.bin": b"1", "config.json": json.dumps({}).encode()}
    with pytest.raises(
        DownloadError, match=r"expected weights of transcoders .* at org/name, found only config\.json"
    ):
        fetch("org/name", progress=False)
    assert not [path for path in hub.asked if "/resolve/" in path]


@pytest.mark.parametrize("ask", [fetch, fetch_model])
def test_without_a_connection_the_reason_is_one_line(ask, hub, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="the download of org/name from the Hugging Face hub failed"):
        ask("org/name", progress=False)
