"""Which layers and heads something is done in: what specs of edges and of states choose alike.

Border: numbers; knows a model by its sizes only, and never imports torch.
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
    """Layers and heads, None for all of them.

    Each method gives a changed copy; choosing again replaces the choice.
    """

    chosen_layers: tuple[int, ...] | None = None
    chosen_heads: tuple[int, ...] | None = None

    def layer(self, layer: int) -> Self:
        """In this layer alone, counted from 0."""
        return self.layers([layer])

    def layers(self, layers: Iterable[int]) -> Self:
        """In these layers alone, whatever their order. Raises InterventionError for none, or one below 0."""
        return replace(self, chosen_layers=_sorted("layer", layers))

    def layer_range(self, first: int, last: int) -> Self:
        """In layers first … last, both included."""
        first, last = (as_index(layer, "layers", InterventionError) for layer in (first, last))
        if first > last:
            raise InterventionError(f"expected layers first <= last, found {first}..{last}; swap them")
        return self.layers(range(first, last + 1))

    def head(self, head: int) -> Self:
        """In this head alone, counted from 0."""
        return self.heads([head])

    def heads(self, heads: Iterable[int]) -> Self:
        """In these heads alone, whatever their order. Raises InterventionError for none, or one below 0."""
        return replace(self, chosen_heads=_sorted("head", heads))

    def applies_to_layer(self, layer: int) -> bool:
        """Whether a layer is chosen."""
        return self.chosen_layers is None or layer in self.chosen_layers

    def applies_to_head(self, head: int) -> bool:
        """Whether a head is chosen."""
        return self.chosen_heads is None or head in self.chosen_heads

    def require_places(self, n_layers: int, n_heads: int) -> None:
        """Raise InterventionError unless a model with these sizes has all that is chosen."""
        for what, chosen, size in (
            ("layers", self.chosen_layers, n_layers),
            ("heads", self.chosen_heads, n_heads),
        ):
            outside = [index for index in chosen or () if index >= size]
            if outside:
                raise InterventionError(f"expected {what} in 0..{size - 1}, found {outside[0]}")

    def at_layers(self, config: Architecture, kind: str, change: Intervention) -> HookSpec:
        """An intervention at a point of every layer chosen."""
        spec = HookSpec()
        layers = range(config.num_layers) if self.chosen_layers is None else self.chosen_layers
        for layer in layers:
            spec = spec.intervene(HookPoint(kind, layer), change)
        return spec


def _sorted(what: str, chosen: Iterable[int]) -> tuple[int, ...]:
    kept = tuple(sorted(set(as_indices(chosen, f"{what}s", InterventionError))))
    if not kept:
        raise InterventionError(f"expected at least one {what}, found none; leave it out to mean all")
    if kept[0] < 0:
        raise InterventionError(f"expected a {what} counted from 0, found {kept[0]}")
    return kept
