"""Assigns prompts to batches, from their lengths alone and never from timing.

Prompts are sorted by length and padded on the right to the longest of their batch. In a causal model padding
changes no earlier position, and padded positions are dropped before anything is stored. Where this does not
hold (RoPE that depends on the sequence length, interventions at positions counted from the end) only prompts
of one length share a batch.

The activations of a prompt must not depend, to the last bit, on the other prompts of its batch (DESIGN.md,
"What last bits depend on"). Two rules ensure this:

- Matrix products call one library for powers of two and another for all other sizes
  (networks/kernels/products.py). So prompts whose length is a power of two run whole, in batches of that
  length whose number of prompts is a power of two; other prompts are never padded to such a length.
- Products of few rows use other kernels. So a batch with few positions is repeated until it has enough.
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
"""Largest share of padding in a batch: at worst an eighth of the work is lost, in exchange for full
batches."""


@dataclass(frozen=True)
class Piece:
    """The part of a prompt that lies in a segment: positions [start, stop)."""

    prompt: int
    """Number of the prompt in the run."""
    start: int
    """First position of the prompt that lies in the segment."""
    stop: int
    """Position after the last one that lies in the segment."""
    at: int
    """Token of the segment, counted from its start, at which position `start` is stored."""
    run: int
    """Number of positions to compute, from position 0."""


@dataclass(frozen=True)
class PieceBatch:
    """Prompts of a segment that run in one forward pass."""

    pieces: tuple[Piece, ...]
    """Piece of each prompt inside the segment, one row each."""
    length: int
    """Positions of each row, padding on the right included."""
    copies: int = 1
    """How many times all rows are repeated, because passes with few positions round differently."""


def pieces_of(
    segment: range, row_start: npt.NDArray[Any], row_size: npt.NDArray[Any], *, whole: bool
) -> list[Piece]:
    """Find the part of each prompt that lies in a segment, and the positions to compute for it.

    A prompt that crosses the start of the segment runs from position 0.

    Arguments:
        segment: token range of the segment in the run.
        row_start: first token of each prompt, int [prompt].
        row_size: length of each prompt, int [prompt].
        whole: whether to run every prompt to its end, because later positions, or their number, change
            earlier ones.
    """
    # The last prompt that begins at or before the segment; it may have ended before.
    first_prompt = int(np.searchsorted(row_start, segment.start, side="right")) - 1
    end_prompt = int(np.searchsorted(row_start, segment.stop, side="left"))
    pieces = []
    for prompt in range(max(first_prompt, 0), end_prompt):
        begin, size = int(row_start[prompt]), int(row_size[prompt])
        start, stop = max(segment.start - begin, 0), min(segment.stop - begin, size)
        if start < stop:
            run = size if whole or _is_power_of_two(size) else stop
            # A cut prompt must not get a power of two by chance: its products would call the other library.
            while run < size and _is_power_of_two(run):
                run += 1
            pieces.append(Piece(prompt, start, stop, begin + start - segment.start, run))
    return pieces


def plan_batches(
    pieces: Sequence[Piece], *, batch_tokens: int, one_length: bool, fewest: int = 1
) -> list[PieceBatch]:
    """Group the prompts of a segment into batches of similar length.

    Arguments:
        pieces: the part of each prompt that lies in the segment.
        batch_tokens: most positions of a batch, padding included; a longer prompt runs alone.
        one_length: whether all prompts of a batch must have the same length.
        fewest: fewest positions of a pass; the rows of a smaller batch are repeated.
    """
    groups: list[list[Piece]] = []
    # The prompt number breaks ties: equal pieces make equal batches, in whatever order they come.
    for piece in sorted(pieces, key=lambda piece: (piece.run, piece.prompt)):
        if not groups or not _fits(groups[-1], piece, batch_tokens, one_length):
            groups.append([])
        groups[-1].append(piece)
    parts = [part for group in groups for part in _power_of_two_parts(group)]
    return [PieceBatch(tuple(part), part[-1].run, _copies(part, part[-1].run, fewest)) for part in parts]


def halves(batch: PieceBatch, *, fewest: int) -> list[PieceBatch]:
    """Split a batch into two of the same padded length; a power-of-two batch splits into powers of two.

    Arguments:
        batch: a batch of at least two prompts.
        fewest: fewest positions of a pass; the rows of a smaller half are repeated.
    """
    middle = len(batch.pieces) // 2
    parts = batch.pieces[:middle], batch.pieces[middle:]
    return [PieceBatch(part, batch.length, _copies(part, batch.length, fewest)) for part in parts]


def _copies(pieces: Sequence[Piece], length: int, fewest: int) -> int:
    """How many times the rows of a batch must be repeated for `fewest` positions."""
    return max(1, math.ceil(fewest / (len(pieces) * length)))


def _power_of_two_parts(group: list[Piece]) -> Iterator[list[Piece]]:
    """Split prompts whose length is a power of two into parts whose number is one, the largest first.

    Prompts of another length are one part.
    """
    while _is_power_of_two(group[0].run) and not _is_power_of_two(len(group)):
        # The largest power of two that is not above the number of pieces.
        count = 1 << (len(group).bit_length() - 1)
        yield group[:count]
        group = group[count:]
    yield group


def _is_power_of_two(count: int) -> bool:
    return count.bit_count() == 1


def _fits(waiting: Sequence[Piece], piece: Piece, batch_tokens: int, one_length: bool) -> bool:
    """Whether a prompt may join a batch; it is the longest so far, so the batch is padded to its length."""
    needs_equal_length = one_length or _is_power_of_two(piece.run) or _is_power_of_two(waiting[0].run)
    if needs_equal_length and piece.run != waiting[0].run:
        return False
    computed = piece.run * (len(waiting) + 1)
    without_padding = sum(member.run for member in waiting) + piece.run
    return computed <= batch_tokens and computed - without_padding <= MAX_WASTE * computed
