"""What tokens write to a recurrent state, chosen by layers, heads and positions: knocked out or steered.

    S_t = (what is left of S_{t-1}) + c_t k_t v_t^T

c is 0 where a write is knocked out, the scale where it is steered, 1 elsewhere; decay, and in RWKV-7 the
removal of what stood under a key, happen all the same. What the token itself reads beside the state (the
bonus of RWKV-6, which reads the state *before* it, and that of RWKV-7) is not scaled.

A `StateKnockoutSpec` or `StateSteeringSpec` is an immutable value, built by chaining; `hooks(config, length)`
turns it into the interventions of a forward pass. Where both are asked for, the knockout wins at the
positions it names, and `state_hooks` knows another reading.

Border: names and numbers; knows a model by its sizes only, and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from ....store.arrays import as_indices
from ....store.errors import InterventionError
from ..architectures.points import STATE_ROOMS, HookPoint
from .interventions import Intervention, Scale, Zero
from .places import PlacedSpec
from .spec import HookSpec

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

__all__ = ["StateKnockoutSpec", "StateSteeringSpec", "state_hooks"]

WRITES = tuple(f"{room}_write" for room in STATE_ROOMS)
"""Points of writes; a model has one of them."""


@dataclass(frozen=True)
class _WriteSpec(PlacedSpec):
    """Which writes: layers, heads (None for all of them) and positions, which add up."""

    chosen_positions: tuple[int, ...] = ()

    def position(self, position: int) -> Self:
        """Also the write of this token; negative positions count from the end."""
        return self.positions([position])

    def positions(self, positions: Iterable[int]) -> Self:
        """Also the writes of these tokens."""
        added = as_indices(positions, f"{type(self).__name__}: positions", InterventionError)
        return replace(self, chosen_positions=tuple(dict.fromkeys([*self.chosen_positions, *added])))

    def validate(self, config: Architecture, length: int) -> None:
        """Raise InterventionError unless a model has all that is chosen, for a prompt of `length` tokens."""
        points = _writes(config)
        if not points:
            raise InterventionError(
                "expected a model whose tokens write to a state (RWKV-5 to 7, Mamba, hybrids), found "
                f"{config.model_type}; cut attention edges where a model attends (KnockoutSpec)"
            )
        self.require_places(config.num_layers, config.axis_sizes[points[0].dims[1]])
        without = sorted(set(self.chosen_layers or ()) - {point.layer for point in points})
        if without:
            raise InterventionError(
                f"expected layers with a recurrent state, found layer {without[0]} of {config.model_type}, "
                f"which has none; those that have one are {', '.join(str(point.layer) for point in points)}"
            )
        if not self.chosen_positions:
            raise InterventionError(
                "expected at least one position whose write is changed, found none; add one with .position(0)"
            )
        outside = [place for place in self.chosen_positions if not -length <= place < length]
        if outside:
            raise InterventionError(
                f"expected positions in 0..{length - 1} (or negative, from the end), found {outside[0]}"
            )

    def counted(self, length: int) -> tuple[int, ...]:
        """The positions counted from the start of a prompt, whatever follows it in a run."""
        return tuple(dict.fromkeys(place % length for place in self.chosen_positions))

    def at_writes(self, config: Architecture, change: Intervention) -> HookSpec:
        """An intervention at the write of every layer chosen that has one."""
        spec = HookSpec()
        for point in _writes(config):
            if point.layer is not None and self.applies_to_layer(point.layer):
                spec = spec.intervene(point, change)
        return spec


def _writes(config: Architecture) -> list[HookPoint]:
    """The points of a model's writes, by layer; none where everything attends."""
    return [point for point in config.hook_points if point.kind in WRITES]


@dataclass(frozen=True)
class StateKnockoutSpec(_WriteSpec):
    """Writes to leave out.

    >>> StateKnockoutSpec().position(0).layer_range(2, 3).chosen_layers
    (2, 3)
    """

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """The interventions that leave these writes out, for a prompt of `length` tokens.

        Raises InterventionError if the model or the prompt does not have them.
        """
        self.validate(config, length)
        return self.at_writes(config, Zero(positions=self.counted(length), heads=self.chosen_heads))


@dataclass(frozen=True)
class StateSteeringSpec(_WriteSpec):
    """Writes to scale: 0 knocks them out, 1 changes nothing, negative ones turn them round."""

    factor: float = 1.0

    @classmethod
    def scale(cls, factor: float) -> StateSteeringSpec:
        """Multiply writes by a finite factor."""
        return cls(factor=float(factor))

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """The interventions that scale these writes, for a prompt of `length` tokens.

        Raises InterventionError if the model or the prompt does not have them.
        """
        self.validate(config, length)
        change = Scale(self.factor, positions=self.counted(length), heads=self.chosen_heads)
        return self.at_writes(config, change)


def state_hooks(
    config: Architecture,
    length: int,
    knockout: StateKnockoutSpec,
    steering: StateSteeringSpec,
    *,
    rule: Literal["per_position", "per_layer"] = "per_position",
) -> HookSpec:
    """Both at once: the knockout wins where both apply.

    rule: "per_position" as candle-mi documents it; "per_layer" as it computes: in a layer in which anything
    is knocked out nothing is steered.
    """
    if rule == "per_layer":
        held = [point.layer for point in _writes(config) if point.layer is not None]
        left = [layer for layer in held if not knockout.applies_to_layer(layer)]
        own = [layer for layer in left if steering.applies_to_layer(layer)]
        if not own:
            return knockout.hooks(config, length)
        steering = steering.layers(own)
    return steering.hooks(config, length).extend(knockout.hooks(config, length))
