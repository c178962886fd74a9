"""A run in the store as a capture reads it: whole, or some prompts of a larger one.

Border: what is stored; what is missing and who computes it is capture.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....store.reading.labelled import LabelledEntry
from ....store.records import Record
from ....store.runs.committed import VariableLayer
from ....store.runs.selections import View

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Found"]


@dataclass(frozen=True)
class Found:
    """A run in the store, whole or some prompts of it."""

    entry: LabelledEntry
    rows: list[int] | None = None
    """Which of the entry's prompts are meant; None for all, in order."""
    views: Mapping[str, View] = field(default_factory=dict)
    """Variables that are not stored themselves, and what shows them."""

    def is_published(self, cell: VariableLayer) -> bool:
        """Whether a cell can be read, as it is stored or from what is."""
        return self.record(cell) is not None

    def record(self, cell: VariableLayer) -> Record | None:
        """What is published of what is read for a cell."""
        return self.entry.record(*self._stored(cell))

    def content(self, cell: VariableLayer) -> str:
        """R of what is read for a cell."""
        return self.entry.content(*self._stored(cell))

    def _stored(self, cell: VariableLayer) -> VariableLayer:
        return (self.views[cell[0]][0], cell[1]) if cell[0] in self.views else cell

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompts meant."""
        tokens = self.entry.tokens
        return tokens.n_tokens if self.rows is None else int(tokens.row_size[self.rows].sum())

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(start, stop) of each segment; prompts picked from a larger run are one."""
        if self.rows is not None:
            return [(0, self.n_tokens)]
        return [(segment.start, segment.stop) for segment in self.entry.segments]

    def contents(self, cells: Sequence[VariableLayer], segment: tuple[int, int] | None) -> list[list[Any]]:
        """[variable, layer, digest] of what is stored for each cell; of a range of tokens that is no segment,
        as another model's may be, with the digests of all it lies in."""
        if segment is None or self.rows is not None:
            return [[*cell, self.content(cell)] for cell in cells]
        start, stop = segment
        numbers = [n for n, (first, end) in enumerate(self.segments) if first < stop and start < end]
        return [
            [*cell, *(self.entry.segment_digest(*self._stored(cell), n) for n in numbers)] for cell in cells
        ]

    def open(self, cells: Sequence[VariableLayer], segment: tuple[int, int] | None = None) -> xr.Dataset:
        """The given cells, labelled and lazy. segment: only the tokens of this one, or of any range."""
        layers: dict[str, list[int]] = {}
        for name, layer in cells:
            layers.setdefault(name, []).extend([] if layer is None else [layer])
        held = {name: sorted(chosen) for name, chosen in layers.items() if chosen}
        whole = segment is None or tuple(segment) in self.segments
        if self.rows is None:
            number = self.segments.index((segment[0], segment[1])) if segment and whole else None
            dataset = self.entry.open(list(layers), held, views=self.views, segment=number)
        else:
            dataset = self.entry.open(list(layers), held).mi.prompts(self.rows)  # one segment
        return dataset if segment is None or whole else dataset.isel(token=slice(*segment))
