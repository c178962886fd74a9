"""Which tokens a feature raises and lowers: against plain products, and stored."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.graph.graph import graph_node
from mizarr.stages.graph.logit_effects import logit_effects, logit_effects_node
from mizarr.stages.logits.readout import readout, readout_node
from mizarr.store.errors import ShapeError, SourceChanged

from .random_transcoders import save_random_transcoders


@pytest.fixture(scope="module")
def clt(tmp_path_factory: pytest.TempPathFactory) -> mizarr.Dictionary:
    model = mizarr.Model.from_pretrained("specimen")
    return mizarr.Dictionary.from_pretrained(
        save_random_transcoders(tmp_path_factory.mktemp("effects") / "clt", model, "clt-jumprelu")
    )


def nodes(*features: tuple[int, int, int]) -> tuple[xr.DataArray, xr.DataArray]:
    active = xr.DataArray(np.array(features), dims=("active", "axis"))
    return active, xr.DataArray(np.arange(len(features)), dims="selected")


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_effects_are_what_the_last_target_writes_read_by_the_unembedding(clt, norm):
    rng, width, vocab = np.random.default_rng(0), clt.d_out, 50
    unembed, gain = rng.normal(size=(vocab, width)), rng.normal(size=width)
    table = readout(unembed, gain, norm=norm, eps=1e-5)
    active, selected = nodes((1, 3, 7), (1, 5, 7), (4, 2, 0), (5, 1, 9))
    found = logit_effects(active, selected, table, dictionary=clt, top_k=3)
    last = clt.write_layers[-1]
    for i, (layer, _, feature) in enumerate(active.values.tolist()):
        row = clt.decoder_vector((layer, feature), last).double().numpy()
        row = row - row.mean() if norm == "layer" else row
        logits = (row * gain) @ unembed.T
        logits -= logits.mean()
        order = np.argsort(-logits)
        np.testing.assert_array_equal(found["raised"][i], order[:3])
        np.testing.assert_array_equal(found["lowered"][i], order[::-1][:3])
        np.testing.assert_allclose(found["raised_by"][i], logits[order[:3]], rtol=1e-4)
        np.testing.assert_allclose(found["lowered_by"][i], logits[order[::-1][:3]], rtol=1e-4)


def test_other_files_and_another_models_readout_are_refused(clt):
    table = readout(np.ones((4, clt.d_out + 1)), np.ones(clt.d_out + 1), norm="rms", eps=1e-5)
    with pytest.raises(ShapeError, match=f"width {clt.d_out}"):
        logit_effects(*nodes((0, 1, 0)), table, dictionary=clt)
    other = replace(clt.as_resource(), features="of another file")
    with pytest.raises(SourceChanged, match="files were changed after it was opened"), other.open():
        raise AssertionError("never reached")


def test_they_are_stored_under_a_key_that_knows_no_place(clt, tmp_path: Path):
    source = ModelSource("specimen")
    moved = mizarr.Dictionary.from_pretrained(shutil.copytree(clt.files.directory, tmp_path / "moved"))
    store = mizarr.open_store(tmp_path / "store")
    keys = []
    for dictionary in (clt, moved):
        graph = graph_node(source, dictionary, "The capital of France is", max_feature_nodes=12)
        node = logit_effects_node(graph, readout_node(source.files))
        run(node, store, quiet=True)
        keys.append(node.key(store).digest)
    assert keys[0] == keys[1]
    found, model = node.open(store), mizarr.Model.from_pretrained("specimen")
    assert dict(found.sizes) == {"selected": 12, "rank": 5}
    held = graph.open(store)
    layer, _, feature = held["active_features"].values[held["selected_features"].values[0]].tolist()
    row = clt.decoder_vector((layer, feature), clt.write_layers[-1])
    weights = model.network.weights
    gain = weights.final_norm.weight.float()
    unembed = (weights.embed if weights.lm_head is None else weights.lm_head).float()
    logits = (row * gain) @ (unembed - unembed.mean(0)).T
    assert found["raised"][0].values.tolist() == torch.topk(logits, 5).indices.tolist()
    np.testing.assert_allclose(found["lowered_by"][0], logits.sort().values[:5], rtol=1e-4, atol=1e-6)
