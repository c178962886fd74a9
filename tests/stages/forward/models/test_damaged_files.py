"""A file that is missing, empty, a link to nothing, a folder or a pointer of git-lfs is told in one line, at
every door, whichever file of a model it is.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import mizarr
from mizarr import Model, open_store
from mizarr.stages.features.dictionary import Dictionary
from mizarr.store.errors import ConfigError, MizarrError, ModelNotFound, StoreError
from mizarr.store.exchange.outside import LFS_POINTER
from mizarr.workflows.cli import run as mizarr_command

SPECIMEN = Path(__file__).parents[4] / "stages" / "forward" / "specimen"
CLT = Path(__file__).parents[4] / "stages" / "features" / "specimen" / "clt"
PUT = {
    "a link to nothing": (lambda path: path.symlink_to(path.with_name("nowhere")), "which does not exist"),
    "a link to itself": (lambda path: path.symlink_to(path), "which does not exist"),
    "a folder": (lambda path: path.mkdir(), "found a folder"),
    "a pipe": (os.mkfifo, "found a pipe, socket or device"),
    "nothing": (lambda path: path.touch(), "is empty"),
    "git-lfs pointer": (
        lambda path: path.write_bytes(LFS_POINTER + b"v1\noid sha256:0\nsize 9\n"),
        "git lfs pull",
    ),
}
FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SPECIMEN / name, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("put", "says"), PUT.values(), ids=PUT)
def test_what_lies_in_the_place_of_a_file_is_told_in_one_line(folder, name, put, says):
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    with pytest.raises(MizarrError, match=says) as caught:
        mizarr.generate(Model.from_pretrained(folder, device="cpu"), "The", max_tokens=1)
    assert "\n" not in str(caught.value) and str(folder / name) in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize(("put", "says"), PUT.values(), ids=PUT)
def test_the_command_says_the_same(folder, name, put, says, capsys):
    (folder / name).unlink()
    put(folder / name)
    assert mizarr_command(["models", "inspect", str(folder)]) == 2
    told = capsys.readouterr().err
    assert says in told and "Traceback" not in told


@pytest.mark.parametrize(("put", "says"), PUT.values(), ids=PUT)
def test_shards_and_dictionaries_say_the_same(folder, tmp_path, put, says):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    put(folder / "a.safetensors")
    with pytest.raises(MizarrError, match=says):
        Model.from_pretrained(folder, device="cpu")
    shutil.copytree(CLT, tmp_path / "clt")
    weights = next(iter(sorted((tmp_path / "clt").glob("*.safetensors"))))
    weights.unlink()
    put(weights)
    with pytest.raises(MizarrError) as caught:
        Dictionary.from_pretrained(tmp_path / "clt").layer(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["{}", "./{}", "{}/", "sub/{}"])
@pytest.mark.parametrize("name", ["none.gguf", "m-00001-of-00002.gguf"])
def test_a_gguf_file_that_is_not_there_is_called_one(tmp_path, monkeypatch, form, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    asked = form.format(name).rstrip("/")
    with pytest.raises(ModelNotFound, match=r"expected a GGUF file at .*, found none") as caught:
        Model.from_pretrained(asked)
    assert "models fetch" not in str(caught.value)
    assert ("some.gguf" in str(caught.value)) is ("sub/" not in form)


@pytest.mark.parametrize("name", [None, 3, "", b"specimen", "a\0b", "a" * 5000, "~nobody-here/x"], ids=repr)
def test_names_of_no_model_are_refused_in_one_line(name):
    with pytest.raises(MizarrError) as caught:
        Model.from_pretrained(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("mode", ["w", "x", "r+", "w-", "", None, 3, ["r"]], ids=repr)
def test_modes_there_are_not_are_refused_and_nothing_is_made(tmp_path, mode):
    with pytest.raises(ConfigError, match=r"expected mode='a' .* or mode='r'"):
        open_store(tmp_path / "store", mode=mode)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.write_text("x") and path, "place, found a file; name a folder"),
        (lambda path: path.write_text("x") and path / "below", r"\(Not a directory\); name another folder"),
        (lambda path: path.symlink_to(path.with_name("nowhere")) or path, "nowhere, which does not exist"),
        (lambda path: path.symlink_to(path) or path, "place, which does not exist"),
        (lambda path: os.mkfifo(path) or path, "expected the folder of a store at .*place, found"),
        (lambda path: f"{path}\0", r"the folder of a store \(embedded null byte\); name another folder"),
        (lambda path: "a" * 5000, r"the folder of a store \(File name too long\); name another folder"),
        (
            lambda path: "~nobody-here/store",
            r"'~nobody-here/store' cannot be .* home directory.*; name another",
        ),
        (lambda path: "", "expected the folder or URL of a store .*, found ''"),
        (lambda path: None, "expected the folder or URL of a store .*, found None"),
        (lambda path: 3, "expected the folder or URL of a store .*, found 3"),
        (lambda path: b"store", "expected the folder or URL of a store .*, found b'store'"),
    ],
    ids=[
        "file",
        "below a file",
        "link",
        "loop",
        "pipe",
        "NUL",
        "long",
        "user",
        "empty",
        "None",
        "3",
        "bytes",
    ],
)
def test_paths_that_are_no_folder_are_refused_by_a_store_in_one_line(tmp_path, make, told, mode):
    path = make(tmp_path / "place")
    with pytest.raises(StoreError, match=told) as caught:
        open_store(path, mode=mode)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
