"""Which prompts share a forward pass: decided from the corpus alone, never from timing.

Prompts are sorted by length and padded on the right to the longest of their batch; in a causal model what
stands to the right changes nothing to the left, and padded places are dropped before anything is stored.
Where that does not hold (rotations that depend on the length of the sequence, interventions counted from the
end of a prompt) only prompts of one length share a batch.

What a pass gives of a prompt must not depend on its company, to the last bit (DESIGN.md, "What last bits
depend on"). Two rules see to that. Products ask one library for powers of two and another for all else
(networks/kernels/products.py): so prompts whose length is a power of two run whole, with others of that
length, a power of two of them; and others are never computed at such a length. And products of few rows have
kernels of their own: so a batch of few is computed several times over.

Knows lengths; knows no tokens, models or arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
class PieceBatch:
    """Pieces that run together, each padded on the right to `length` positions; `copies` times."""

    pieces: tuple[Piece, ...]
    length: int
    copies: int = 1


def pieces_of(
    segment: range, row_start: npt.NDArray[Any], row_size: npt.NDArray[Any], *, whole: bool
) -> list[Piece]:
    """The prompts a token range touches, cut to it; a prompt that straddles its edge is run here and kept
    in part.

    whole: run every prompt to its end, because later positions do change earlier ones here, or their number
    does.
    """
    first = int(np.searchsorted(row_start, segment.start, side="right")) - 1
    last = int(np.searchsorted(row_start, segment.stop, side="left"))
    found = []
    for prompt in range(max(first, 0), last):
        begin, size = int(row_start[prompt]), int(row_size[prompt])
        start, stop = max(segment.start - begin, 0), min(segment.stop - begin, size)
        if start < stop:
            run = size if whole or _is_power(size) else stop
            while run < size and _is_power(run):
                run += 1
            found.append(Piece(prompt, start, stop, begin + start - segment.start, run))
    return found


def plan_batches(
    pieces: Sequence[Piece], *, batch_tokens: int, one_length: bool, fewest: int = 1
) -> list[PieceBatch]:
    """Batches of at most `batch_tokens` computed positions; a longer prompt runs alone. fewest: positions of
    a pass, for which a batch of fewer is copied."""
    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.run, piece.prompt)):
        if not groups or not _fits(groups[-1], piece, batch_tokens, one_length):
            groups.append([])
        groups[-1].append(piece)
    parts = [part for group in groups for part in _by_powers(group)]
    return [PieceBatch(tuple(part), part[-1].run, _copies(part, part[-1].run, fewest)) for part in parts]


def halves(batch: PieceBatch, *, fewest: int) -> list[PieceBatch]:
    """The same pieces, of the same length, in two batches; of what is a power of two, by powers of two."""
    middle = len(batch.pieces) // 2
    parts = batch.pieces[:middle], batch.pieces[middle:]
    return [PieceBatch(part, batch.length, _copies(part, batch.length, fewest)) for part in parts]


def _copies(pieces: Sequence[Piece], length: int, fewest: int) -> int:
    """How often a batch is computed that it has `fewest` positions."""
    return max(1, math.ceil(fewest / (len(pieces) * length)))


def _by_powers(group: list[Piece]) -> Iterator[list[Piece]]:
    """A group as it is, or, of a length that is a power of two, by powers of two, the largest first."""
    while _is_power(group[0].run) and not _is_power(len(group)):
        count = 1 << (len(group).bit_length() - 1)
        yield group[:count]
        group = group[count:]
    yield group


def _is_power(count: int) -> bool:
    """Whether it is a power of two."""
    return count.bit_count() == 1


def _fits(waiting: Sequence[Piece], piece: Piece, batch_tokens: int, one_length: bool) -> bool:
    """Whether the next longer piece may join; pieces come sorted, so it sets the length of the batch."""
    apart = one_length or _is_power(piece.run) or _is_power(waiting[0].run)
    if apart and piece.run != waiting[0].run:
        return False
    computed = piece.run * (len(waiting) + 1)
    kept = sum(held.run for held in waiting) + piece.run
    return computed <= batch_tokens and computed - kept <= MAX_WASTE * computed
