"""GGUF files give the model they were made of, and quantised ones the numbers their blocks stand for."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from mizarr import HookSpec, Model, capture, open_store
from mizarr.stages.forward.models.files import resolve
from mizarr.store.errors import ConfigError, ModelNotFound, WeightsError
from mizarr.workflows.cli import run as mizarr_command

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
from ..random_models import draw_weights  # noqa: E402
from .gguf_files import KINDS, draw_config, save_gguf  # noqa: E402 - needs gguf

IDS = [5, 17, 3, 90, 9, 40, 40, 2, 61, 8, 33, 7, 1, 22, 95, 4, 19, 18, 70, 6]


def save_random(folder, model_type, seed, kind=None, **given):
    """A random reference model, and the file made of it."""
    from transformers import AutoModelForCausalLM

    config = draw_config(model_type, seed, **given)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    draw_weights(model)
    save_gguf(folder / "model.gguf", model, kind)
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def near(found, expected, bar=1e-4):
    torch.testing.assert_close(found, expected, atol=bar * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model_type", KINDS)
def test_logits_are_those_of_the_checkpoint_it_was_made_of(model_type, seed, tmp_path):
    reference = save_random(tmp_path, model_type, seed)
    model = Model.from_pretrained(tmp_path / "model.gguf")
    assert model.config.model_type == model_type
    near(model.forward(IDS).logits[0], logits_of(reference))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16", "F16"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt2", "qwen2_moe"])
def test_quantised_files_give_the_numbers_their_blocks_stand_for(model_type, kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    reference = save_random(tmp_path, model_type, 3, kind)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.ndim > 1 and not name.endswith("mlp.gate.weight") and "shared_expert_gate" not in name:
                turned = model_type == "gpt2" and ".h." in name
                rows = weight.T if turned else weight
                rows = gguf.dequantize(gguf.quantize(rows.contiguous().numpy(), kind), kind)
                weight.copy_(torch.from_numpy(rows.T if turned else rows))
    near(Model.from_pretrained(tmp_path / "model.gguf").forward(IDS).logits[0], logits_of(reference))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL"])
def test_blocks_of_any_kind_are_what_the_format_says(kind, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model, quantised = LlamaForCausalLM(config), gguf.GGMLQuantizationType[kind]
    rng, size = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[quantised]
    blocks = rng.integers(0, 64, (256, 256 // size[0] * size[1]), dtype=np.uint8)
    save_gguf(tmp_path / "model.gguf", model)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(tmp_path / "packed.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        packed = tensor.name == "blk.0.ffn_down.weight"
        writer.add_tensor(
            tensor.name, blocks if packed else tensor.data, raw_dtype=quantised if packed else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = resolve(tmp_path / "packed.gguf").checkpoint
    found = checkpoint.array("model.layers.0.mlp.down_proj.weight")
    np.testing.assert_array_equal(found, gguf.dequantize(blocks, quantised))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_told_from_its_divisors(factor, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    }  # fmt: skip
    config = draw_config("llama", 4, rope_parameters=scaling, max_position_embeddings=16384)
    config._attn_implementation = "eager"
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    turned = config.hidden_size // config.num_attention_heads
    plain = 5e5 ** -(torch.arange(0, turned, 2) / turned)
    divisors = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy().astype("f4")
    save_gguf(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": divisors})
    near(Model.from_pretrained(tmp_path / "model.gguf").forward(IDS).logits[0], logits_of(model))
    save_gguf(tmp_path / "strange.gguf", model, tensors={"rope_freqs.weight": divisors + 0.5})
    with pytest.raises(ConfigError, match="rope_freqs"):
        Model.from_pretrained(tmp_path / "strange.gguf")


def test_a_file_is_captured_patched_and_found_again_and_another_is_another_model(tmp_path):
    save_random(tmp_path, "qwen2", 5, gguf.GGMLQuantizationType.Q8_0)
    path, store = tmp_path / "model.gguf", open_store(tmp_path / "store")
    first = capture(path, [IDS], "blocks.*.hook_resid_post", store=store, progress=False)
    shutil.copy(path, tmp_path / "copy.gguf")
    again = capture(tmp_path / "copy.gguf", [IDS], "blocks.*.hook_resid_post", store=store, progress=False)
    np.testing.assert_array_equal(first["resid_post"].values, again["resid_post"].values)
    assert len(list(store.entries())) == 1
    cache = Model.from_pretrained(path).forward(IDS, HookSpec().capture("blocks.1.hook_resid_post"))
    found = cache["blocks.1.hook_resid_post"][0].numpy()
    np.testing.assert_allclose(first["resid_post"].sel(layer=1).values, found, atol=1e-5)
    other = tmp_path / "other"
    other.mkdir()
    save_random(other, "qwen2", 6, gguf.GGMLQuantizationType.Q8_0)
    assert resolve(other / "model.gguf").identity() != resolve(path).identity()


def test_what_is_not_read_is_said_in_one_line(tmp_path, capsys):
    model = save_random(tmp_path, "llama", 7)
    path = tmp_path / "model.gguf"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="GGUF"):
        Model.from_pretrained(path)
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(WeightsError, match="GGUF"):
        Model.from_pretrained(path)
    kind = b"general.architecture\x08\0\0\0\x05" + bytes(7)
    path.write_bytes(whole.replace(kind + b"llama", kind + b"bloom"))
    with pytest.raises(ConfigError, match="bloom"):
        Model.from_pretrained(path)
    save_gguf(path, model, tensors={"blk.0.attn_sinks.weight": np.zeros(4, "f4")})
    with pytest.raises(WeightsError, match="attn_sinks"):
        Model.from_pretrained(path)
    with pytest.raises(ConfigError, match="transformers"):
        Model.from_pretrained(path, backend="transformers")
    with pytest.raises(ModelNotFound, match=r"model\.gguf"):
        Model.from_pretrained(tmp_path)
    (tmp_path / "half-00001-of-00002.gguf").write_bytes(whole)
    with pytest.raises(WeightsError, match="00002-of-00002"):
        Model.from_pretrained(tmp_path / "half-00001-of-00002.gguf")
    assert mizarr_command(["models", "inspect", str(tmp_path / "half-00001-of-00002.gguf")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_inspection_shows_the_plain_weights(tmp_path, capsys):
    import json

    reference = save_random(tmp_path, "qwen2", 8, gguf.GGMLQuantizationType.Q8_0)
    assert mizarr_command(["models", "inspect", str(tmp_path / "model.gguf"), "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model_type"], told["layout"], told["issues"]) == ("qwen2", "known family", [])
    weights = dict(reference.named_parameters())
    for tensor in told["tensors"]:
        plain = weights[tensor["name"]].detach()
        assert tensor["shape"] == list(plain.shape)
        assert tensor["norm"] == pytest.approx(float(plain.norm()), rel=1e-2)
    assert {tensor["name"] for tensor in told["tensors"]} <= set(weights)
