"""Scaling of a dictionary's input, and its inverse for the output.

Border: rows [..., hidden]; the conventions are those of SAELens (`normalize_activations`). Each scaling
returns the scaled rows and a function that maps a reconstruction of them back. One factor for all inputs is
not a scaling but LayerFeatures.gain, which can be folded into rows of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AsIs", "ConstantNorm", "InputOnly", "LayerNorm", "Scaling"]

_EPS = 1e-5
"""Epsilon that is added to the standard deviation by the scaling "layer_norm", as in SAELens."""


class Scaling(Protocol):
    """Function that normalises each input vector of a dictionary, and gives the inverse for its output."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and a function that scales a reconstruction back to the size of x."""
        ...


@dataclass(frozen=True)
class AsIs:
    """No scaling."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """x unchanged, and a function that changes nothing."""
        return x, lambda y: y


@dataclass(frozen=True)
class ConstantNorm:
    """Scales every input vector to norm sqrt(hidden) (SAELens: "constant_norm_rescale")."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and the inverse."""
        factor = x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True)
        return x * factor, lambda y: y / factor


@dataclass(frozen=True)
class LayerNorm:
    """Subtracts each vector's mean and divides by its unbiased standard deviation + 1e-5 ("layer_norm").

    The inverse multiplies by the standard deviation without the 1e-5, as in SAELens.
    """

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and the inverse."""
        mean = x.mean(dim=-1, keepdim=True)
        # torch's std divides by n - 1, as SAELens computes it.
        spread = (x - mean).std(dim=-1, keepdim=True)
        return (x - mean) / (spread + _EPS), lambda y: y * spread + mean


@dataclass(frozen=True)
class InputOnly:
    """Scales the input only: a transcoder's output is another hook point, with another scale."""

    scaling: Scaling
    """Scaling of the input."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scaled x [..., hidden], and a function that changes nothing."""
        return self.scaling(x)[0], lambda y: y
