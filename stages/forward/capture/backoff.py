"""Batch size of a harvest, lowered when a forward pass runs out of memory.

A batch that runs out of memory runs again in halves, down to single prompts, and later batches keep the lower
size: a harvest of hours is not lost to its longest prompts. The user is told once, and the size is noted in
the provenance, because batches can change last bits (DESIGN.md, "What last bits depend on").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....store.errors import PlanError
from .batches import PieceBatch

_ALLOCATION = ("can't allocate memory", "not enough memory", "out of memory")


class BatchSize:
    """Largest number of positions (prompts times padded length) in a batch; lowered when memory runs out."""

    def __init__(self, tokens: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Set the first batch size.

        Arguments:
            tokens: largest number of positions in a batch.
            say: called once, with a message for the user, when the size is lowered.
        """
        self.tokens = tokens
        self.is_lowered = False
        self._say = say

    def allows(self, batch: PieceBatch) -> bool:
        """Whether a batch is small enough to run; a single prompt always is."""
        return len(batch.pieces) == 1 or len(batch.pieces) * batch.length <= self.tokens

    def lower(self, failed: PieceBatch) -> None:
        """Halve the batch size after a batch ran out of memory.

        Arguments:
            failed: the batch that ran out of memory.

        Raises:
            PlanError: for a batch of a single prompt, which cannot be split.
        """
        failed_tokens = len(failed.pieces) * failed.length
        # A prompt cannot be cut: later positions need its earlier ones in the same pass.
        if len(failed.pieces) == 1:
            raise PlanError(
                f"out of memory in a forward pass over one prompt of {failed.length} tokens; cut prompts "
                "into shorter contexts, capture fewer hook points, or use a device with more memory"
            )
        # Half of the batch that failed, which may have been smaller than the limit.
        self.tokens = max(min(self.tokens, failed_tokens) // 2, 1)
        if not self.is_lowered:
            self._say(
                f"out of memory with {failed_tokens} tokens in a batch; later batches have at most "
                f"{self.tokens}; set --batch-tokens {self.tokens} to start with that"
            )
        self.is_lowered = True

    def note(self) -> dict[str, Any]:
        """Entry for the provenance record of the run; an empty dict if the size was never lowered."""
        return {"batch_tokens_lowered_to": self.tokens} if self.is_lowered else {}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the CPU or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator of torch raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ALLOCATION)


def fits(work: Callable[[], None]) -> bool:
    """Call `work`; returns False if it ran out of memory. Memory that it held is freed before this
    returns."""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    # After the error has left: its traceback would keep the tensors of the failed pass alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False
