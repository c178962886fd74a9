"""How large batches are, and how much smaller they become where a pass does not fit in memory.

What runs out of memory is run again in batches of half the size, down to single prompts, and so is all that
follows: a harvest of hours is not lost to its longest prompts. What was done is told, once, and noted beside
what it made, as batches decide last bits where DESIGN.md says so ("What last bits depend on").

Border: a number and an exception; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....store.errors import PlanError
from .batches import PieceBatch

_ALLOCATION = ("can't allocate memory", "not enough memory", "out of memory")


class BatchSize:
    """Computed positions a batch may have. say: told, once, that it became less."""

    def __init__(self, tokens: int, say: Callable[[str], None] = lambda text: None) -> None:
        self.tokens = tokens
        self.is_lowered = False
        self._say = say

    def allows(self, batch: PieceBatch) -> bool:
        """Whether it is tried: a single prompt always is."""
        return len(batch.pieces) == 1 or len(batch.pieces) * batch.length <= self.tokens

    def lower(self, failed: PieceBatch) -> None:
        """Half of what just did not fit; PlanError for a single prompt."""
        held = len(failed.pieces) * failed.length
        if len(failed.pieces) == 1:
            raise PlanError(
                f"expected memory for a pass over one prompt of {failed.length} tokens, found too little; "
                "cut prompts into shorter contexts, capture fewer points, or use a device with more memory"
            )
        self.tokens = max(min(self.tokens, held) // 2, 1)
        if not self.is_lowered:
            self._say(
                f"out of memory at {held} tokens a batch: {self.tokens} from here on; --batch-tokens says it "
                "from the start"
            )
        self.is_lowered = True

    def note(self) -> dict[str, Any]:
        """For provenance: nothing where everything fitted."""
        return {"batch_tokens_lowered_to": self.tokens} if self.is_lowered else {}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a pass failed for want of memory, here or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ALLOCATION)


def fits(work: Callable[[], None]) -> bool:
    """Do some work; False where memory ran out. What it held, here and on a device, is let go of before this
    returns."""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False
