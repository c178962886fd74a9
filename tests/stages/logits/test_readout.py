"""The readout extracted from a checkpoint gives the logits the model itself gives."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.checkpoints.checkpoint import checkpoint_of
from mizarr.stages.logits.lens import logits
from mizarr.stages.logits.readout import readout, readout_from_files
from mizarr.store.errors import ShapeError, WeightsError

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "llama, untied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "gemma2, soft cap, 1 + w": (Gemma2ForCausalLM, Gemma2Config(**SIZES, final_logit_softcapping=3.0)),
    "starcoder2, layer norm": (
        Starcoder2ForCausalLM,
        Starcoder2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_states_before_the_final_norm_give_the_logits_of_the_model(family: str, tmp_path: Path):
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases start at 1 and 0, which would hide that they are used.
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    held: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: held.append(args[0]))
    with torch.no_grad():
        expected = model(torch.arange(7)[None]).logits[0].numpy()
    raw = json.loads((tmp_path / "config.json").read_text())
    found = readout_from_files([tmp_path / "model.safetensors"], from_hf_config(raw))
    states = xr.DataArray(held[0][0].numpy(), dims=("position", "hidden"))
    np.testing.assert_allclose(logits(states, found), expected, atol=2e-5)


def test_bfloat16_tensors_are_read_bit_for_bit(tmp_path: Path):
    values = torch.randn(5, 3).bfloat16()
    save_file({"a": torch.zeros(2), "b": values}, tmp_path / "m.safetensors")
    found = checkpoint_of([tmp_path / "m.safetensors"]).array("b")
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), values.view(torch.uint16).numpy())


def test_a_missing_tensor_is_named_with_the_nearest_one(tmp_path: Path):
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        checkpoint_of([tmp_path / "m.safetensors"]).array("lm_haed.weight")


def test_a_truncated_file_is_refused(tmp_path: Path):
    save_file({"a": torch.zeros(100)}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-4])
    (tmp_path / "text.safetensors").write_bytes(b"version https://git-lfs")
    for name, told in (
        ("cut.safetensors", r"is truncated: expected \d+ bytes, found \d+"),
        ("text.safetensors", r"is not a complete safetensors file: its header .* bytes, and 15 follow"),
    ):
        with pytest.raises(WeightsError, match=f"{name} {told}; download it again"):
            checkpoint_of([tmp_path / name]).array("a")


def test_an_integer_checkpoint_is_refused(tmp_path: Path):
    header = json.dumps({"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"ab")
    with pytest.raises(
        WeightsError, match="tensor 'a' of dtype F64, F32, F16, BF16, found I8; load an unquantised"
    ):
        checkpoint_of([tmp_path / "m.safetensors"]).array("a")


def test_rows_beyond_the_tokenizer_have_no_text():
    found = readout(np.eye(4, 2), np.ones(2), norm="gemma_rms", eps=1e-6, vocabulary=["a", "b"])
    assert found["token"].values.tolist() == ["a", "b", "", ""]
    assert found["norm_weight"].values.tolist() == [2, 2]
    assert found.attrs == {"norm": "rms", "eps": 1e-6, "soft_cap": 0.0}


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="norm_weight"):
        readout(np.eye(4, 2), np.ones(3), norm="rms", eps=0)
    with pytest.raises(ShapeError, match="'batch'"):
        readout(np.eye(2), np.ones(2), norm="batch", eps=0)
