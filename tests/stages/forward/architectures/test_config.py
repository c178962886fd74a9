"""Configurations: a family's axes agree with the reference implementation's own reading of the same file."""

from __future__ import annotations

import json
import math

import pytest

from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.store.errors import ConfigError

from .. import random_models

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def raw(model_type, **keys):
    return SMALL | {"model_type": model_type} | keys


def as_the_reference_reads(model_type, keys):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **keys)


def attention(config):
    """The attention of the first layer."""
    return config.blocks[0].mixers[0]


def windows(config):
    """Of each layer."""
    return tuple(block.mixers[0].window for block in config.blocks)


def compare(ours, theirs):
    """Every axis both spell out."""
    ours_attends = attention(ours)
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours_attends.num_kv_heads == theirs.num_key_value_heads
    assert ours_attends.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.norm_eps == getattr(theirs, "rms_norm_eps", getattr(theirs, "norm_epsilon", None))
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours_attends.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours_attends.rope.scheme == theirs.rope_parameters["rope_type"]
    size = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    assert list(windows(ours)) == [size if kind == "sliding_attention" else None for kind in types]
    assert ours_attends.logit_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.final_logit_softcapping == getattr(theirs, "final_logit_softcapping", None)
    scalar = getattr(theirs, "query_pre_attn_scalar", None) or ours_attends.head_dim
    assert ours.layers[0].mixer.scale == 1 / math.sqrt(scalar)


@pytest.mark.parametrize("family", random_models.FAMILIES)
def test_a_bare_config_takes_the_defaults_of_the_reference_implementation(family):
    kv = {"helium": 20}.get(family, 32)
    heads = 32 if 32 % kv == 0 else kv  # which the reference's default of key heads divides
    keys = SMALL | {"num_attention_heads": heads, "hidden_size": 4 * heads}
    compare(from_hf_config({"model_type": family} | keys), as_the_reference_reads(family, keys))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", random_models.FAMILIES)
def test_a_saved_config_reads_as_the_reference_implementation_reads_it(family, seed, tmp_path):
    theirs = random_models.config(family, seed)
    theirs.save_pretrained(tmp_path)
    compare(from_hf_config(json.loads((tmp_path / "config.json").read_text())), theirs)


def test_llama_3_2_as_published():
    config = from_hf_config(
        raw(
            "llama",
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            intermediate_size=8192,
            vocab_size=128256,
            tie_word_embeddings=True,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
            max_position_embeddings=131072,
        )
    )
    rope = attention(config).rope
    assert (rope.scheme, rope.theta, rope.factor) == ("llama3", 500000.0, 32.0)
    assert rope.original_max_position_embeddings == 8192 and rope.dim == 64
    assert config.tie_word_embeddings and not attention(config).qkv_bias


def test_gemma_2_alternates_windows_and_layer_types_override_the_alternation():
    config = from_hf_config(raw("gemma2"))
    assert windows(config) == (4096, None, 4096, None)
    assert (attention(config).logit_softcap, config.final_logit_softcapping) == (50.0, 30.0)
    assert config.layers[0].norms == "around" and config.embedding_scale == 8.0
    listed = ["full_attention"] * 3 + ["sliding_attention"]
    assert windows(from_hf_config(raw("gemma2", layer_types=listed))) == (None, None, None, 4096)


def test_an_explicit_null_soft_cap_is_no_cap():
    config = from_hf_config(raw("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert attention(config).logit_softcap is None and config.final_logit_softcapping is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8,) * 4),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
    ],
)
def test_qwen_slides_only_where_it_is_switched_on_and_from_max_window_layers(keys, expected):
    assert windows(from_hf_config(raw("qwen2", **keys))) == expected


def test_phi_3_honours_its_window_and_longrope_under_its_older_names():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = from_hf_config(raw("phi3", sliding_window=2047, rope_scaling={"type": "su", **factors}))
    assert windows(config) == (2047,) * 4
    rope = attention(config).rope
    assert rope.scheme == "longrope" and rope.original_max_position_embeddings == 4096


def test_llama_biases_follow_their_keys():
    config = from_hf_config(raw("llama", attention_bias=True, mlp_bias=True))
    assert attention(config).qkv_bias and attention(config).o_bias
    assert config.blocks[0].channel_mixer.has_bias


@pytest.mark.parametrize(
    ("family", "key", "value", "activation"),
    [
        ("llama", "hidden_act", "gelu", "gelu"),
        ("llama", "hidden_act", None, "silu"),
        ("gemma", "hidden_act", "gelu", "gelu_tanh"),
        ("gemma", "hidden_activation", None, "gelu_tanh"),
        ("gemma2", "hidden_activation", None, "gelu_tanh"),
        ("gemma2", "hidden_activation", "gelu", "gelu"),
        ("starcoder2", "hidden_act", "gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_activations_follow_the_config_and_a_null_key_is_no_key(family, key, value, activation):
    assert from_hf_config(raw(family, **{key: value})).blocks[0].channel_mixer.activation == activation


@pytest.mark.parametrize("key", SMALL)
def test_a_missing_or_mistyped_required_key_is_named(key):
    with pytest.raises(ConfigError, match=rf"expected {key} to be a positive integer, found no such key"):
        from_hf_config({k: v for k, v in raw("llama").items() if k != key})
    with pytest.raises(ConfigError, match=rf"expected {key} to be a positive integer, found '64'"):
        from_hf_config(raw("llama", **{key: "64"}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads \(4\) to be a multiple of num_key_value_heads, found 3",
        ),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "found rope_type 'proportional'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: expected factor to be a finite number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "for 'full_attention' layers"),
        ({"hidden_act": "swiglu"}, "found 'swiglu'"),
        ({"head_dim": 15}, "positive, even number of entries of each head, found 15"),
        ({"tie_word_embeddings": "yes"}, "expected tie_word_embeddings to be true or false, found 'yes'"),
        ({"quantization_config": {"bits": 4}}, "found a quantization_config; fetch the model's unquantised"),
        ({"use_bidirectional_attention": True}, "expected a causal decoder"),
    ],
)
def test_what_cannot_be_followed_is_an_error_that_says_what_was_found(keys, message):
    with pytest.raises(ConfigError, match=message):
        from_hf_config(raw("llama", **keys))


def test_a_config_without_model_type_and_an_unknown_one_are_told_apart():
    with pytest.raises(ConfigError, match="expected a model_type such as 'llama', found None; add the key"):
        from_hf_config(dict(SMALL))
    with pytest.raises(ConfigError, match="found 'lama'; nearest is 'llama'"):
        from_hf_config(raw("lama"))


def test_layer_types_of_another_kind_or_number_are_refused():
    with pytest.raises(ConfigError, match="found 'chunked_attention'"):
        from_hf_config(raw("gemma2", layer_types=["chunked_attention"] * 4))
    with pytest.raises(ConfigError, match=r"one entry for each of 4 layers, found 1"):
        from_hf_config(raw("gemma2", layer_types=["full_attention"]))


def test_rope_settings_in_old_and_new_spelling_are_one_configuration():
    old = from_hf_config(raw("llama", rope_theta=500000.0, rope_scaling=LLAMA3))
    new = from_hf_config(raw("llama", rope_parameters={"rope_theta": 500000.0, **LLAMA3}))
    assert old == new and old.digest == new.digest


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_theta": 2e4},
        {"head_dim": 32},
        {"hidden_act": "relu"},
        {"attention_bias": True},
    ],
)
def test_every_field_that_alters_numbers_alters_the_digest(change):
    assert from_hf_config(raw("llama", **change)).digest != from_hf_config(raw("llama")).digest
