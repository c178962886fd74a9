"""GLA, RetNet, DeltaNet and gated DeltaNet, in the layout of flash-linear-attention's checkpoints.

Parity with the papers' equations (literal_fla.py), planned runs and generation are tested with all hybrids
(test_hybrids.py and others); here is what configs mean, and which points there are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mizarr import HookPoint, HookSpec, Model, Zero
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.store.errors import ConfigError

from .literal_fla import MIXERS
from .random_hybrids import save_random_hybrid
from .test_hybrids import assert_near, draw_ids

FLA = tuple(MIXERS)


def read(family: str, **changes: Any) -> Any:
    return KNOWN[family].read(ConfigReader({"model_type": family} | changes), {})


def mixer_of(family: str, **changes: Any) -> Any:
    return read(family, **changes).blocks[0].mixers[0]


@pytest.mark.parametrize("family", FLA)
@pytest.mark.parametrize("seed", range(2, 6))
def test_logits_are_those_of_the_papers_equations_at_every_length(family, seed, tmp_path):
    """Beyond two draws of each, as every switch of a config is another model here; past several chunks."""
    reference = save_random_hybrid(tmp_path, family, seed)
    model = Model.from_pretrained(tmp_path)
    for length in (1, 37, 130):
        ids = draw_ids(1, length)
        with torch.no_grad():
            expected = reference(ids).logits
        assert_near(model.forward(ids).logits, expected, 2e-5)


@pytest.mark.parametrize("family", FLA)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    for seed in range(6):
        save_random_hybrid(tmp_path / str(seed), family, seed, tokenizer=False)
        files = resolve(tmp_path / str(seed))
        found = report(files.config, read_shapes(files.weight_files))
        assert files.has_known_family and found.is_compatible and not found.warnings, found.issues
        assert found.config == files.architecture()


def test_absent_keys_mean_what_they_mean_to_flash_linear_attention():
    gla, retnet, delta = mixer_of("gla"), mixer_of("retnet"), mixer_of("delta_net")
    assert (gla.heads, gla.groups, gla.key_size, gla.value_size, gla.conv_size) == (4, 4, 256, 512, 0)
    assert (gla.decays, gla.decay_rank, gla.decay_divisor, gla.rope) == ("key", 16, 16.0, None)
    assert (retnet.heads, retnet.key_size, retnet.value_size, retnet.decays) == (8, 256, 512, "fixed")
    assert (retnet.rope.theta, retnet.rope.dim, retnet.conv_size) == (10000.0, 256, 0)
    assert (delta.heads, delta.key_size, delta.value_size, delta.conv_size) == (16, 128, 128, 4)
    assert (delta.decays, delta.gate, delta.beta_factor) == (None, None, 1.0)
    gated = mixer_of("gated_deltanet")
    assert (gated.heads, gated.groups, gated.key_size, gated.value_size) == (6, 6, 256, 512)
    assert (gated.decays, gated.gate, gated.conv_size) == ("head", "silu", 4)
    layers = {family: read(family).num_layers for family in FLA}
    assert layers == {"gla": 24, "retnet": 24, "delta_net": 24, "gated_deltanet": 21}
    inner = {family: read(family).blocks[0].channel_mixer.intermediate_size for family in FLA}
    assert inner == {"gla": 5632, "retnet": 2816, "delta_net": 5632, "gated_deltanet": 5632}
    # 340M: as released, with sizes of its own.
    small = mixer_of("gla", hidden_size=1024, num_heads=4, expand_k=0.5, use_short_conv=True)
    assert (small.key_size, small.value_size, small.conv_size) == (128, 256, 4)


@pytest.mark.parametrize(
    ("family", "changes", "absent"),
    [
        ("gla", {"use_output_gate": False}, {"linear_gate", "linear_conv", "linear_beta"}),
        ("gla", {"use_short_conv": True}, {"linear_beta"}),
        ("retnet", {}, {"linear_conv", "linear_beta"}),
        ("delta_net", {}, {"linear_gate", "linear_decay", "linear_log_decay"}),
        ("gated_deltanet", {"use_short_conv": False}, {"linear_conv"}),
    ],
)
def test_what_a_mixer_lacks_it_has_no_points_for(family, changes, absent):
    kinds = ("gate", "conv", "q", "k", "v", "beta", "decay", "log_decay", "write", "state_seq", "out")
    found = {point.kind for point in read(family, **changes).hook_points}
    assert {f"linear_{kind}" for kind in kinds} - found == absent


@pytest.mark.parametrize("family", ["gla", "retnet"])
def test_states_go_on_as_the_points_say_and_alpha_times_values_is_what_is_read(family, tmp_path):
    save_random_hybrid(tmp_path, family, 1, attn=None)
    model = Model.from_pretrained(tmp_path, dtype="float64")
    cache = model.forward(draw_ids(2, 21), HookSpec().capture("blocks.*.linear.*"))
    for layer in range(model.config.num_layers):
        held = {point.kind.removeprefix("linear_"): cache[point] for point in cache if point.layer == layer}
        torch.testing.assert_close(held["alpha_raw"] @ held["v"], held["out"], atol=1e-12, rtol=1e-9)
        assert not held["alpha_raw"].triu(1).any()
        before = torch.nn.functional.pad(held["state_seq"], (0, 0, 0, 0, 1, 0))[:, :, :-1]
        expected = held["decay"].unsqueeze(-1) * before + held["k"].unsqueeze(-1) * held["v"].unsqueeze(-2)
        torch.testing.assert_close(held["state_seq"], expected, atol=1e-12, rtol=1e-9)
        read = (held["q"].unsqueeze(-2) @ held["state_seq"]).squeeze(-2)
        torch.testing.assert_close(read, held["out"], atol=1e-12, rtol=1e-9)


def test_retention_leaves_what_its_heads_are_made_to(tmp_path):
    """1 - 2^(-5 - h) of head h, in every layer and at every token."""
    save_random_hybrid(tmp_path, "retnet", 0, attn=None, num_heads=4, num_kv_heads=4)
    model = Model.from_pretrained(tmp_path)
    decay = model.forward(draw_ids(1, 5), HookSpec().capture("blocks.2.linear.hook_decay"))
    expected = torch.tensor([1 - 2.0 ** (-5 - head) for head in range(4)])
    found = decay[HookPoint.linear_decay(2)][0, :, :, 0]
    torch.testing.assert_close(found, expected[:, None].expand(4, 5), atol=1e-7, rtol=0)


def test_a_delta_net_forgets_nothing_but_what_it_replaces(tmp_path):
    """With beta 0 at a token the state behind it is the one before."""
    save_random_hybrid(tmp_path, "delta_net", 0, attn=None)
    model = Model.from_pretrained(tmp_path, dtype="float64")
    spec = HookSpec().intervene("blocks.0.linear.hook_beta", Zero(positions=(3,)))
    states = model.forward(draw_ids(1, 9), spec.capture("blocks.0.linear.hook_state_seq"))
    held = states[HookPoint.linear_state_seq(0)][0]
    assert torch.equal(held[:, 3], held[:, 2])
    assert not torch.equal(held[:, 4], held[:, 3])


def test_layers_that_attend_are_those_the_config_lists():
    told = {"num_heads": 32, "num_kv_heads": 8, "qkv_bias": False, "window_size": 2048}
    found = read("gated_deltanet", attn=told | {"layers": [1, 3]}, num_hidden_layers=5)
    kinds = [layer.mixer.kind for layer in found.layers]
    assert kinds == ["recurrence", "attention", "recurrence", "attention", "recurrence"]
    assert found.layers[1].mixer.window == 2048
    assert found.context_length == 2048
    assert read("gated_deltanet").context_length > 1 << 30


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gla", {"hidden_act": "gelu"}, r"expected hidden_act 'silu' .*found 'gelu'"),
        ("gla", {"num_heads": 3}, r"num_heads to divide 1024 channels of expand_k, found 3"),
        ("gla", {"num_kv_heads": 3}, r"multiple of num_kv_heads \(3\), found 4"),
        ("gla", {"feature_map": "hedgehog"}, r"expected an activation among .*found 'hedgehog'"),
        ("retnet", {"attnres_block_size": 4}, r"expected no attnres_block_size, found 4"),
        ("delta_net", {"qk_norm": "sum"}, r"expected qk_norm 'l2', found 'sum'"),
        ("delta_net", {"qk_activation": "elu"}, r"expected qk_activation 'silu', found 'elu'"),
        ("delta_net", {"use_beta": False}, r"expected use_beta to be true, found false"),
        ("gated_deltanet", {"num_v_heads": 7}, r"found 7 heads and 6 groups"),
        (
            "gated_deltanet",
            {"attn": {"layers": [21], "num_heads": 2}},
            r"layer numbers below 21, found",
        ),
        ("gated_deltanet", {"attn": {"num_heads": 2}}, r"layer numbers below 21, found"),
        ("gated_deltanet", {"attn": {"layers": [0]}}, r"attn: expected num_heads to be a positive integer"),
        (
            "gla",
            {"attn": {"layers": [0], "num_heads": 3}},
            r"attn: expected num_heads to divide hidden_size \(2048\), found 3",
        ),
        ("gated_deltanet", {"quantization_config": {}}, r"expected unquantised weights"),
    ],
)
def test_what_is_not_followed_is_one_line(family, changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read(family, **changes)
    assert "\n" not in str(raised.value)
