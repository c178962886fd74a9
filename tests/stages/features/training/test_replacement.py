"""Loss of a model that reads reconstructions: nothing lost by perfect ones, all by empty ones."""

from __future__ import annotations

import pytest
import torch

import mizarr
from mizarr import HookSpec, Replace, Zero
from mizarr.stages.features.layers.activations import ReLU
from mizarr.stages.features.layers.layer import LayerFeatures
from mizarr.stages.features.training.replacement import replacement_loss
from mizarr.store.errors import PromptError

PROMPTS = [[1, 5, 9, 3, 7, 2], [4, 4, 8, 1, 6, 30], [2, 3, 5, 8], [7]]


@pytest.fixture
def model(checkpoint):
    """Two layers, 16 wide, with weights far enough from zero for layers to matter."""
    return mizarr.Model.from_pretrained(checkpoint(), device="cpu")


def perfect(layer, width=16):
    """Features that give back what they read."""
    signs = torch.cat([torch.eye(width), -torch.eye(width)])
    return LayerFeatures(layer, signs, {layer: signs.clone()}, ReLU())


def empty(layer, targets, width=16):
    rows = torch.zeros(3, width)
    return LayerFeatures(layer, rows, dict.fromkeys(targets, rows), ReLU())


def random(layer, targets, width=16, count=12):
    draw = torch.Generator().manual_seed(layer)
    return LayerFeatures(
        layer,
        torch.randn(count, width, generator=draw),
        {m: 0.1 * torch.randn(count, width, generator=draw) for m in targets},
        ReLU(),
        b_dec=torch.randn(width, generator=draw) * 0.1,
    )


@pytest.mark.parametrize("kind", ["mlp_out", "resid_post"])
def test_perfect_reconstructions_cost_nothing(model, kind):
    found = replacement_loss(model, {0: perfect(0), 1: perfect(1)}, kind, kind, PROMPTS)
    assert found.ce.sel(way="replaced").values == pytest.approx([found.ce_clean.item()] * 3, abs=1e-5)
    assert found.ce_recovered.values == pytest.approx(1.0, abs=1e-3)
    assert found.kl_recovered.values == pytest.approx(1.0, abs=1e-4)
    assert found.attrs["tokens"] == 4 + 4 + 2


def test_empty_features_are_zero_ablation(model):
    layers = {0: empty(0, (0, 1)), 1: empty(1, (1,))}
    found = replacement_loss(model, layers, "resid_mid", "mlp_out", PROMPTS)
    assert found.ce_recovered.sel(ablation="zero").values == pytest.approx([0.0] * 3, abs=1e-6)
    logits = model.forward(
        PROMPTS[2], HookSpec().intervene("blocks.*.hook_mlp_out", Zero(positions=(1, 2, 3)))
    ).logits
    alone = replacement_loss(model, layers, "resid_mid", "mlp_out", PROMPTS[2:3])
    chance = logits[0].log_softmax(-1)
    assert alone.ce.sel(place="all", way="zero").item() == pytest.approx(
        -(chance[1, 5] + chance[2, 8]).item() / 2
    )


def test_all_together_features_read_what_the_replaced_model_computes(model):
    """Against the two layers done by hand: the second reads a stream in which the first is replaced."""
    layers = {0: random(0, (0, 1)), 1: random(1, (1,))}
    ids = PROMPTS[0]
    clean = model.forward(ids, HookSpec().capture("blocks.0.hook_resid_mid"))["blocks.0.hook_resid_mid"][
        0, 1:
    ]
    first = (clean @ layers[0].W_enc.T).relu()
    spec = HookSpec().intervene(
        "blocks.0.hook_mlp_out", Replace(first @ layers[0].W_dec[0] + layers[0].b_dec, positions=range(1, 6))
    )
    seen = model.forward(ids, HookSpec().extend(spec).capture("blocks.1.hook_resid_mid"))
    second = (seen["blocks.1.hook_resid_mid"][0, 1:] @ layers[1].W_enc.T).relu()
    value = first @ layers[0].W_dec[1] + second @ layers[1].W_dec[1] + layers[1].b_dec
    spec = spec.intervene("blocks.1.hook_mlp_out", Replace(value, positions=range(1, 6)))
    chance = model.forward(ids, spec).logits[0].log_softmax(-1)
    wanted = -sum(chance[i, ids[i + 1]].item() for i in range(1, 5)) / 4
    found = replacement_loss(model, layers, "resid_mid", "mlp_out", [ids])
    assert found.ce.sel(place="all", way="replaced").item() == pytest.approx(wanted, rel=1e-5)
    places = found.ce.sel(way="replaced").values
    assert len(set(places.round(6))) == 3


def test_means_are_of_the_positions_that_count(model):
    found = replacement_loss(model, {1: perfect(1)}, "mlp_out", "mlp_out", PROMPTS[:1])
    states = model.forward(PROMPTS[0], HookSpec().capture("blocks.1.hook_mlp_out"))["blocks.1.hook_mlp_out"]
    mean = Replace(states[0, 1:].mean(0), positions=range(1, 6))
    chance = (
        model.forward(PROMPTS[0], HookSpec().intervene("blocks.1.hook_mlp_out", mean))
        .logits[0]
        .log_softmax(-1)
    )
    wanted = -sum(chance[i, PROMPTS[0][i + 1]].item() for i in range(1, 5)) / 4
    assert found.ce.sel(place="1", way="mean").item() == pytest.approx(wanted, rel=1e-5)


def test_heads_side_by_side_are_put_back_where_they_were(model):
    found = replacement_loss(model, {0: perfect(0)}, "z", "z", PROMPTS)
    assert found.ce_recovered.values == pytest.approx(1.0, abs=1e-3)


def test_prompts_that_predict_nothing_are_refused(model):
    with pytest.raises(PromptError, match="longer than 2 tokens"):
        replacement_loss(model, {0: perfect(0)}, "mlp_out", "mlp_out", [[1], [1, 2]])
