"""What a config.json of a hybrid with linear attention means: the reference's defaults, and one line for
what nobody follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import Model
from mizarr.stages.forward.architectures.composed import ComposedArchitecture
from mizarr.stages.forward.architectures.hybrids.linear_families import KIN, LINEAR, read_linear
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.store.errors import ConfigError

from ..random_hybrids import draw, save_random_hybrid

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForImageTextToText

REQUIRED = {"hidden_size": 960, "num_hidden_layers": 6, "vocab_size": 96}
"""Keys without a default here; the reference's number of heads divides the width in every family."""


def read(family: str, **changes: Any) -> ComposedArchitecture:
    return read_linear(ConfigReader(REQUIRED | {"model_type": family} | changes), {})


@pytest.mark.parametrize("family", LINEAR)
def test_absent_keys_mean_what_they_mean_to_the_reference(family):
    """The config the reference makes of the required keys says all others."""
    from transformers import AutoConfig

    types = {"layer_types": ["conv", "full_attention"] * 3} if family == "lfm2_moe" else {}
    full = AutoConfig.for_model(family, **REQUIRED, **types).to_dict()
    assert len(full) > len(REQUIRED) + 10
    assert read(family, **types).fields == read(family, **json.loads(json.dumps(full))).fields


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_next", {"hidden_act": "gelu"}, r"expected hidden_act 'silu' in a model with .*found 'gelu'"),
        (
            "qwen3_next",
            {"layer_types": ["mamba"] * 6},
            r"type of each layer, full_attention or .*found 'mamba'",
        ),
        (
            "qwen3_next",
            {"layer_types": ["full_attention"]},
            r"layer_types to have one entry for each of 6 layers, found 1",
        ),
        (
            "qwen3_5_text",
            {"linear_num_value_heads": 24},
            r"found 24 heads and 16 groups",
        ),
        (
            "lfm2",
            {"layer_types": ["linear_attention"] * 6},
            r"type of each layer, full_attention or conv, found",
        ),
        ("lfm2", {"partial_rotary_factor": 0.5}, r"expected no partial_rotary_factor"),
        (
            "recurrent_gemma",
            {"block_types": ["mlp"]},
            r"block_types to list the type of each layer, recurrent or .*'mlp'",
        ),
        ("minimax", {"hidden_act": "snake"}, r"expected an activation among .*found 'snake'"),
        ("minimax", {"quantization_config": {}}, r"expected unquantised weights"),
    ],
)
def test_what_is_not_followed_is_one_line(family, changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read(family, **changes)
    assert "\n" not in str(raised.value)


def test_layers_say_what_mixes_in_them_and_where_norms_stand():
    def facts(family: str) -> list[tuple[str, int | None, str]]:
        layers = read(family).layers
        return [(layer.mixer.kind, layer.mixer.window, layer.norms) for layer in layers]

    delta, attention = ("recurrence", None, "before"), ("attention", None, "before")
    assert facts("qwen3_next") == [delta, delta, delta, attention, delta, delta]
    assert facts("olmo_hybrid") == [delta, delta, delta, ("attention", None, "after"), delta, delta]
    assert facts("recurrent_gemma")[1:3] == [delta, ("attention", 2048, "before")]
    assert facts("minimax")[:2] == [("attention", None, "of stream"), ("recurrence", None, "of stream")]
    lfm2 = read("lfm2", full_attn_idxs=[1]).layers
    assert [layer.mixer.window for layer in lfm2] == [3, None, 3, 3, 3, 3]


@pytest.mark.parametrize("family", LINEAR)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    save_random_hybrid(tmp_path, family, 0, tokenizer=False)
    files = resolve(tmp_path)
    assert files.has_known_family
    found = report(files.config, read_shapes(files.weight_files))
    assert found.known_family and found.is_compatible and not found.warnings
    assert found.config == files.architecture()
    assert KNOWN[family].described["model_type"] == family


def test_the_text_model_of_a_larger_one_is_found_under_its_name(tmp_path):
    """Names of tensors are no part of what a model is."""
    raw = ConfigReader(REQUIRED | {"model_type": "qwen3_5_text"})
    plain, nested = (
        read_linear(raw, {f"model.{room}norm.weight": (960,)}) for room in ("", "language_model.")
    )
    assert plain.digest == nested.digest
    assert nested.tensors.prefix == "model.language_model.layers.{}."


def save_with_images(folder: Path, family: str, seed: int) -> Any:
    """A random model of texts and images, of which the text model is drawn as its family is."""
    text = draw(f"{family}_text", seed)
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    tower |= {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16}
    tied = text["tie_word_embeddings"]
    config = AutoConfig.for_model(family, text_config=text, vision_config=tower, tie_word_embeddings=tied)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.model.language_model.named_parameters():
            if weight.ndim > 1 and not name.endswith("A_log"):
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("seed", range(3))
def test_the_text_model_of_one_that_reads_images_gives_its_logits(family, seed, tmp_path):
    reference = save_with_images(tmp_path, family, seed)
    model, ids = Model.from_pretrained(tmp_path), torch.randint(2, 320, (2, 37))
    assert model.config.model_type == f"{family}_text"
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits
        exact = reference.double()(input_ids=ids, use_cache=False).logits
    # The reference's own rounding, which differs between instruction sets: norms of small sums amplify it.
    rounding = float((expected - exact).abs().max())
    difference = float((model.forward(ids).logits - expected).abs().max())
    assert difference <= max(3 * rounding, 1e-5 * max(1, float(expected.abs().max())))
    files = resolve(tmp_path)
    found = report(files.config, read_shapes(files.weight_files))
    assert found.is_compatible and all("model.visual." in warning for warning in found.warnings)


def test_experts_may_lie_in_one_tensor_as_they_were_released(tmp_path):
    save_with_images(tmp_path, "qwen3_5_moe", 0)
    ids, path = torch.randint(2, 320, (2, 19)), tmp_path / "model.safetensors"
    expected, held = Model.from_pretrained(tmp_path).forward(ids).logits, load_file(path)
    for layer in range(3):
        room, count = f"model.language_model.layers.{layer}.mlp.experts.", 4
        taken = {
            part: torch.stack([held.pop(f"{room}{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        }
        held[f"{room}gate_up_proj"] = torch.cat([taken["gate"], taken["up"]], dim=1)
        held[f"{room}down_proj"] = taken["down"]
    save_file(held, path, {"format": "pt"})
    torch.testing.assert_close(Model.from_pretrained(tmp_path).forward(ids).logits, expected)


@pytest.mark.parametrize(("text", "whole", "head", "tied"), [
    (True, None, True, True), (None, True, False, True), (False, True, True, False),
    (False, True, False, True), (None, None, True, False),
])  # fmt: skip
def test_where_the_config_ties_twice_and_differently_the_checkpoint_says_which(text, whole, head, tied):
    raw: dict[str, Any] = {"model_type": "qwen3_5", "text_config": REQUIRED | {"tie_word_embeddings": text}}
    raw["tie_word_embeddings"] = whole
    shapes = {"lm_head.weight": (96, 960)} if head else {}
    assert KIN["qwen3_5"].config(ConfigReader(raw), shapes).tie_word_embeddings is tied


def test_a_section_that_is_missing_is_one_line():
    told = r"^config.json: text_config: expected num_hidden_layers .*found no such key"
    with pytest.raises(ConfigError, match=told) as raised:
        KIN["qwen3_5"].config(ConfigReader({"model_type": "qwen3_5"}), {})
    assert "\n" not in str(raised.value)


def test_kimi_linear_is_read_as_it_was_released():
    """Sizes of its delta nets in a section of their own, layers counted from 1, names of its own."""
    linear = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 3, "full_attn_layers": [3, 6]}
    released = read(
        "kimi_linear",
        linear_attn_config=linear | {"kda_layers": [1, 2, 4, 5]},
        model_max_length=4096,
        num_experts=8,
        num_experts_per_token=2,
        num_expert_group=2,
        moe_renormalize=False,
    )
    written = read(
        "kimi_linear",
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        linear_head_dim=16,
        linear_num_heads=4,
        linear_conv_kernel_dim=3,
        max_position_embeddings=4096,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        norm_topk_prob=False,
    )
    assert released.fields == written.fields
    assert released.context_length == 4096
