"""Activation functions of features: pre-activations in, sparse activations out.

Border: one row is one token, the last axis the features; where pre-activations come from is layer.py's.

Idea and sources: ReLU (Bricken et al. 2023), JumpReLU (Rajamanoharan et al. 2024, eq. 3; the inequality is
strict), TopK (Gao et al. 2024), gated (Rajamanoharan et al. 2024, "Improving Dictionary Learning with Gated
Sparse Autoencoders", eq. 6, with the magnitude's weights tied to the gate's), group max (sparsify). Among
equal pre-activations the lowest index wins, on every device.

`per_row` says whether a feature's activation depends on the row's other features: where it does not,
features can be computed in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AbsTopK", "Activation", "Gated", "GroupMax", "JumpReLU", "ReLU", "TopK", "moved"]


class Activation(Protocol):
    """What turns pre-activations [..., feature] into activations of that shape."""

    @property
    def per_row(self) -> bool:
        """Whether features of a row compete, so that they cannot be computed apart."""
        ...

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]; features: which ones these are, if not all."""
        ...


@dataclass(frozen=True)
class ReLU:
    """max(p, 0)."""

    per_row = False

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        return pre.relu()


@dataclass(frozen=True, eq=False)
class JumpReLU:
    """p where p > threshold, else 0.

    threshold: [feature], or one number for all. rectified: negative values become 0 as well (SAELens); they
    can only come up with a negative threshold.
    """

    threshold: Tensor
    rectified: bool = False

    per_row = False

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        threshold = self.threshold[features] if self.threshold.ndim else self.threshold
        kept = pre * (pre > threshold.to(pre))
        return kept.relu() if self.rectified else kept


@dataclass(frozen=True)
class TopK:
    """The k largest of each row, 0 elsewhere; all of them where there are no more than k.

    rectified: negative ones among them become 0 (SAELens, sparsify); circuit-tracer keeps them.
    """

    k: int
    rectified: bool = True

    per_row = True

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        kept = pre * _largest(pre, self.k)
        return kept.relu() if self.rectified else kept


@dataclass(frozen=True)
class AbsTopK:
    """The k of largest magnitude of each row, with their signs, 0 elsewhere (SAELens)."""

    k: int

    per_row = True

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        return pre * _largest(pre.abs(), self.k)


@dataclass(frozen=True)
class GroupMax:
    """Features in k equal groups of neighbours; the largest of each group, rectified, 0 elsewhere."""

    k: int

    per_row = True

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        groups = pre.unflatten(-1, (self.k, -1))
        kept: Tensor = (groups * _largest(groups, 1)).flatten(-2)
        return kept.relu()


@dataclass(frozen=True, eq=False)
class Gated:
    """(z + b_gate > 0) * relu(z * exp(r_mag) + b_mag) of z = x W_enc'; all three [feature]."""

    b_gate: Tensor
    b_mag: Tensor
    r_mag: Tensor

    per_row = False

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        b_gate, b_mag, r_mag = (part[features].to(pre) for part in (self.b_gate, self.b_mag, self.r_mag))
        return (pre + b_gate > 0) * (pre * r_mag.exp() + b_mag).relu()


def moved(activation: Activation, device: torch.device | str) -> Activation:
    """The same function with its thresholds and gates on a device."""
    from torch import Tensor

    fields = {name: value.to(device) for name, value in vars(activation).items() if isinstance(value, Tensor)}
    found: Activation = replace(activation, **fields) if fields else activation  # type: ignore[type-var]
    return found


def _largest(values: Tensor, k: int) -> Tensor:
    """Which k of the last axis are largest, bool; equal ones from the lowest index on (topk does not say)."""
    import torch

    if k >= values.shape[-1]:
        return torch.ones_like(values, dtype=torch.bool)
    if k <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    least = values.topk(k, dim=-1).values[..., -1:]
    above = values > least
    level = values == least
    room = k - above.sum(-1, keepdim=True)
    if bool((level.sum(-1, keepdim=True) <= room).all()):  # no ties to break, as a rule
        return above | level
    return above | (level & (level.cumsum(-1) <= room))
