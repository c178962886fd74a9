"""A key speaks of one model: whatever happens to files and tensors, what it leads to is that model's."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr import HookSpec
from mizarr.pipeline import run
from mizarr.stages.causal.grids.ablation import Ablation
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models.files import ModelFiles, resolve
from mizarr.stages.forward.models.fingerprint import _weighted_sum, fingerprint
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.forward.runs.experiment import ExperimentNode
from mizarr.stages.logits.component_weights import component_weights_node
from mizarr.stages.logits.readout import readout_node
from mizarr.store import index
from mizarr.store.errors import ConfigError, SourceChanged
from mizarr.store.index import FileDigests
from tests.layer_parts import part_of

RESID = "blocks.*.hook_resid_post"
PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


@pytest.fixture
def store(tmp_path):
    return mizarr.open_store(tmp_path / "store", durability="process")


@pytest.fixture
def folder(checkpoint):
    return Path(checkpoint())


def replace_weights(folder: Path, how: str = "in place", seed: int = 1) -> None:
    """Other weights of the same size under the same name, with the times of the old ones."""
    path = folder / "model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    numbers = np.frombuffer(bytes(content[start:]), "<f4")
    content[start:] = np.random.default_rng(seed).permutation(numbers).tobytes()
    if how == "in place":
        with path.open("r+b") as file:
            file.write(content)
    else:
        path.with_name("new").write_bytes(content)
        path.with_name("new").replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def afresh(model: Model | Path) -> np.ndarray:
    """The same activations without anything that could remember: no store, no loaded model."""
    loaded = model if isinstance(model, Model) else Model.from_pretrained(model)
    rows = [loaded.forward(ids, HookSpec().capture(RESID), want=None) for ids in PROMPTS]
    return np.concatenate(
        [np.stack([row[f"blocks.{n}.hook_resid_post"][0].numpy() for n in range(2)]) for row in rows], axis=1
    )


def captured(model, store) -> np.ndarray:
    found: xr.Dataset = mizarr.capture(model, PROMPTS, RESID, store=store, progress=False)
    return found["resid_post"].values


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= 1e-5 * np.abs(other).max())


@pytest.mark.parametrize("how", ["in place", "renamed"])
def test_a_replaced_checkpoint_is_another_model_in_the_same_process(folder, store, tmp_path, how):
    first = captured(str(folder), store)
    replace_weights(folder, how)
    second = captured(str(folder), store)
    assert not same(first, second)
    assert same(second, afresh(folder))
    code = f"""
import mizarr, numpy as np
store = mizarr.open_store({str(store.path)!r})
found = mizarr.capture({str(folder)!r}, {PROMPTS}, {RESID!r}, store=store, progress=False)
np.save({str(tmp_path / "elsewhere.npy")!r}, found["resid_post"].values)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert np.array_equal(np.load(tmp_path / "elsewhere.npy"), second)


def test_files_put_back_are_the_first_model_again(folder, store):
    kept = (folder / "model.safetensors").read_bytes()
    first = captured(str(folder), store)
    replace_weights(folder)
    captured(str(folder), store)
    (folder / "model.safetensors").write_bytes(kept)
    assert np.array_equal(captured(str(folder), store), first)


def test_a_replaced_configuration_is_another_model(folder, store, tmp_path):
    captured(str(folder), store)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert same(captured(str(folder), store), afresh(folder))


@pytest.mark.parametrize("ran", [False, True], ids=["before it ran", "after it ran"])
def test_a_node_made_before_its_files_were_replaced_is_refused(folder, store, ran):
    node = CaptureNode(str(folder), PROMPTS, RESID)
    assert node.run_key
    if ran:
        captured(str(folder), store)
    replace_weights(folder)
    with pytest.raises(SourceChanged, match="they were replaced meanwhile; run the command again"):
        node.status(store)
    assert len(list(store.records())) == (2 if ran else 0)


def test_files_replaced_between_plan_and_load_are_never_loaded(folder):
    """Also where the question comes from another process, which has the name and the identity only."""
    source = ModelSource(str(folder))
    sent = pickle.loads(pickle.dumps(source))
    replace_weights(folder)
    for each in (source, sent):
        with pytest.raises(
            SourceChanged, match=r"with identity [0-9a-f]{12}, as when|they were replaced meanwhile"
        ):
            each.load()


def test_files_replaced_while_they_are_read_are_refused(folder, monkeypatch):
    from mizarr.stages.forward.networks import table

    read, network = table.NETWORKS["composed"]

    def interrupted(take, config, layer):
        loaded = read(take, config, layer)
        replace_weights(folder)
        return loaded

    monkeypatch.setitem(table.NETWORKS, "composed", (interrupted, network))
    with pytest.raises(SourceChanged, match="replaced meanwhile"):
        Model.from_pretrained(folder)


@pytest.mark.parametrize("first", ["read", "digested"])
def test_files_replaced_while_they_are_read_and_digested_at_once_are_refused(folder, monkeypatch, first):
    """Whichever is done with the old file when it is replaced."""
    from mizarr.stages.forward.models import model as loading
    from mizarr.stages.forward.networks import table

    monkeypatch.setattr(index, "is_settled", lambda *_: True)
    digested, read = threading.Event(), threading.Event()
    identity, build = ModelFiles.identity, table.build

    def late(self, *args, **how):
        if threading.current_thread().name.startswith("mizarr-digest") and first == "read":
            assert read.wait(10)
        found = identity(self, *args, **how)
        digested.set()
        return found

    def replaced(*args, **how):
        if first == "digested":
            assert digested.wait(10)
            replace_weights(folder)
            return build(*args, **how)
        network = build(*args, **how)
        replace_weights(folder)
        read.set()
        return network

    monkeypatch.setattr(ModelFiles, "identity", late)
    monkeypatch.setattr(table, "build", replaced)
    with pytest.raises(SourceChanged, match="replaced meanwhile"):
        loading.Model.from_pretrained(folder)


def test_a_file_whose_next_change_might_not_show_is_digested_before_it_is_read(folder, monkeypatch):
    from mizarr.stages.forward.networks import table

    order, build, digest = [], table.build, FileDigests.digest
    monkeypatch.setattr(index, "is_settled", lambda *_: False)

    def noted(self, path):
        if path.suffix == ".safetensors":
            order.append("digest")
        return digest(self, path)

    monkeypatch.setattr(FileDigests, "digest", noted)
    monkeypatch.setattr(table, "build", lambda *given, **how: order.append("read") or build(*given, **how))
    Model.from_pretrained(folder)
    assert order == ["digest", "read", "digest"]


def test_what_is_read_and_digested_at_once_is_what_it_is_one_after_the_other(folder, monkeypatch):
    one = Model.from_pretrained(folder)
    monkeypatch.setattr(index, "is_settled", lambda *_: True)
    other = Model.from_pretrained(folder)
    assert one.identity == other.identity and np.array_equal(afresh(one), afresh(other))


def test_saving_into_the_folder_does_not_touch_a_loaded_model(folder, store, tmp_path):
    model = Model.from_pretrained(folder)
    before = afresh(model)
    identity = model.identity
    replace_weights(folder)
    assert np.array_equal(afresh(model), before) and model.identity == identity
    assert same(captured(model, store), before)
    assert same(captured(str(folder), store), afresh(folder))


@pytest.mark.parametrize("node", [readout_node, lambda files: component_weights_node(files, "attention")])
def test_what_is_read_from_files_is_not_kept_under_the_digest_of_others(folder, store, node, monkeypatch):
    """Neither when they are replaced before it is read, nor while it is written."""
    made = node(resolve(folder))
    replace_weights(folder)
    with pytest.raises(SourceChanged):
        made.status(store)
    made = node(resolve(folder))
    make = made._make
    monkeypatch.setattr(made, "_make", lambda: (make().load(), replace_weights(folder, seed=2))[0])
    with pytest.raises(SourceChanged):
        made.run(store, None)
    assert not list(store.records())


# -- weights edited in memory


def layer(model):
    return model.network.weights.layers[0]


def _mul(model):
    part_of(layer(model), "down").weight.mul_(1.5)


def _data(model):
    part_of(layer(model), "down").weight.data.mul_(1.5)


def _numpy(model):
    part_of(layer(model), "down").weight.numpy()[3, 2] += 1.0


def _swap(model):
    rows = part_of(layer(model), "down").weight.data
    rows[[0, 1]] = rows[[1, 0]]


def _assign_tensor(model):
    object.__setattr__(part_of(layer(model), "ln1"), "weight", part_of(layer(model), "ln1").weight * 2)


def _assign_weights(model):
    weights = model.network.weights
    model.network.weights = dataclasses.replace(weights, embed=weights.embed + 0.1)


def _train(model):
    weight = part_of(layer(model), "up").weight.requires_grad_()
    with torch.enable_grad():
        (weight * torch.arange(weight.numel()).view_as(weight)).sum().backward()
    torch.optim.SGD([weight], lr=1e-4).step()
    weight.requires_grad_(False)


EDITS = [_mul, _data, _numpy, _swap, _assign_tensor, _assign_weights, _train]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__[1:])
def test_edited_weights_are_a_model_of_their_own(folder, store, tmp_path, edit):
    first = captured(str(folder), store)
    model = Model.from_pretrained(folder)
    assert np.array_equal(captured(model, store), first)
    edit(model)
    edited = captured(model, store)
    assert not same(edited, first)
    assert same(edited, afresh(model))
    assert np.array_equal(captured(str(folder), store), first)


def test_the_same_edit_is_the_same_model_and_undoing_it_the_first(folder):
    one, other = Model.from_pretrained(folder), Model.from_pretrained(folder)
    identity = one.require_identity()
    kept = part_of(layer(one), "down").weight.clone()
    for model in (one, other):
        _data(model)
    assert one.require_identity() == other.require_identity() != identity
    part_of(layer(one), "down").weight.copy_(kept)
    assert one.require_identity() == identity


def test_a_cast_model_has_the_key_of_what_it_computes(folder):
    model = Model.from_pretrained(folder)
    embed = model.network.weights.embed.double()
    model.network.weights = dataclasses.replace(model.network.weights, embed=embed)
    assert model.require_identity().dtype == "float64" and model.dtype == torch.float64


@pytest.mark.parametrize(
    "alter",
    [
        lambda model: setattr(model.network, "config", dataclasses.replace(model.config, norm_eps=0.5)),
        lambda model: setattr(model.network, "embed", lambda ids: torch.zeros(*ids.shape, 16)),
        lambda model: setattr(model.network, "adapter", torch.nn.Linear(16, 16)),
    ],
    ids=["configuration", "method", "adapter"],
)
def test_a_model_altered_beyond_its_tensors_cannot_be_stored(folder, store, alter):
    model = Model.from_pretrained(folder)
    alter(model)
    with pytest.raises(ConfigError, match="results cannot be stored under a key"):
        captured(model, store)
    with pytest.raises(ConfigError):
        mizarr.run(model, [mizarr.Run([1, 2])], store=store)
    assert not list(store.records())


def _alter_configuration(model):
    model.network.config = dataclasses.replace(model.config, norm_eps=0.5)


@pytest.mark.parametrize("edit", [*EDITS, _alter_configuration], ids=lambda edit: edit.__name__[1:])
@pytest.mark.parametrize("door", ["same node", "later node", "experiment"])
def test_a_model_that_was_loaded_by_name_and_edited_is_not_served_for_its_files(folder, store, edit, door):
    """Loaded models are kept for the next question, so one edit would reach everybody who asks by name."""
    expected = captured(str(folder), store)
    node = CaptureNode(str(folder), [[9, 8, 7]], RESID)
    edit(node.source.load())
    doors = {
        "same node": lambda: run(node, store),
        "later node": lambda: run(CaptureNode(str(folder), [[4, 4]], RESID), store),
        "experiment": lambda: run(ablation_node(folder), store),
    }
    kept = len(list(store.records()))
    with pytest.raises(SourceChanged, match=r"as in its files, found \S+ edited in memory; pass the edited"):
        doors[door]()
    assert len(list(store.records())) == kept
    doors[door]()
    fresh = mizarr.open_store(store.address + "-fresh", durability="process")
    assert np.array_equal(captured(str(folder), fresh), expected)


def ablation_node(folder):
    ablation = Ablation(tokens=(1, 2, 3), kinds=("mlp_out",), metrics=(LogitDifference(1, 2),))
    return ExperimentNode(ablation, ModelSource(str(folder)))


def test_runs_of_edited_weights_are_kept_apart(folder, store):
    model = Model.from_pretrained(folder)
    runs = [mizarr.Run([1, 2, 3])]
    first = mizarr.run(model, runs, store=store)[0].logits
    _data(model)
    (stored,), (plain,) = mizarr.run(model, runs, store=store), mizarr.run(model, runs)
    assert torch.equal(stored.logits, plain.logits) and not torch.equal(plain.logits, first)


def test_a_node_made_before_its_weights_were_edited_is_refused(folder, store):
    model = Model.from_pretrained(folder)
    node = CaptureNode(model, PROMPTS, RESID)
    assert node.run_key
    _numpy(model)
    with pytest.raises(SourceChanged, match="edited in memory during this call; call it again"):
        run(node, store)
    assert not list(store.records())


def test_what_is_stored_of_a_model_is_not_served_for_its_edited_weights(folder, store):
    model = Model.from_pretrained(folder)
    node = CaptureNode(model, PROMPTS, RESID)
    run(node, store)
    _data(model)
    with pytest.raises(SourceChanged, match="edited in memory during this call; call it again"):
        run(node, store)


def test_a_workflow_refuses_a_model_that_is_not_its_files(folder, store):
    """Readout and tokenizer come from the files."""
    model = Model.from_pretrained(folder)
    _mul(model)
    with pytest.raises(SourceChanged, match=r"replaced during this run .*; run the command again"):
        mizarr.compute("logit_lens", model=model, store=store, prompts=["w1 w2 w3"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
def test_the_checksum_of_a_gpu_changes_with_any_element(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 100, (31, 7), generator=generator).to(dtype)
    found = _weighted_sum(tensor)
    assert _weighted_sum(tensor.clone()) == found
    others = [torch.zeros_like(tensor), tensor.flip(0), tensor[torch.randperm(31, generator=generator)]]
    for row, column in ((0, 0), (17, 3), (30, 6)):
        changed = tensor.clone()
        changed[row, column] += 1
        others.append(changed)
    assert len({found, *map(_weighted_sum, others)}) == 1 + len(others)


def test_a_fingerprint_tells_where_two_states_differ():
    held = {"rows": [torch.zeros(3), np.zeros(2)], "eps": 1e-5, "names": {"b", "a"}}
    before = fingerprint(held)
    assert before.first_difference(fingerprint(held)) is None
    held["rows"][1][0] = 1
    assert before.first_difference(fingerprint(held)) == "'rows'.1"
    assert before.first_difference(fingerprint(held), tensors=False) is None
    held["eps"] = 1e-6
    assert before.first_difference(fingerprint(held)) == "'eps'"


def test_a_tensor_whose_bytes_cannot_be_read_has_no_identity():
    with pytest.raises(
        ConfigError, match="expected a dense tensor at 'w' of the model, found one whose bytes cannot"
    ):
        fingerprint({"w": torch.zeros(2, device="meta")})
    with pytest.raises(ConfigError):
        fingerprint({"w": torch.eye(2).to_sparse()})
