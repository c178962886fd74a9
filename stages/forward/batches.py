"""Which prompts share a forward pass: decided from the corpus alone, never from timing.

The same corpus, segment and batch size always give the same batches, so that a resumed or differently scheduled harvest computes the
same bits. Prompts are sorted by length and padded on the right to the longest of their batch; in a causal model what stands to the
right changes nothing to the left, and padded places are dropped before anything is stored. Where that does not hold (rotations that
depend on the length of the sequence, interventions counted from the end of a prompt) only prompts of one length share a batch.

Knows lengths; knows no tokens, models or arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_WASTE = 0.125
"""Padded places may be at most this share of a batch: an eighth of the work lost at worst, for batches that stay full."""


@dataclass(frozen=True)
class Batch:
    """Prompts that run together, and which of their positions are kept."""

    prompts: tuple[int, ...]
    length: int
    """Positions run; shorter prompts are padded on the right."""


@dataclass(frozen=True)
class Piece:
    """The part of a prompt that lies in a segment: positions [start, stop) go to tokens [at, at + stop - start) of the segment."""

    prompt: int
    start: int
    stop: int
    at: int


def pieces_of(segment: range, row_start: np.ndarray, row_size: np.ndarray) -> list[Piece]:
    """The prompts a token range touches, cut to it; a prompt that straddles its edge is run here and kept in part."""
    first = int(np.searchsorted(row_start, segment.start, side="right")) - 1
    last = int(np.searchsorted(row_start, segment.stop, side="left"))
    found = []
    for prompt in range(max(first, 0), last):
        begin, size = int(row_start[prompt]), int(row_size[prompt])
        start, stop = max(segment.start - begin, 0), min(segment.stop - begin, size)
        if start < stop:
            found.append(Piece(prompt, start, stop, begin + start - segment.start))
    return found


def plan_batches(pieces: Sequence[Piece], *, batch_tokens: int, one_length: bool) -> list[Batch]:
    """Batches of at most `batch_tokens` run positions (a longer prompt runs alone).

    A prompt is run up to the last position that is kept, as later ones cannot change it; under `one_length` it is run whole, which
    the caller says by giving pieces that end with their prompt.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.stop, piece.prompt))
    batches: list[Batch] = []
    waiting: list[Piece] = []
    for piece in ordered:
        if waiting and not _fits(waiting, piece, batch_tokens, one_length):
            batches.append(_batch(waiting))
            waiting = []
        waiting.append(piece)
    if waiting:
        batches.append(_batch(waiting))
    return batches


def _fits(waiting: Sequence[Piece], piece: Piece, batch_tokens: int, one_length: bool) -> bool:
    if one_length and piece.stop != waiting[0].stop:
        return False
    run = piece.stop * (len(waiting) + 1)
    kept = sum(held.stop for held in waiting) + piece.stop
    return run <= batch_tokens and run - kept <= MAX_WASTE * run


def _batch(pieces: Sequence[Piece]) -> Batch:
    return Batch(tuple(piece.prompt for piece in pieces), max(piece.stop for piece in pieces))
