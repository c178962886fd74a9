"""State-space models and hybrids compute what the reference computes, and what their hook points say they do.

The reference: transformers, float32, eager attention, its plain loops in place of fused kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookPoint, HookSpec, Model, Scale, Zero
from mizarr.stages.forward.hooks.spec import BoundSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.hooks.wants import ALL_LOGITS
from mizarr.stages.forward.hooks.writes import StateKnockoutSpec, StateSteeringSpec
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.loop import through_layers
from mizarr.stages.forward.passes.plain import WholePrompts
from mizarr.stages.logits.component_weights import component_weights
from mizarr.stages.logits.readout import readout_from_files
from mizarr.store.errors import ConfigError, HookPointNotFound, InterventionError

from .compared import assert_near, assert_parity, draw_ids
from .random_hybrids import HYBRIDS, save_random_hybrid

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[3].parent / "shared" / "reference" / "recurrent"


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("seed", range(2))
def test_logits_and_streams_agree_with_transformers(family, seed, tmp_path):
    reference = save_random_hybrid(tmp_path, family, seed)
    model = Model.from_pretrained(tmp_path)
    assert_parity(model, reference)


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid", "jamba", "falcon_h1", "nemotron_h"])
def test_attention_patterns_agree_with_transformers(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 4)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(2, 40)
    cache = model.forward(ids, HookSpec().capture("blocks.*.attn.hook_pattern"))
    with torch.no_grad():
        held = reference(ids, output_attentions=True, use_cache=False).attentions
    expected = [pattern for pattern in held if pattern is not None]
    assert len(expected) == len(cache) >= 1
    for point, pattern in zip(cache, expected, strict=True):
        assert_near(cache[point], pattern, 1e-5)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prompt_gives_the_same_alone_and_in_company(family, tmp_path):
    save_random_hybrid(tmp_path, family, 3)
    model = Model.from_pretrained(tmp_path)
    prompts = [[5, 9, 100], [7] * 12, [3], list(range(2, 43))]
    together = model.forward(prompts)
    for row, ids in enumerate(prompts):
        assert_near(together.logits[row, : len(ids)], model.forward(ids).logits[0], 1e-5)


@pytest.mark.parametrize("name", ["mamba-tiny", "mamba2-tiny"])
def test_logits_streams_states_and_convolved_rows_of_the_stored_reference(name):
    folder = ROOT / name
    if not folder.is_dir():
        pytest.skip("the reference arrays are not beside this checkout")
    model = Model.from_pretrained(folder)
    spec = HookSpec().capture("blocks.*.hook_resid_p*", "blocks.*.ssm.hook_state", "hook_final_norm")
    spec = spec.capture("blocks.*.ln1.hook_normalized")
    layers = model.config.num_layers
    for length in (1, 7, 40):
        held = np.load(folder / f"reference_len{length}.npz")
        cache = model.forward(held["tokens"].tolist(), spec)
        assert np.abs(cache.logits[0].numpy() - held["logits"]).max() <= 2e-5
        for layer in range(layers):
            found = cache[HookPoint.resid_post(layer)][0].numpy()
            assert np.abs(found - held[f"hidden_{layer}"]).max() <= 2e-5
            state, expected = cache[HookPoint.ssm_state(layer)][0].mT, held[f"recurrent_states_{layer}"]
            assert np.abs(state.numpy().reshape(expected.shape) - expected).max() <= 2e-5
            assert np.abs(convolved(model, cache, layer, 4) - held[f"conv_states_{layer}"]).max() <= 2e-5
        final = cache[HookPoint.final_norm()][0].numpy()
        assert np.abs(final - held[f"hidden_{layers}"]).max() <= 2e-5


def convolved(model: Model, cache: Any, layer: int, size: int) -> np.ndarray:
    """What enters a layer's convolution at the last tokens, zeros before the first: [channel, size]."""
    (mixer,) = model.network.weights.layers[layer].mixers
    shape = mixer.spec
    normed = cache[HookPoint.ln1_normalized(layer)][0] * model.network.norm_gain("ln1", layer, torch.float32)
    first = 0 if shape.kind == "mamba" else shape.channels
    width = model.config.axis_sizes["ssm_channel"]
    rows = normed @ mixer.weights["in"][first : first + width].T
    padded = torch.nn.functional.pad(rows, (0, 0, size, 0))
    return padded[-size:].T.numpy()


# Hook points


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "falcon_h1", "zamba", "zamba2"])
def test_what_is_read_is_alpha_times_values_and_goes_on_from_the_states(family, tmp_path):
    save_random_hybrid(tmp_path, family, 1)
    model = Model.from_pretrained(tmp_path, dtype="float64")
    cache = model.forward(draw_ids(2, 21), HookSpec().capture("blocks.*.ssm.*"))
    layers = {point.layer for point in cache if point.kind == "ssm_out"}
    assert layers
    for layer in layers:
        alpha, values, out = (cache[HookPoint(f"ssm_{name}", layer)] for name in ("alpha_raw", "x", "out"))
        torch.testing.assert_close(alpha @ values, out, atol=1e-12, rtol=1e-9)
        assert not alpha.triu(1).any()
        states, decay = (cache[HookPoint(f"ssm_{name}", layer)] for name in ("state_seq", "decay"))
        per_group = states.shape[1] // cache[HookPoint.ssm_B(layer)].shape[1]
        keys, queries = (
            cache[HookPoint(f"ssm_{name}", layer)].repeat_interleave(per_group, 1) for name in ("B", "C")
        )
        written = (cache[HookPoint.ssm_dt(layer)] * keys).unsqueeze(-1) * values.unsqueeze(-2)
        before = torch.nn.functional.pad(states, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        expected = decay.unsqueeze(-1) * before + written
        torch.testing.assert_close(states, expected, atol=1e-12, rtol=1e-9)
        torch.testing.assert_close((queries.unsqueeze(-2) @ states).squeeze(-2), out, atol=1e-12, rtol=1e-9)
        assert torch.equal(cache[HookPoint.ssm_state(layer)], states[:, :, -1])


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_write_knocked_out_is_a_step_that_only_forgets(family, tmp_path):
    """B = 0 at the token writes nothing, and leaves its decay."""
    save_random_hybrid(tmp_path, family, 0)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 9)
    plain = model.forward(ids).logits
    knocked, silent = (
        model.forward(ids, HookSpec().intervene(f"blocks.1.ssm.hook_{name}", Zero(positions=(3,)))).logits
        for name in ("write", "B")
    )
    assert_near(knocked, silent)
    assert_near(knocked[:, :3], plain[:, :3])
    assert float((knocked - plain)[:, 3:].abs().amax(-1).min()) > 1e-4


@pytest.mark.parametrize("family", HYBRIDS)
def test_capturing_everything_changes_no_logit_by_more_than_rounding(family, tmp_path):
    """Only states that are read are met step by step, which adds up in another order."""
    save_random_hybrid(tmp_path, family, 1)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 23)
    plain = model.forward(ids).logits
    assert_near(model.forward(ids, HookSpec().capture("*")).logits, plain)
    quiet = [str(point) for point in model.hook_points if not point.kind.endswith("state_seq")]
    assert torch.equal(model.forward(ids, HookSpec().capture(*quiet)).logits, plain)


def test_points_are_in_the_layers_that_have_them_and_others_are_told(tmp_path):
    types = ["linear_attention", "full_attention", "mlp", "linear_attention"]
    save_random_hybrid(tmp_path, "nemotron_h", 0, layers_block_type=types)
    model = Model.from_pretrained(tmp_path)
    layers = {
        kind: [point.layer for point in model.hook_points if point.kind == kind]
        for kind in ("q", "ssm_x", "mlp_post_act", "resid_mid", "resid_post")
    }
    expected = {"q": [1], "ssm_x": [0, 3], "mlp_post_act": [2], "resid_mid": [], "resid_post": [0, 1, 2, 3]}
    assert layers == expected
    for name, told in (
        (
            "blocks.3.attn.hook_q",
            "layer 3 of .* has a state-space mixer, .*; this hook point exists in layer 1",
        ),
        ("blocks.1.ssm.hook_dt", "layer 1 of .* has attention, .*; this hook point exists in layers 0, 3"),
        ("blocks.2.attn.hook_z", "layer 2 of .* has no mixer, .*; this hook point exists in layer 1"),
        ("blocks.4.attn.hook_q", "has layers 0 to 3, found .*; the last one is 'blocks.1.attn.hook_q'"),
    ):
        with pytest.raises(HookPointNotFound, match=told):
            model.forward([1, 2, 3], HookSpec().capture(name))
    with pytest.raises(InterventionError, match=r"computed only to be captured"):
        model.forward([1, 2, 3], HookSpec().intervene("blocks.0.ssm.hook_state", Scale(2.0)))


def test_a_residual_stream_in_float32_stays_so_in_bfloat16(tmp_path):
    reference = save_random_hybrid(tmp_path, "mamba2", 1).bfloat16()
    model = Model.from_pretrained(tmp_path, dtype="bfloat16")
    assert model.config.has_wide_stream
    ids = draw_ids(2, 24)
    cache = model.forward(ids, HookSpec().capture("blocks.0.hook_resid_post", "blocks.0.hook_attn_out"))
    assert cache[HookPoint.resid_post(0)].dtype == torch.float32
    assert cache[HookPoint.attn_out(0)].dtype == torch.bfloat16
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits.float()
    assert_near(cache.logits.float(), expected, 0.05)


def test_points_of_heads_are_stored_by_token_and_come_back(tmp_path):
    """In the layers that have them."""
    save_random_hybrid(tmp_path / "model", "granitemoehybrid", 0)
    model, prompts = Model.from_pretrained(tmp_path / "model"), [[5, 9, 100], list(range(2, 13))]
    kinds = ("ssm_gate", "ssm_conv", "ssm_dt", "ssm_B", "ssm_decay", "ssm_write", "ssm_state_seq", "ssm_out")
    points = [point for point in model.hook_points if point.kind in (*kinds, "z")]
    assert len({point.layer for point in points if point.kind == "z"}) < model.config.num_layers
    store = mizarr.open_store(tmp_path / "store")
    acts = mizarr.capture(str(tmp_path / "model"), prompts, HookSpec().capture(*points), store=store)
    caches = [model.forward(ids, HookSpec().capture(*points)) for ids in prompts]
    for point in points:
        values = [cache[point][0] for cache in caches]
        by_token = [value.transpose(0, 1) if point.dims[2] == "position" else value for value in values]
        expected = torch.cat(by_token).numpy()
        array = acts[point.kind]
        found = array.sel({array.dims[0]: point.layer}).values
        scale = max(1.0, float(np.abs(expected).max()))
        assert np.abs(found.reshape(expected.shape) - expected).max() <= 1e-5 * scale, point


# What others ask of it


@pytest.mark.parametrize("family", ["granitemoehybrid", "falcon_h1", "mamba"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_readout_of_the_files_is_the_head_with_its_factor(family, dtype, tmp_path):
    save_random_hybrid(tmp_path, family, 0)
    model, files = Model.from_pretrained(tmp_path, dtype=dtype), resolve(tmp_path)
    found = readout_from_files(files.weight_files, files.architecture(), dtype=dtype)
    held = model.network.unembedding.float().numpy()
    np.testing.assert_array_equal(found["unembed"].values, held)
    states = model.forward(draw_ids(1, 5), HookSpec().capture("hook_final_norm"))
    logits = states[HookPoint.final_norm()].float().numpy() @ held.T
    assert np.abs(logits - states.logits.float().numpy()).max() <= (1e-5 if dtype == "float32" else 0.05)


def test_who_asks_for_heads_of_attention_where_none_is_gets_one_line(tmp_path):
    save_random_hybrid(tmp_path / "mamba", "mamba", 0)
    save_random_hybrid(tmp_path / "bamba", "bamba", 0)
    model = Model.from_pretrained(tmp_path / "mamba")
    with pytest.raises(
        ConfigError, match=r"an axis 'head', found one with the axes hidden, ssm_head, .* all have attention"
    ):
        model.config.axis_sizes["head"]
    with pytest.raises(ConfigError, match="expected layer 0 of mamba to have self-attention, found none"):
        model.network.output_matrix(0)
    files = resolve(tmp_path / "bamba")
    with pytest.raises(
        ConfigError, match="attention in every layer; this 'bamba' model has it in 2 of 3 layers"
    ):
        component_weights(files.weight_files, files.architecture(), "attention")


def test_matrices_of_attention_are_those_of_the_layers_that_attend(tmp_path):
    """The factors of a family are in them: what heads add to the stream is z times the output matrix."""
    save_random_hybrid(tmp_path, "granitemoehybrid", 0, layer_types=["mamba", "attention", "mamba"])
    model = Model.from_pretrained(tmp_path)
    spec = HookSpec().capture("blocks.1.attn.hook_[zv]", "blocks.1.hook_attn_out", "blocks.1.ln1.*")
    cache = model.forward(draw_ids(1, 9), spec)
    heads = cache[HookPoint.z(1)].transpose(1, 2).flatten(2)
    assert_near(heads @ model.network.output_matrix(1).T, cache[HookPoint.attn_out(1)])
    normed = cache[HookPoint.ln1_normalized(1)] * model.network.norm_gain("ln1", 1, torch.float32)
    values = cache[HookPoint.v(1)].transpose(1, 2).flatten(2)
    assert_near(normed @ model.network.value_matrix(1).T, values)


@pytest.mark.parametrize("family", HYBRIDS)
def test_gradients_agree_with_transformers(family, tmp_path):
    """Of squared logits by embeddings, through every layer."""
    reference = save_random_hybrid(tmp_path, family, 1, tie_word_embeddings=False)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 19)
    weight = reference.get_input_embeddings().weight
    (expected,) = torch.autograd.grad(reference(ids, use_cache=False).logits.square().sum(), weight)
    embedding = model.network.embedding.requires_grad_()
    history = WholePrompts(19, RunTaps(BoundSpec(), lambda *_: None), ids.device)
    taps = RunTaps(BoundSpec(), lambda *_: None)
    stream = through_layers(model.network, ids, history, taps)
    logits = model.network.unembed(model.network.finish(stream, taps, None), ALL_LOGITS)
    (found,) = torch.autograd.grad(logits.square().sum(), embedding)
    assert_near(found, expected, 2e-5)


def test_writes_are_knocked_out_in_the_layers_that_have_a_state(tmp_path):
    types = ["linear_attention", "full_attention", "mlp", "linear_attention"]
    save_random_hybrid(tmp_path, "nemotron_h", 0, layers_block_type=types)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 9)
    by_hand = HookSpec().intervene("blocks.*.ssm.hook_write", Zero(positions=(2, 5), heads=(1,)))
    spec = StateKnockoutSpec().positions([2, 5]).head(1).hooks(model.config, 9)
    assert torch.equal(model.forward(ids, spec).logits, model.forward(ids, by_hand).logits)
    scaled = StateSteeringSpec.scale(0).positions([2, 5]).head(1).layer(3).hooks(model.config, 9)
    assert [layer for point, _ in scaled.bind(model.hook_points).interventions if (layer := point.layer)] == [
        3
    ]
    with pytest.raises(InterventionError, match=r"found layer 1 of nemotron_h, .*; choose among 0, 3"):
        StateKnockoutSpec().position(0).layer(1).hooks(model.config, 9)
    with pytest.raises(InterventionError, match=r"expected heads in 0\.\.3, found 4"):
        StateKnockoutSpec().position(0).head(4).hooks(model.config, 9)


@pytest.mark.parametrize(("family", "room"), [("xlstm", "mlstm"), ("gla", "linear"), ("zamba2", "ssm")])
def test_writes_are_knocked_out_whatever_their_room(family, room, tmp_path):
    told = {"layers_block_type": ["hybrid"] * 5} if family == "zamba2" else {"attn": None}
    save_random_hybrid(tmp_path, family, 1, **({} if family == "xlstm" else told))
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 9)
    by_hand = HookSpec().intervene(f"blocks.1.{room}.hook_write", Zero(positions=(2, 5)))
    spec = StateKnockoutSpec().positions([2, 5]).layer(1).hooks(model.config, 9)
    found, plain = model.forward(ids, spec).logits, model.forward(ids).logits
    assert torch.equal(found, model.forward(ids, by_hand).logits)
    assert torch.equal(found[:, :2], plain[:, :2]) and not torch.equal(found[:, 2], plain[:, 2])
