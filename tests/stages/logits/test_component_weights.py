"""What layers write with, read from a checkpoint, is what the reference implementation holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mizarr.pipeline import run
from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.logits.component_weights import component_weights, component_weights_node
from mizarr.store import open_store
from mizarr.store.errors import ConfigError

from ..forward.random_models import save_random_model


def weights_of(folder: Path, part: str, **options):
    config = from_hf_config(json.loads((folder / "config.json").read_text()))
    return component_weights([folder / "model.safetensors"], config, part, **options)


def test_a_family_with_four_norms_and_one_plus_w(tmp_path: Path):
    layer = save_random_model(tmp_path, "gemma2", 1).model.layers[1]
    found = weights_of(tmp_path, "attention").isel(layer=1)
    flat = found["W_O"].values.reshape(-1, found.sizes["hidden"])
    np.testing.assert_array_equal(flat, layer.self_attn.o_proj.weight.detach().numpy().T)
    norm = layer.post_attention_layernorm.weight.detach().numpy()
    np.testing.assert_array_equal(found["ln1_post_weight"], norm + 1)
    assert "b_O" not in found
    found = weights_of(tmp_path, "mlp").isel(layer=1)
    np.testing.assert_array_equal(found["W_out"], layer.mlp.down_proj.weight.detach().numpy().T)
    norm = layer.pre_feedforward_layernorm.weight.detach().numpy()
    np.testing.assert_array_equal(found["ln2_weight"], norm + 1)


def test_a_family_with_biases_and_layer_norm(tmp_path: Path):
    layer = save_random_model(tmp_path, "starcoder2", 1, use_bias=True).model.layers[0]
    attention, mlp = (weights_of(tmp_path, part).isel(layer=0) for part in ("attention", "mlp"))
    expected = {
        "b_O": layer.self_attn.o_proj.bias,
        "ln1_weight": layer.input_layernorm.weight,
        "ln1_bias": layer.input_layernorm.bias,
        "b_out": layer.mlp.c_proj.bias,
        "ln2_bias": layer.post_attention_layernorm.bias,
    }
    held = {**attention.data_vars, **mlp.data_vars}
    for name, tensor in expected.items():
        np.testing.assert_array_equal(held[name], tensor.detach())
    assert attention.attrs == {"part": "attention", "norm": "layer"}


def test_weights_are_rounded_as_the_model_holds_them(tmp_path: Path):
    import torch

    layer = save_random_model(tmp_path, "llama", 1).model.layers[0]
    found = weights_of(tmp_path, "mlp", dtype="bfloat16")["W_out"].isel(layer=0)
    expected = layer.mlp.down_proj.weight.detach().to(torch.bfloat16).float().numpy().T
    np.testing.assert_array_equal(found, expected)


def test_an_unknown_part_is_refused(tmp_path: Path):
    save_random_model(tmp_path, "llama", 1)
    with pytest.raises(ConfigError, match="'attention' or 'mlp'"):
        weights_of(tmp_path, "neurons")


def test_they_are_stored_once_per_model_and_need_no_torch(tmp_path: Path):
    save_random_model(tmp_path, "phi3", 1)
    program = """
import sys
sys.modules["torch"] = None
from mizarr.pipeline import run
from mizarr.stages.logits.component_weights import component_weights_node
from mizarr.stages.forward.models.files import resolve
from mizarr.store import open_store
store, files = open_store(sys.argv[2]), resolve(sys.argv[1])
for part in ("attention", "mlp"):
    run(component_weights_node(files, part), store)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path), str(tmp_path / "store")], check=True)
    store, files = open_store(tmp_path / "store"), resolve(str(tmp_path))
    for part in ("attention", "mlp"):
        node = component_weights_node(files, part)
        assert node.status(store).is_cached
        run(node, store)
        expected = weights_of(tmp_path, part)
        for name in expected.data_vars:
            np.testing.assert_array_equal(node.open(store)[name], expected[name])
