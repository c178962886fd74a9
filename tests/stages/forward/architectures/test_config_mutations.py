"""A changed config is computed as the reference computes it, or refused: never silently something else."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mizarr.stages.forward.architectures.known import KNOWN, SECOND_NAMES

from ..config_mutations import TABLED, Saved, mutated, outcome, saved, single_changes

DRAWS = int(os.environ.get("MIZARR_CONFIG_DRAWS", "20000"))
"""Changed configs of all families together, in the slow test."""
SEED = int(os.environ.get("MIZARR_CONFIG_SEED", "0"))
"""Another one draws other configs."""
NOT_COMPUTED = {"image_token_id", "boi_token_id", "eoi_token_id", "video_token_id", "initializer_range"}
NOT_COMPUTED |= {"vision_feature_layers", "num_mtp_layers"}
"""Keys with two names that change no logits of a text model."""

CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("rwkv", {"layer_norm_epsilon": 1e-2}, "equal"),
    ("opt", {"layer_norm_eps": 1e-2}, "equal"),
    ("granite", {"attention_multiplier": 0}, "equal"),
    ("granite", {"residual_multiplier": 0.0}, "equal"),
    ("granitemoehybrid", {"attention_multiplier": 0}, "equal"),
    ("bamba", {"mamba_conv_bias": None}, "not equal"),
    ("smollm3", {"use_sliding_window": False, "layer_types": "sliding_attention"}, "refused"),
    ("qwen2_moe", {"use_sliding_window": False, "layer_types": "sliding_attention"}, "refused"),
    ("qwen2", {"use_sliding_window": False, "layer_types": "sliding_attention"}, "refused"),
    ("mistral", {"sliding_window": None, "layer_types": "sliding_attention"}, "refused"),
    ("recurrent_gemma", {"sliding_window": 2}, "refused"),
    ("recurrent_gemma", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "refused"),
    ("recurrent_gemma", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": -0.5}}, "refused"),
    ("modernbert-decoder", {"sliding_window": 0}, "refused"),
    ("modernbert-decoder", {"sliding_window": 2.5}, "refused"),
    ("modernbert-decoder", {"sliding_window": 3}, "refused"),
    ("modernbert", {"sliding_window": 1}, "refused"),
    ("xlstm", {"num_hidden_layers": 1}, "refused"),
    ("esm", {"position_embedding_type": None}, "refused"),
    ("gptj", {"rotary_dim": 3}, "refused"),
    ("gptj", {"rotary_dim": None}, "refused"),
    ("gpt_neo", {"attention_types": [[["global"], 3], [["local"], 1]]}, "refused"),
    ("gpt_neo", {"attention_types": None}, "equal"),
    ("zamba2", {"hybrid_layer_ids": [1, 0]}, "refused"),
    ("deberta", {"pos_att_type": ["p2c", "c2p", "p2c"]}, "refused"),
    ("gemma2", {"query_pre_attn_scalar": -16}, "refused"),
    ("deepseek_v3", {"n_group": 8}, "refused"),
    ("deepseek_v3", {"head_dim": 2}, "refused"),
    ("deepseek_v2", {"head_dim": 2}, "equal"),
    ("youtu", {"head_dim": 2}, "refused"),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 3, "layer_types": None}, "equal"),
    ("qwen2_moe", {"use_sliding_window": False, "layer_types": None}, "equal"),
    ("gpt_oss", {"rope_parameters": {}}, "equal"),
    ("cwm", {"rope_parameters": {}}, "equal"),
    ("mpt", {"attn_config": {"softmax_scale": 0}}, "refused"),
    ("codegen", {"rotary_dim": 64}, "refused"),
    ("granite", {"logits_scaling": 0}, "refused"),
]
"""Family, what is changed, and what becomes of it; a type of layers is that of all of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("family", "changes", "expected"), CHANGES, ids=[f"{f} {c}" for f, c, _ in CHANGES])
def test_a_change_is_followed_or_refused(family, changes, expected, tmp_path):
    model = saved(family, 1, tmp_path / "model")
    config = {**model.config, **changes}
    if changes.get("layer_types"):
        config["layer_types"] = [changes["layer_types"]] * config["num_hidden_layers"]
    found = outcome(model, config, ())
    if expected == "not equal":
        assert found.kind in ("equal", "refused", "not computed"), found
    else:
        assert found.kind == expected, found


def under_two_names(model: Saved) -> list[tuple[str, str]]:
    second = SECOND_NAMES.get(str(model.config["model_type"]), {})
    return [(name, own) for name, own in second.items() if isinstance(model.config.get(own), int)]


@pytest.mark.parametrize(
    "family", sorted({"gpt2", "gptj", "gpt_neo", "mpt", "bloom", "xglm", "distilbert", "mixtral"})
)
def test_two_names_of_one_key_with_two_values_are_refused_in_any_order(family, tmp_path):
    model = saved(family, 1, tmp_path / "model")
    assert under_two_names(model)
    for name, own in under_two_names(model):
        other = model.config[own] * 2
        for config in ({name: other, **model.config}, {**model.config, name: other}):
            found = outcome(model, config, (name,))
            assert found.kind == "refused" and name in found.detail and own in found.detail, found
        renamed = {name if key == own else key: value for key, value in model.config.items()}
        assert outcome(model, renamed, (name,)).kind == "equal"
        assert outcome(model, {**model.config, name: model.config[own]}, (name,)).kind == "equal"


def test_second_names_are_those_of_the_reference():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    maps = {family: CONFIG_MAPPING[family].attribute_map for family in KNOWN if family in CONFIG_MAPPING}
    expected = {
        family: {name: own for name, own in names.items() if name not in NOT_COMPUTED}
        for family, names in maps.items()
    }
    assert {family: names for family, names in expected.items() if names} == SECOND_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("family", TABLED)
def test_every_single_change_is_equal_or_refused(family, tmp_path):
    """About 290 changes of a family, 38,000 together."""
    model = saved(family, SEED, tmp_path / "model")
    counts: Counter[str] = Counter()
    wrong = []
    for config, keys in single_changes(model.config, model.names):
        found = outcome(model, config, keys)
        counts[found.kind] += 1
        if found.kind in ("different", "crashed"):
            wrong.append(found)
    print(family, dict(counts))
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("family", TABLED)
def test_changed_configs_are_equal_or_refused(family, tmp_path):
    rng = random.Random(f"{family} {SEED}")
    model = saved(family, SEED, tmp_path / "model")
    assert outcome(model, model.config, ()).kind == "equal"
    counts: Counter[str] = Counter()
    wrong = []
    for _ in range(DRAWS // len(TABLED)):
        found = outcome(model, *mutated(model.config, model.names, rng))
        counts[found.kind] += 1
        if found.kind in ("different", "crashed"):
            wrong.append(found)
    print(family, dict(counts))
    assert not wrong


@pytest.mark.parametrize("family", ["granite", "cohere2", "gemma3n_text"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": -1.0, "high_freq_factor": 4.0},
            "low_freq",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": -4.0},
            "high_freq",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -8.0}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": -2.0}, "beta_slow"),
        ({"rope_type": "default", "rope_theta": -1e4}, "rope_theta"),
    ],
)
def test_a_rope_that_no_model_has_is_refused(family, rope, message, tmp_path):
    model = saved(family, 1, tmp_path / "model")
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **rope}
    by_kind = {"full_attention": rope, "sliding_attention": rope}
    found = outcome(
        model, {**model.config, "rope_parameters": by_kind if family == "gemma3n_text" else rope}, ()
    )
    assert found.kind == "refused" and message in found.detail, found
