"""How a dictionary's input is scaled before features see it, and how that is undone.

Border: rows [..., hidden]; the conventions are SAELens's (`normalize_activations`). Each scaling gives the
scaled rows and a function that brings a reconstruction of them back. One factor for all inputs is no scaling
but LayerFeatures.gain, which rows of features can carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AsIs", "ConstantNorm", "InputOnly", "LayerNorm", "Scaling"]

_EPS = 1e-5


class Scaling(Protocol):
    """Input rows to scaled rows, and the way back."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and what turns a reconstruction of that into one of x."""
        ...


@dataclass(frozen=True)
class AsIs:
    """Inputs and outputs as the model has them."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and the way back."""
        return x, lambda y: y


@dataclass(frozen=True)
class ConstantNorm:
    """Every row to norm sqrt(hidden) ("constant_norm_rescale")."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and the way back."""
        factor = x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True)
        return x * factor, lambda y: y / factor


@dataclass(frozen=True)
class LayerNorm:
    """Every row centred and divided by its unbiased standard deviation + 1e-5 ("layer_norm").

    The way back multiplies by the standard deviation alone, as SAELens does.
    """

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and the way back."""
        mean = x.mean(dim=-1, keepdim=True)
        spread = (x - mean).std(dim=-1, keepdim=True)
        return (x - mean) / (spread + _EPS), lambda y: y * spread + mean


@dataclass(frozen=True)
class InputOnly:
    """A scaling that is not undone: what a transcoder writes is in another place, of another scale."""

    scaling: Scaling

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and no way back."""
        return self.scaling(x)[0], lambda y: y
