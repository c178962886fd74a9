"""StateKnockoutSpec and StateSteeringSpec: writes of tokens to a recurrent state, to leave out or to scale.

    S_t = (decayed S_{t-1}) + c_t k_t v_t^T

c is 0 where a write is knocked out, the factor where it is steered, 1 elsewhere. Decay still happens, and in
RWKV-7 the removal of the value stored under a key. What a token reads past the state is not scaled: the bonus
of RWKV-6, which reads the state *before* the token, and that of RWKV-7.

Both specs are immutable values built by chaining; `hooks(config, length)` turns one into the interventions of
a forward pass. `state_hooks` applies both; the knockout wins at the positions it names. Knows a model by its
sizes only and never imports torch.
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
"""Hook point kinds of state writes, one per kind of recurrence."""


@dataclass(frozen=True)
class _WriteSpec(PlacedSpec):
    """State writes of selected layers and heads; each call of `position` adds a position to the others."""

    chosen_positions: tuple[int, ...] = ()
    """Positions whose writes are changed; negative from the end."""

    def position(self, position: int) -> Self:
        """Add the write of this token; negative positions count from the end."""
        return self.positions([position])

    def positions(self, positions: Iterable[int]) -> Self:
        """Add the writes of these tokens."""
        added = as_indices(positions, f"{type(self).__name__}: positions", InterventionError)
        return replace(self, chosen_positions=tuple(dict.fromkeys([*self.chosen_positions, *added])))

    def validate(self, config: Architecture, length: int) -> None:
        """Check the spec against a model and a prompt of `length` tokens.

        Arguments:
            config: architecture of the model.
            length: tokens of the prompt.

        Raises:
            InterventionError: for a model without recurrent state, for layers, heads or positions that it
                does not have, and for no position.
        """
        points = _write_points(config)
        if not points:
            raise InterventionError(
                f"{type(self).__name__}: expected a model with a recurrent state (RWKV-5 to 7, Mamba, "
                f"hybrids), found {config.model_type}; for attention use KnockoutSpec or SteeringSpec"
            )
        # The second axis of a write is that of its heads, whose name differs by recurrence (ssm_head,
        # linear_head, …).
        self.require_places(config.num_layers, config.axis_sizes[points[0].dims[1]])
        stateless = sorted(set(self.chosen_layers or ()) - {point.layer for point in points})
        if stateless:
            raise InterventionError(
                f"{type(self).__name__}: expected layers with a recurrent state, found layer {stateless[0]} "
                f"of {config.model_type}, which has none; choose among "
                f"{', '.join(str(point.layer) for point in points)}"
            )
        if not self.chosen_positions:
            raise InterventionError(
                f"{type(self).__name__}: expected at least one position whose state write is changed, found "
                "none; add one with .position(0)"
            )
        outside = [position for position in self.chosen_positions if not -length <= position < length]
        if outside:
            raise InterventionError(
                f"{type(self).__name__}: expected positions in 0..{length - 1} (or negative, from the end), "
                f"found {outside[0]}"
            )

    def positions_from_start(self, length: int) -> tuple[int, ...]:
        """The positions counted from the start of a prompt, so that generated tokens do not shift them."""
        return tuple(dict.fromkeys(position % length for position in self.chosen_positions))

    def at_writes(self, config: Architecture, change: Intervention) -> HookSpec:
        """A HookSpec with the intervention at the state write of every selected recurrent layer."""
        spec = HookSpec()
        for point in _write_points(config):
            if point.layer is not None and self.applies_to_layer(point.layer):
                spec = spec.intervene(point, change)
        return spec


def _write_points(config: Architecture) -> list[HookPoint]:
    """Hook points of a model's state writes, by layer; empty for a model without recurrence."""
    return [point for point in config.hook_points if point.kind in WRITES]


@dataclass(frozen=True)
class StateKnockoutSpec(_WriteSpec):
    """Writes of tokens to a recurrent state to leave out: at their positions the state only decays.

    >>> StateKnockoutSpec().position(0).layer_range(2, 3).chosen_layers
    (2, 3)
    """

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """Interventions that leave these writes out of a prompt of `length` tokens.

        Arguments:
            config: architecture of the model.
            length: tokens of the prompt.

        Raises:
            InterventionError: if the model or the prompt does not have the writes.
        """
        self.validate(config, length)
        return self.at_writes(
            config, Zero(positions=self.positions_from_start(length), heads=self.chosen_heads)
        )


@dataclass(frozen=True)
class StateSteeringSpec(_WriteSpec):
    """Writes of tokens to a recurrent state to scale.

    Factor 0 leaves a write out, 1 changes nothing, a negative factor flips its sign.
    """

    factor: float = 1.0
    """Factor of k v^T in the write."""

    @classmethod
    def scale(cls, factor: float) -> StateSteeringSpec:
        """A spec that multiplies writes by a finite factor."""
        return cls(factor=float(factor))

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """Interventions that scale these writes in a prompt of `length` tokens.

        Arguments:
            config: architecture of the model.
            length: tokens of the prompt.

        Raises:
            InterventionError: if the model or the prompt does not have the writes.
        """
        self.validate(config, length)
        change = Scale(self.factor, positions=self.positions_from_start(length), heads=self.chosen_heads)
        return self.at_writes(config, change)


def state_hooks(
    config: Architecture,
    length: int,
    knockout: StateKnockoutSpec,
    steering: StateSteeringSpec,
    *,
    rule: Literal["per_position", "per_layer"] = "per_position",
) -> HookSpec:
    """Interventions of a knockout and a steering spec together; the knockout wins where both apply.

    Arguments:
        config: architecture of the model.
        length: tokens of the prompt.
        knockout: writes to leave out.
        steering: writes to scale.
        rule: "per_position", as candle-mi documents it; or "per_layer", as candle-mi computes it: a layer
            with any knockout is not steered at all.

    Raises:
        InterventionError: if the model or the prompt does not have the writes.
    """
    if rule == "per_layer":
        recurrent = [point.layer for point in _write_points(config) if point.layer is not None]
        without_knockout = [layer for layer in recurrent if not knockout.applies_to_layer(layer)]
        steered = [layer for layer in without_knockout if steering.applies_to_layer(layer)]
        if not steered:
            return knockout.hooks(config, length)
        steering = steering.layers(steered)
    # The knockout comes second: interventions at one point apply in order, and zero stays zero.
    return steering.hooks(config, length).extend(knockout.hooks(config, length))
