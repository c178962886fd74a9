"""What training minimises: variance left unexplained, and what keeps features few and alive.

Border: a model and one batch of scaled rows; steps, schedules and optimisers are the trainer's.

    relu       + c sum a |W_dec|              (l1; Bricken et al. 2023, weighted as by Conerly et al. 2024)
               + c sum tanh(s a |W_dec|)      (tanh; Jermyn et al. 2024, Lindsey et al. 2025)
    jumprelu   + c L0, or the tanh; straight-through gradients to thresholds (Rajamanoharan et al. 2024)
    topk       the k largest of each row (Gao et al. 2024)
    batchtopk  the k B largest of the B rows of a batch (Bussmann et al. 2024); the least of them, averaged
               over steps, is the JumpReLU threshold meanwhile

The reconstruction term is the sum over written layers of FVU, with the variance of all the data. The top ones
have AuxK besides: what dead features can make of the error (Gao et al. 2024, appendix A.2), without bias.
Prefixes: the first n features reconstruct alone, too (Matryoshka; Bussmann et al. 2025).
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


@dataclass(frozen=True, eq=False)
class Loss:
    """Of one batch. total: what is minimised. fvu: of each written layer. activations: of each layer
    [batch, feature], without gradient. penalty, auxiliary: their parts of the total.
    """

    total: Tensor
    fvu: dict[int, Tensor]
    activations: dict[int, Tensor]
    penalty: Tensor
    auxiliary: Tensor


def loss(
    model: DictionaryModel,
    inputs: Mapping[int, Tensor],
    outputs: Mapping[int, Tensor],
    *,
    k: int,
    pressure: float,
    dead: Mapping[int, Tensor],
) -> Loss:
    """Of scaled rows: layer -> [batch, width].

    k: of this step. pressure: share of the penalty in force, 0 to 1. dead: layer -> bool [feature]. Moves the
    running threshold of batchtopk.
    """
    it = model.settings
    pre = {layer: model.preactivations(layer, inputs[layer]) for layer in model.layers}
    active = {layer: _activate(model, layer, p, k) for layer, p in pre.items()}
    made = model.decode(active, inputs)
    errors = {layer: made[layer] - outputs[layer] for layer in made}
    fvu = {layer: error.square().mean() for layer, error in errors.items()}
    total = torch.stack(list(fvu.values())).sum()
    for size in it.prefixes:
        part = {layer: a * (torch.arange(it.features) < size) for layer, a in active.items()}
        shorter = model.decode(part, inputs)
        total = total + torch.stack([(shorter[m] - outputs[m]).square().mean() for m in shorter]).sum()
    penalty = auxiliary = torch.zeros(())
    if not it.is_top:
        penalty = pressure * sum(
            (_penalty(model, layer, pre[layer], active[layer], dead[layer]) for layer in model.layers),
            penalty,
        )
    elif it.auxiliary and any(bool(which.any()) for which in dead.values()):
        auxiliary = it.auxiliary * _auxiliary(model, pre, errors, dead)
    values = {layer: a.detach() for layer, a in active.items()}
    told = {layer: value.detach() for layer, value in fvu.items()}
    return Loss(total + penalty + auxiliary, told, values, penalty.detach(), auxiliary.detach())


def _activate(model: DictionaryModel, layer: int, pre: Tensor, k: int) -> Tensor:
    it = model.settings
    if it.activation == "relu":
        return pre.relu()
    if it.activation == "jumprelu":
        return jump_relu(pre, model.threshold(layer), it.bandwidth)
    if it.activation == "topk":
        kept = pre * _kept(pre, k)
        return kept.relu() if it.is_autoencoder else kept
    return _batch_top(model, layer, pre.relu(), k)


def _kept(pre: Tensor, k: int) -> Tensor:
    """Which k of each row are largest."""
    if k >= pre.shape[1]:
        return torch.ones_like(pre, dtype=torch.bool)
    chosen = pre.topk(k, dim=1).indices
    return torch.zeros_like(pre, dtype=torch.bool).scatter_(1, chosen, True)


def _batch_top(model: DictionaryModel, layer: int, a: Tensor, k: int) -> Tensor:
    """The k per row, on average, that are largest in the batch; their least moves the running threshold."""
    values = a.detach()
    count = k * len(values)
    if count < values.numel():
        # kthvalue counts from below; a selection is all that is needed, no order.
        least = values.flatten().kthvalue(values.numel() - count + 1).values
        a = a * (values >= least)
    positive = a.detach()[a.detach() > 0]
    if len(positive):
        found, before = float(positive.min()), model.running[layer]
        model.running[layer] = RUNNING * before + (1 - RUNNING) * found if before else found
    return a


def _penalty(model: DictionaryModel, layer: int, pre: Tensor, a: Tensor, dead: Tensor) -> Tensor:
    """Mean over rows of what sparsity costs at one layer."""
    it, norms = model.settings, model.norms(layer)
    if it.penalty == "step":
        each = step_function(pre, model.threshold(layer), it.bandwidth)
    elif it.penalty == "tanh":
        each = (it.tanh_scale * a * norms).tanh()
    else:
        each = a * norms
    cost = it.sparsity * each.sum(1).mean()
    if it.activation == "jumprelu" and it.dead_penalty and bool(dead.any()):
        short = (model.threshold(layer) - pre).relu() * norms * dead
        cost = cost + it.dead_penalty * short.sum(1).mean()
    return cost


def _auxiliary(
    model: DictionaryModel,
    pre: Mapping[int, Tensor],
    errors: Mapping[int, Tensor],
    dead: Mapping[int, Tensor],
) -> Tensor:
    """Squared error per entry, in units of variance, of dead features on what the others leave over.

    min(d_in / 2, dead) of them per layer and row, scaled down where fewer than d_in / 2 are dead.
    """
    half = max(1, model.d_in // 2)
    revived, counts = {}, []
    for layer, p in pre.items():
        count = int(dead[layer].sum())
        counts.append(count)
        if count:
            masked = p.masked_fill(~dead[layer], -torch.inf)
            revived[layer] = torch.where(_kept(masked, min(half, count)), p, 0.0)
    made = model.decode(revived)
    parts = [(made[m] + errors[m].detach()).square().mean() for m in made]  # error = made - wanted
    return torch.stack(parts).sum() * min(1.0, max(counts) / half)


class _JumpReLU(torch.autograd.Function):
    """p where p > threshold. To p the gradient passes where it is open; to the threshold, -(threshold /
    width) in a band of that width around it (Rajamanoharan et al. 2024, eq. 11)."""

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
    """1 where p > threshold. To the threshold the gradient is -1 / width in a band of that width around it,
    to p none (Rajamanoharan et al. 2024, eq. 12)."""

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

    pre [batch, feature], threshold [feature], width: of the band that gives gradients.
    """
    found: Tensor = _JumpReLU.apply(pre, threshold, width)  # type: ignore[no-untyped-call]
    return found


def step_function(pre: Tensor, threshold: Tensor, width: float) -> Tensor:
    """1 where p > threshold, else 0, with a straight-through gradient to the threshold; see `jump_relu`."""
    found: Tensor = _Step.apply(pre, threshold, width)  # type: ignore[no-untyped-call]
    return found
