"""Unknown families: a row worked out from the tensors equals the row written by hand, and whatever is left
over stops it.
"""

from __future__ import annotations

import json

import pytest

from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.models.autoconfig import architecture_of, examine, inferred, report
from mizarr.stages.forward.networks import weights
from mizarr.store.errors import ConfigError

from .. import random_models

RAW = {
    "model_type": "novel",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHAPES = weights.expected_tensors(from_hf_config(RAW | {"model_type": "llama"}))


def issues(raw=RAW, shapes=SHAPES):
    return " | ".join(report(raw, shapes).issues)


TOLD = [name for name in random_models.FAMILIES if name != "helium"]
"""Families whose files tell everything; which entries rope turns together stands in none."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", TOLD)
def test_the_inferred_configuration_equals_the_familys_own(family, seed, tmp_path):
    random_models.save_random_model(tmp_path, family, seed, tokenizer=False)
    raw = json.loads((tmp_path / "config.json").read_text())
    shapes = weights.read_shapes([tmp_path / "model.safetensors"])
    inferred = examine(raw, shapes, None)
    assert inferred.issues == []
    assert inferred.config == from_hf_config(raw)


def test_an_unknown_family_laid_out_like_llama_runs():
    found = report(RAW, SHAPES)
    assert found.is_compatible and not found.known_family and found.warnings == []
    as_llama = from_hf_config(RAW | {"model_type": "llama"})
    assert found.require().blocks == as_llama.blocks


def test_head_sizes_the_config_leaves_out_come_from_the_tensors():
    raw = {key: value for key, value in RAW.items() if key != "num_key_value_heads"}
    assert report(raw, SHAPES).require().heads_of(0).num_kv_heads == 2


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm"])
def test_a_tensor_missing_from_any_layer_is_found(layer, name):
    tensor = f"model.layers.{layer}.{name}.weight"
    assert f"expected a tensor {tensor}, found" in issues(
        shapes={k: v for k, v in SHAPES.items() if k != tensor}
    )


def test_a_shape_of_a_later_layer_is_checked_too():
    wrong = SHAPES | {"model.layers.2.mlp.up_proj.weight": (25, 16)}
    assert "expected model.layers.2.mlp.up_proj.weight of shape [24, 16], found [25, 16]" in issues(
        shapes=wrong
    )


def test_a_tensor_the_decoder_would_not_use_stops_an_unknown_family_and_only_warns_for_a_known_one():
    extra = SHAPES | {f"model.layers.{i}.self_attn.sinks": (4,) for i in range(3)}
    assert "found model.layers.0.self_attn.sinks (and in 2 more layers)" in issues(shapes=extra)
    known = report(RAW | {"model_type": "llama"}, extra)
    assert known.is_compatible
    assert known.warnings == ["tensor model.layers.0.self_attn.sinks (and in 2 more layers) is not used"]


def test_rotary_buffers_of_old_checkpoints_are_nothing_to_mention():
    assert report(RAW, SHAPES | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}).warnings == []


@pytest.mark.parametrize(
    "change",
    [{"residual_multiplier": 0.22}, {"clip_qkv": 8.0}, {"num_local_experts": 8}, {"no_rope_layers": [1, 0]}],
)
def test_a_key_known_to_change_numbers_stops_an_unknown_family(change):
    key = next(iter(change))
    assert f"expected {key} to be absent, null" in issues(RAW | change)
    assert issues(RAW | {key: None}) == ""


def test_a_key_nobody_reads_is_a_warning_and_a_null_or_harmless_one_is_not():
    raw = RAW | {
        "flux": 3,
        "ballast": None,
        "use_cache": True,
        "rope_scaling": {"rope_type": "default", "mrope_section": [1]},
    }
    assert report(raw, SHAPES).warnings == [
        "flux in config.json was not read",
        "rope_scaling.mrope_section in config.json was not read",
    ]


def test_a_null_hidden_activation_does_not_shadow_hidden_act():
    gemma = RAW | {"model_type": "gemma9", "hidden_activation": None, "hidden_act": "gelu_pytorch_tanh"}
    assert report(gemma, SHAPES).require().blocks[0].channel_mixer.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("prefix", "convention"),
    [("transformer.h.0.attn.c_attn.weight", "GPT-2"), ("gpt_neox.layers.0.attention.dense.weight", "Pythia")],
)
def test_another_naming_convention_is_named(prefix, convention):
    found = issues(shapes={prefix: (16, 16), "wte.weight": (32, 16)})
    assert convention in found and "found wte.weight" in found


def test_missing_norms_are_one_issue_per_kind_with_what_is_there_instead():
    """OLMo 1 has layer norms without weights: nothing here computes those."""
    bare = {name: shape for name, shape in SHAPES.items() if "norm" not in name}
    found = report(RAW, bare).issues
    assert len(found) == 3
    assert found[0] == "expected a tensor model.norm.weight, found nothing like it"
    assert "input_layernorm.weight (and in 2 more layers)" in found[1]


def test_every_missing_scalar_is_an_issue_of_its_own():
    assert len(report({"model_type": "novel"}, {}).issues) == 5
    assert "multimodal" in issues({"model_type": "novel", "text_config": {}})


def test_one_error_lists_every_issue(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"wte.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'novel' checkpoint, an unknown family, for \d+ reasons") as error:
        architecture_of(RAW, [tmp_path / "model.safetensors"])
    assert str(error.value).count("\n  - ") > 5


def test_a_model_type_that_is_no_word_is_refused():
    with pytest.raises(ConfigError, match=r"expected a model_type such as 'llama', found \['llama'\]"):
        architecture_of(RAW | {"model_type": ["llama"]}, [])


def test_biases_are_read_off_the_tensors():
    biased = SHAPES | {
        "model.layers.0.self_attn.q_proj.bias": (16,),
        "model.layers.0.mlp.down_proj.bias": (16,),
    }
    (block, *_) = inferred(ConfigReader(RAW), biased).blocks
    (attention,) = block.mixers
    assert attention.qkv_bias and block.channel_mixer.has_bias and not attention.o_bias
