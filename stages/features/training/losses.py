"""The training loss: variance left unexplained, a sparsity penalty, and an auxiliary loss for dead features.

Border: a model and one batch of scaled rows; steps, schedules and optimisers are in trainer.py.

    relu       + c sum a |W_dec|              (l1; Bricken et al. 2023, weighted as by Conerly et al. 2024)
               + c sum tanh(s a |W_dec|)      (tanh; Jermyn et al. 2024, Lindsey et al. 2025)
    jumprelu   + c L0, or the tanh; straight-through gradients to thresholds (Rajamanoharan et al. 2024)
    topk       the k largest of each row (Gao et al. 2024)
    batchtopk  the k B largest of the B rows of a batch (Bussmann et al. 2024); the smallest of them, averaged
               over steps, is the running JumpReLU threshold

The reconstruction term is the sum over written layers of FVU, with the variance of all the data. topk and
batchtopk add AuxK: the reconstruction of the error by dead features (Gao et al. 2024, appendix A.2), without
bias. Prefixes: the first n features must also reconstruct alone (Matryoshka; Bussmann et al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .models import DictionaryModel

__all__ = ["Loss", "jump_relu", "loss", "step_function"]

RUNNING = 0.99
"""Factor per step of the exponential moving average that is the threshold of batchtopk."""


@dataclass(frozen=True, eq=False)
class Loss:
    """Training loss of one batch, with its terms."""

    total: Tensor
    """The loss that is minimised, a scalar with gradient."""
    fvu: dict[int, Tensor]
    """Fraction of variance unexplained of each written layer, scalars."""
    activations: dict[int, Tensor]
    """Activations [batch, feature] of each layer, without gradient."""
    penalty: Tensor
    """Sparsity penalty, a term of the total."""
    auxiliary: Tensor
    """AuxK loss that revives dead features, a term of the total."""


def loss(
    model: DictionaryModel,
    inputs: Mapping[int, Tensor],
    outputs: Mapping[int, Tensor],
    *,
    k: int,
    pressure: float,
    dead: Mapping[int, Tensor],
) -> Loss:
    """Training loss of a batch; also updates the running thresholds of batchtopk in `model`.

    Arguments:
        model: The dictionary in training.
        inputs: Scaled activations [batch, width] by layer that is read.
        outputs: Scaled activations [batch, width] by layer that is written.
        k: Number of active features per row in this step (topk, batchtopk).
        pressure: Factor of the sparsity penalty in this step, 0 to 1.
        dead: Mask of dead features by layer, bool [feature].
    """
    settings = model.settings
    pre = {layer: model.preactivations(layer, inputs[layer]) for layer in model.layers}
    active = {layer: _activate(model, layer, p, k) for layer, p in pre.items()}
    rebuilt = model.decode(active, inputs)
    errors = {layer: rebuilt[layer] - outputs[layer] for layer in rebuilt}
    # Outputs are scaled to variance 1 per entry, so the mean squared error is the FVU.
    fvu = {layer: error.square().mean() for layer, error in errors.items()}
    total = torch.stack(list(fvu.values())).sum()
    # Matryoshka: each prefix of the features must reconstruct alone, with the same biases.
    for size in settings.prefixes:
        is_in_prefix = torch.arange(settings.features) < size
        rebuilt_by_prefix = model.decode({layer: a * is_in_prefix for layer, a in active.items()}, inputs)
        prefix_errors = [(y - outputs[layer]).square().mean() for layer, y in rebuilt_by_prefix.items()]
        total = total + torch.stack(prefix_errors).sum()
    penalty = auxiliary = torch.zeros(())
    if not settings.is_top:
        penalty = pressure * sum(
            (_penalty(model, layer, pre[layer], active[layer], dead[layer]) for layer in model.layers),
            penalty,
        )
    elif settings.auxiliary and any(bool(is_dead.any()) for is_dead in dead.values()):
        auxiliary = settings.auxiliary * _auxiliary(model, pre, errors, dead)
    values = {layer: a.detach() for layer, a in active.items()}
    fvu_values = {layer: value.detach() for layer, value in fvu.items()}
    return Loss(total + penalty + auxiliary, fvu_values, values, penalty.detach(), auxiliary.detach())


def _activate(model: DictionaryModel, layer: int, pre: Tensor, k: int) -> Tensor:
    """Activations [batch, feature] of one layer in training, from its pre-activations."""
    settings = model.settings
    if settings.activation == "relu":
        return pre.relu()
    if settings.activation == "jumprelu":
        return jump_relu(pre, model.threshold(layer), settings.bandwidth)
    if settings.activation == "topk":
        # As in exported files: SAELens rectifies the k largest values, circuit-tracer does not.
        largest = pre * _is_largest(pre, k)
        return largest.relu() if settings.is_autoencoder else largest
    return _batch_top(model, layer, pre.relu(), k)


def _is_largest(pre: Tensor, k: int) -> Tensor:
    """Boolean mask [batch, feature] of the k largest values of each row."""
    if k >= pre.shape[1]:
        return torch.ones_like(pre, dtype=torch.bool)
    indices = pre.topk(k, dim=1).indices
    return torch.zeros_like(pre, dtype=torch.bool).scatter_(1, indices, True)


def _batch_top(model: DictionaryModel, layer: int, a: Tensor, k: int) -> Tensor:
    """Keep the k * batch largest activations of the batch, and update the layer's running threshold."""
    values = a.detach()
    n_kept = k * len(values)
    # Otherwise there are no more than k per row, and all are kept.
    if n_kept < values.numel():
        # kthvalue counts from below; it selects without sorting.
        cutoff = values.flatten().kthvalue(values.numel() - n_kept + 1).values
        a = a * (values >= cutoff)
    positive = a.detach()[a.detach() > 0]
    # A batch without active features says nothing about the threshold.
    if len(positive):
        smallest, running = float(positive.min()), model.running[layer]
        model.running[layer] = RUNNING * running + (1 - RUNNING) * smallest if running else smallest
    return a


def _penalty(model: DictionaryModel, layer: int, pre: Tensor, a: Tensor, dead: Tensor) -> Tensor:
    """Sparsity penalty of one layer, averaged over the rows of the batch, a scalar."""
    settings, norms = model.settings, model.norms(layer)
    if settings.penalty == "step":
        costs = step_function(pre, model.threshold(layer), settings.bandwidth)
    elif settings.penalty == "tanh":
        costs = (settings.tanh_scale * a * norms).tanh()
    else:
        costs = a * norms
    cost = settings.sparsity * costs.sum(1).mean()
    if settings.activation == "jumprelu" and settings.dead_penalty and bool(dead.any()):
        # Pulls pre-activations of dead features up to the threshold, in proportion to the distance.
        distance = (model.threshold(layer) - pre).relu() * norms * dead
        cost = cost + settings.dead_penalty * distance.sum(1).mean()
    return cost


def _auxiliary(
    model: DictionaryModel,
    pre: Mapping[int, Tensor],
    errors: Mapping[int, Tensor],
    dead: Mapping[int, Tensor],
) -> Tensor:
    """AuxK loss: how badly dead features alone reconstruct the error that the live features leave.

    Squared error per entry, summed over written layers (1: the variance of the data). At most d_in / 2 dead
    features are active per row and layer; with fewer dead ones the loss is scaled down.
    """
    most_active = max(1, model.d_in // 2)
    revived, n_dead = {}, []
    for layer, p in pre.items():
        n_dead.append(int(dead[layer].sum()))
        if n_dead[-1]:
            dead_only = p.masked_fill(~dead[layer], -torch.inf)
            revived[layer] = torch.where(_is_largest(dead_only, min(most_active, n_dead[-1])), p, 0.0)
    rebuilt = model.decode(revived)
    # Plus, because errors are reconstruction - target: dead features should write their negative.
    parts = [(rebuilt[layer] + errors[layer].detach()).square().mean() for layer in rebuilt]
    # Fewer dead features than d_in / 2 cannot explain the whole error, so the loss is scaled down.
    return torch.stack(parts).sum() * min(1.0, max(n_dead) / most_active)


class _JumpReLU(torch.autograd.Function):
    """JumpReLU (p where p > threshold, else 0) with a straight-through gradient to the threshold.

    The gradient to p is 1 where p > threshold; the gradient to the threshold is -(threshold / width) in a
    band
    of that width around it (Rajamanoharan et al. 2024, eq. 11).
    """

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, width: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.width = width
        return pre * (pre > threshold)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        pre, threshold = ctx.saved_tensors
        near = ((pre - threshold) / ctx.width).abs() < 0.5
        slope = -(threshold / ctx.width) * (near * grads[0]).sum(0)
        return grads[0] * (pre > threshold), slope, None


class _Step(torch.autograd.Function):
    """Step function (1 where p > threshold, else 0) with a straight-through gradient to the threshold.

    The gradient to the threshold is -1 / width in a band of that width around it; there is no gradient to p
    (Rajamanoharan et al. 2024, eq. 12).
    """

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, width: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.width = width
        return (pre > threshold).to(pre)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor, None]:
        pre, threshold = ctx.saved_tensors
        near = ((pre - threshold) / ctx.width).abs() < 0.5
        return None, -(near * grads[0]).sum(0) / ctx.width, None


def jump_relu(pre: Tensor, threshold: Tensor, width: float) -> Tensor:
    """p where p > threshold, else 0, with a straight-through gradient to the threshold.

    Arguments:
        pre: Pre-activations [batch, feature].
        threshold: Threshold [feature].
        width: Width of the band around the threshold in which it gets gradients.
    """
    activations: Tensor = _JumpReLU.apply(pre, threshold, width)  # type: ignore[no-untyped-call]
    return activations


def step_function(pre: Tensor, threshold: Tensor, width: float) -> Tensor:
    """1 where p > threshold, else 0, with a straight-through gradient to the threshold.

    Arguments:
        pre: Pre-activations [batch, feature].
        threshold: Threshold [feature].
        width: Width of the band around the threshold in which it gets gradients.
    """
    steps: Tensor = _Step.apply(pre, threshold, width)  # type: ignore[no-untyped-call]
    return steps
