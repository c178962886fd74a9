"""Hook points of experts: what the router says, what experts weigh and give, and changes of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr import Add, HookPoint, HookSpec, Model, Replace, Zero
from mizarr.pipeline import run
from mizarr.stages.causal.grids.ablation import Ablation
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.store.errors import HookPointNotFound, InterventionError

from .compared import assert_near, draw_ids
from .random_hybrids import save_random_hybrid

pytest.importorskip("transformers")

FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "granitemoeshared",
    "jamba",
    "minimax_m2",
    "llama4_text",
)
"""Every way to route, with and without an expert of all tokens."""
IDS = draw_ids(2, 12)


def layers_of(model: Model) -> list[int]:
    return model.config.layers_with("expert_weights")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_random_hybrid(tmp_path, request.param, 1, tokenizer=False)
    return tmp_path


def test_what_experts_give_by_their_weights_is_what_the_mlp_gives(folder):
    model = Model.from_pretrained(folder)
    points = ("router_*", "expert_weights", "expert_out", "shared_expert_out", "post")
    held = [f"blocks.*.mlp.hook_{name}" for name in points]
    has_shared = bool(model.config.layers_with("shared_expert_out"))
    cache = model.forward(
        IDS, HookSpec().capture(*[name for name in held if has_shared or "shared" not in name])
    )
    assert layers_of(model)
    for layer in layers_of(model):
        shape = model.config.blocks[layer].channel_mixer
        weights = cache[HookPoint.expert_weights(layer)]
        assert weights.shape == (2, 12, shape.count)
        assert ((weights != 0).sum(-1) == shape.chosen).all()
        told = cache[HookPoint.expert_out(layer)]
        whole = torch.einsum("bse,besd->bsd", weights, told)
        assert (told.abs().sum(-1) == 0).transpose(1, 2).eq(weights == 0).all()
        if has_shared:
            whole = whole + cache[HookPoint.shared_expert_out(layer)]
        assert_near(whole, cache[HookPoint.mlp_post(layer)])
        probabilities = cache[HookPoint.router_probs(layer)]
        if shape.routing.startswith("sigmoid"):
            assert torch.equal(probabilities, cache[HookPoint.router_logits(layer)].sigmoid())
        else:
            assert_near(probabilities.sum(-1), torch.ones(2, 12))
            best = probabilities.topk(shape.chosen).indices.sort().values
            assert torch.equal(best, weights.topk(shape.chosen).indices.sort().values)


def test_reading_them_changes_no_bit(folder):
    model = Model.from_pretrained(folder)
    read = HookSpec().capture("blocks.*.mlp.hook_*", "blocks.*.mlp.hook_expert_out")
    assert torch.equal(model.forward(IDS, read).logits, model.forward(IDS).logits)


def silenced(folder: Path, layer: int, expert: int, to: Path) -> Path:
    """The checkpoint with the last projection of one expert zero."""
    tensors = load_file(folder / "model.safetensors")
    ends = (f".experts.{expert}.w2.weight", f".experts.{expert}.down_proj.weight")
    listed = [name for name in tensors if f"layers.{layer}." in name and name.endswith(ends)]
    whole = [
        name
        for name in tensors
        if f"layers.{layer}." in name
        and name.endswith(("experts.down_proj", "output_linear.weight"))
        and "shared" not in name
    ]
    assert len(listed) + len(whole) == 1
    for name in listed:
        tensors[name] = torch.zeros_like(tensors[name])
    for name in whole:
        tensors[name][expert] = 0
    to.mkdir()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


def test_an_expert_knocked_out_is_one_that_writes_nothing(folder):
    from transformers import AutoModelForCausalLM

    model = Model.from_pretrained(folder)
    layer = layers_of(model)[0]
    weights = model.forward(IDS, HookSpec().capture(HookPoint.expert_weights(layer)))[
        HookPoint.expert_weights(layer)
    ]
    expert = int((weights != 0).sum((0, 1)).argmax())
    without = silenced(folder, layer, expert, folder / "silenced")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(without).float().eval()(IDS, use_cache=False).logits
    for kind in ("expert_weights", "expert_out"):
        spec = HookSpec().intervene(HookPoint(kind, layer), Zero(experts=(expert,)))
        found = model.forward(IDS, spec).logits
        assert_near(found, expected)
    assert (expected - model.forward(IDS).logits).abs().max() > 1e-4, "or nothing was knocked out"


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "llama4_text"])
def test_an_expert_can_be_forced_on_a_token_by_its_score_or_by_its_weight(family, tmp_path):
    save_random_hybrid(tmp_path, family, 1, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    layer, place = layers_of(model)[0], 5
    point, kinds = HookPoint.expert_weights(layer), ("expert_weights", "expert_out", "post")
    plain = model.forward(IDS, HookSpec().capture(*(f"blocks.{layer}.mlp.hook_{kind}" for kind in kinds)))
    left = int(plain[point][0, place].eq(0).nonzero()[0])
    by_score = HookSpec().intervene(
        HookPoint.router_logits(layer), Add(torch.tensor([50.0]), positions=(place,), experts=(left,))
    )
    cache = model.forward(IDS, by_score.capture(point))
    assert cache[point][0, place, left] > 0
    others = [i for i in range(12) if i != place]
    assert torch.equal(cache[point][:, others], plain[point][:, others])
    by_weight = HookSpec().intervene(point, Replace(torch.tensor([0.5]), positions=(place,), experts=(left,)))
    spec = by_weight.capture(f"blocks.{layer}.mlp.hook_expert_out", f"blocks.{layer}.mlp.hook_post")
    cache = model.forward(IDS, spec)
    more = 0.5 * cache[HookPoint.expert_out(layer)][0, left, place]
    assert more.abs().max() > 0
    was = plain[HookPoint.mlp_post(layer)][0, place]
    assert_near(cache[HookPoint.mlp_post(layer)][0, place], was + more)


def test_they_are_stored_and_come_back_as_they_were(tmp_path):
    save_random_hybrid(tmp_path / "model", "qwen2_moe", 1, tokenizer=False)
    model, rows = Model.from_pretrained(tmp_path / "model"), [[5, 9, 100], [7] * 9, list(range(2, 20))]
    hooks = HookSpec().capture("blocks.*.mlp.hook_router_logits", "blocks.*.mlp.hook_expert_weights")
    hooks = hooks.capture("blocks.*.mlp.hook_expert_out")
    states = mizarr.capture(model, rows, hooks, store=mizarr.open_store(tmp_path / "store"))
    assert states["expert_weights"].dims == ("layer", "token", "expert")
    assert states["expert_out"].dims == ("layer", "token", "expert", "hidden")
    for number, row in enumerate(rows):
        cache, stored = model.forward(row, hooks), states.mi.prompt(number)
        for layer in states["expert_weights"]["layer"].values.tolist():
            for kind in ("router_logits", "expert_weights"):
                here = stored[kind].sel(layer=layer).values
                torch.testing.assert_close(torch.tensor(here), cache[HookPoint(kind, layer)][0])
            told = stored["expert_out"].sel(layer=layer).transpose("expert", ..., "hidden").values
            torch.testing.assert_close(torch.tensor(told), cache[HookPoint.expert_out(layer)][0])


def refused(spec: Any, model: Model) -> None:
    model.forward([1, 2, 3], spec)


def test_what_cannot_be_asked_of_experts_is_refused_in_one_line(tmp_path):
    save_random_hybrid(tmp_path, "mixtral", 1, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    point = HookPoint.expert_weights(0)
    with pytest.raises(InterventionError, match=r"expected experts in 0\.\.\d+ .*, found 99"):
        refused(HookSpec().intervene(point, Zero(experts=(99,))), model)
    with pytest.raises(InterventionError, match="experts"):
        refused(HookSpec().intervene(HookPoint.resid_post(0), Zero(experts=(0,))), model)
    with pytest.raises(InterventionError, match="hook_router_probs"):
        refused(HookSpec().intervene(HookPoint.router_probs(0), Zero()), model)
    with pytest.raises(HookPointNotFound, match="has no hook point"):
        refused(HookSpec().capture(HookPoint.expert_weights(0)), Model.from_pretrained("specimen"))
    every = model.forward([1, 2, 3], HookSpec().capture("blocks.*"))
    assert HookPoint.expert_out(0) not in every and point in every


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_a_grid_takes_every_expert_away_by_itself(how, tmp_path):
    """Against one plain forward pass for each."""
    save_random_hybrid(tmp_path / "model", "qwen3_moe", 1, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path / "model"), tuple(range(3, 12))
    layers = tuple(layers_of(model))
    references = () if how == "zero" else (tuple(range(20, 29)), tuple(range(5, 10)))
    ablation = Ablation(
        tokens=ids, how=how, references=references, kinds=("expert_weights",), over="head_position",
        layers=layers, metrics=(LogitDifference(17, 40),),
    )  # fmt: skip
    store = mizarr.open_store(tmp_path / "store")
    node = ablation.on(model)
    run(node, store)
    found = node.open(store)["logit_difference"]
    assert found.dims == ("layer", "expert", "position")
    for layer in layers:
        point = HookPoint.expert_weights(layer)
        rows = [model.forward(list(each), HookSpec().capture(point))[point][0] for each in references]
        mean = torch.cat(rows).double().mean(0) if rows else torch.zeros(found.sizes["expert"])
        for expert in range(0, found.sizes["expert"], 3):
            for place in (0, 4, 8):
                put = Replace(mean[expert : expert + 1].float(), positions=(place,), experts=(expert,))
                logits = model.forward(list(ids), HookSpec().intervene(point, put)).logits[0, -1]
                here = found.sel(layer=layer, expert=expert, position=place)
                assert float(here) == pytest.approx(float(logits[17] - logits[40]), abs=2e-5)
