"""xLSTM: matrix memories with exponential gates. Parity, planned runs and generation are tested with all
hybrids (test_hybrids.py and others); here is what it alone has."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import HookPoint, HookSpec, Model, Zero
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.store.errors import ConfigError

from .random_hybrids import save_random_hybrid
from .test_hybrids import assert_near, draw_ids

pytest.importorskip("transformers")


def test_states_are_those_the_reference_keeps(tmp_path):
    """C, n and m behind the last token."""
    reference = save_random_hybrid(tmp_path, "xlstm", 0)
    model, held = Model.from_pretrained(tmp_path), []
    hooks = [
        block.mlstm_layer.register_forward_hook(lambda _, __, output: held.append(output[1]))
        for block in reference.base_model.blocks
    ]
    for length in (1, 5, 37, 100):
        ids = draw_ids(2, length)
        held.clear()
        with torch.no_grad():
            reference(ids, use_cache=False)
        cache = model.forward(ids, HookSpec().capture("blocks.*.mlstm.hook_state"))
        for layer, (memory, norm, top) in enumerate(held):
            state = cache[HookPoint.mlstm_state(layer)]
            assert_near(state[..., :-2], memory)
            assert_near(state[..., -2], norm)
            assert_near(state[..., -1], top.flatten(2).expand(-1, -1, state.shape[2]))
    for hook in hooks:
        hook.remove()


def test_states_go_on_as_the_points_say_and_alpha_times_values_is_what_is_read(tmp_path):
    save_random_hybrid(tmp_path, "xlstm", 1)
    model = Model.from_pretrained(tmp_path, dtype="float64")
    cache = model.forward(draw_ids(2, 21), HookSpec().capture("blocks.*.mlstm.*"))
    for layer in range(model.config.num_layers):
        held = {point.kind.removeprefix("mlstm_"): cache[point] for point in cache if point.layer == layer}
        torch.testing.assert_close(held["alpha_raw"] @ held["v"], held["out"], atol=1e-12, rtol=1e-9)
        assert not held["alpha_raw"].triu(1).any()
        states = held["state_seq"][..., :-1] * held["state_seq"][..., -1:].exp()
        before = torch.nn.functional.pad(states, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        values = torch.nn.functional.pad(held["v"], (0, 1), value=1.0)
        written = (held["input"].exp() * held["k"]).unsqueeze(-1) * values.unsqueeze(-2)
        expected = held["decay"].unsqueeze(-1) * before + written
        torch.testing.assert_close(states, expected, atol=1e-12, rtol=1e-9)
        read = (held["q"].unsqueeze(-2) @ states).squeeze(-2)
        divisor = read[..., -1:].abs().clamp(min=1.0)
        top = held["state_seq"][:, :, :, 0, -1:]
        divisor = divisor + model.config.blocks[0].mixers[0].eps * top.exp()
        torch.testing.assert_close(read[..., :-1] / divisor, held["out"], atol=1e-12, rtol=1e-9)
        assert torch.equal(held["state"], held["state_seq"][:, :, -1])


def test_a_write_knocked_out_is_a_token_without_a_key(tmp_path):
    save_random_hybrid(tmp_path, "xlstm", 0)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 9)
    plain = model.forward(ids).logits
    knocked, silent = (
        model.forward(ids, HookSpec().intervene(f"blocks.1.mlstm.hook_{name}", Zero(positions=(3,)))).logits
        for name in ("write", "k")
    )
    assert_near(knocked, silent)
    assert_near(knocked[:, :3], plain[:, :3])
    assert float((knocked - plain)[:, 3:].abs().amax(-1).min()) > 1e-4


@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_are_the_same_model(bias, tmp_path):
    """The reference cannot make such a model by itself; its own layer says in which order parts lie."""
    for name in ("single", "fused"):
        save_random_hybrid(tmp_path / name, "xlstm", 2, use_bias=bias)
    path = tmp_path / "fused" / "model.safetensors"
    held = load_file(path)
    for ending in ("weight", "bias"):
        for name in [name for name in held if name.endswith(f"mlstm_layer.q.{ending}")]:
            room = name.removesuffix(f"q.{ending}")
            parts = [held.pop(f"{room}{part}.{ending}") for part in ("q", "k", "v", "ogate_preact")]
            held[f"{room}qkv_opreact.{ending}"] = torch.cat(parts)
        for name in [name for name in held if name.endswith(f"igate_preact.{ending}")]:
            room = name.removesuffix(f"igate_preact.{ending}")
            parts = [held.pop(f"{room}{part}gate_preact.{ending}") for part in "if"]
            held[f"{room}ifgate_preact.{ending}"] = torch.cat(parts)
        for name in [name for name in held if name.endswith(f"proj_up_gate.{ending}")]:
            room = name.removesuffix(f"proj_up_gate.{ending}")
            parts = [held.pop(f"{room}{part}.{ending}") for part in ("proj_up_gate", "proj_up")]
            held[f"{room}proj_up_gate_z.{ending}"] = torch.cat(parts)
    save_file(held, path, {"format": "pt"})
    config = tmp_path / "fused" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"weight_mode": "fused"}))
    ids = draw_ids(2, 37)
    single, fused = (
        Model.from_pretrained(tmp_path / name).forward(ids).logits for name in ("single", "fused")
    )
    assert_near(fused, single, 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_heads": 3},
            r"num_heads to divide the 16 channels of keys and the 32 channels of values, found 3",
        ),
        ({"weight_mode": "double"}, r"expected weight_mode to be 'single' or 'fused', found 'double'"),
        ({"gate_soft_cap": "15"}, r"expected gate_soft_cap to be a finite number, found '15'"),
    ],
)
def test_what_is_not_followed_is_one_line(changes, message):
    raw = {"model_type": "xlstm", "hidden_size": 32, "vocab_size": 96, "num_heads": 2} | changes
    with pytest.raises(ConfigError, match=message) as raised:
        KNOWN["xlstm"].read(ConfigReader(raw), {})
    assert "\n" not in str(raised.value)
