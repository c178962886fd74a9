"""RWKV against the arrays of an independent implementation: every point it has, and interventions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr import HookPoint, HookSpec, Model
from mizarr.stages.causal.metrics import kl_divergence
from mizarr.stages.forward.hooks.writes import StateKnockoutSpec, StateSteeringSpec, state_hooks

ROOT = Path(__file__).resolve().parents[3].parent / "shared" / "reference" / "recurrent"
WITH_STATES = ("rwkv6-tiny", "rwkv6-hd32-tied", "rwkv7-tiny", "rwkv7-hd64")
LENGTHS = (1, 7, 40)
OURS = {"rwkv.log_decay": "rwkv.hook_log_decay", "rwkv.alpha_raw": "rwkv.hook_alpha_raw"} | {
    f"rwkv.{name}": f"rwkv.hook_{name}" for name in ("r", "k", "v", "kk", "a", "decay", "wkv_out")
}
OTHERS = ("state.attn_x", "state.ffn_x", "rwkv.state_norm_per_step")
"""What is worked out of points: inputs of a shift, norms of states."""


BOTH = [(name, dtype) for name in WITH_STATES for dtype in ("float32", "float64")]


@pytest.fixture(scope="module", params=BOTH)
def loaded(request) -> tuple[Path, Model]:
    name, dtype = request.param
    if not ROOT.is_dir():
        pytest.skip("the reference arrays are not beside this checkout")
    return ROOT / name, Model.from_pretrained(ROOT / name, dtype=dtype)


def tolerance(model: Model) -> float:
    """The reference keeps logits and streams in float64, all else in float32."""
    return 5e-5 if str(model.dtype) == "torch.float32" else 1e-9


def test_every_array_of_the_reference(loaded):
    folder, model = loaded
    compared = set()
    for length in LENGTHS:
        held = np.load(folder / f"reference_len{length}.npz")
        cache = model.forward(held["tokens"].tolist(), HookSpec().capture("hook_*", "blocks.*"))
        assert np.abs(cache.logits[0].numpy() - held["logits"]).max() <= tolerance(model)
        for name in held.files:
            _, _, inside = name.split(".", 2) if name.startswith("blocks") else ("", "", "")
            if name in ("tokens", "logits") or inside in OTHERS:
                continue
            point = HookPoint.parse(name.replace(inside, OURS.get(inside, inside)) if inside else name)
            found, expected = cache[point][0].numpy(), held[name]
            if found.shape != expected.shape:  # theirs puts positions before heads
                found = np.moveaxis(found, 0, 1)
            scale = max(1.0, float(np.abs(expected).max()))
            bound = max(tolerance(model) if "resid_post" in name else 2e-7, 1e-5 * (tolerance(model) > 1e-6))
            assert np.abs(found - expected).max() <= bound * scale, name
            compared.add(point.kind)
    wanted = {"embed", "resid_pre", "resid_post", "attn_out", "mlp_out", "rwkv_state", "rwkv_log_decay"}
    wanted |= {"rwkv_alpha_raw", "rwkv_effective_attn", "rwkv_r", "rwkv_wkv_out", "final_norm"}
    assert compared >= wanted


def test_shifts_and_states_are_what_the_reference_carries(loaded):
    folder, model = loaded
    held = np.load(folder / "reference_len7.npz")
    spec = HookSpec().capture("blocks.*.hook_resid_pre", "blocks.*.mlp.hook_pre", "blocks.*.rwkv.hook_state*")
    cache = model.forward(held["tokens"].tolist(), spec)
    for layer in range(model.config.num_layers):
        carried = cache[HookPoint.mlp_pre(layer)][0, -1].numpy()
        assert np.abs(carried - held[f"blocks.{layer}.state.ffn_x"]).max() <= 1e-5
        states = cache[HookPoint.rwkv_state_seq(layer)][0]
        norms = states.flatten(2).norm(dim=-1).T.numpy()
        theirs = held[f"blocks.{layer}.rwkv.state_norm_per_step"]
        assert np.abs(norms.reshape(theirs.shape) - theirs).max() <= 1e-5 * max(1.0, float(theirs.max()))
        assert np.array_equal(states[:, -1].numpy(), cache[HookPoint.rwkv_state(layer)][0].numpy())


def interventions(told: dict, model: Model, length: int) -> HookSpec:
    """A spec of the manifest."""
    chosen = {}
    for name, made in (("knockout", StateKnockoutSpec()), ("steering", None)):
        if name not in told:
            continue
        spec = made if made is not None else StateSteeringSpec.scale(told[name]["scale"])
        spec = spec.positions(told[name]["positions"])
        chosen[name] = spec if told[name]["layers"] is None else spec.layers(told[name]["layers"])
    if len(chosen) == 2:
        return state_hooks(model.config, length, chosen["knockout"], chosen["steering"], rule=told["rule"])
    (spec,) = chosen.values()
    return spec.hooks(model.config, length)


def test_writes_knocked_out_and_steered(loaded):
    folder, model = loaded
    held, manifest = np.load(folder / "interventions.npz"), json.loads((folder / "manifest.json").read_text())
    compared = 0
    for length in (7, 40):
        ids = manifest["sequences"][f"len{length}"]
        names = list(manifest["specs"])
        specs = [interventions(manifest["specs"][name], model, length) for name in names]
        runs = [mizarr.Run(ids, spec, mizarr.logits()) for spec in (None, *specs)]
        plain, *planned = mizarr.run(model, runs)
        for name, run, cache in zip(names, runs[1:], planned, strict=True):
            expected = held[f"len{length}/{name}/logits"]
            alone = model.forward(ids, run.hooks)
            scale = max(1.0, float(np.abs(expected).max()))
            for found in (cache, alone):
                assert found.logits[0].shape == expected.shape
                difference = np.abs(found.logits[0].numpy() - expected).max()
                assert difference <= max(tolerance(model), 1e-7) * scale, name  # kept in float32
            told = manifest["interventions"][f"len{length}/{name}"]
            kl = kl_divergence(plain.logits[0, -1].numpy(), alone.logits[0, -1].numpy())
            assert kl == pytest.approx(told["kl_last"], abs=1e-6, rel=1e-3), name
            compared += 1
    assert compared == 2 * len(manifest["specs"])


def test_steering_by_one_changes_no_bit_and_by_zero_is_a_knockout(loaded):
    folder, model = loaded
    ids = json.loads((folder / "manifest.json").read_text())["sequences"]["len7"]
    one, zero = (StateSteeringSpec.scale(f).positions([1, 4]).hooks(model.config, 7) for f in (1, 0))
    cut = StateKnockoutSpec().positions([1, 4]).hooks(model.config, 7)
    logits = [model.forward(ids, hooks).logits for hooks in (None, one, zero, cut)]
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[2], logits[3])
    assert not np.allclose(logits[0], logits[2], atol=1e-3)


def test_the_last_write_is_read_by_its_own_token_in_version_7_alone(loaded):
    """Version 6 reads the state before the token, and its bonus is not scaled."""
    folder, model = loaded
    ids = json.loads((folder / "manifest.json").read_text())["sequences"]["len7"]
    cut = StateKnockoutSpec().position(-1).hooks(model.config, 7)
    same = np.array_equal(model.forward(ids).logits, model.forward(ids, cut).logits)
    assert same == (model.config.model_type == "rwkv6")


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("float64", 5e-8)])
def test_version_4(dtype, bound):
    folder = ROOT / "rwkv4-tiny"
    if not folder.is_dir():
        pytest.skip("the reference arrays are not beside this checkout")
    model = Model.from_pretrained(folder, dtype=dtype)
    for length in LENGTHS:
        held = np.load(folder / f"reference_len{length}.npz")
        cache = model.forward(held["tokens"].tolist(), HookSpec().capture("blocks.*.hook_resid_post"))
        theirs = held["logits_f64"] if dtype == "float64" else held["logits"]
        assert np.abs(cache.logits[0].numpy() - theirs.reshape(length, -1)).max() <= bound
        hidden = [name for name in held.files if name.startswith("hidden_")]
        for layer in range(model.config.num_layers - 1):
            stream = cache[HookPoint.resid_post(layer)][0].numpy()
            assert np.abs(stream - held[f"hidden_{layer}"].reshape(stream.shape)).max() <= 2e-5
        assert len(hidden) > model.config.num_layers - 1
