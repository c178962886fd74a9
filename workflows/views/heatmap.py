"""View of a matrix as coloured cells."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...store.arrays import Array
from . import labels, paper
from .view import View

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Heatmap"]

SATURATES = "The colour scale leaves out the first token, an attention sink, whose cells exceed it."
"""Added to the caption if cells of the first token lie outside the colour scale."""


@dataclass(frozen=True, kw_only=True)
class Heatmap(View):
    """A matrix as coloured cells, with row and column labels."""

    kind: ClassVar[str] = "heatmap"
    is_drawn: ClassVar[bool] = True
    values: Array
    """The matrix, float [row, column]; NaN for an empty cell."""
    rows: tuple[str, ...]
    """Labels of the rows."""
    columns: tuple[str, ...]
    """Labels of the columns."""
    row_name: str = "layer"
    """What a row is; label of the vertical axis."""
    column_name: str = "position"
    """What a column is; label of the horizontal axis."""
    value_name: str
    """What the values are; label of the colour bar."""
    unit: str = ""
    """Unit of the values."""
    low: float | None = None
    """Lower end of the colour scale; None for the smallest value."""
    high: float | None = None
    """Upper end of the colour scale; None for the largest value."""
    diverging: bool = False
    """Whether the colour scale is symmetric around zero, with one hue for each sign."""
    upward: bool = False
    """Whether the first row is at the bottom, as for layers."""
    framed: tuple[tuple[int, int, int, int], ...] = ()
    """Blocks of cells with a frame: (first row, first column, last row, last column), inclusive."""
    frame_name: str = ""
    """Meaning of a frame, shown beside the colour bar of a page and in the caption of a figure."""
    texts: tuple[tuple[str, ...], ...] = field(default=(), metadata={"page": False})
    """Texts [row][column] that a figure writes into the cells; empty for none, see `numbers`."""
    numbers: str = field(default="", metadata={"page": False})
    """Format such as ".2f" of values that a figure writes into up to 16 x 16 cells; "" for none."""

    def __post_init__(self) -> None:
        labels.expect("values", self.values, (len(self.rows), len(self.columns)))

    @classmethod
    def of(cls, array: xr.DataArray, title: str = "", caption: str = "", **view_fields: Any) -> Heatmap:
        """Build a heatmap from a labelled array [row, column].

        Arguments:
            array: Its coordinates are the labels, its dims, `long_name` and `units` the names and unit. If
                the first dim is "layer", the first layer is at the bottom.
            title: Title of the view.
            caption: Caption of the view.
            view_fields: Other fields; they override those of the array.
        """
        row_dim, column_dim = map(str, array.dims)
        array_fields = {
            "rows": labels.along(array, row_dim),
            "columns": labels.along(array, column_dim),
            "row_name": labels.word(row_dim),
            "column_name": labels.word(column_dim),
            "value_name": labels.name(array),
            "unit": labels.unit(array),
            "upward": row_dim == "layer",
        }
        return cls(title=title, caption=caption, **{**array_fields, "values": array.values, **view_fields})

    def without_first_token(self) -> Heatmap:
        """The heatmap with a colour scale that ignores its first column, the first token of a prompt.

        Models use that token as an attention sink: its norms and attention weights are about a hundred times
        larger, so that all other cells would have the same colour. Cells of the first token may saturate; the
        caption then says so. For a matrix of queries by keys the first row is ignored, too: the first token
        can attend only to itself.
        """
        skipped_rows = int(self.values.shape[0] == self.values.shape[1] and self.rows == self.columns)
        without_sink = np.asarray(self.values, np.float64)[skipped_rows:, 1:]
        finite = without_sink[np.isfinite(without_sink)]
        if not finite.size:
            return self
        scaled = replace(
            self,
            low=float(finite.min()) if self.low is None else self.low,
            high=float(finite.max()) if self.diverging or self.high is None else self.high,
        )
        if self.diverging:
            scaled = replace(scaled, low=-float(np.abs(finite).max()), high=float(np.abs(finite).max()))
        low, high = scaled._colour_range()
        sink = np.asarray(self.values, np.float64)[:, 0]
        if not ((sink < low) | (sink > high)).any():
            return scaled
        caption = f"{self.caption.rstrip('.')}. {SATURATES}".removeprefix(". ")
        return replace(scaled, caption=caption)

    def inches(self) -> tuple[float, float]:
        """Size of labels and cells; cells with text are wider. See `View.inches`."""
        rows, columns = self.values.shape
        numbers = self._writes_numbers
        cell = 0.82 if self.texts else 0.44 if numbers else 0.36 if _is_long(self.columns) else 0.3
        tall = 0.34 if self.texts or numbers else 0.28
        square = self.row_name == self.column_name and columns > 16
        across, down = max(2.2, cell * columns), max(1.4, tall * rows)
        below = 0.9 if _is_long(self.columns) else 0.5
        wide, high = (3.6, 3.6) if square else (across, down)
        return min(14.0, 1.6 + self.gutter + wide), min(14.0, below + high)

    @property
    def gutter(self) -> float:
        """Width of the longest row label, at most 38 characters; see `View.gutter`."""
        return 0.07 * min(max(map(len, self.rows), default=0), 38)

    def panel(self) -> Heatmap:
        """The heatmap with the meaning of a frame appended to its caption, unless the caption mentions it."""
        if not (self.framed and self.frame_name) or "framed" in self.caption.lower():
            return self
        return replace(self, caption=f"{self.caption}; framed: {self.frame_name}".removeprefix("; "))

    def draw(self, axes: Any) -> None:
        """Draw cells, labels, frames and the colour bar."""
        low, high = self._colour_range()
        # interpolation="nearest": matplotlib's default blends cells that are smaller than a pixel or two.
        image = axes.imshow(
            self.values.astype(float),
            cmap=paper.ramp("diverging" if self.diverging else "sequential"),
            vmin=low,
            vmax=high,
            aspect="auto",
            origin="lower" if self.upward else "upper",
            interpolation="nearest",
        )
        paper.bare(axes)
        paper.ticks(axes.xaxis, self.columns, int(11 * (self.inches()[0] - 1.6 - self.gutter)))
        paper.ticks(axes.yaxis, self.rows)
        axes.set(xlabel=self.column_name, ylabel=self.row_name)
        for first_row, first_column, last_row, last_column in self.framed:
            axes.add_patch(paper.frame(first_column, first_row, last_column, last_row))
        self._write(axes, low, high)
        paper.bar(axes, image, f"{self.value_name}, {self.unit}" if self.unit else self.value_name)

    @property
    def _writes_numbers(self) -> bool:
        """Whether a figure writes `numbers` into the cells: there are few enough to be read."""
        return bool(self.numbers) and max(self.values.shape) <= 16

    def _colour_range(self) -> tuple[float, float]:
        """(low, high) end of the colour scale, by the same rule as the page's JavaScript."""
        finite = self.values[np.isfinite(self.values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        low, high = low if self.low is None else self.low, high if self.high is None else self.high
        if self.diverging:
            high = max(abs(low), abs(high)) or 1.0
            return -high, high
        # Cells that are all equal: a colour scale without extent would divide by zero.
        return low, high if high > low else low + 1.0

    def _write(self, axes: Any, low: float, high: float) -> None:
        """Write `texts` or `numbers` into the cells, in bold for cells that are framed individually.

        Arguments:
            axes: Matplotlib axes.
            low: Lower end of the colour scale.
            high: Upper end of the colour scale.
        """
        if not self.texts and not self._writes_numbers:
            return
        framed_cells = {frame[:2] for frame in self.framed if frame[:2] == frame[2:]}
        room = max(4, int(13.5 * self.inches()[0] / (self.values.shape[1] + 2)))
        for row, column in np.ndindex(self.values.shape):
            value = float(self.values[row, column])
            if not np.isfinite(value):
                continue
            text = self.texts[row][column] if self.texts else format(value, self.numbers)
            share = abs(value) / high if self.diverging else (value - low) / (high - low)
            # White on the dark end of the colour scale.
            axes.text(
                column,
                row,
                paper.fit(text, room),
                ha="center",
                va="center",
                fontsize=8 if self.texts else 7,
                color="white" if share > 0.6 else paper.INK,
                fontweight="bold" if (row, column) in framed_cells else "normal",
            )


def _is_long(names: tuple[str, ...]) -> bool:
    """Whether column labels are too long to stand upright below cells: more than three characters."""
    return max(map(len, names), default=0) > 3
