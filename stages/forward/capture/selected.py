"""Rows of the tokens that a selection keeps, from batches of whole prompts to their place in a segment.

Border: which tokens are meant is told by the selection, how prompts are cut by the batch; what is kept of
them is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....store.runs.entries import Entry
from ....store.runs.selections import Selection
from .batches import PieceBatch
from .overlap import send


@dataclass(frozen=True)
class _Rows:
    """What is kept of one batch. prompt, position: of each row, int [row]. places: rows that adjoin here and
    in the segment, (first here, first there, how many)."""

    batch: PieceBatch
    prompt: Tensor
    position: Tensor
    places: list[tuple[int, int, int]]


class SelectedRows:
    """Where the kept tokens of one segment go: rows of the segment, in order of their tokens."""

    def __init__(self, entry: Entry, n: int, selection: Selection) -> None:
        self._tokens, self._segment, self._selection = entry.tokens, entry.segments[n], selection
        self._first = int(entry.bounds(selection.axis)[n])
        self._latest: _Rows | None = None

    def put(self, value: Tensor, batch: PieceBatch, place: Tensor) -> None:
        """Kept positions of [batch, position, …] to their rows [row, …] of the segment."""
        if self._latest is None or self._latest.batch is not batch:
            self._latest = self._of(batch, value.device)  # once for all layers: a GPU is waited for
        rows = value[self._latest.prompt, self._latest.position]
        for here, there, count in self._latest.places:
            send(rows[here : here + count], place[there : there + count])

    def _of(self, batch: PieceBatch, device: torch.device) -> _Rows:
        starts = np.array([piece.at for piece in batch.pieces], np.int64) + self._segment.start
        firsts = self._selection.starts_on(self._tokens, starts) - self._first
        kept: list[npt.NDArray[np.int64]] = []
        places: list[tuple[int, int, int]] = []
        here = 0
        for piece, there in zip(batch.pieces, firsts.tolist(), strict=True):
            held = self._selection.places(self._tokens, piece.prompt)
            kept.append(held[(held >= piece.start) & (held < piece.stop)])
            count = len(kept[-1])
            if places and places[-1][1] + places[-1][2] == there:
                begun, at, before = places.pop()
                places.append((begun, at, before + count))
            else:
                places.append((here, there, count))
            here += count
        prompt = np.repeat(np.arange(len(kept)), [len(each) for each in kept])
        position = np.concatenate(kept)
        return _Rows(
            batch, torch.from_numpy(prompt).to(device), torch.from_numpy(position).to(device), places
        )
