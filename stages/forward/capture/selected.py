"""Copies the tokens of a selection from batches of prompts to their rows of a segment buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....store.runs.entries import Entry
from ....store.runs.selections import Selection
from .batches import PieceBatch
from .overlap import send


class _RowRange(NamedTuple):
    """Selected tokens of a batch whose rows in the segment buffer are consecutive: one copy."""

    start: int
    """Index of the first one among the selected tokens of the batch."""
    row: int
    """Row of the first one in the segment buffer."""
    n_rows: int
    """Number of rows."""


@dataclass(frozen=True)
class _BatchSelection:
    """Where the selected tokens of one batch are, and where they go in the segment buffer."""

    batch: PieceBatch
    """The batch."""
    prompt: Tensor
    """Row of the batch for each selected token, int [row]."""
    position: Tensor
    """Position in the prompt for each selected token, int [row]."""
    ranges: list[_RowRange]
    """Copies to the segment buffer."""


class SelectedRows:
    """Copies selected tokens into the buffer of one segment, whose rows are in token order."""

    def __init__(self, entry: Entry, n: int, selection: Selection) -> None:
        """Prepare to copy the selected tokens of one segment.

        Arguments:
            entry: the stored run.
            n: number of the segment.
            selection: the tokens to keep.
        """
        self._tokens, self._segment, self._selection = entry.tokens, entry.segments[n], selection
        self._first_row = int(entry.bounds(selection.axis)[n])
        self._latest: _BatchSelection | None = None

    def put(self, value: Tensor, batch: PieceBatch, buffer: Tensor) -> None:
        """Copy the selected positions of [batch, position, …] to their rows of buffer [row, …].

        Arguments:
            value: activations [batch, position, …].
            batch: the prompts of `value`.
            buffer: the rows of the segment.
        """
        if self._latest is None or self._latest.batch is not batch:
            # Once per batch, not per layer: copying indices to a GPU synchronises it.
            self._latest = self._selection_in(batch, value.device)
        rows = value[self._latest.prompt, self._latest.position]
        for start, row, count in self._latest.ranges:
            send(rows[start : start + count], buffer[row : row + count])

    def _selection_in(self, batch: PieceBatch, device: torch.device) -> _BatchSelection:
        """Find the selected tokens of a batch, and their rows in the segment buffer.

        Arguments:
            batch: the prompts.
            device: device of the activations, to which indices are moved.
        """
        starts = np.array([piece.at for piece in batch.pieces], np.int64) + self._segment.start
        first_rows = self._selection.starts_on(self._tokens, starts) - self._first_row
        positions: list[npt.NDArray[np.int64]] = []
        ranges: list[_RowRange] = []
        start = 0
        for piece, row in zip(batch.pieces, first_rows.tolist(), strict=True):
            selected = self._selection.places(self._tokens, piece.prompt)
            positions.append(selected[(selected >= piece.start) & (selected < piece.stop)])
            count = len(positions[-1])
            # The rows of this prompt follow those of the prompt before it: one copy for both.
            if ranges and ranges[-1].row + ranges[-1].n_rows == row:
                ranges[-1] = ranges[-1]._replace(n_rows=ranges[-1].n_rows + count)
            else:
                ranges.append(_RowRange(start, row, count))
            start += count
        counts = [len(prompt_positions) for prompt_positions in positions]
        prompt = torch.from_numpy(np.repeat(np.arange(len(positions)), counts))
        position = torch.from_numpy(np.concatenate(positions))
        return _BatchSelection(batch, prompt.to(device), position.to(device), ranges)
