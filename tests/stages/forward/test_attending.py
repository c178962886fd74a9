"""Families whose layers all attend compute what the reference computes, and read its configs as it does."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import HookPoint, HookSpec, Model
from mizarr.stages.forward.architectures.attending.families import ATTENDING as ROWS
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.generation.generate import generate
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.store.errors import ConfigError

from .compared import (
    RAGGED,
    assert_alike_together,
    assert_near,
    assert_parity,
    assert_read_by_its_files,
    draw_ids,
    normed_sum,
)
from .random_attending import ATTENDING, AXES
from .random_hybrids import draw, save_random_hybrid
from .random_later import REQUIRED

pytest.importorskip("transformers")


def read(raw: dict[str, Any]) -> Any:
    return KNOWN[raw["model_type"]].read(ConfigReader(json.loads(json.dumps(raw))), {})


@pytest.mark.parametrize("family", ATTENDING)
@pytest.mark.parametrize("seed", range(2))
def test_logits_and_streams_agree_with_transformers(family, seed, tmp_path):
    reference = save_random_hybrid(tmp_path, family, seed, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    assert_parity(model, reference)
    assert_alike_together(model, RAGGED)


@pytest.mark.parametrize("family", ATTENDING)
def test_attention_patterns_agree_with_transformers(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 4, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(2, 40)
    cache = model.forward(ids, HookSpec().capture("blocks.*.attn.hook_pattern"))
    with torch.no_grad():
        patterns = reference(ids, output_attentions=True, use_cache=False).attentions
    assert len(patterns) == len(cache) == model.config.num_layers
    for point, pattern in zip(cache, patterns, strict=True):
        found = cache[point]
        # Sinks take their share; some references return the pattern as it was before.
        assert_near(found / found.sum(-1, keepdim=True) if family.endswith("_swa") else found, pattern)


@pytest.mark.parametrize("family", ATTENDING)
def test_the_stream_is_what_layers_add_to_it(family, tmp_path):
    save_random_hybrid(tmp_path, family, 2, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 12)
    cache = model.forward(ids, HookSpec().capture("*"))
    assert_near(cache.logits, model.forward(ids).logits)
    stream = cache[HookPoint.embed()]
    for layer in range(model.config.num_layers):
        gains = getattr(model.network.weights.layers[layer], "gains", {})
        stream = stream * gains.get("1", 1)
        stream = normed_sum(model, cache, "ln1", layer, stream + cache[HookPoint.attn_out(layer)])
        if (middle := HookPoint.resid_mid(layer)) in cache:
            assert_near(stream, cache[middle])
        stream = stream * gains.get("2", 1)
        stream = normed_sum(model, cache, "ln2", layer, stream + cache[HookPoint.mlp_out(layer)])
        assert_near(stream, cache[HookPoint.resid_post(layer)])
        has_middle = not model.config.layers[layer].is_parallel
        assert (middle in cache) == has_middle == (HookPoint("ln2_scale", layer) in cache or family in AFTER)


AFTER = ("exaone4", "flex_olmo", "olmo2", "olmo3")


@pytest.mark.parametrize("family", ATTENDING)
def test_absent_keys_mean_what_they_mean_to_the_reference(family):
    """The config the reference makes of the required keys says all others."""
    from transformers import AutoConfig

    usual = {"hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 8, "intermediate_size": 96}
    required = {ROWS[family].aliases.get(key, key): value for key, value in usual.items()}
    required |= {"vocab_size": 96} | ({"word_embed_proj_dim": 2048} if family == "opt" else {})
    required |= REQUIRED.get(family, {})
    if family == "gpt_neo":
        required["attention_types"] = [[["global", "local"], 4]]
    full = AutoConfig.for_model(family, **required).to_dict()
    silent = required | {"model_type": family}
    assert len(full) > len(required) + 10
    assert read(silent).fields == read(full).fields
    assert read(silent).digest == read(full).digest


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_two_ropes_are_read_as_older_configs_write_them(family):
    from transformers import AutoConfig

    raw = {
        **draw(family, 0),
        "model_type": family,
        "rope_theta": 7e5,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_local_base_freq": 3e4,
    }
    del raw["rope_parameters"]
    told = AutoConfig.for_model(**raw).to_dict()
    assert set(told["rope_parameters"]) == {"full_attention", "sliding_attention"}
    assert read(raw).digest == read(told).digest


def test_pythia_is_read_as_older_configs_write_it():
    from transformers import AutoConfig

    raw = {**draw("gpt_neox", 0), "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 5000}
    del raw["rope_parameters"]
    assert read(raw).digest == read(AutoConfig.for_model(**raw).to_dict()).digest


@pytest.mark.parametrize(("family", "root"), [("gpt2", "transformer."), ("gpt_neox", "gpt_neox.")])
def test_names_may_lack_what_the_reference_writes_before_them(family, root, tmp_path):
    save_random_hybrid(tmp_path / "whole", family, 0, tokenizer=False)
    shutil.copytree(tmp_path / "whole", tmp_path / "bare")
    held = load_file(tmp_path / "bare" / "model.safetensors")
    bare = {name.removeprefix(root): tensor for name, tensor in held.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # the mask, which old files hold
    assert not any(name.startswith(root) for name in bare)
    save_file(bare, tmp_path / "bare" / "model.safetensors")
    whole, other = (Model.from_pretrained(tmp_path / name) for name in ("whole", "bare"))
    ids = draw_ids(1, 20)
    assert torch.equal(whole.forward(ids).logits, other.forward(ids).logits)
    assert whole.config.digest == other.config.digest
    files = resolve(tmp_path / "bare")
    assert not report(files.config, read_shapes(files.weight_files)).warnings


@pytest.mark.parametrize("family", ATTENDING)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    save_random_hybrid(tmp_path, family, 0, tokenizer=False)
    files = resolve(tmp_path)
    assert files.has_known_family
    found = report(files.config, read_shapes(files.weight_files))
    assert found.known_family and found.is_compatible and not found.warnings
    assert found.config == files.architecture()
    assert KNOWN[family].described["model_type"] == family


@pytest.mark.parametrize("family", AXES)
def test_greedy_tokens_are_those_of_transformers_with_keys_kept_or_not(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 1, tokenizer=False)
    model, prompts = Model.from_pretrained(tmp_path), draw_ids(2, 7).tolist()
    anew, kept = (generate(model, prompts, max_tokens=20, eos=(), cache=cache) for cache in (False, True))
    assert kept.ids == anew.ids
    with torch.no_grad():
        logits = reference(torch.tensor([list(each.token_ids) for each in anew]), use_cache=False).logits
    for row, each in enumerate(anew):
        assert list(each.generated_ids) == logits[row, 6:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("family", "told", "message"),
    [
        (
            "cohere",
            {"use_qk_norm": True},
            "expected no use_qk_norm, found True in a cohere model",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "expected no clip_qkv, found 8.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "expected no attn_logit_softcapping, found 50.0"),
        (
            "smollm3",
            {"no_rope_layers": [1, 2, 0]},
            r"no_rope_layers to list 0 or 1 for each of 3 layers, found \[",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers to list 0 or 1 for each of 3 layers"),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default"}},
            "expected rope_parameters to have the sections full_attention and",
        ),
        (
            "olmo2",
            {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
            "expected one rope_type for all",
        ),
        (
            "mixtral",
            {"num_key_value_heads": 3, "num_attention_heads": 4},
            "multiple of num_key_value_heads, found 3",
        ),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types to have one entry for each of"),
        ("opt", {"do_layer_norm_before": False}, "expected do_layer_norm_before to be True, found False"),
        (
            "gpt_neo",
            {"attention_types": [[["global"], 1]]},
            "attention_types to list 'global' or 'local' for each",
        ),
        ("stablelm", {"qk_layernorm": True}, "expected no qk_layernorm, found True"),
        ("glm4_moe", {"n_group": 3}, "multiple of the number of expert groups, found 8 experts and 3 groups"),
        ("mixtral", {"num_experts_per_tok": 9}, "at most 4 experts per token, as many as there are, found 9"),
        ("falcon", {"alibi": True}, "expected alibi to be False, found True"),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "expected parallel_attn to be true if new_decoder_architecture is",
        ),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: expected qk_ln to be False, found True"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "expected no apply_residual_connection_post_layernorm, found True",
        ),
        ("phimoe", {"num_experts_per_tok": 1}, "expected num_experts_per_tok to be 2"),
        ("deepseek_v2", {"topk_method": "noaux_tc", "first_k_dense_replace": 0}, "found 'noaux_tc'"),
        ("exaone_moe", {"mlp_layer_types": ["dense"]}, "'dense' or 'sparse' for each of 3 layers"),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta to list a number for each of 3"),
        ("ministral3", {"layer_types": ["full_attention"] * 3}, "expected no layer_types"),
        ("xglm", {"pad_token_id": 2}, "expected pad_token_id to be below 2, .*found 2"),
        ("cwm", {"hidden_act": "xielu"}, "expected an activation among"),
        (
            "diffllama",
            {"num_key_value_heads": 1},
            "num_key_value_heads in config.json to be even, .* found 1",
        ),
        (
            "llama4_text",
            {"layer_types": ["sliding_attention"] * 3},
            "chunked_attention or full_attention for",
        ),
    ],
)
def test_what_is_not_followed_is_told(family, told, message):
    with pytest.raises(ConfigError, match=message):
        read({**draw(family, 0), "model_type": family, **told})


@pytest.mark.parametrize("family", ["nanochat", "nemotron", "olmo", "phi"])
def test_a_readout_of_the_files_gives_the_logits(family, tmp_path):
    """Heads with a bias, norms without weights, and norms by 1 more than theirs."""
    save_random_hybrid(tmp_path, family, 1, tokenizer=False)
    assert_read_by_its_files(tmp_path)


def test_values_that_are_clipped_are_no_linear_map(tmp_path):
    save_random_hybrid(tmp_path, "olmo", 0, tokenizer=False, clip_qkv=0.5)
    network = Model.from_pretrained(tmp_path).network
    with pytest.raises(
        ConfigError, match=r"linear map of the normalised stream, found olmo, which clips them to 0\.5"
    ):
        network.value_matrix(1)


def test_a_swedish_gpt2_is_a_gpt2():
    raw = json.loads(json.dumps(draw("gpt2", 0)))
    swedish, english = (read(raw | {"model_type": name}) for name in ("gpt-sw3", "gpt2"))
    assert swedish.fields | {"model_type": "gpt2"} == english.fields


@pytest.mark.parametrize("family", ["gpt2", "falcon", "xglm"])
def test_a_key_the_reference_has_another_name_for_is_not_read(family):
    raw = {**draw(family, 0), "model_type": family}
    assert read(raw | {"hidden_act": "relu2", "intermediate_size": 7}).digest == read(raw).digest


def test_draws_differ_along_every_axis():
    """Or the tests above would compare one configuration with itself."""
    for family in ATTENDING:
        drawn = {read({**draw(family, seed), "model_type": family}).digest for seed in range(12)}
        assert len(drawn) >= 10, family
