"""RecurrentPass: a block of layers gone through several times in one pass, fed with directions or not.

    x = embed; x = layers[0 .. loop_start)
    x0 = x
    x = block(x)                                    pass 1
    depth - 1 times:
        fed:      x = block(x0 + strength * vector at each position)
        not fed:  x = block(x)
    x = layers(loop_end .. L); final norm, LM head

This is the recurrent feedback of candle-mi's "anacrousis". Two things follow from the loop and are what is
computed here, rather than the loop:

* Fed, every pass from the second on begins with the same state and so gives the same: what came before is
  thrown away. A depth of 2 is a depth of any more, `loop_end` decides nothing, and all of it is one plain
  pass with strength * vector added to `hook_resid_pre` of `loop_start`: interventions, which every driver
  knows.
* Not fed, it is the layers in another order, which the one loop over layers is given.

A depth of 1 feeds nothing: it is a plain pass.

Border: layers, positions and vectors; knows an architecture's sizes. Never imports torch before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ....store.arrays import as_index, require_kind
from ....store.digest import canonical_json
from ....store.errors import ConfigError, InterventionError
from ..architectures.points import HookPoint
from .interventions import Add, Intervention, check_indices
from .payloads import Owned, Payload, checked_payload, finite, own_array, owned, plain_value
from .spec import BoundSpec

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

__all__ = ["RecurrentPass"]

Feedback = tuple[int, Payload, float]


@dataclass(frozen=True, eq=False)
class RecurrentPass:
    """Layers `loop_start` to `loop_end`, both included, gone through `depth` times.

    feedback: (position, vector [hidden], strength) triples; before every pass but the first the state is set
    back to what entered the block, with strength * vector added at each position, several at one adding up.
    Positions are those of the prompt, negative ones counted from its end. Without any, a pass goes on from
    what the one before gave. sustained: in generation, what is fed is fed at the newest position as well, at
    every step; at the first step that is the last position of the prompt, which is then fed twice if it was
    already. In a pass over a prompt alone nothing is newest, and it changes nothing.

    Raises ConfigError for a depth below 1, layers in no order, or nothing to sustain; InterventionError for a
    vector or strength that is no number.
    """

    loop_start: int
    loop_end: int
    depth: int = 2
    feedback: Sequence[Feedback] = Owned(())  # type: ignore[assignment]  # a descriptor
    sustained: bool = False

    def __post_init__(self) -> None:
        for name in ("loop_start", "loop_end", "depth"):
            object.__setattr__(self, name, as_index(getattr(self, name), f"{_NAME}: {name}"))
        if self.depth < 1:
            raise ConfigError(f"RecurrentPass: expected a depth of at least 1, found {self.depth}")
        if not 0 <= self.loop_start <= self.loop_end:
            raise ConfigError(
                "RecurrentPass: expected 0 <= loop_start <= loop_end, found layers "
                f"{self.loop_start} to {self.loop_end}"
            )
        fed = tuple(
            (
                as_index(place, f"{_NAME}: positions of feedback", InterventionError),
                _vector(vector),
                finite(_NAME, s),
            )
            for place, vector, s in owned(self, "feedback")
        )
        if self.sustained and not fed:
            raise ConfigError(
                "RecurrentPass: expected feedback to sustain, found none; give (position, vector, strength), "
                "or leave sustained out"
            )
        object.__setattr__(self, "feedback", fed)

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values that identify it; vectors by dtype, shape and digest of their bytes."""
        return {name: plain_value(value) for name, value in vars(self).items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecurrentPass) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(canonical_json(self.canonical()))

    @property
    def is_fed(self) -> bool:
        """Whether anything is added anywhere."""
        return bool(owned(self, "feedback")) and self.depth > 1

    def order(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers as they are gone through, where that is not each of them once; else None."""
        if owned(self, "feedback") or self.depth == 1:
            return None
        block = range(self.loop_start, self.loop_end + 1)
        return (*range(self.loop_start), *self.depth * tuple(block), *range(self.loop_end + 1, num_layers))

    def check(self, config: Architecture, length: int) -> None:
        """Raise ConfigError or InterventionError unless it fits a model and a prompt of `length` tokens."""
        if self.loop_end >= config.num_layers:
            raise ConfigError(
                f"RecurrentPass: expected layers in 0..{config.num_layers - 1}, found "
                f"{self.loop_start} to {self.loop_end}"
            )
        check_indices(
            _NAME, "positions of feedback", [position for position, _, _ in owned(self, "feedback")], length
        )
        hidden = config.axis_sizes["hidden"]
        for position, vector, _ in owned(self, "feedback"):
            if tuple(vector.shape) != (hidden,):
                raise InterventionError(
                    f"RecurrentPass: expected a vector of length {hidden} for position {position}, found "
                    f"shape {list(vector.shape)}"
                )

    def applied(
        self, spec: BoundSpec, config: Architecture, length: int, *, grows: bool = False
    ) -> BoundSpec:
        """A spec with the recurrence in it, for prompts of `length` tokens; what is fed comes before the
        spec's own changes. grows: whether tokens are generated behind them. Raises as `check` does."""
        self.check(config, length)
        fed = tuple(self._fed(length, grows))
        return replace(spec, interventions=(*fed, *spec.interventions), order=self.order(config.num_layers))

    def _fed(self, length: int, grows: bool) -> Iterator[tuple[HookPoint, Intervention]]:
        """What is added at the block's first hook point."""
        if not self.is_fed:
            return
        point = HookPoint.resid_pre(self.loop_start)
        newest = [(-1, vector, strength) for _, vector, strength in owned(self, "feedback")]
        own = [
            (position % length, vector, strength) for position, vector, strength in owned(self, "feedback")
        ]
        for position, vector, strength in [*own, *(newest if self.sustained and grows else [])]:
            yield point, Add(_scaled(vector, strength), positions=(position,))


_NAME = RecurrentPass.__name__


def _vector(value: Any) -> Payload:
    """A copy of a vector, as wide as it was given: unlike other payloads it may meet a float64 stream."""
    checked = checked_payload(_NAME, value)
    if hasattr(value, "detach"):
        return checked
    given = np.asarray(value)
    return own_array(given.astype(np.float32) if given.dtype.kind == "V" else given)


def _scaled(vector: Payload, strength: float) -> Payload:
    """strength * vector, as a tensor: as an array it would be narrowed to float32."""
    import torch

    return strength * torch.as_tensor(vector.copy() if isinstance(vector, np.ndarray) else vector)


def require_recurrent(value: Any) -> None:
    """Raise ConfigError unless this is a `RecurrentPass`, or None."""
    require_kind(
        value, (RecurrentPass, type(None)), "recurrent as a mizarr.RecurrentPass", "leave it out for one pass"
    )
