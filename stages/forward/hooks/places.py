"""PlacedSpec: the layers and heads in which attention edges or state writes are changed.

Base of `KnockoutSpec`, `SteeringSpec` (edges.py) and of their counterparts for recurrent states (writes.py).
Knows a model by its sizes only and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from ....store.arrays import as_index, as_indices
from ....store.errors import InterventionError
from ..architectures.points import HookPoint
from .interventions import Intervention
from .spec import HookSpec

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

__all__ = ["PlacedSpec"]


@dataclass(frozen=True)
class PlacedSpec:
    """Layers and heads of an intervention.

    Each method returns a changed copy; selecting layers or heads again replaces the earlier selection.
    """

    chosen_layers: tuple[int, ...] | None = None
    """Layers in ascending order; None for all."""
    chosen_heads: tuple[int, ...] | None = None
    """Heads in ascending order; None for all."""

    def layer(self, layer: int) -> Self:
        """Restrict to one layer, counted from 0."""
        return self.layers([layer])

    def layers(self, layers: Iterable[int]) -> Self:
        """Restrict to several layers, in any order.

        Raises:
            InterventionError: for no layer, or a negative one.
        """
        return replace(self, chosen_layers=_sorted("layer", layers))

    def layer_range(self, first: int, last: int) -> Self:
        """Restrict to layers first … last, both included.

        Arguments:
            first: first layer.
            last: last layer, included.

        Raises:
            InterventionError: for first > last.
        """
        first, last = (as_index(layer, "layers", InterventionError) for layer in (first, last))
        if first > last:
            raise InterventionError(
                f"layer_range: expected first <= last, found layers {first} to {last}; swap them"
            )
        return self.layers(range(first, last + 1))

    def head(self, head: int) -> Self:
        """Restrict to one attention head, counted from 0."""
        return self.heads([head])

    def heads(self, heads: Iterable[int]) -> Self:
        """Restrict to several attention heads, in any order.

        Raises:
            InterventionError: for no head, or a negative one.
        """
        return replace(self, chosen_heads=_sorted("head", heads))

    def applies_to_layer(self, layer: int) -> bool:
        """Whether a layer is selected."""
        return self.chosen_layers is None or layer in self.chosen_layers

    def applies_to_head(self, head: int) -> bool:
        """Whether a head is selected."""
        return self.chosen_heads is None or head in self.chosen_heads

    def require_places(self, n_layers: int, n_heads: int) -> None:
        """Raise InterventionError unless a model with these sizes has all selected layers and heads.

        Arguments:
            n_layers: layers of the model.
            n_heads: heads of the model.
        """
        for axis, indices, size in (
            ("layers", self.chosen_layers, n_layers),
            ("heads", self.chosen_heads, n_heads),
        ):
            outside = [index for index in indices or () if index >= size]
            if outside:
                raise InterventionError(
                    f"{type(self).__name__}: expected {axis} in 0..{size - 1}, found {outside[0]}"
                )

    def at_layers(self, config: Architecture, kind: str, change: Intervention) -> HookSpec:
        """A HookSpec with the intervention at hook points of this kind in every selected layer.

        Arguments:
            config: architecture of the model.
            kind: hook point kind, e.g. "pattern".
            change: the intervention.
        """
        spec = HookSpec()
        layers = range(config.num_layers) if self.chosen_layers is None else self.chosen_layers
        for layer in layers:
            spec = spec.intervene(HookPoint(kind, layer), change)
        return spec


def _sorted(axis: str, indices: Iterable[int]) -> tuple[int, ...]:
    # Sorted and distinct: specs with the same layers in another order must have the same key.
    distinct = tuple(sorted(set(as_indices(indices, f"{axis}s", InterventionError))))
    if not distinct:
        raise InterventionError(
            f"expected at least one {axis} to intervene in, found none; leave out .{axis}s(…) to mean all"
        )
    if distinct[0] < 0:
        raise InterventionError(f"expected a {axis} counted from 0, found {distinct[0]}")
    return distinct
