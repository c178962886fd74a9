"""A stored run as `capture` reads it: the whole run, or some prompts of a larger run.

Reads the store only; capture.py decides what is missing and computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....store.reading.labelled import LabelledEntry
from ....store.records import Record
from ....store.runs.committed import VariableLayer
from ....store.runs.selections import View
from ..hooks.spec import layers_by_variable

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["StoredRun"]


@dataclass(frozen=True)
class StoredRun:
    """Stored activations of a whole run, or of some of its prompts."""

    entry: LabelledEntry
    """The run in the store, which may have more prompts."""
    rows: list[int] | None = None
    """Prompt numbers to read from the entry; None reads all prompts in order."""
    views: Mapping[str, View] = field(default_factory=dict)
    """Variable of selected tokens -> (stored variable of all tokens, selection) from which it is read."""

    def is_published(self, cell: VariableLayer) -> bool:
        """Whether a (variable, layer) can be read, from an array of its own or from one of all tokens."""
        return self.record(cell) is not None

    def record(self, cell: VariableLayer) -> Record | None:
        """Record of the stored array that contains a (variable, layer); None for an incomplete array."""
        return self.entry.record(*self._source_cell(cell))

    def content(self, cell: VariableLayer) -> str:
        """Content digest of the stored array from which a (variable, layer) is read."""
        return self.entry.content(*self._source_cell(cell))

    def _source_cell(self, cell: VariableLayer) -> VariableLayer:
        """(variable, layer) of the stored array from which a (variable, layer) is read; often itself."""
        return (self.views[cell[0]][0], cell[1]) if cell[0] in self.views else cell

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the prompts that are read."""
        tokens = self.entry.tokens
        return tokens.n_tokens if self.rows is None else int(tokens.row_size[self.rows].sum())

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(start, stop) token range of each segment; prompts of a larger run count as one segment."""
        if self.rows is not None:
            return [(0, self.n_tokens)]
        return [(segment.start, segment.stop) for segment in self.entry.segments]

    def contents(self, cells: Sequence[VariableLayer], segment: tuple[int, int] | None) -> list[list[Any]]:
        """Digests that identify the stored content of some arrays.

        Arguments:
            cells: (variable, layer) of each array.
            segment: (start, stop) token range; None for all tokens.

        Returns:
            [variable, layer, digest, ...] for each array. A token range need not be a segment of this run (it
            may be one of another model's run): the digests are those of all segments that it overlaps.
        """
        # Prompts of a larger run count as one segment, identified by the content of its whole arrays.
        if segment is None or self.rows is not None:
            return [[*cell, self.content(cell)] for cell in cells]
        start, stop = segment
        overlapped = [
            n
            for n, (segment_start, segment_stop) in enumerate(self.segments)
            if segment_start < stop and start < segment_stop
        ]
        return [
            [*cell, *(self.entry.segment_digest(*self._source_cell(cell), n) for n in overlapped)]
            for cell in cells
        ]

    def open(self, cells: Sequence[VariableLayer], segment: tuple[int, int] | None = None) -> xr.Dataset:
        """Open some of the stored arrays as a labelled, lazy Dataset.

        Arguments:
            cells: (variable, layer) of each array.
            segment: (start, stop) token range to read, which need not be a segment; None for all tokens.
        """
        layers = layers_by_variable(cells)
        sorted_layers = {name: sorted(numbers) for name, numbers in layers.items() if numbers}
        is_segment = segment is not None and tuple(segment) in self.segments
        if self.rows is None:
            number = self.segments.index((segment[0], segment[1])) if segment and is_segment else None
            dataset = self.entry.open(list(layers), sorted_layers, views=self.views, segment=number)
        else:
            dataset = self.entry.open(list(layers), sorted_layers).mi.prompts(self.rows)
        return dataset if segment is None or is_segment else dataset.isel(token=slice(*segment))
