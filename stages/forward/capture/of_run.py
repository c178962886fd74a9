"""What is kept of all tokens of a run together, segment by segment.

Border: activations of one batch in, a row for the segment out; how rows of segments become one is
`store/runs/run_sums.py`'s. A dictionary is asked what is active in rows of activations, and nothing else.

A batch that did not fit in memory is run again, whatever it had shown before: so what a batch gives waits
until it is over.

Axes: row = token; feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ....store.errors import ShapeError
from ....store.runs.committed import VariableLayer, cell_name
from ....store.runs.entries import Entry
from ....store.runs.packed import PackedTokens
from ....store.runs.run_sums import BELOW, MOST_TOKENS, QUANTA
from ....store.runs.selections import Selection
from ..hooks.reductions import RUN_MEAN
from ..hooks.spec import BoundSpec, KeptCapture
from ..networks.kernels import FEW_ROWS
from .batches import PieceBatch
from .overlap import SegmentBuffer

__all__ = ["OfRun", "of_run", "sums_in_parts"]

_AT_ONCE = 1 << 26
"""Pre-activations of rows that are encoded together, no more than a dictionary itself takes at a time."""


class OfRun:
    """Rows of one segment, to which each batch adds. Made by `of_run`."""

    def __init__(
        self, entry: Entry, n: int, places: Mapping[VariableLayer, Tensor], dictionaries: Mapping[str, Any]
    ) -> None:
        """places: the segment's row of each cell. dictionaries: by identity, open."""
        self._tokens, self._n, self._places = entry.tokens, n, places
        self._dictionaries = dictionaries
        self._waiting: list[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]] = []
        self._layers: dict[tuple[str, int], Any] = {}
        self._counted: dict[tuple[str, VariableLayer, Selection | None], dict[str, Tensor]] = {}

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """While a batch is run; nothing of it is added where it does not come to its end."""
        self._waiting.clear()
        self._counted.clear()
        yield
        for place, made, join in self._waiting:
            place.copy_(join(place, made.to(place.device)))

    def meet(self, kept: KeptCapture, value: Tensor, batch: PieceBatch) -> None:
        """What is kept of [batch, position, …]."""
        reduction = kept.keep.reduction
        assert reduction is not None
        mask = _mask(value, batch, self._tokens, kept.keep.selection)
        if reduction == RUN_MEAN:
            made = sums_in_parts(value[mask], f"segment {self._n} of {cell_name(kept.cell)}")
        else:
            made = self._of_features(kept, value, mask)[reduction.statistic]
        join = torch.maximum if reduction.combine == "max" else torch.add
        self._waiting.append((self._places[kept.cell], made, join))

    def _of_features(self, kept: KeptCapture, value: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Figures of all features of one layer, counted once for all that is kept of them."""
        reduction, number = kept.keep.reduction, kept.capture.point.layer or 0
        identity = "" if reduction is None or reduction.identity is None else reduction.identity
        which = identity, kept.capture.cell, kept.keep.selection
        if which not in self._counted:
            if (identity, number) not in self._layers:
                dictionary = self._dictionaries[identity]
                self._layers[identity, number] = dictionary.layer(number).on(dictionary.device)
            layer = self._layers[identity, number]
            self._counted[which] = counted(layer, value.flatten(0, 1).flatten(1), mask.flatten())
        return self._counted[which]


@contextmanager
def of_run(entry: Entry, n: int, spec: BoundSpec, buffer: SegmentBuffer) -> Iterator[OfRun]:
    """What a spec keeps of a run, over one segment; dictionaries are open meanwhile, and must be the same
    before and after."""
    segment = entry.segments[n]
    kepts = [kept for kept in spec.kept if kept.keep.reduction is not None and kept.keep.reduction.is_of_run]
    if kepts and len(segment) > MOST_TOKENS:
        raise ShapeError(
            f"expected segments of at most {MOST_TOKENS} tokens to keep sums over a run of, found "
            f"{len(segment)}; capture into a new store, with fewer (segment_tokens=)"
        )
    with ExitStack() as stack:
        places, dictionaries = {}, {}
        for kept in kepts:
            reduction = kept.keep.reduction
            assert reduction is not None
            places[kept.cell] = buffer.view(kept.cell, 1)[0]
            places[kept.cell].fill_(-torch.inf if reduction.combine == "max" else 0)
            if reduction.encoder is not None and reduction.identity not in dictionaries:
                resource = reduction.encoder.resource
                dictionaries[reduction.identity or ""] = stack.enter_context(resource.open())
        yield OfRun(entry, n, places, dictionaries)


def counted(layer: Any, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Of each feature of a layer over the rows [row, width] that count (mask: bool [row]): "count" of rows it
    is active in, int64 [feature]; exact "sum" of its activations, float64 [feature, part]; "max", -inf where
    it is never active.

    layer: `features.layers.layer.LayerFeatures`. Rows are filled up and cut so that no product has fewer than
    `FEW_ROWS`, whose last bits are others (DESIGN.md, "What last bits depend on").
    """
    size = layer.n_features
    count = torch.zeros(size, dtype=torch.int64)
    total = torch.zeros(size, len(QUANTA), dtype=torch.float64)
    largest = torch.full((size,), -torch.inf)
    missing, step = -len(rows) % FEW_ROWS, FEW_ROWS * max(1, _AT_ONCE // size // FEW_ROWS)
    rows = torch.cat([rows, rows[:1].expand(missing, -1)]) if missing else rows
    mask = torch.cat([mask, mask.new_zeros(missing)])
    for some, chosen in zip(rows.split(step), mask.split(step), strict=True):
        if not bool(chosen.any()):
            continue
        row, feature, value = (part.cpu() for part in layer.active(some))
        here = chosen.cpu()[row]
        feature, value = feature[here], value[here]
        count += torch.bincount(feature, minlength=size)
        total.index_add_(0, feature, in_parts(value, f"activations of layer {layer.layer}"))
        largest.scatter_reduce_(0, feature, value.float(), "amax")
    return {"count": count, "sum": total, "max": largest}


def sums_in_parts(rows: Tensor, what: str) -> Tensor:
    """Exact sums over rows [row, …], float64 [..., part]; NaN where a row has it.

    what: the rows, as an error names them. Raises ShapeError for a magnitude of `BELOW` or more.
    """
    return in_parts(rows, what).sum(0)  # exact, in whatever order


def in_parts(values: Tensor, what: str) -> Tensor:
    """Values [...] in parts that add up to them, float64 [..., part]; see `sums_in_parts`."""
    if values.numel() and float(values.abs().nan_to_num(0.0, torch.inf).max()) >= BELOW:
        raise ShapeError(
            f"{what}: expected magnitudes below {BELOW:.1e} to add exactly, found larger ones; capture the "
            "numbers themselves, or in a wider dtype"
        )
    left, found = values.double(), []
    for quantum in QUANTA:
        part = (left / quantum).round() * quantum
        left = left - part
        found.append(part)
    return torch.stack(found, dim=-1)


def _mask(value: Tensor, batch: PieceBatch, tokens: PackedTokens, selection: Selection | None) -> Tensor:
    """Which places of [batch, position, …] are tokens of the segment that are kept, bool [batch,
    position]."""
    mask = torch.zeros(value.shape[:2], dtype=torch.bool)
    for row, piece in enumerate(batch.pieces):
        if selection is None:
            mask[row, piece.start : piece.stop] = True
        else:
            at = selection.places(tokens, piece.prompt)
            mask[row, torch.from_numpy(at[(at >= piece.start) & (at < piece.stop)])] = True
    return mask.to(value.device)
