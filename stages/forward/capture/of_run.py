"""What is kept of all tokens of a run together, segment by segment.

Border: activations of one batch in, a row for the segment out; how rows of segments become one is
`store/runs/run_sums.py`'s.

A batch that did not fit in memory is run again, whatever it had shown before: so what a batch gives waits
until it is over.

Axes: row = token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....store.errors import ShapeError
from ....store.runs.committed import VariableLayer
from ....store.runs.packed import PackedTokens
from ....store.runs.run_sums import BELOW, MOST_TOKENS, QUANTA
from ....store.runs.selections import Selection
from .batches import Batch

__all__ = ["OfRun", "kept_rows", "sums_in_parts"]

Joined = Callable[[Tensor, Tensor], Tensor]


class OfRun:
    """Rows of one segment, to which each batch adds."""

    def __init__(self, segment: range) -> None:
        if len(segment) > MOST_TOKENS:
            raise ShapeError(
                f"expected segments of at most {MOST_TOKENS} tokens to keep sums over a run of, found "
                f"{len(segment)}; capture into a new store, with fewer (segment_tokens=)"
            )
        self._waiting: dict[VariableLayer, tuple[Tensor, Tensor, Joined]] = {}

    def add(self, cell: VariableLayer, place: Tensor, made: Tensor, join: Joined) -> None:
        """What a batch gives; place: the segment's row."""
        self._waiting[cell] = (place, made, join)

    def begin(self) -> None:
        """Forget a batch that did not come to its end."""
        self._waiting.clear()

    def end(self) -> None:
        """The batch is over."""
        for place, made, join in self._waiting.values():
            place.copy_(join(place, made.to(place.device)))
        self._waiting.clear()


def kept_rows(value: Tensor, batch: Batch, tokens: PackedTokens, selection: Selection | None) -> Tensor:
    """Of [batch, position, …] the tokens of the segment that are kept, [row, …]."""
    found = []
    for row, piece in enumerate(batch.pieces):
        if selection is None:
            found.append(value[row, piece.start : piece.stop])
            continue
        at = selection.places(tokens, piece.prompt)
        at = at[(at >= piece.start) & (at < piece.stop)]
        found.append(value[row, torch.tensor(at, device=value.device)])
    return torch.cat(found)


def sums_in_parts(rows: Tensor, what: str) -> Tensor:
    """Exact sums over rows [row, …], float64 [..., part]; NaN where a row has it.

    what: the rows, as an error names them. Raises ShapeError for a magnitude of `BELOW` or more.
    """
    if rows.numel() and float(rows.abs().nan_to_num(0.0, torch.inf).max()) >= BELOW:
        raise ShapeError(
            f"{what}: expected magnitudes below {BELOW:.1e} to add exactly, found larger ones; capture the "
            "numbers themselves, or in a wider dtype"
        )
    left, found = rows.double(), []
    for quantum in QUANTA:
        part = (left / quantum).round() * quantum
        left = left - part
        found.append(part.sum(0))  # exact, in whatever order
    return torch.stack(found, dim=-1)
