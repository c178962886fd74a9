"""A matrix as coloured cells."""

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
"""What a caption says where the cells of the first token have no colour of their own."""


@dataclass(frozen=True, kw_only=True)
class Heatmap(View):
    """A matrix as coloured cells: `values` [row, column], NaN where there is none.

    rows, columns: labels.  row_name, column_name, value_name, unit: what the tooltip calls them.
    low, high: ends of the colour scale; None takes those of the values.  diverging: colours part at zero, and
    the scale is as long below it as above.  upward: the first row lies at the bottom, as layers do.
    framed: blocks of cells with a frame around, each (first row, first column, last row, last column).
    frame_name: what a frame means, beside the colours of a page and in the caption of a figure.
    """

    kind: ClassVar[str] = "heatmap"
    is_drawn: ClassVar[bool] = True
    values: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_name: str = "layer"
    column_name: str = "position"
    value_name: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    diverging: bool = False
    upward: bool = False
    framed: tuple[tuple[int, int, int, int], ...] = ()
    frame_name: str = ""
    texts: tuple[tuple[str, ...], ...] = field(default=(), metadata={"page": False})
    """What a figure writes into the cells; empty: nothing, or, in few cells, their numbers."""
    numbers: str = field(default="", metadata={"page": False})
    """Format of numbers that a figure writes into up to 16 x 16 cells; "": none."""

    def __post_init__(self) -> None:
        labels.expect("values", self.values, (len(self.rows), len(self.columns)))

    @classmethod
    def of(cls, array: xr.DataArray, title: str = "", caption: str = "", **told: Any) -> Heatmap:
        """From a labelled array of two dims, rows first: names, labels and unit are its own unless `told`.
        Layers lie upward."""
        down, across = map(str, array.dims)
        own = {
            "rows": labels.along(array, down),
            "columns": labels.along(array, across),
            "row_name": labels.word(down),
            "column_name": labels.word(across),
            "value_name": labels.name(array),
            "unit": labels.unit(array),
            "upward": down == "layer",
        }
        return cls(title=title, caption=caption, **{**own, "values": array.values, **told})

    def without_first_token(self) -> Heatmap:
        """With colours between the ends of all columns but the first, which is the first token of a prompt.

        Models use that token as an attention sink: its norms and weights are a hundred times those of the
        others, which then all have one colour. Its own cells saturate; where they do, the caption says so.
        With queries down and keys across, the first row is left out, too: the first token reads itself alone.
        """
        first_row = int(self.values.shape[0] == self.values.shape[1] and self.rows == self.columns)
        others = np.asarray(self.values, np.float64)[first_row:, 1:]
        finite = others[np.isfinite(others)]
        if not finite.size:
            return self
        scaled = replace(
            self,
            low=float(finite.min()) if self.low is None else self.low,
            high=float(finite.max()) if self.diverging or self.high is None else self.high,
        )
        if self.diverging:
            scaled = replace(scaled, low=-float(np.abs(finite).max()), high=float(np.abs(finite).max()))
        low, high = scaled._ends()
        sink = np.asarray(self.values, np.float64)[:, 0]
        if not ((sink < low) | (sink > high)).any():
            return scaled
        caption = f"{self.caption.rstrip('.')}. {SATURATES}".removeprefix(". ")
        return replace(scaled, caption=caption)

    def inches(self) -> tuple[float, float]:
        """Room for labels and cells; wider ones where there is text in them."""
        rows, columns = self.values.shape
        cell = 0.82 if self.texts else 0.44 if self.numbers else 0.36 if _is_long(self.columns) else 0.3
        tall = 0.34 if self.texts or self.numbers else 0.28
        square = self.row_name == self.column_name and columns > 16
        across, down = max(2.2, cell * columns), max(1.4, tall * rows)
        below = 0.9 if _is_long(self.columns) else 0.5
        wide, high = (3.6, 3.6) if square else (across, down)
        return min(14.0, 1.6 + self.gutter + wide), min(14.0, below + high)

    @property
    def gutter(self) -> float:
        """See `View`; as long as the longest name of a row, of 38 characters at most."""
        return 0.07 * min(max(map(len, self.rows), default=0), 38)

    def panel(self) -> Heatmap:
        """With what a frame means in its caption, unless that tells it."""
        if not (self.framed and self.frame_name) or "framed" in self.caption.lower():
            return self
        return replace(self, caption=f"{self.caption}; framed: {self.frame_name}".removeprefix("; "))

    def draw(self, axes: Any) -> None:
        """Cells, their labels, frames, and the colours' meaning."""
        low, high = self._ends()
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
        for top, left, bottom, right in self.framed:
            axes.add_patch(paper.frame(left, bottom, right, top))
        self._write(axes, low, high)
        paper.bar(axes, image, f"{self.value_name}, {self.unit}" if self.unit else self.value_name)

    def _ends(self) -> tuple[float, float]:
        """Ends of the colours, as a page has them."""
        finite = self.values[np.isfinite(self.values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        low, high = low if self.low is None else self.low, high if self.high is None else self.high
        if self.diverging:
            high = max(abs(low), abs(high)) or 1.0
            return -high, high
        return low, high if high > low else low + 1.0

    def _write(self, axes: Any, low: float, high: float) -> None:
        """Texts, or numbers, in the cells; bold in those with a frame of their own."""
        if not self.texts and not (self.numbers and max(self.values.shape) <= 16):
            return
        own = {(top, left) for top, left, bottom, right in self.framed if (top, left) == (bottom, right)}
        room = max(4, int(13.5 * self.inches()[0] / (self.values.shape[1] + 2)))
        for row, column in np.ndindex(self.values.shape):
            value = float(self.values[row, column])
            if not np.isfinite(value):
                continue
            text = self.texts[row][column] if self.texts else format(value, self.numbers)
            share = abs(value) / high if self.diverging else (value - low) / (high - low)
            axes.text(
                column,
                row,
                paper.fit(text, room),
                ha="center",
                va="center",
                fontsize=8 if self.texts else 7,
                color="white" if share > 0.6 else paper.INK,
                fontweight="bold" if (row, column) in own else "normal",
            )


def _is_long(names: tuple[str, ...]) -> bool:
    return max(map(len, names), default=0) > 3
