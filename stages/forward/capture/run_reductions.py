"""Reductions over all tokens of a run (means, feature counts), accumulated segment by segment.

Input: activations of one batch. Output: one row per segment; `store/runs/run_sums.py` combines the rows of
all segments. Of a dictionary only the active features of given activations are needed.

A batch that runs out of memory is run again. So its contributions are added only after it has finished.

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

__all__ = ["RunReductions", "count_features", "open_run_reductions", "sums_in_parts"]

_AT_ONCE = 1 << 26
"""Most pre-activations (rows times features) encoded at a time; a dictionary itself uses the same limit."""


class RunReductions:
    """Adds up, over the tokens of one segment, what is stored of a whole run: means, or counts of features.

    Made by `open_run_reductions`.
    """

    def __init__(
        self,
        entry: Entry,
        n: int,
        segment_rows: Mapping[VariableLayer, Tensor],
        dictionaries: Mapping[str, Any],
    ) -> None:
        """Start with no tokens of segment `n`.

        Arguments:
            entry: the stored run.
            n: number of the segment.
            segment_rows: (variable, layer) -> row of the segment, to which batches are added in place.
            dictionaries: identity -> open dictionary.
        """
        self._tokens, self._n, self._segment_rows = entry.tokens, n, segment_rows
        self._dictionaries = dictionaries
        self._pending: list[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]] = []
        self._layers: dict[tuple[str, int], Any] = {}
        self._statistics: dict[tuple[str, VariableLayer, Selection | None], dict[str, Tensor]] = {}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run one batch in this block; its values are added at the end, and dropped after an error."""
        self._pending.clear()
        self._statistics.clear()
        yield
        for segment_row, contribution, combine in self._pending:
            # In place: the row is a view of the segment buffer that the writer commits.
            segment_row.copy_(combine(segment_row, contribution.to(segment_row.device)))

    def add(self, kept_capture: KeptCapture, value: Tensor, batch: PieceBatch) -> None:
        """Reduce [batch, position, …] over the tokens of the segment, to be added when the batch ends.

        Arguments:
            kept_capture: the capture and its reduction.
            value: activations [batch, position, …].
            batch: the prompts of `value`.
        """
        reduction = kept_capture.keep.reduction
        assert reduction is not None
        mask = _counted_tokens(value, batch, self._tokens, kept_capture.keep.selection)
        if reduction == RUN_MEAN:
            contribution = sums_in_parts(value[mask], f"segment {self._n} of {cell_name(kept_capture.cell)}")
        else:
            contribution = self._feature_statistics(kept_capture, value, mask)[reduction.statistic]
        combine = torch.maximum if reduction.combine == "max" else torch.add
        self._pending.append((self._segment_rows[kept_capture.cell], contribution, combine))

    def _feature_statistics(
        self, kept_capture: KeptCapture, value: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """Count, sum and maximum of each feature of one layer, computed once per batch for all three."""
        reduction, layer = kept_capture.keep.reduction, kept_capture.capture.point.layer or 0
        identity = "" if reduction is None or reduction.identity is None else reduction.identity
        key = identity, kept_capture.capture.cell, kept_capture.keep.selection
        if key not in self._statistics:
            if (identity, layer) not in self._layers:
                dictionary = self._dictionaries[identity]
                self._layers[identity, layer] = dictionary.layer(layer).on(dictionary.device)
            features = self._layers[identity, layer]
            self._statistics[key] = count_features(features, value.flatten(0, 1).flatten(1), mask.flatten())
        return self._statistics[key]


@contextmanager
def open_run_reductions(
    entry: Entry, n: int, spec: BoundSpec, buffer: SegmentBuffer
) -> Iterator[RunReductions]:
    """In this block, add up means over a run and counts of features over the tokens of segment `n`.

    Dictionaries whose features are counted are open in this block.

    Arguments:
        entry: the stored run.
        n: number of the segment.
        spec: captures of the segment.
        buffer: its arrays hold the sums, one row for the segment.

    Raises:
        ShapeError: if the segment has too many tokens for exact sums.
        SourceChanged: if the files of a dictionary change before the block ends.
    """
    segment = entry.segments[n]
    reduced = [
        kept_capture
        for kept_capture in spec.kept
        if kept_capture.keep.reduction is not None and kept_capture.keep.reduction.is_of_run
    ]
    if reduced and len(segment) > MOST_TOKENS:
        raise ShapeError(
            f"reductions over a run need segments of at most {MOST_TOKENS} tokens, so that sums are exact; "
            f"found {len(segment)}; capture into a new store with a smaller segment_tokens="
        )
    with ExitStack() as stack:
        segment_rows, dictionaries = {}, {}
        for kept_capture in reduced:
            reduction = kept_capture.keep.reduction
            assert reduction is not None
            segment_rows[kept_capture.cell] = buffer.view(kept_capture.cell, 1)[0]
            # Buffers are reused: the row may still hold the sums of an earlier segment.
            segment_rows[kept_capture.cell].fill_(-torch.inf if reduction.combine == "max" else 0)
            if reduction.encoder is not None and reduction.identity not in dictionaries:
                resource = reduction.encoder.resource
                dictionaries[reduction.identity or ""] = stack.enter_context(resource.open())
        yield RunReductions(entry, n, segment_rows, dictionaries)


def count_features(layer: Any, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Encode activations with one layer of a dictionary, and count each feature over the rows.

    Arguments:
        layer: features of one layer of a dictionary (`features.layers.layer.LayerFeatures`).
        rows: activations that the dictionary encodes, [row, width].
        mask: bool [row], True for rows that count.

    Returns:
        "count", int64 [feature]: rows in which the feature is active. "sum", float64 [feature, part]: exact
        sum of its activations, in parts. "max", float32 [feature]: its largest activation, -inf if it is
        never active.
    """
    # Matrix products of fewer than FEW_ROWS rows run other kernels and round differently (DESIGN.md, "What
    # last bits depend on"), so rows are padded to a multiple of FEW_ROWS and split by multiples of it.
    size = layer.n_features
    count = torch.zeros(size, dtype=torch.int64)
    total = torch.zeros(size, len(QUANTA), dtype=torch.float64)
    largest = torch.full((size,), -torch.inf)
    padding, step = -len(rows) % FEW_ROWS, FEW_ROWS * max(1, _AT_ONCE // size // FEW_ROWS)
    rows = torch.cat([rows, rows[:1].expand(padding, -1)]) if padding else rows
    mask = torch.cat([mask, mask.new_zeros(padding)])
    for chunk, chunk_mask in zip(rows.split(step), mask.split(step), strict=True):
        if not bool(chunk_mask.any()):
            continue
        row, feature, value = (tensor.cpu() for tensor in layer.active(chunk))
        is_counted = chunk_mask.cpu()[row]
        feature, value = feature[is_counted], value[is_counted]
        count += torch.bincount(feature, minlength=size)
        total.index_add_(0, feature, in_parts(value, f"activations of layer {layer.layer}"))
        largest.scatter_reduce_(0, feature, value.float(), "amax")
    return {"count": count, "sum": total, "max": largest}


def sums_in_parts(rows: Tensor, label: str) -> Tensor:
    """Sum rows exactly, whatever their order, as a few float64 parts that add up to the sum.

    Arguments:
        rows: values to add, [row, …].
        label: name of the rows in errors.

    Returns:
        float64 [..., part]; NaN where a row is NaN.

    Raises:
        ShapeError: for a magnitude of `BELOW` or more.
    """
    return in_parts(rows, label).sum(0)  # each part is a multiple of one quantum: exact in any order


def in_parts(values: Tensor, label: str) -> Tensor:
    """Split each number into float64 parts that add up to it and whose sums over many numbers are exact.

    Arguments:
        values: numbers of any shape.
        label: name of the numbers in errors.

    Returns:
        float64 [..., part]; NaN where a value is NaN.

    Raises:
        ShapeError: for a magnitude of `BELOW` or more.
    """
    # NaN counts as 0 here and stays NaN in the parts; infinity is refused with the large numbers.
    if values.numel() and float(values.abs().nan_to_num(0.0, torch.inf).max()) >= BELOW:
        raise ShapeError(
            f"{label}: expected magnitudes below {BELOW:.1e}, so that sums over the run are exact, found "
            "larger ones; capture the activations without reduce="
        )
    remainder, parts = values.double(), []
    for quantum in QUANTA:
        part = (remainder / quantum).round() * quantum
        # Exact in float64: the remainder has no more binary digits than the value.
        remainder = remainder - part
        parts.append(part)
    return torch.stack(parts, dim=-1)


def _counted_tokens(
    value: Tensor, batch: PieceBatch, tokens: PackedTokens, selection: Selection | None
) -> Tensor:
    """Bool [batch, position], True at tokens that lie in the segment and in the selection (None: all)."""
    mask = torch.zeros(value.shape[:2], dtype=torch.bool)
    for row, piece in enumerate(batch.pieces):
        if selection is None:
            mask[row, piece.start : piece.stop] = True
        else:
            positions = selection.places(tokens, piece.prompt)
            in_segment = (positions >= piece.start) & (positions < piece.stop)
            mask[row, torch.from_numpy(positions[in_segment])] = True
    return mask.to(value.device)
