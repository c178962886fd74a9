"""Gemma 3n and Gemma 4: inputs of each layer, keys of earlier layers, several streams, experts beside an MLP.

Planned runs, generation and gradients are tested with all families (test_planner.py and others); here is what
they alone have, and the reference.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import mizarr
from mizarr import Add, HookPoint, HookSpec, Model, Replace, Zero
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.stages.forward.passes.kept import Cache, read_on
from mizarr.stages.forward.runs.run import Run
from mizarr.store.errors import ConfigError, HookPointNotFound, InterventionError

from .compared import RAGGED, assert_alike_together, assert_near, assert_parity, draw_ids
from .random_gemmas import FULL, GEMMAS, SLIDING
from .random_hybrids import draw, save_random_hybrid
from .random_models import VOCAB

pytest.importorskip("transformers")
SHARED = {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4, "num_kv_shared_layers": 2}
EACH = {"activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.5], "intermediate_size": 28}
"""Of Gemma 3n, what is told of each layer."""


def read(raw: dict[str, Any]) -> Any:
    return KNOWN[raw["model_type"]].read(ConfigReader(json.loads(json.dumps(raw))), {})


def sharing(family: str, **axes: Any) -> dict[str, Any]:
    """Four layers, of which the last two read keys of the first two."""
    return SHARED | (EACH if family == "gemma3n_text" else {"hidden_size_per_layer_input": 6}) | axes


@pytest.mark.parametrize("family", GEMMAS)
@pytest.mark.parametrize("seed", range(6))
def test_logits_and_streams_agree_with_transformers(family, seed, tmp_path):
    """Scores are products of normed queries and keys as they are, and where few gates are open what is normed
    is next to nothing: last bits of rope count for more than elsewhere."""
    reference = save_random_hybrid(tmp_path, family, seed, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    assert_parity(model, reference, 5e-5)
    assert_alike_together(model, RAGGED)


@pytest.mark.parametrize("family", GEMMAS)
def test_attention_patterns_agree_with_transformers(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 4, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(2, 40)
    cache = model.forward(ids, HookSpec().capture("blocks.*.attn.hook_pattern"))
    with torch.no_grad():
        patterns = reference(ids, output_attentions=True, use_cache=False).attentions
    assert len(patterns) == len(cache) == model.config.num_layers
    for point, pattern in zip(cache, patterns, strict=True):
        assert_near(cache[point], pattern)


@pytest.mark.parametrize("family", GEMMAS)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    save_random_hybrid(tmp_path, family, 0, tokenizer=False)
    files = resolve(tmp_path)
    found = report(files.config, read_shapes(files.weight_files))
    assert files.has_known_family and found.is_compatible and not found.warnings
    assert found.config == files.architecture()
    assert KNOWN[family].described["model_type"] == family


# Streams


def test_the_stream_of_gemma4_is_what_a_layer_adds_to_it_times_a_number(tmp_path):
    save_random_hybrid(tmp_path, "gemma4_text", 1, tokenizer=False, **sharing("gemma4_text"))
    model = Model.from_pretrained(tmp_path)
    cache = model.forward(draw_ids(1, 12), HookSpec().capture("*"))
    for layer in range(4):
        at = {point.kind: cache[point] for point in cache if point.layer == layer}
        assert_near(at["resid_pre"] + at["attn_out"], at["resid_mid"])
        scalar = model.network.weights.layers[layer].scalar
        assert_near((at["resid_mid"] + at["mlp_out"] + at["layer_input_out"]) * scalar, at["resid_post"])


def test_a_layer_of_gemma3n_computes_one_stream_and_corrects_all(tmp_path):
    axes = sharing("gemma3n_text", altup_num_inputs=3, altup_active_idx=1)
    save_random_hybrid(tmp_path, "gemma3n_text", 1, tokenizer=False, **axes)
    model = Model.from_pretrained(tmp_path)
    cache = model.forward(draw_ids(1, 12), HookSpec().capture("*", "*altup*"))
    for layer in range(4):
        at = {point.kind: cache[point] for point in cache if point.layer == layer}
        assert torch.equal(at["altup_streams"][:, 1], at["resid_pre"])
        predicted = at["altup_predicted"][:, 1]
        assert_near((predicted + at["attn_out"] + at["laurel_out"]) / math.sqrt(2), at["resid_mid"])
        assert_near(at["altup_corrected"][:, 1] + at["layer_input_out"], at["resid_post"])
        made = at["resid_mid"] + at["mlp_out"]
        moved = at["altup_corrected"] - at["altup_predicted"]
        # All of them in the direction of what the layer has made of one, each as far as it likes.
        direction = (made - predicted)[:, None]
        shares = (moved * direction).sum(-1, keepdim=True) / direction.square().sum(-1, keepdim=True)
        assert_near(shares * direction, moved, 1e-4)
    merged = cache["altup.hook_merged"]
    assert_near(model.project_to_vocab(merged), cache.logits)


def test_streams_side_by_side_are_met_by_their_name_alone(tmp_path):
    save_random_hybrid(tmp_path, "gemma3n_text", 0, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    kinds = {point.kind for point in model.forward([3, 4], HookSpec().capture("*"))}
    assert "altup_merged" in kinds and not kinds & {"altup_streams", "altup_predicted", "altup_corrected"}


@pytest.mark.parametrize("family", GEMMAS)
def test_another_embedding_is_another_token_but_for_what_the_table_says(family, tmp_path):
    """What is made of the embedding for later is made of it as it was changed."""
    save_random_hybrid(tmp_path, family, 0, tokenizer=False, **sharing(family))
    model, ids = Model.from_pretrained(tmp_path, dtype="float64"), draw_ids(1, 9)
    table = model.network.weights.beside["table"]
    table[:] = table[:1]
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % VOCAB
    scale = torch.tensor(model.config.embedding_scale, dtype=torch.float64)
    change = Replace(model.network.embedding[other[0, 3]] * scale, positions=(3,))
    expected = model.forward(other).logits
    assert_near(model.forward(ids, HookSpec().intervene("hook_embed", change)).logits, expected, 1e-6)
    moved = model.forward(ids, HookSpec().intervene("blocks.0.hook_resid_pre", change)).logits
    assert float((moved - expected)[:, 3:].abs().max()) > 1e-5


# Keys of earlier layers


@pytest.mark.parametrize("family", GEMMAS)
def test_a_change_of_keys_reaches_layers_that_read_them_past_the_stream(family, tmp_path):
    save_random_hybrid(tmp_path, family, 2, tokenizer=False, **sharing(family))
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 9)
    pattern = HookPoint.pattern(3)
    spec = HookSpec().intervene("blocks.1.attn.hook_k", Zero(positions=(2,)))
    silent = HookSpec().extend(spec).intervene("blocks.1.hook_attn_out", Zero())
    plain = HookSpec().intervene("blocks.1.hook_attn_out", Zero())
    one, other = (model.forward(ids, HookSpec().extend(each).capture(pattern)) for each in (silent, plain))
    difference = (one[pattern] - other[pattern]).abs().amax((0, 1, 3))
    assert not difference[:2].any() and bool((difference[2:] > 1e-6).all())
    runs = [Run(ids[0].tolist(), each) for each in (silent, plain, spec)]
    for run, found in zip(runs, mizarr.run(model, runs), strict=True):
        assert_near(found.logits, model.forward(run.prompt, run.hooks, want=run.want).logits)


@pytest.mark.parametrize("family", GEMMAS)
def test_layers_without_keys_have_no_points_of_them_and_reach_no_later_position(family, tmp_path):
    save_random_hybrid(tmp_path, family, 2, tokenizer=False, **sharing(family))
    model = Model.from_pretrained(tmp_path)
    assert [point.layer for point in model.hook_points if point.kind == "rot_k"] == [0, 1]
    assert [layer.mixer.source for layer in model.config.layers] == [None, None, 0, 1]
    reaches = [model.config.reach(HookPoint.resid_pre(layer)) for layer in range(4)]
    assert reaches == ["later", "later", "here", "here"]
    with pytest.raises(HookPointNotFound, match=r"layer 2 of .* has attention, and no hook point"):
        model.forward([3, 4], HookSpec().capture("blocks.2.attn.hook_k"))


@pytest.mark.parametrize("family", GEMMAS)
def test_keys_that_layers_share_are_kept_once(family, tmp_path):
    save_random_hybrid(tmp_path, family, 2, tokenizer=False, **sharing(family))
    model = Model.from_pretrained(tmp_path)
    cache, held = Cache(), 0
    from mizarr.stages.forward.hooks.spec import BoundSpec
    from mizarr.stages.forward.hooks.taps import RunTaps

    with torch.no_grad():
        read_on(model.network, [[5, 6, 7]], cache, RunTaps(BoundSpec(), lambda *_: None))
    for layer in range(2):
        (shape,) = model.config.blocks[layer].mixers
        held += 2 * 64 * shape.num_kv_heads * shape.head_dim * 4
    assert cache.nbytes == held


def test_weights_that_no_layer_reads_may_be_there(tmp_path):
    """Released checkpoints hold keys of layers that have none."""
    from safetensors.torch import load_file, save_file

    save_random_hybrid(tmp_path, "gemma3n_text", 2, tokenizer=False, **sharing("gemma3n_text"))
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    more = {f"model.layers.3.self_attn.{part}_proj.weight": torch.ones(3, 4) for part in "kv"}
    expected = Model.from_pretrained(tmp_path).forward([3, 4, 5]).logits
    save_file(held | more, file, {"format": "pt"})
    assert torch.equal(Model.from_pretrained(tmp_path).forward([3, 4, 5]).logits, expected)
    assert not report(resolve(tmp_path).config, read_shapes([file])).warnings


# Axes of several sizes


def test_heads_that_are_wider_in_some_layers_are_met_as_they_are(tmp_path):
    axes = {"head_dim": 8, "global_head_dim": 16, "use_double_wide_mlp": True, "intermediate_size": 20}
    save_random_hybrid(tmp_path, "gemma4_text", 3, tokenizer=False, **sharing("gemma4_text", **axes))
    model = Model.from_pretrained(tmp_path)
    cache = model.forward([3, 4, 5], HookSpec().capture("blocks.*.attn.hook_z", "blocks.*.mlp.hook_post_act"))
    assert [cache[HookPoint.z(layer)].shape[-1] for layer in range(4)] == [8, 16, 8, 16]
    assert [cache[HookPoint.mlp_post_act(layer)].shape[-1] for layer in range(4)] == [20, 20, 40, 40]
    fits, misses = (
        HookSpec().intervene("blocks.1.attn.hook_z", Add(torch.ones(width), positions=(0,)))
        for width in (16, 8)
    )
    model.forward([3, 4], fits)
    with pytest.raises(InterventionError, match="d_head=16"):
        model.forward([3, 4], misses)
    with pytest.raises(
        ConfigError,
        match=r"the axis .d_head. to have one size in all layers of the model, found the sizes 8 and 16",
    ):
        model.config.width("z")


def test_what_is_wider_in_some_layers_is_kept_in_no_store(tmp_path):
    axes = {"head_dim": 8, "global_head_dim": 16}
    save_random_hybrid(tmp_path / "m", "gemma4_text", 3, **sharing("gemma4_text", **axes))
    store = mizarr.open_store(tmp_path / "store")
    held = mizarr.capture(
        tmp_path / "m", [[3, 4]], HookSpec().capture("blocks.*.hook_resid_post"), store=store, progress=False
    )
    assert held["resid_post"].shape == (4, 2, draw("gemma4_text", 3)["hidden_size"])
    hooks = HookSpec().capture("blocks.1.attn.hook_z")
    with pytest.raises(
        ConfigError,
        match=r"the axis .d_head. to have one size in all layers of the model, found the sizes 8 and 16",
    ):
        mizarr.capture(tmp_path / "m", [[3, 4]], hooks, store=store, progress=False)


@pytest.mark.parametrize("family", GEMMAS)
def test_what_takes_the_stream_for_a_sum_refuses_in_one_line(family, tmp_path):
    save_random_hybrid(tmp_path, family, 0)
    model = Model.from_pretrained(tmp_path)
    assert {layer.norms for layer in model.config.layers} == {"of stream"}
    with pytest.raises(
        ConfigError, match=f"values are a linear map of the normalised stream, found {family}, which"
    ):
        model.network.value_matrix(0)


# Configurations


@pytest.mark.parametrize("family", GEMMAS)
def test_absent_keys_mean_what_they_mean_to_the_reference(family):
    """The config the reference makes of the required keys says all others."""
    from transformers import AutoConfig

    required = {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 40}
    full = AutoConfig.for_model(family, **required).to_dict()
    silent = read(required | {"model_type": family})
    assert len(full) > len(required) + 10
    assert silent.fields == read(full).fields
    assert silent.digest == read(full).digest


def test_heads_of_released_gemma4_are_told_in_two_ways():
    from transformers import AutoConfig

    told = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    raw = draw("gemma4_text", 0) | told
    full = AutoConfig.for_model("gemma4_text", **raw).to_dict()
    assert "global_head_dim" not in full and full["per_layer_config"]
    assert read(raw | {"model_type": "gemma4_text"}).digest == read(full).digest


def test_two_ropes_are_read_as_older_configs_write_them():
    from transformers import AutoConfig

    raw = {**draw("gemma3n_text", 0), "model_type": "gemma3n_text", "rope_theta": 7e5}
    raw |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_local_base_freq": 3e4}
    del raw["rope_parameters"]
    assert read(raw).digest == read(AutoConfig.for_model(**raw).to_dict()).digest


@pytest.mark.parametrize(
    ("family", "told", "message"),
    [
        ("gemma3n_text", {"altup_active_idx": 9}, r"active stream to be 0 to \d, found 9"),
        (
            "gemma3n_text",
            {"activation_sparsity_pattern": [0.5]},
            "a list with a number for each of . layers, found",
        ),
        ("gemma3n_text", {"activation_sparsity_pattern": 1.0}, "numbers from 0 to below 1, found"),
        ("gemma3n_text", {"intermediate_size": [8]}, "intermediate_size to be a number, or a list"),
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 9},
            "a layer of each type before the last 9 layers, .* found no",
        ),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, r"image tokens only\), found 'all'"),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 7},
            r"vocab_size_per_layer_input to be at least vocab_size \(320\), found 7",
        ),
        ("gemma4_text", {"per_layer_config": {"0": {"skip": ["mlp"]}}}, "found '0': .*'skip'"),
        (
            "gemma4_text",
            {"per_layer_config": {"0": {"head_dim": 24}}, "layer_types": [SLIDING, SLIDING, FULL]},
            "same head_dim and num_key_value_heads in all sliding_attention layers",
        ),
        (
            "gemma4_text",
            {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "expected no truncate=False",
        ),
        ("gemma4_text", {"layer_types": ["full_attention"]}, "layer_types to have one entry for each of"),
        ("gemma4_text", {"hidden_activation": "xielu"}, "expected an activation among"),
    ],
)
def test_what_is_not_followed_is_one_line(family, told, message):
    raw = {**draw(family, 4), "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 4}
    if family == "gemma4_text" and "per_layer_config" in told:
        raw |= {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL]}
    with pytest.raises(ConfigError, match=message) as raised:
        read(raw | {"model_type": family} | told)
    assert "\n" not in str(raised.value)


def test_draws_differ_along_every_axis():
    """Or the tests above would compare one configuration with itself."""
    for family in GEMMAS:
        drawn = {read({**draw(family, seed), "model_type": family}).digest for seed in range(12)}
        assert len(drawn) >= 10, family
