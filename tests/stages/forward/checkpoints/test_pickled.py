"""Checkpoints that torch.save wrote: the same model as from safetensors, and no code is run."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mizarr import Model
from mizarr.stages.algzoo.files import read_tensors
from mizarr.stages.features.training import checkpoint
from mizarr.stages.forward.checkpoints.pickled import PickledFiles
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.graph.files import torch_file
from mizarr.stages.logits.readout import readout_from_files
from mizarr.store.errors import MizarrError, WeightsError

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
    with pytest.raises(WeightsError, match=r"expected only tensors in .*pytorch_model\.bin") as caught:
        Model.from_pretrained(folder, device="cpu")
    assert "\n" not in str(caught.value) and not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"state": {"a": torch.ones(1)}},
            "expected a dict of tensors by name in .*, found dict under 'state'",
        ),
        ([torch.ones(1)], "found list"),
        ({"a": 3}, "found int under 'a'"),
        (b"\x80\x02}q\x00.", "cannot be read|found a pickle"),
        (b"version https://git-lfs", "cannot be read|found a pickle"),
        (b"", "is empty"),
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
    with pytest.raises(
        WeightsError, match=r"the 2 weight files listed in .*, found no pytorch_model-00002-of-00002\.bin"
    ):
        _ = resolve(folder).weight_files


class Storage:
    """What a pickle says of a storage: longer or shorter than it is, or one that is in no file."""

    def __init__(self, kind, key, count):
        self.id = ("storage", kind, key, "cpu", count)


class Rebuilt:
    """A tensor of six numbers of a storage."""

    def __init__(self, storage, offset=0, shape=(6,), stride=(1,)):
        self.parts = storage, offset, shape, stride, False, OrderedDict()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.parts


class Called:
    """Something torch allows pickles to call."""

    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return value.id if isinstance(value, Storage) else None


def pickled_bytes(value):
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def hostile(path, value, members=(("0", bytes(24)), ("1", bytes(24)))):
    """A zip as torch.save writes it, of a pickle that is none of its own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled_bytes(value))
        archive.writestr("archive/byteorder", "little")
        for key, data in members:
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")
    return path


LYING = {
    "longer": Rebuilt(Storage(torch.FloatStorage, "0", 12), shape=(12,)),
    "longer than the file": Rebuilt(Storage(torch.FloatStorage, "0", 2**40)),
    "shorter": Rebuilt(Storage(torch.FloatStorage, "0", 5), shape=(5,)),
    "of another dtype": Rebuilt(Storage(torch.DoubleStorage, "0", 6)),
    "of no member": Rebuilt(Storage(torch.FloatStorage, "7", 6)),
    "elsewhere": Rebuilt(Storage(torch.FloatStorage, "../version", 6)),
    "negative": Rebuilt(Storage(torch.FloatStorage, "0", -6)),
    "a fraction": Rebuilt(Storage(torch.FloatStorage, "0", 6.0)),
    "behind its end": Rebuilt(Storage(torch.FloatStorage, "0", 6), 3),
    "before its start": Rebuilt(Storage(torch.FloatStorage, "0", 6), -3),
    "of a huge shape": Rebuilt(Storage(torch.FloatStorage, "0", 6), shape=(2**40, 2**40)),
    "of a negative shape": Rebuilt(Storage(torch.FloatStorage, "0", 6), shape=(-6,)),
    "of large strides": Rebuilt(Storage(torch.FloatStorage, "0", 6), stride=(2**40,)),
    "memory as it is": Called(torch.Tensor, 6),
    "a storage as it is": Rebuilt(Called(torch.UntypedStorage, 24)),
    "much memory": Called(bytearray, 2**40),
}  # fmt: skip
DOORS = {
    "checkpoint": lambda path: PickledFiles((path,)).entries,
    "graph": torch_file.read,
    "network": lambda path: read_tensors(path.rename(path.with_suffix(".pth"))),
    "training": lambda path: checkpoint.load(path.rename(path.with_name("checkpoint.pt")).parent),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("value", LYING.values(), ids=LYING)
def test_every_number_of_a_tensor_is_of_its_own_bytes_in_the_file(value, door, tmp_path):
    with pytest.raises(MizarrError) as caught:
        door(hostile(tmp_path / "a.bin", {"a": value}))
    assert "\n" not in str(caught.value)


def old(path, value, keys, data):
    """A file as torch.save wrote it before torch 1.6."""
    parts = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True}]
    head = b"".join(pickle.dumps(part, 2) for part in parts)
    path.write_bytes(head + pickled_bytes(value) + pickle.dumps(keys, 2) + data)
    return path


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("count", "keys", "data"),
    [(6, [], b""), (6, ["0"], b""), (2**40, ["0"], struct.pack("<q", 2**40)), (6, ["0", "0"], bytes(64))],
)
def test_files_of_older_torch_hold_every_storage_they_speak_of(count, keys, data, door, tmp_path):
    storage = Storage(torch.FloatStorage, "0", count)
    storage.id = (*storage.id, None)
    with pytest.raises(MizarrError) as caught:
        door(old(tmp_path / "a.bin", {"a": Rebuilt(storage)}, keys, data))
    assert "\n" not in str(caught.value)


def test_a_byte_that_differs_from_its_checksum_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    torch.save({"a": torch.arange(1000.0)}, path)
    assert PickledFiles((path,)).entries["a"].shape == (1000,)
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(500).tobytes() + np.float32(501).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="Bad CRC-32"):
        _ = PickledFiles((path,)).entries


def test_files_without_checksums_are_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(10.0)}, tmp_path / "a.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    with PickledFiles((tmp_path / "a.bin",)).opened() as take:
        assert take("a").tolist() == list(range(10))


@pytest.mark.parametrize("is_zip", [True, False])
def test_views_parameters_and_all_dtypes_are_read(is_zip, tmp_path):
    whole = torch.arange(20.0)
    tensors = {"a": whole, "b": whole[3:8], "c": whole.reshape(4, 5).T, "none": torch.zeros(0)}
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64)
    tensors |= {str(dtype): whole.to(dtype) for dtype in dtypes}
    state = {**tensors, "weight": torch.nn.Parameter(whole)}
    torch.save(state, tmp_path / "a.bin", _use_new_zipfile_serialization=is_zip)
    with PickledFiles((tmp_path / "a.bin",)).opened() as take:
        for name, tensor in tensors.items():
            assert torch.equal(take(name), tensor), name
