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

SATURATES = (
    "The colour scale ignores the first token, an attention sink: its cells exceed the scale and have the "
    "end colour."
)
"""Sentence added to the caption if cells of the first token lie outside the colour scale."""


@dataclass(frozen=True, kw_only=True)
class Heatmap(View):
    """A matrix shown as coloured cells, with row and column labels and a colour bar."""

    kind: ClassVar[str] = "heatmap"
    is_drawn: ClassVar[bool] = True
    values: Array
    """The matrix, float [row, column]; NaN for an empty cell."""
    rows: tuple[str, ...]
    """Label of each row."""
    columns: tuple[str, ...]
    """Label of each column."""
    row_name: str = "layer"
    """What a row is; label of the vertical axis."""
    column_name: str = "position"
    """What a column is; label of the horizontal axis."""
    value_name: str
    """Name of the quantity in the cells; label of the colour bar."""
    unit: str = ""
    """Unit of the quantity; "" without a unit."""
    low: float | None = None
    """Value at the lower end of the colour scale; None for the smallest value of the matrix."""
    high: float | None = None
    """Value at the upper end of the colour scale; None for the largest value of the matrix."""
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
        is_query_by_key = self.values.shape[0] == self.values.shape[1] and self.rows == self.columns
        first_row = 1 if is_query_by_key else 0
        without_sink = np.asarray(self.values, np.float64)[first_row:, 1:]
        finite = without_sink[np.isfinite(without_sink)]
        if not finite.size:
            return self
        if self.diverging:
            largest = float(np.abs(finite).max())
            scaled = replace(self, low=-largest, high=largest)
        else:
            scaled = replace(
                self,
                low=float(finite.min()) if self.low is None else self.low,
                high=float(finite.max()) if self.high is None else self.high,
            )
        low, high = scaled._colour_range()
        sink = np.asarray(self.values, np.float64)[:, 0]
        if not ((sink < low) | (sink > high)).any():
            return scaled
        caption = f"{self.caption.rstrip('.')}. {SATURATES}".removeprefix(". ")
        return replace(scaled, caption=caption)

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches of the cells, their labels and the colour bar; cells with text are
        wider."""
        n_rows, n_columns = self.values.shape
        has_long_labels = _are_long(self.columns)
        cell_width = (
            0.82 if self.texts else 0.44 if self._writes_numbers else 0.36 if has_long_labels else 0.3
        )
        cell_height = 0.34 if self.texts or self._writes_numbers else 0.28
        if self.row_name == self.column_name and n_columns > 16:
            width, height = 3.6, 3.6
        else:
            width, height = max(2.2, cell_width * n_columns), max(1.4, cell_height * n_rows)
        height_of_labels = 0.9 if has_long_labels else 0.5
        return min(14.0, 1.6 + self.gutter + width), min(14.0, height_of_labels + height)

    @property
    def gutter(self) -> float:
        """Width, in inches, of the row labels left of the axes; labels are cut to 38 characters."""
        return 0.07 * min(max(map(len, self.rows), default=0), 38)

    def panel(self) -> Heatmap:
        """The heatmap to draw in a figure: its caption says what a frame means, unless it mentions frames."""
        if not (self.framed and self.frame_name) or "framed" in self.caption.lower():
            return self
        return replace(self, caption=f"{self.caption}; framed: {self.frame_name}".removeprefix("; "))

    def draw(self, axes: Any) -> None:
        """Draw cells, labels, frames and the colour bar."""
        low, high = self._colour_range()
        # interpolation="nearest": matplotlib's default blends neighbouring cells if a cell is a few pixels
        # wide.
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
        # About 11 characters per inch; 1.6 inches are the margins and the colour bar, as in `inches`.
        paper.ticks(axes.xaxis, self.columns, int(11 * (self.inches()[0] - 1.6 - self.gutter)))
        paper.ticks(axes.yaxis, self.rows)
        axes.set(xlabel=self.column_name, ylabel=self.row_name)
        for first_row, first_column, last_row, last_column in self.framed:
            axes.add_patch(paper.frame(first_column, first_row, last_column, last_row))
        self._write_into_cells(axes, low, high)
        paper.bar(axes, image, f"{self.value_name}, {self.unit}" if self.unit else self.value_name)

    @property
    def _writes_numbers(self) -> bool:
        """Whether a figure writes `numbers` into the cells: there are few enough to be read."""
        return bool(self.numbers) and max(self.values.shape) <= 16

    def _colour_range(self) -> tuple[float, float]:
        """Values at the (lower, upper) end of the colour scale, by the same rule as the page's JavaScript."""
        finite = self.values[np.isfinite(self.values)]
        smallest, largest = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        low = smallest if self.low is None else self.low
        high = largest if self.high is None else self.high
        if self.diverging:
            high = max(abs(low), abs(high)) or 1.0
            return -high, high
        # Cells that are all equal: a colour scale without extent would divide by zero.
        return low, high if high > low else low + 1.0

    def _write_into_cells(self, axes: Any, low: float, high: float) -> None:
        """Write `texts`, or else the values in the format `numbers`, into the cells, if one of them is set.

        Arguments:
            axes: Matplotlib axes.
            low: Value at the lower end of the colour scale.
            high: Value at the upper end of the colour scale.
        """
        n_columns = self.values.shape[1]
        if not self.texts and not self._writes_numbers:
            return
        # A frame is (first row, first column, last row, last column): equal corners frame a single cell.
        single_framed_cells = {frame[:2] for frame in self.framed if frame[:2] == frame[2:]}
        # 13.5 characters of this font size per inch; row labels and colour bar are about as wide as two
        # cells.
        characters_per_cell = max(4, int(13.5 * self.inches()[0] / (n_columns + 2)))
        for row, column in np.ndindex(self.values.shape):
            value = float(self.values[row, column])
            if not np.isfinite(value):
                continue
            text = self.texts[row][column] if self.texts else format(value, self.numbers)
            darkness = abs(value) / high if self.diverging else (value - low) / (high - low)
            axes.text(
                column,
                row,
                paper.fit(text, characters_per_cell),
                ha="center",
                va="center",
                fontsize=8 if self.texts else 7,
                color="white" if darkness > 0.6 else paper.INK,
                fontweight="bold" if (row, column) in single_framed_cells else "normal",
            )


def _are_long(column_labels: tuple[str, ...]) -> bool:
    """Whether column labels are too long to be written horizontally below cells: more than 3 characters."""
    return max(map(len, column_labels), default=0) > 3
