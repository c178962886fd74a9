"""RecurrentPass: a block of layers executed several times in one pass, with or without fed-back directions.

    x = embed; x = layers[0 .. loop_start)
    x0 = x
    x = block(x)                                    pass 1
    depth - 1 times:
        with feedback:     x = block(x0 + strength * vector at each position)
        without feedback:  x = block(x)
    x = layers(loop_end .. L); final norm, LM head

This is the recurrent feedback of candle-mi's "anacrousis". The loop itself is never run, because it reduces
to two simpler computations:

* With feedback, every pass from the second on starts from the same x0 and gives the same result, so all
  passes but the last are discarded. Any depth above 1 is one plain pass with strength * vector added to
  `hook_resid_pre` of `loop_start`, whatever `loop_end` is: ordinary interventions, which every driver
  supports.
* Without feedback, it is another order of layers, which the loop over layers takes as an argument.

A depth of 1 is a plain pass. Knows an architecture by its sizes; imports torch only when used.
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
from .payloads import (
    Payload,
    PayloadField,
    checked_payload,
    finite,
    plain_value,
    private_payload,
    readonly_copy,
)
from .spec import BoundSpec

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

__all__ = ["RecurrentPass"]

Feedback = tuple[int, Payload, float]
"""(position, vector [hidden], strength)."""


@dataclass(frozen=True, eq=False)
class RecurrentPass:
    """Layers `loop_start` to `loop_end`, both included, executed `depth` times.

    Raises:
        ConfigError: for a depth below 1, layers out of order, or `sustained` without feedback.
        InterventionError: for a vector or strength that is not finite.
    """

    loop_start: int
    """First layer of the block."""
    loop_end: int
    """Last layer of the block."""
    depth: int = 2
    """Number of passes through the block, at least 1."""
    feedback: Sequence[Feedback] = PayloadField(())  # type: ignore[assignment]  # a descriptor
    """(position, vector [hidden], strength) triples; several at one position are summed. Before every pass
    but the first, the stream is reset to what entered the block, plus strength * vector at each position of
    the prompt (negative from its end). Empty: each pass continues from the one before."""
    sustained: bool = False
    """In generation, whether the vectors are also added at the newest position, at every step. At the first
    step that is the last position of the prompt, which then gets a vector twice if it is in `feedback`.
    Without generation it changes nothing."""

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
        feedback = tuple(
            (
                as_index(position, f"{_NAME}: positions of feedback", InterventionError),
                _checked_vector(vector),
                finite(_NAME, strength),
            )
            for position, vector, strength in private_payload(self, "feedback")
        )
        if self.sustained and not feedback:
            raise ConfigError(
                "RecurrentPass: expected feedback vectors for sustained=True, found none; pass "
                "feedback=[(position, vector, strength)], or leave sustained out"
            )
        object.__setattr__(self, "feedback", feedback)

    def canonical(self) -> dict[str, Any]:
        """The fields as plain JSON values for a digest; vectors as dtype, shape and digest of their bytes."""
        # `vars` and not the fields: reading a PayloadField copies its tensors.
        return {name: plain_value(value) for name, value in vars(self).items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecurrentPass) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(canonical_json(self.canonical()))

    @property
    def is_fed(self) -> bool:
        """Whether vectors are added at any position."""
        # At depth 1 the block runs once, before any feedback would be added.
        return bool(private_payload(self, "feedback")) and self.depth > 1

    def order(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers in execution order, where some are repeated; None for each layer once."""
        # With feedback all passes but the last are discarded, so one plain pass gives their result (module
        # docstring).
        if private_payload(self, "feedback") or self.depth == 1:
            return None
        # A repeated layer computes its keys and values again each time, so no cache can hold them.
        block = range(self.loop_start, self.loop_end + 1)
        return (*range(self.loop_start), *self.depth * tuple(block), *range(self.loop_end + 1, num_layers))

    def check(self, config: Architecture, length: int) -> None:
        """Raise ConfigError or InterventionError unless it fits a model and a prompt of `length` tokens.

        Arguments:
            config: architecture of the model.
            length: tokens of the prompt.
        """
        if self.loop_end >= config.num_layers:
            raise ConfigError(
                f"RecurrentPass: expected a block of layers within 0..{config.num_layers - 1}, found layers "
                f"{self.loop_start} to {self.loop_end}"
            )
        check_indices(
            _NAME,
            "positions of feedback",
            [position for position, _, _ in private_payload(self, "feedback")],
            length,
        )
        hidden = config.axis_sizes["hidden"]
        for position, vector, _ in private_payload(self, "feedback"):
            if tuple(vector.shape) != (hidden,):
                raise InterventionError(
                    f"RecurrentPass: expected a feedback vector of length {hidden} (hidden size of the "
                    f"model) for position {position}, found shape {list(vector.shape)}"
                )

    def applied(
        self, spec: BoundSpec, config: Architecture, length: int, *, grows: bool = False
    ) -> BoundSpec:
        """A copy of a bound spec that also runs the layers in this pass's order and adds its feedback.

        Arguments:
            spec: bound spec of the run; its own interventions come after the feedback.
            config: architecture of the model.
            length: tokens of the prompt.
            grows: whether tokens are generated after the prompt.

        Raises:
            ConfigError: for layers that the model does not have.
            InterventionError: for positions or vectors that do not fit.
        """
        self.check(config, length)
        feedback = tuple(self._feedback_interventions(length, grows))
        return replace(
            # Feedback first: interventions at the block's input then see the stream with it, as in the loop.
            spec,
            interventions=(*feedback, *spec.interventions),
            order=self.order(config.num_layers),
        )

    def _feedback_interventions(self, length: int, grows: bool) -> Iterator[tuple[HookPoint, Intervention]]:
        """Interventions that add the feedback vectors to the residual stream that enters the block."""
        if not self.is_fed:
            return
        point = HookPoint.resid_pre(self.loop_start)
        feedback = private_payload(self, "feedback")
        for position, vector, strength in feedback:
            yield point, Add(_scaled(vector, strength), positions=(position % length,))
        if self.sustained and grows:
            for _, vector, strength in feedback:
                yield point, Add(_scaled(vector, strength), positions=(-1,))


_NAME = RecurrentPass.__name__


def _checked_vector(value: Any) -> Payload:
    """A copy of a feedback vector that later writes to the original do not change; its dtype is kept."""
    checked = checked_payload(_NAME, value)
    if hasattr(value, "detach"):
        return checked
    array = np.asarray(value)
    # `checked_payload` narrows float64 to float32, but feedback may be added to a float64 stream.
    return readonly_copy(array.astype(np.float32) if array.dtype.kind == "V" else array)


def _scaled(vector: Payload, strength: float) -> Payload:
    """strength * vector, as a tensor: a numpy payload would be narrowed to float32."""
    import torch

    return strength * torch.as_tensor(vector.copy() if isinstance(vector, np.ndarray) else vector)


def require_recurrent(value: Any) -> None:
    """Raise ConfigError unless an argument is a `RecurrentPass` or None."""
    require_kind(
        value, (RecurrentPass, type(None)), "recurrent as a mizarr.RecurrentPass", "leave it out for one pass"
    )
