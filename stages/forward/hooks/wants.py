"""Logits: at which positions and for which vocabulary items a pass computes logits.

The LM head of a small model costs as much as several of its layers; computing only the needed rows of the
unembedding saves that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....store.arrays import as_indices, require_kind
from ....store.errors import PromptError

if TYPE_CHECKING:
    from torch import Tensor

    from ..architectures.architecture import Architecture


@dataclass(frozen=True)
class Logits:
    """Positions and vocabulary items at which a forward pass computes logits."""

    positions: tuple[int, ...] | None = None
    """Prompt positions, negative from the end; None for every position."""
    tokens: tuple[int, ...] | range | None = None
    """Token ids; None for the whole vocabulary. A range selects rows of the LM head without copying them."""

    def __post_init__(self) -> None:
        for name in ("positions", "tokens"):
            indices = getattr(self, name)
            # A range stays a range: as a tuple it would lose the view of the LM head's rows.
            is_range = name == "tokens" and isinstance(indices, range)
            if indices is not None and not is_range:
                object.__setattr__(self, name, as_indices(indices, f"logits: {name}", PromptError))

    def read(self, config: Architecture, length: int) -> Logits | None:
        """The positions and logits that a model's head computes for this selection: a pooled head has logits
        at one position only. None for a model without head.

        Arguments:
            config: architecture of the model.
            length: tokens of the prompt.

        Raises:
            ConfigError: for chosen logits of a model without head.
            PromptError: for positions of a head that gives one vector of logits per prompt.
        """
        head = config.head
        if head.kind == "none":
            if self.tokens is not None:
                config.require_head()
            return None
        if not head.is_pooled:
            return self
        position = {"first": (0,), "last": (-1,)}.get(head.reads)
        # The last position is what runs ask for if they name none.
        if self.positions not in (None, (-1,), (length - 1,), position):
            raise PromptError(
                f"logits: expected no position, because {config.model_type} computes one vector of logits "
                f"per prompt, found {list(self.positions or ())}; leave position= out"
            )
        return Logits(position, self.tokens)

    def check(self, length: int, vocab_size: int) -> None:
        """Raise PromptError for a position or token id out of range.

        Arguments:
            length: tokens of the prompt.
            vocab_size: size of the vocabulary.
        """
        for name, indices, low, size in (
            ("position", self.positions, -length, length),
            ("token id", self.tokens, 0, vocab_size),
        ):
            outside = [index for index in indices or () if not low <= index < size]
            if outside:
                raise PromptError(f"logits: expected a {name} in {low}..{size - 1}, found {outside[0]}")

    def at_positions(self, x: Tensor) -> Tensor:
        """x [batch, position, …] -> [batch, selected positions, …]."""
        return x if self.positions is None else x[:, list(self.positions)]

    def of_tokens(self, head: Tensor) -> Tensor:
        """Weights of the LM head [vocab, hidden] -> [selected tokens, hidden]."""
        if self.tokens is None:
            return head
        ids = self.tokens
        # A slice is a view; indexing with a list would copy the rows.
        return head[ids.start : ids.stop] if isinstance(ids, range) and ids.step == 1 else head[list(ids)]


ALL_LOGITS = Logits()
LAST_LOGITS = Logits(positions=(-1,))


def logits(position: int | Sequence[int] | None = None, tokens: int | Sequence[int] | None = None) -> Logits:
    """Select logits: ``logits()`` all, ``logits(position=-1, tokens=[a, b])`` two numbers per prompt.

    Arguments:
        position: one position or several, negative from the end; None for all.
        tokens: one token id or several; None for the whole vocabulary.

    Raises:
        PromptError: for values that are no integers.
    """
    return Logits(
        None if position is None else as_indices(position, "logits: positions", PromptError),
        None if tokens is None else as_indices(tokens, "logits: tokens", PromptError),
    )


def require_want(want: Any) -> None:
    """Raise ConfigError unless the argument `want` is a `Logits` or None."""
    require_kind(
        want, (Logits, type(None)), "want as mizarr.logits(…), or None", "write mizarr.logits(position=-1)"
    )
