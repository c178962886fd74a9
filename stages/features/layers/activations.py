"""Activation functions of features: pre-activations in, sparse activations out.

Border: one row is one token, the last axis the features; layer.py computes pre-activations.

Sources: ReLU (Bricken et al. 2023), JumpReLU (Rajamanoharan et al. 2024, eq. 3; the inequality is strict),
TopK (Gao et al. 2024), gated (Rajamanoharan et al. 2024, "Improving Dictionary Learning with Gated Sparse
Autoencoders", eq. 6, with the magnitude's weights tied to the gate's), group max (sparsify). Among equal
pre-activations the lowest index wins, on every device.

`per_row` states whether a feature's activation depends on the other features of the row; if not, features can
be computed in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AbsTopK", "Activation", "Gated", "GroupMax", "JumpReLU", "ReLU", "TopK", "to_device"]


class Activation(Protocol):
    """Function from pre-activations to sparse activations, applied to all features or a range of them."""

    @property
    def per_row(self) -> bool:
        """Whether an activation depends on the other features of its row, as in TopK."""
        ...

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations.

        Arguments:
            pre: Pre-activations [..., feature].
            features: Range of the dictionary's features to which `pre` belongs.
        """
        ...


@dataclass(frozen=True)
class ReLU:
    """max(p, 0) of each pre-activation p."""

    per_row = False

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        return pre.relu()


@dataclass(frozen=True, eq=False)
class JumpReLU:
    """Each pre-activation p where p > threshold, else 0."""

    threshold: Tensor
    """Threshold [feature], or one number for all features."""
    rectified: bool = False
    """Whether negative activations become 0, as in SAELens; only negative thresholds give any."""

    per_row = False

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        threshold = self.threshold[features] if self.threshold.ndim else self.threshold
        passed = pre * (pre > threshold.to(pre))
        return passed.relu() if self.rectified else passed


@dataclass(frozen=True)
class TopK:
    """The k largest pre-activations of each row, 0 elsewhere."""

    k: int
    """Number of values kept per row."""
    rectified: bool = True
    """Whether negative values among the k become 0 (SAELens, sparsify); circuit-tracer keeps them."""

    per_row = True

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        largest = pre * _largest(pre, self.k)
        return largest.relu() if self.rectified else largest


@dataclass(frozen=True)
class AbsTopK:
    """The k pre-activations of largest magnitude in each row, with their signs, 0 elsewhere (SAELens)."""

    k: int
    """Number of values kept per row."""

    per_row = True

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        return pre * _largest(pre.abs(), self.k)


@dataclass(frozen=True)
class GroupMax:
    """ReLU of the largest pre-activation in each of k equal groups of consecutive features, 0 elsewhere."""

    k: int
    """Number of groups."""

    per_row = True

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        groups = pre.unflatten(-1, (self.k, -1))
        largest: Tensor = (groups * _largest(groups, 1)).flatten(-2)
        return largest.relu()


@dataclass(frozen=True, eq=False)
class Gated:
    """Gated: (z + b_gate > 0) * relu(z * exp(r_mag) + b_mag), where z is the pre-activation x W_enc'.

    The three parameters have shape [feature].
    """

    b_gate: Tensor
    """Bias of the gate, which decides whether a feature is active."""
    b_mag: Tensor
    """Bias of the magnitude, which is the value of an active feature."""
    r_mag: Tensor
    """Logarithm of the factor between the encoder rows of the magnitude and those of the gate."""

    per_row = False

    def __call__(self, pre: Tensor, features: slice = slice(None)) -> Tensor:
        """Activations of pre-activations [..., feature]."""
        b_gate, b_mag, r_mag = (part[features].to(pre) for part in (self.b_gate, self.b_mag, self.r_mag))
        return (pre + b_gate > 0) * (pre * r_mag.exp() + b_mag).relu()


def to_device(activation: Activation, device: torch.device | str) -> Activation:
    """The activation function with its thresholds and gates on a device.

    Arguments:
        activation: An activation function.
        device: The device.
    """
    from torch import Tensor

    fields = {name: value.to(device) for name, value in vars(activation).items() if isinstance(value, Tensor)}
    copy: Activation = replace(activation, **fields) if fields else activation  # type: ignore[type-var]
    return copy


def _largest(values: Tensor, k: int) -> Tensor:
    """Boolean mask of the k largest values along the last axis; low indices win ties.

    `torch.topk` leaves open which of several equal values it returns.
    """
    import torch

    if k >= values.shape[-1]:
        return torch.ones_like(values, dtype=torch.bool)
    if k <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    # Only the k-th largest value is taken from topk, which does not depend on the order of ties.
    kth_largest = values.topk(k, dim=-1).values[..., -1:]
    is_larger = values > kth_largest
    is_tied = values == kth_largest
    n_ties_wanted = k - is_larger.sum(-1, keepdim=True)
    # Usually there are no ties, and the cumulative sum over all features is saved.
    if bool((is_tied.sum(-1, keepdim=True) <= n_ties_wanted).all()):
        return is_larger | is_tied
    return is_larger | (is_tied & (is_tied.cumsum(-1) <= n_ties_wanted))
