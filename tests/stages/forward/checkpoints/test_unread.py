"""Tensors that nothing reads: refused inside the layers of a model, told in a line elsewhere."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr import Model
from mizarr.store.errors import WeightsError

from ..config_mutations import saved

INSIDE = {
    "llama": [
        "model.layers.1.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.mlp.gate_proj.weight_scale",
    ],
    "gpt2": ["transformer.h.0.attn.q_norm.weight", "transformer.h.1.ln_3.weight"],
    "mamba": ["backbone.layers.0.mixer.gate.weight"],
    "rwkv": ["rwkv.blocks.1.attention.gate.weight"],
    "bert": ["bert.encoder.layer.0.attention.self.query.lora_B.weight"],
}
OUTSIDE = ["value_head.weight", "model.layers.7.self_attn.q_proj.weight", "score.weight"]
SILENT = ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]


def add(folder, name, value=None):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: torch.ones(4) if value is None else value}, path, {"format": "pt"})


@pytest.mark.parametrize(("family", "name"), [(f, name) for f, names in INSIDE.items() for name in names])
@pytest.mark.parametrize("door", ["load", "capture", "streamed"])
def test_a_tensor_inside_a_layer_is_refused(family, name, door, tmp_path):
    model = saved(family, 1, tmp_path / "model")
    add(tmp_path / "model", name)
    store = mizarr.open_store(tmp_path / "store")
    doors = {
        "load": lambda: Model.from_pretrained(tmp_path / "model"),
        "streamed": lambda: Model.from_pretrained(tmp_path / "model", max_memory=10**6),
        "capture": lambda: mizarr.capture(
            str(tmp_path / "model"), model.ids, "blocks.0.hook_resid_post", store=store, progress=False
        ),
    }
    with pytest.raises(WeightsError, match=r"found '.*', which would be ignored; merge an adapter"):
        doors[door]()
    assert not list(store.records())


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_tensor_elsewhere_is_told_in_a_line(name, tmp_path, capsys):
    model = saved("llama", 1, tmp_path)
    capsys.readouterr()
    expected = Model.from_pretrained(tmp_path).forward(model.ids).logits
    assert capsys.readouterr().err == ""
    add(tmp_path, name)
    read = Model.from_pretrained(tmp_path)
    assert torch.equal(read.forward(model.ids).logits, expected)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}: tensors that are not read: ")
    assert ".".join(name.split(".")[:2]) in line
    Model.from_pretrained(tmp_path, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", SILENT)
def test_buffers_and_copies_are_nothing_to_tell(name, tmp_path, capsys):
    model = saved("gemma2", 1, tmp_path)
    assert model.config["tie_word_embeddings"] or name != "lm_head.weight"
    value = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    add(tmp_path, name, value if name == "lm_head.weight" else None)
    capsys.readouterr()
    Model.from_pretrained(tmp_path)
    assert capsys.readouterr().err == ""
