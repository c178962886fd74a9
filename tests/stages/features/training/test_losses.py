"""Losses and their gradients, against formulas on small numbers."""

from __future__ import annotations

import pytest
import torch

from mizarr.stages.features.training.losses import jump_relu, loss, step_function
from mizarr.stages.features.training.models import DictionaryModel, Normaliser
from mizarr.stages.features.training.settings import TrainingSettings

WIDTH = 0.4


def model_of(layers=1, width=4, **said):
    settings = TrainingSettings(**({"features": 6, "k": 2, "read": "hook_resid_post"} | said))
    affine = {layer: Normaliser(torch.zeros(width), 1.0) for layer in range(layers)}
    return DictionaryModel(settings, affine, affine, seed=0)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def none_dead(model):
    return {layer: torch.zeros(model.settings.features, dtype=torch.bool) for layer in model.layers}


def test_jump_relu_passes_gradients_where_it_is_open_and_to_thresholds_in_the_band():
    pre = torch.tensor([[0.5], [0.65], [0.85], [0.2]], requires_grad=True)
    threshold = torch.tensor([0.6], requires_grad=True)
    out = jump_relu(pre, threshold, WIDTH)
    assert torch.equal(out.detach(), torch.tensor([[0.0], [0.65], [0.85], [0.0]]))
    weight = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    (out * weight).sum().backward()
    assert torch.equal(pre.grad, torch.tensor([[0.0], [2.0], [4.0], [0.0]]))
    # in the band of 0.2 on either side: rows 0 and 1
    assert threshold.grad.item() == pytest.approx(-(0.6 / WIDTH) * (1 + 2))


def test_the_step_gives_gradients_to_thresholds_only():
    pre = torch.tensor([[0.5], [0.65], [0.85]], requires_grad=True)
    threshold = torch.tensor([0.6], requires_grad=True)
    out = step_function(pre, threshold, WIDTH)
    assert out.flatten().tolist() == [0.0, 1.0, 1.0]
    (out * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    assert pre.grad is None
    assert threshold.grad.item() == pytest.approx(-(1 + 2) / WIDTH)


def test_fvu_is_the_mean_squared_error_per_entry_of_scaled_rows():
    model = model_of(activation="relu", sparsity=0.0)
    x = rows(8, 4)
    found = loss(model, {0: x}, {0: x}, k=2, pressure=1.0, dead=none_dead(model))
    a = (x @ model.W_enc["0"].T).relu()
    wanted = (a @ model.W_dec["0"][:, 0] - x).square().mean()
    assert torch.allclose(found.total, wanted)
    assert torch.allclose(found.fvu[0], wanted)


@pytest.mark.parametrize("penalty", ["l1", "tanh"])
def test_penalties_weigh_activations_by_the_norm_of_what_they_write(penalty):
    model = model_of(activation="relu", sparsity=0.1, penalty=penalty, tanh_scale=3.0)
    with torch.no_grad():
        model.W_dec["0"] *= torch.arange(1.0, 7)[:, None, None]
    x = rows(8, 4)
    found = loss(model, {0: x}, {0: x}, k=2, pressure=0.5, dead=none_dead(model))
    weighed = (x @ model.W_enc["0"].T).relu() * torch.arange(1.0, 7)
    cost = weighed if penalty == "l1" else (3 * weighed).tanh()
    assert found.penalty.item() == pytest.approx(0.5 * 0.1 * cost.sum(1).mean().item(), rel=1e-5)


def test_dead_features_of_a_jump_relu_are_pulled_towards_their_thresholds():
    model = model_of(activation="jumprelu", sparsity=0.0, dead_penalty=0.1, threshold=0.5)
    x = rows(8, 4)
    dead = {0: torch.tensor([True, False, False, True, False, False])}
    found = loss(model, {0: x}, {0: x}, k=2, pressure=1.0, dead=dead)
    short = (0.5 - x @ model.W_enc["0"].T).relu()[:, [0, 3]]
    assert found.penalty.item() == pytest.approx(0.1 * short.sum(1).mean().item(), rel=1e-5)


def test_topk_keeps_k_of_each_row_and_batchtopk_k_per_row_of_all():
    x = rows(50, 4)
    x[0] *= 10
    each = model_of(activation="topk")
    found = loss(each, {0: x}, {0: x}, k=2, pressure=1.0, dead=none_dead(each)).activations[0]
    pre = x @ each.W_enc["0"].T
    assert ((found != 0).sum(1) <= 2).all()
    assert torch.equal(found, torch.where(pre >= pre.topk(2).values[:, -1:], pre.relu(), 0.0))
    together = model_of(activation="batchtopk")
    a = loss(together, {0: x}, {0: x}, k=2, pressure=1.0, dead=none_dead(together)).activations[0]
    assert (a != 0).sum() == 100
    assert (a != 0).sum(1).max() > 2
    assert a[a != 0].min() > pre.relu()[a == 0].max()


def test_the_running_threshold_follows_the_least_that_was_kept():
    model = model_of(activation="batchtopk")
    least = []
    for seed in range(3):
        x = rows(50, 4, seed=seed)
        a = loss(model, {0: x}, {0: x}, k=2, pressure=1.0, dead=none_dead(model)).activations[0]
        least.append(a[a > 0].min().item())
    first = 0.99 * least[0] + 0.01 * least[1]
    assert model.running[0] == pytest.approx(0.99 * first + 0.01 * least[2], rel=1e-12)


def test_auxk_is_what_dead_features_leave_of_the_error_without_bias():
    model = model_of(activation="topk", auxiliary=0.25)
    with torch.no_grad():
        model.b_dec["0"] += 3.0
    x = rows(8, 4)
    dead = {0: torch.tensor([True, False, False, True, False, True])}
    found = loss(model, {0: x}, {0: x}, k=2, pressure=1.0, dead=dead)
    pre = x @ model.W_enc["0"].T
    error = x - (found.activations[0] @ model.W_dec["0"][:, 0] + 3.0)
    # width 4: two of the three dead ones take part
    masked = pre.masked_fill(~dead[0], -torch.inf)
    kept = torch.where(masked >= masked.topk(2).values[:, -1:], pre, 0.0)
    wanted = 0.25 * (kept @ model.W_dec["0"][:, 0] - error).square().mean()
    assert found.auxiliary.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_prefixes_reconstruct_by_themselves():
    model = model_of(activation="topk", prefixes=(2, 4))
    x = rows(8, 4)
    found = loss(model, {0: x}, {0: x}, k=3, pressure=1.0, dead=none_dead(model))
    a, W = found.activations[0], model.W_dec["0"][:, 0]
    wanted = sum((a[:, :n] @ W[:n] - x).square().mean() for n in (2, 4, 6))
    assert found.total.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_features_of_a_clt_write_to_their_layer_and_all_later_ones():
    model = model_of(
        layers=3, kind="clt", activation="relu", sparsity=0.0, read="hook_resid_mid", write="hook_mlp_out"
    )
    x = {layer: rows(5, 4, seed=layer) for layer in range(3)}
    y = {layer: rows(5, 4, seed=10 + layer) for layer in range(3)}
    found = loss(model, x, y, k=2, pressure=1.0, dead=none_dead(model))
    a = {layer: (x[layer] @ model.W_enc[str(layer)].T).relu() for layer in range(3)}
    for m in range(3):
        made = sum(a[source] @ model.W_dec[str(source)][:, m - source] for source in range(m + 1))
        assert found.fvu[m].item() == pytest.approx((made - y[m]).square().mean().item(), rel=1e-5)
