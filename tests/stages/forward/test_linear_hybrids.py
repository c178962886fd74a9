"""Gated delta nets, lightning attention, gated linear units and short convolutions compute what the reference
computes, and what their hook points say they do.

The reference: transformers, float32, eager attention, its plain loops in place of fused kernels.
"""

from __future__ import annotations

import pytest
import torch

from mizarr import HookPoint, HookSpec, Model, Scale, Zero
from mizarr.stages.forward.generation.generate import generate

from .compared import assert_near, draw_ids
from .random_hybrids import HYBRIDS, save_random_hybrid

pytest.importorskip("transformers")
LINEAR = HYBRIDS[HYBRIDS.index("qwen3_next") :]
DELTA_FIRST = ["linear_attention", "full_attention", "linear_attention"]
WITH_STATES = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "recurrent_gemma", "minimax")


@pytest.mark.parametrize("family", LINEAR)
def test_greedy_tokens_are_those_of_transformers_with_states_kept_or_not(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 1)
    model, prompts = Model.from_pretrained(tmp_path), draw_ids(2, 7).tolist()
    anew, kept = (generate(model, prompts, max_tokens=20, eos=(), cache=cache) for cache in (False, True))
    assert kept.ids == anew.ids
    ids = torch.tensor([list(result.token_ids) for result in anew])
    with torch.no_grad():
        logprobs = reference(ids, use_cache=False).logits.log_softmax(-1)[:, 6:-1]
    for row, (one, other) in enumerate(zip(anew, kept, strict=True)):
        assert list(one.generated_ids) == logprobs[row].argmax(-1).tolist()
        expected = logprobs[row, range(20), list(one.generated_ids)].float()
        for found in (one.logprobs, other.logprobs):
            torch.testing.assert_close(torch.as_tensor(found).float(), expected, atol=1e-4, rtol=0)


# Hook points


@pytest.mark.parametrize("family", WITH_STATES)
def test_states_go_on_as_the_points_say_and_alpha_times_values_is_what_is_read(family, tmp_path):
    save_random_hybrid(tmp_path, family, 1)
    model = Model.from_pretrained(tmp_path, dtype="float64")
    cache = model.forward(draw_ids(2, 21), HookSpec().capture("blocks.*.linear.*"))
    layers = {point.layer for point in cache if point.kind == "linear_out"}
    assert layers
    for layer in layers:
        held = {point.kind.removeprefix("linear_"): cache[point] for point in cache if point.layer == layer}
        values, out, states = held["v"], held["out"], held["state_seq"]
        torch.testing.assert_close(held["alpha_raw"] @ values, out, atol=1e-12, rtol=1e-9)
        assert not held["alpha_raw"].triu(1).any()
        per_group = states.shape[1] // held["k"].shape[1]
        keys = held["k"].repeat_interleave(per_group, 1)
        queries = held["q"].repeat_interleave(per_group, 1) if "q" in held else torch.ones_like(keys)
        before = torch.nn.functional.pad(states, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        decayed = held["decay"].unsqueeze(-1) * before
        if "beta" in held:
            found = (keys.unsqueeze(-2) @ decayed).squeeze(-2)
            values = held["beta"] * (values - found)
        expected = decayed + keys.unsqueeze(-1) * values.unsqueeze(-2)
        torch.testing.assert_close(states, expected, atol=1e-12, rtol=1e-9)
        torch.testing.assert_close((queries.unsqueeze(-2) @ states).squeeze(-2), out, atol=1e-12, rtol=1e-9)
        assert torch.equal(held["state"], states[:, :, -1])


@pytest.mark.parametrize("family", ["recurrent_gemma", "minimax"])
def test_a_write_knocked_out_is_a_token_without_a_key(family, tmp_path):
    types = (
        {"layer_types": ["linear_attention"] * 3} if family == "minimax" else {"block_types": ["recurrent"]}
    )
    save_random_hybrid(tmp_path, family, 0, **types)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 9)
    plain = model.forward(ids).logits
    knocked, silent = (
        model.forward(ids, HookSpec().intervene(f"blocks.1.linear.hook_{name}", Zero(positions=(3,)))).logits
        for name in ("write", "k")
    )
    assert_near(knocked, silent)
    assert_near(knocked[:, :3], plain[:, :3])
    assert float((knocked - plain)[:, 3:].abs().amax(-1).min()) > 1e-4


def test_a_delta_write_knocked_out_still_takes_away_and_a_silent_beta_does_neither(tmp_path):
    save_random_hybrid(tmp_path, "qwen3_5_text", 0, layer_types=DELTA_FIRST)
    model, ids = Model.from_pretrained(tmp_path, dtype="float64"), draw_ids(1, 9)

    def states(*silent: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = HookSpec().capture("blocks.0.linear.hook_state_seq", "blocks.0.linear.hook_[kv]")
        spec = spec.capture("blocks.0.linear.hook_decay")
        for name in silent:
            spec = spec.intervene(f"blocks.0.linear.hook_{name}", Zero(positions=(3,)))
        cache = model.forward(ids, spec)
        kept = (
            cache[HookPoint.linear_decay(0)][:, :, 3, :, None] * cache[HookPoint.linear_state_seq(0)][:, :, 2]
        )
        return cache[HookPoint.linear_state_seq(0)][:, :, 3], kept, cache[HookPoint.linear_k(0)][:, :, 3]

    found, kept, _ = states("beta")
    torch.testing.assert_close(found, kept, atol=1e-12, rtol=0)
    found, kept, keys = states("write")
    away = found - kept
    assert float(away.abs().max()) > 1e-4
    # What is taken away lies along the key alone.
    keys = keys.repeat_interleave(found.shape[1] // keys.shape[1], 1).unsqueeze(-1)
    along = keys @ (keys.mT @ away) / keys.square().sum(-2, keepdim=True)
    torch.testing.assert_close(away, along, atol=1e-12, rtol=0)


def test_gates_of_attention_multiply_heads(tmp_path):
    save_random_hybrid(tmp_path, "qwen3_5_text", 0, layer_types=DELTA_FIRST)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(2, 9)
    names = [f"blocks.1.attn.hook_{name}" for name in ("gate", "pattern", "v", "z", "result")]
    cache = model.forward(ids, HookSpec().capture(*names, "blocks.1.hook_attn_out"))
    gate, pattern, v, z = (cache[getattr(HookPoint, name)(1)] for name in ("attn_gate", "pattern", "v", "z"))
    heads = pattern @ v.repeat_interleave(pattern.shape[1] // v.shape[1], 1)
    assert_near(z, heads * gate)
    open_gates = model.forward(ids, HookSpec().intervene(names[0], Scale(2.0)).capture(names[3]))
    assert_near(open_gates[HookPoint.z(1)], 2 * z)


def test_short_convolutions_see_a_token_and_the_few_before_it(tmp_path):
    save_random_hybrid(tmp_path, "lfm2", 0, layer_types=["conv"] * 3, conv_L_cache=3, conv_bias=False)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 12)
    cache = model.forward(ids, HookSpec().capture("blocks.0.conv.*"))
    (mixer,) = model.network.weights.layers[0].mixers
    weight = mixer.weights["conv"].squeeze(1)
    padded = torch.nn.functional.pad(cache[HookPoint.conv_x(0)], (0, 0, 2, 0))
    expected = sum(padded[:, i : i + 12] * weight[:, i] for i in range(3))
    assert_near(cache[HookPoint.conv_out(0)], expected)
    spec = HookSpec().intervene("blocks.0.conv.hook_in_gate", Zero(positions=(4,)))
    moved = model.forward(ids, spec.capture("blocks.0.hook_attn_out"))[HookPoint.attn_out(0)]
    plain = model.forward(ids, HookSpec().capture("blocks.0.hook_attn_out"))[HookPoint.attn_out(0)]
    touched = (moved - plain)[0].abs().amax(-1).nonzero().flatten().tolist()
    assert touched == [4, 5, 6]


def test_where_norms_are_on_the_stream_it_is_what_they_give_times_a_factor(tmp_path):
    save_random_hybrid(tmp_path, "minimax", 0)
    model = Model.from_pretrained(tmp_path)
    spec = HookSpec().capture("blocks.1.ln[12].hook_normalized", "blocks.1.hook_*_out")
    cache = model.forward(draw_ids(2, 9), spec.capture("blocks.1.hook_resid_*"))
    carried = model.config.blocks[1].carried
    for norm, added, after, factor in zip(
        ("ln1", "ln2"), ("attn_out", "mlp_out"), ("resid_mid", "resid_post"), carried, strict=True
    ):
        gain = model.network.norm_gain(norm, 1, torch.float32)
        stream = cache[HookPoint(f"{norm}_normalized", 1)] * gain * factor
        assert_near(stream + cache[HookPoint(added, 1)], cache[HookPoint(after, 1)])


def test_heads_of_latent_attention_are_patterns_times_values(tmp_path):
    types = ["linear_attention", "full_attention", "linear_attention"]
    save_random_hybrid(tmp_path, "kimi_linear", 0, layer_types=types)
    model = Model.from_pretrained(tmp_path)
    names = ("latent.hook_*", "attn.hook_scores", "attn.hook_pattern")
    cache = model.forward(draw_ids(2, 9), HookSpec().capture(*(f"blocks.1.{name}" for name in names)))
    held = {point.kind.removeprefix("latent_"): cache[point] for point in cache}
    shared = held["c"][:, None, :, -4:].expand_as(held["k"][..., -4:])
    assert torch.equal(held["k"][..., -4:], shared)
    assert_near(held["scores"], held["q"] @ held["k"].mT / held["k"].shape[-1] ** 0.5)
    assert_near(held["z"], held["pattern"] @ held["v"])


@pytest.mark.parametrize("family", LINEAR)
def test_bfloat16_is_as_near_as_the_reference_in_it(family, tmp_path):
    """To the reference in float32, on average; everything is captured, in its dtype."""
    reference = save_random_hybrid(tmp_path, family, 1)
    model, ids = Model.from_pretrained(tmp_path, dtype="bfloat16"), draw_ids(2, 37)
    with torch.no_grad():
        exact = reference(ids, use_cache=False).logits
        narrow = reference.bfloat16()(ids, use_cache=False).logits.float()
    found = model.forward(ids, HookSpec().capture("*")).logits.float()
    assert float((found - exact).abs().mean()) <= 1.5 * float((narrow - exact).abs().mean())
