"""Which prompts share a forward pass: decided from the corpus alone, never from timing.

The same corpus, segment and batch size always give the same batches, so that a resumed or differently
scheduled harvest computes the same bits. Prompts are sorted by length and padded on the right to the
longest of their batch; in a causal model what stands to the right changes nothing to the left, and padded
places are dropped before anything is stored. Where that does not hold (rotations that depend on the length
of the sequence, interventions counted from the end of a prompt) only prompts of one length share a batch.

Knows lengths; knows no tokens, models or arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BUFFERS = 2
"""Segment buffers: one being filled, one being written."""
MAX_WASTE = 0.125
"""Padded places may be at most this share of a batch: an eighth of the work lost at worst, for batches that
stay full."""


@dataclass(frozen=True)
class Piece:
    """The part of a prompt that lies in a segment.

    Positions [start, stop) of the prompt go to tokens [at, at + stop - start) of the segment; `run`
    positions have to be computed.
    """

    prompt: int
    start: int
    stop: int
    at: int
    run: int


@dataclass(frozen=True)
class Batch:
    """Pieces that run together, each padded on the right to `length` positions."""

    pieces: tuple[Piece, ...]
    length: int


def pieces_of(
    segment: range, row_start: npt.NDArray[Any], row_size: npt.NDArray[Any], *, whole: bool
) -> list[Piece]:
    """The prompts a token range touches, cut to it; a prompt that straddles its edge is run here and kept
    in part.

    whole: run every prompt to its end, because later positions do change earlier ones here.
    """
    first = int(np.searchsorted(row_start, segment.start, side="right")) - 1
    last = int(np.searchsorted(row_start, segment.stop, side="left"))
    found = []
    for prompt in range(max(first, 0), last):
        begin, size = int(row_start[prompt]), int(row_size[prompt])
        start, stop = max(segment.start - begin, 0), min(segment.stop - begin, size)
        if start < stop:
            found.append(Piece(prompt, start, stop, begin + start - segment.start, size if whole else stop))
    return found


def plan_batches(pieces: Sequence[Piece], *, batch_tokens: int, one_length: bool) -> list[Batch]:
    """Batches of at most `batch_tokens` computed positions; a longer prompt runs alone."""
    batches: list[Batch] = []
    waiting: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.run, piece.prompt)):
        if waiting and not _fits(waiting, piece, batch_tokens, one_length):
            batches.append(Batch(tuple(waiting), waiting[-1].run))
            waiting = []
        waiting.append(piece)
    if waiting:
        batches.append(Batch(tuple(waiting), waiting[-1].run))
    return batches


def _fits(waiting: Sequence[Piece], piece: Piece, batch_tokens: int, one_length: bool) -> bool:
    """Whether the next longer piece may join; pieces come sorted, so it sets the length of the batch."""
    if one_length and piece.run != waiting[0].run:
        return False
    computed = piece.run * (len(waiting) + 1)
    kept = sum(held.run for held in waiting) + piece.run
    return computed <= batch_tokens and computed - kept <= MAX_WASTE * computed
