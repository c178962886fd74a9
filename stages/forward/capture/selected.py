"""Rows of the tokens that a selection keeps, from batches of whole prompts to their place in a segment.

Border: which tokens are meant is told by the selection, how prompts are cut by the batch; what is kept of
them is not asked.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....store.runs.entries import Entry
from ....store.runs.selections import Selection
from .batches import Batch


class SelectedRows:
    """Where the kept tokens of one segment go: rows of the segment, in order of their tokens."""

    def __init__(self, entry: Entry, n: int, selection: Selection) -> None:
        self._tokens, self._segment, self._selection = entry.tokens, entry.segments[n], selection
        self._first = int(entry.bounds(selection.axis)[n])

    def put(self, value: Tensor, batch: Batch, place: Tensor) -> None:
        """Kept positions of [batch, position, …] to their rows [row, …] of the segment."""
        starts = np.array([piece.at for piece in batch.pieces], np.int64) + self._segment.start
        rows = self._selection.starts_on(self._tokens, starts) - self._first
        for number, (piece, row) in enumerate(zip(batch.pieces, rows.tolist(), strict=True)):
            kept = self._selection.places(self._tokens, piece.prompt)
            kept = kept[(kept >= piece.start) & (kept < piece.stop)]
            if len(kept):
                place[row : row + len(kept)].copy_(value[number, torch.tensor(kept, device=value.device)])
