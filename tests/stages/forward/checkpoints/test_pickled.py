"""Checkpoints that torch.save wrote: the same model as from safetensors, and no code is run."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mizarr import Model
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.logits.readout import readout_from_files
from mizarr.store.errors import WeightsError

from .. import random_models

IDS = [5, 17, 3, 250, 9]


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "memo"))


@pytest.fixture
def safe(tmp_path):
    random_models.save_random_model(tmp_path / "safe", "qwen2", 2)
    return tmp_path / "safe"


@pytest.fixture
def pickled(safe, tmp_path):
    """The folder without its safetensors, and the tensors these held."""
    folder = shutil.copytree(safe, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    return folder, load_file(safe / "model.safetensors")


def save(folder, tensors, how):
    if how == "sharded":
        names = sorted(tensors)
        shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for file, held in shards.items():
            torch.save({name: tensors[name] for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        held = OrderedDict(tensors)
        torch.save(held, folder / "pytorch_model.bin", _use_new_zipfile_serialization=how == "zip")


@pytest.mark.parametrize("how", ["zip", "legacy", "sharded"])
def test_the_model_is_the_one_of_safetensors(safe, pickled, how):
    folder, tensors = pickled
    save(folder, tensors, how)
    ours, other = (Model.from_pretrained(each, device="cpu") for each in (folder, safe))
    assert torch.equal(ours.forward(IDS).logits, other.forward(IDS).logits)
    found, wanted = (readout_from_files(f.checkpoint, f.architecture()) for f in map(resolve, (folder, safe)))
    assert found.equals(wanted)


def test_the_identity_is_the_content_of_the_files(pickled):
    folder, tensors = pickled
    save(folder, tensors, "zip")
    first = resolve(folder).identity()
    assert resolve(folder).identity() == first
    tensors["model.norm.weight"][0] += 1
    save(folder, tensors, "zip")
    assert resolve(folder).identity() != first


def test_what_happens_to_the_file_later_does_not_touch_the_model(pickled):
    folder, tensors = pickled
    save(folder, tensors, "zip")
    model = Model.from_pretrained(folder, device="cpu")
    before = model.forward(IDS).logits
    path = folder / "pytorch_model.bin"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(model.forward(IDS).logits, before)


class Touch:
    """What a pickle with code in it does."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_a_pickle_that_does_more_is_refused_and_does_nothing(pickled, tmp_path, how):
    folder, tensors = pickled
    save(folder, tensors | {"more": Touch(tmp_path / "touched")}, how)
    with pytest.raises(WeightsError, match=r"expected nothing but tensors in .*pytorch_model\.bin") as caught:
        Model.from_pretrained(folder, device="cpu")
    assert "\n" not in str(caught.value) and not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"state": {"a": torch.ones(1)}}, "expected tensors by name in .*, found dict under 'state'"),
        ([torch.ones(1)], "found list"),
        ({"a": 3}, "found int under 'a'"),
        (b"\x80\x02}q\x00.", "cannot be read|found a pickle"),
        (b"version https://git-lfs", "cannot be read|found a pickle"),
        (b"", "cannot be read"),
    ],
)
def test_other_files_are_refused_in_one_line(pickled, content, said):
    folder, _ = pickled
    path = folder / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(WeightsError, match=said) as caught:
        Model.from_pretrained(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(pickled):
    folder, tensors = pickled
    save(folder, tensors, "sharded")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(WeightsError, match=r"lists 2 files, found no pytorch_model-00002-of-00002\.bin"):
        _ = resolve(folder).weight_files
