"""What is wanted of a run besides its captures: logits, at which positions and for which vocabulary rows.

The LM head of a small model costs as much as several of its layers; naming the rows wanted is how that is
not paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....store.arrays import as_indices, require_kind
from ....store.errors import PromptError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Logits:
    """Logits at some positions (default all; negative from the end) for some vocabulary items (default
    all; of a range no weight is copied)."""

    positions: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | range | None = None

    def __post_init__(self) -> None:
        for name in ("positions", "tokens"):
            indices = getattr(self, name)
            is_range = name == "tokens" and isinstance(indices, range)
            if indices is not None and not is_range:
                object.__setattr__(self, name, as_indices(indices, f"logits: {name}", PromptError))

    def check(self, length: int, vocab_size: int) -> None:
        """Raise PromptError if a position or token is out of range."""
        for name, chosen, low, size in (
            ("position", self.positions, -length, length),
            ("token id", self.tokens, 0, vocab_size),
        ):
            outside = [index for index in chosen or () if not low <= index < size]
            if outside:
                raise PromptError(f"logits: expected a {name} in {low}..{size - 1}, found {outside[0]}")

    def at_positions(self, x: Tensor) -> Tensor:
        """x [B, S, …] -> [B, positions, …]."""
        return x if self.positions is None else x[:, list(self.positions)]

    def of_tokens(self, head: Tensor) -> Tensor:
        """head [V, D] -> [tokens, D]."""
        if self.tokens is None:
            return head
        at = self.tokens
        return head[at.start : at.stop] if isinstance(at, range) and at.step == 1 else head[list(at)]


ALL_LOGITS = Logits()
LAST_LOGITS = Logits(positions=(-1,))


def logits(position: int | Sequence[int] | None = None, tokens: int | Sequence[int] | None = None) -> Logits:
    """Ask for logits: ``logits()`` all of them, ``logits(position=-1, tokens=[a, b])`` two numbers per
    prompt."""
    return Logits(
        None if position is None else as_indices(position, "logits: positions", PromptError),
        None if tokens is None else as_indices(tokens, "logits: tokens", PromptError),
    )


def require_want(want: Any) -> None:
    """Raise ConfigError unless this says which logits are wanted, or is None."""
    require_kind(
        want, (Logits, type(None)), "want as mizarr.logits(…), or None", "write mizarr.logits(position=-1)"
    )
