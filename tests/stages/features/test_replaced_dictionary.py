"""Results are keyed by a dictionary's content: whatever becomes of its files, none is another's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.corpus.encode import encode_corpus, encode_nodes
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.activity import FeatureActivity
from mizarr.stages.features.effects.alignment import DecoderSearch
from mizarr.stages.features.effects.doses import Dose
from mizarr.stages.features.effects.exchanges import FeatureExchanges
from mizarr.stages.features.layers.activations import TopK
from mizarr.stages.features.training.settings import TrainingSettings
from mizarr.stages.features.training.trained import as_dictionary
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.graph.graph import attribution_graph
from mizarr.store.errors import SourceChanged

from ..forward.random_models import save_random_model
from ..graph.random_transcoders import save_random_transcoders

PROMPTS = [[3, 7, 12, 30, 4]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> mizarr.Model:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, "llama", 3)
    return mizarr.Model.from_pretrained(folder)


@pytest.fixture(scope="module")
def original(model: mizarr.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dictionaries") / "clt"
    return Path(save_random_transcoders(folder, model, "clt-jumprelu"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "clt")


@pytest.fixture
def store(tmp_path: Path) -> mizarr.store.Store:
    return mizarr.open_store(tmp_path / "store", durability="process")


def replace_weights(folder: Path) -> None:
    """Other encoders and decoders of the same size and time, written into the same files."""
    for path in folder.glob("*.safetensors"):
        before = path.stat()
        content = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        width = 4 * ((len(content) - start) // 4)
        numbers = np.frombuffer(bytes(content[start : start + width]), "<f4")
        content[start : start + width] = numbers[::-1].tobytes()
        with path.open("r+b") as file:
            file.write(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def encoded(clt: Dictionary, model: mizarr.Model, store: mizarr.store.Store) -> xr.Dataset:
    return encode_corpus(clt, model, PROMPTS, store=store, progress=False).load()


def test_a_replaced_dictionary_is_another_one(model, folder, store, tmp_path):
    first = encoded(Dictionary.from_pretrained(folder), model, store)
    replace_weights(folder)
    second = encoded(Dictionary.from_pretrained(folder), model, store)
    empty = mizarr.open_store(tmp_path / "empty", durability="process")
    xr.testing.assert_identical(second, encoded(Dictionary.from_pretrained(folder), model, empty))
    assert first.sizes != second.sizes or not np.array_equal(first["activation"], second["activation"])


def test_a_dictionary_opened_before_its_files_were_replaced_is_refused(model, folder, store):
    clt = Dictionary.from_pretrained(folder)
    encoded(clt, model, store)
    kept = len(list(store.records()))
    replace_weights(folder)
    with pytest.raises(
        SourceChanged,
        match=r"W_enc_0.safetensors of .*clt changed .*; it was replaced or edited meanwhile; open it",
    ):
        encoded(clt, model, store)
    with pytest.raises(SourceChanged):
        attribution_graph(model, clt, PROMPTS[0], store=store)
    assert len(list(store.records())) == kept


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_experiments_never_publish_what_other_files_gave(model, folder, store, when, monkeypatch):
    clt = Dictionary.from_pretrained(folder)
    named = (clt.name, clt.identity)
    experiments = [
        FeatureActivity(tuple(PROMPTS[0]), *named),
        DecoderSearch(5, *named, top_k=2),
        FeatureExchanges(((tuple(PROMPTS[0]), 1),), *named, ((Dose(0, 1, fixed=2.0),),), (1.0,), (8,)),
    ]
    for experiment in experiments:
        node = experiment.on(model)
        if when == "before":
            replace_weights(folder)
        else:
            prepare = type(experiment).prepare

            def replaced(self, model, prepare=prepare):
                made = prepare(self, model)
                replace_weights(folder)
                return made

            monkeypatch.setattr(type(experiment), "prepare", replaced)
        with pytest.raises(SourceChanged):
            run(node, store)
        replace_weights(folder)  # back to what it was
    assert not list(store.records())


def test_files_replaced_while_features_are_encoded_give_no_result(model, folder, store, monkeypatch):
    from mizarr.stages.features.corpus import encode

    clt = Dictionary.from_pretrained(folder)
    states = CaptureNode(model, PROMPTS, [str(hook) for hook in clt.read_hooks])
    nodes = encode_nodes(clt, states)
    run(states, store)
    kept = len(list(store.records()))
    blocks = encode._blocks

    def replaced(values):
        replace_weights(folder)
        return blocks(values)

    monkeypatch.setattr(encode, "_blocks", replaced)
    with pytest.raises(SourceChanged):
        run(nodes[0], store)
    assert len(list(store.records())) == kept


EDITS = {
    "in place": lambda features: features.W_enc.mul_(0),
    "an item": lambda features: features.W_enc.__setitem__(0, 5.0),
    "data": lambda features: features.W_enc.data.mul_(3.0),
    "a numpy view": lambda features: features.W_enc.numpy().__imul__(2.0),
    "a decoder": lambda features: next(iter(features.W_dec.values())).mul_(2),
    "a bias": lambda features: features.b_enc.add_(1.0),
    "a field": lambda features: object.__setattr__(features, "W_enc", torch.zeros_like(features.W_enc)),
    "the activation": lambda features: object.__setattr__(features, "activation", TopK(1)),
    "a gain": lambda features: object.__setattr__(features, "gain", 2.0),
}
"""What users do to a dictionary in hand, by torch, by numpy, and to its fields."""


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_an_edited_dictionary_is_refused_at_every_door(edit, model, folder, store):
    """Stages read the files, and their keys name the files: neither is what was edited."""
    edited = Dictionary.from_pretrained(folder)
    edit(edited.layer(1))
    point = str(edited.read_hook(1))
    doors = {
        "graph": lambda: attribution_graph(model, edited, PROMPTS[0], store=store),
        "corpus": lambda: encode_corpus(edited, model, PROMPTS, store=store, progress=False),
        "reduction": lambda: mizarr.HookSpec().capture(point, reduce=edited),
        "resource": edited.as_resource,
    }
    for door in doors.values():
        with pytest.raises(SourceChanged, match=r"weights that its files hold, found \S+ of layer 1 edited"):
            door()


def test_a_dictionary_that_was_only_looked_at_is_as_its_files(model, folder, store):
    opened = Dictionary.from_pretrained(folder)
    for layer in opened.layers:
        opened.layer(layer).encode(torch.ones(2, opened.d_in))
    intact = attribution_graph(model, Dictionary.from_pretrained(folder), PROMPTS[0])
    np.testing.assert_array_equal(
        attribution_graph(model, opened, PROMPTS[0], store=store).adjacency, intact.adjacency
    )


def test_a_dictionary_in_memory_is_identified_by_its_weights_as_they_are(original):
    clt = Dictionary.from_pretrained(original)
    kept = {"read": clt.layout.read, "write": clt.layout.write, "features": clt.n_features, "k": 2}
    settings = TrainingSettings(kind="clt", **kept)
    made = as_dictionary({layer: clt.layer(layer) for layer in clt.layers}, settings, model_name=None)
    identity, resource = made.identity, made.as_resource()
    resource.check()
    made.layer(1).W_enc.data[0, 0] += 1.0
    assert made.identity != identity
    with pytest.raises(SourceChanged):
        resource.check()


def test_a_dictionary_asked_for_by_identity_must_be_it_before_and_after(folder):
    resource = Dictionary.from_pretrained(folder).as_resource()
    with resource.open() as found:
        assert found.identity == resource.features
    with pytest.raises(SourceChanged), resource.open():
        replace_weights(folder)
    with pytest.raises(SourceChanged), resource.open():
        raise AssertionError("never reached")
