"""Diagonal recurrences by steps through all chunks at once: for values so narrow that matrices are thin.

From an empty state all chunks go side by side, token after token; then the state goes from chunk to chunk,
and each token adds what it reads of the state its chunk began with, times the decay since (the two levels
are those of Blelloch, Prefix Sums and Their Applications, 1990). Decays are only ever multiplied.

Axes: as in recurrence.py; chunk as in chunks.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import chunked, walk
from .terms import Terms, step_through


def two_level(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel for many tokens without a correction, of any decay (terms.Kernel)."""
    heads, length = state.shape[:2], terms.values.shape[2]
    queries, keys, values, log_decay = (chunked(x).unsqueeze(0) for x in terms[:4])
    empty = state.new_zeros(1, queries.shape[1], *state.shape[2:])
    read, written = step_through(Terms(queries, keys, values, log_decay, None), empty)
    until = log_decay.exp().cumprod(2)
    since = torch.cat([torch.ones_like(until[:, :, :1]), until[:, :, :-1]], dim=2)
    decay, written = (x.unflatten(0, (*heads, -1)) for x in (until[0, :, -1].unsqueeze(-1), written[0]))
    starts, state = walk(decay, written, state)
    read = read[0] + (queries * since)[0] @ starts.flatten(0, 2)
    return read.unflatten(0, (*heads, -1)).flatten(2, 3)[:, :, :length], state
