"""Views of curves and bars over a common x axis, and of a curve in three dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError
from . import labels, paper
from .view import View

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Bars", "Curve", "Line", "Lines"]

BOX = (1.0, 1.0, 0.8)
"""Relative side lengths of the box around a three-dimensional curve."""
BESIDE, AT_ENDS = 6, 10
"""Above BESIDE curves the legend is beside the axes; above AT_ENDS curves their names are at their ends."""


@dataclass(frozen=True)
class Line:
    """A curve of `Lines`, or a series of bars of `Bars`."""

    name: str
    """Name in the legend."""
    values: Array
    """Value at each point of the x axis, float [x]; NaN for a gap."""
    control: bool = False
    """Whether this is a control: dashed and grey."""
    strong: bool = False
    """Whether the curve is emphasised: thick, and in front of the others."""
    faint: bool = False
    """Whether the curve is drawn thin and named at its end instead of in the legend, as one of many."""
    band: Array | None = None
    """Lower and upper end of an interval around each value, float [2, x]; None for no intervals."""
    level: float | None = None
    """Reference value for this curve, drawn as a dashed horizontal line; None for none."""
    dots: Array | None = field(default=None, metadata={"page": False})
    """Individual values that the curve summarises, float [x, sample]; drawn in figures only."""
    family: str = ""
    """Name of the curve's group, drawn in tints of one colour; "" for a curve without a group."""


@dataclass(frozen=True, kw_only=True)
class Lines(View):
    """Curves over a common x axis.

    On a logarithmic y axis a value of 0 or below leaves a gap in its curve; a note in the plot says how many
    such values there are. A logarithmic x axis needs numbers above 0; others raise ShapeError.
    """

    kind: ClassVar[str] = "lines"
    is_drawn: ClassVar[bool] = True
    x: tuple[float, ...] | tuple[str, ...]
    """Points of the x axis: numbers in increasing order, or text labels."""
    lines: tuple[Line, ...]
    """The curves."""
    x_name: str
    """Label of the x axis."""
    y_name: str
    """Label of the y axis."""
    unit: str = ""
    """Unit of the y axis; "" for none."""
    low: float | None = None
    """Value that the y axis includes at its lower end, even if all curves lie above; None for no such
    value."""
    high: float | None = None
    """Value that the y axis includes at its upper end, even if all curves lie below; None for no such
    value."""
    at: float | None = None
    """Value of x that is marked by a vertical line; None for no mark."""
    log: bool = False
    """Whether the y axis is logarithmic."""
    log_x: bool = False
    """Whether the x axis is logarithmic."""
    filled: bool = field(default=False, metadata={"page": False})
    """Whether figures fill the area below each curve."""
    apart: bool = field(default=False, metadata={"page": False})
    """Whether figures draw each curve over a baseline of its own, one below the other, on a common scale."""
    floor: float | None = field(default=None, metadata={"page": False})
    """Lower end of the y axis of figures, even if curves fall below it and are cut; None for no such end."""

    def __post_init__(self) -> None:
        for line in self.lines:
            labels.expect(f"values of {line.name!r}", line.values, (len(self.x),))
        invalid = [x for x in self.x if isinstance(x, str) or not x > 0] if self.log_x else []
        if invalid:
            raise ShapeError(
                f"expected numbers above 0 on the logarithmic x axis {self.x_name!r}, found {invalid[0]!r}; "
                "pass log_x=False for a linear axis"
            )

    @property
    def unplaced(self) -> int:
        """Number of values and levels of 0 or below, which a logarithmic y axis cannot show; else 0."""
        levels = [line.level for line in self.lines if line.level is not None]
        values = np.concatenate([*(np.ravel(line.values) for line in self.lines), levels])
        return int((values <= 0).sum()) if self.log else 0

    @classmethod
    def of(
        cls,
        array: xr.DataArray,
        title: str = "",
        caption: str = "",
        *,
        control: str = "",
        strong: Any = None,
        **view_fields: Any,
    ) -> Lines:
        """Build curves from a labelled array [curve, x]; numbers along x are sorted.

        Arguments:
            array: Values, one curve per label of the first dim. A text label is the curve's name; a number is
                put after the name of the dim ("layer 3"). Labels and unit of the axes are read from the dims,
                `long_name` and `units`.
            title: Title of the view.
            caption: Caption of the view.
            control: Label of the control curve; "" for none.
            strong: Label of the emphasised curve, which makes all others except the control faint; None for
                none.
            view_fields: Other fields of the view; they override those derived from the array.
        """
        curve_dim, x_dim = map(str, array.dims)
        x = array[x_dim].values.tolist()
        # Labels keep the order of the array; numbers must increase along an axis.
        order = np.argsort(x, kind="stable") if not isinstance(x[0], str) else np.arange(len(x))
        is_named = array[curve_dim].dtype.kind in "UOT"
        is_emphasised = array[curve_dim].values == strong
        array_fields = {
            "x": tuple(x[i] for i in order),
            "x_name": labels.word(x_dim),
            "y_name": labels.name(array),
            "unit": labels.unit(array),
            "lines": tuple(
                Line(
                    label if is_named else f"{labels.word(curve_dim)} {label}",
                    row[order],
                    control=label == control,
                    strong=bool(is_strong),
                    faint=strong is not None and label != control and not is_strong,
                )
                for label, row, is_strong in zip(
                    labels.along(array, curve_dim), array.values, is_emphasised, strict=True
                )
            ),
        }
        return cls(title=title, caption=caption, **{**array_fields, **view_fields})

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches; wider for many text labels on x or a legend beside the axes."""
        width_of_labels = 0.34 * len(self.x) if self.x and isinstance(self.x[0], str) else 0.0
        name_lengths = [len(line.name) for line in self.lines if not line.faint]
        has_legend_beside = BESIDE < len(name_lengths) <= AT_ENDS
        width_of_legend = 0.6 + 0.065 * max(name_lengths) if has_legend_beside else 0.0
        width = max(5.2, 1.6 + width_of_labels) + width_of_legend
        return min(14.0, width), 3.5 if width_of_labels else 3.2

    def draw(self, axes: Any) -> None:
        """Draw the curves with a legend; more than AT_ENDS curves have their names at their ends instead."""
        named = [line for line in self.lines if not line.faint]
        coloured = [line for line in named if not line.control and not line.strong]
        controls = [id(line) for line in named if line.control]
        has_labels = bool(self.x) and isinstance(self.x[0], str)
        x = np.arange(len(self.x)) if has_labels else np.asarray(self.x, float)
        # By id: lines hold arrays and cannot be hashed.
        colours = {id(line): shade for line, shade in zip(coloured, self._shades(coloured), strict=True)}
        scale = max((np.nanmax(np.abs(line.values), initial=0.0) for line in self.lines), default=1.0) or 1.0
        for row, line in enumerate(self.lines):
            # Scaled to -1..1, so that curves over baselines that are 2.2 apart do not overlap.
            values = line.values / scale - 2.2 * row if self.apart else self._drawable(line.values)
            look: dict[str, Any] = {"color": colours.get(id(line), paper.ACCENT), "lw": 1.9, "zorder": 2}
            if line.control:
                style = "--" if id(line) == controls[0] else ":"  # further controls are dotted
                look |= {"color": paper.CONTROL, "lw": 1.4, "ls": style, "zorder": 1}
            elif line.faint:
                look |= {"color": "#7aa6c2", "lw": 0.9, "alpha": 0.75, "zorder": 1}
            elif line.strong:
                look |= {"lw": 2.4, "zorder": 3}
            # A dotted control has no dots at its points, except at a single one, where no line is visible.
            if len(x) <= 24 and not line.faint and not self.apart and (look.get("ls") != ":" or len(x) == 1):
                look |= {"marker": "o", "ms": 3.5}
            if line.dots is not None:
                # Dots are spread in x, and those of different curves are side by side, so that few overlap.
                # The seed is fixed: the same data gives the same PNG.
                jitter = np.random.default_rng(0).uniform(-0.07, 0.07, line.dots.shape)
                offset = 0.3 * (row - (len(self.lines) - 1) / 2)
                dot_x = (x[:, None] + (0.0 if self.log_x else offset + jitter)).ravel()
                axes.plot(dot_x, line.dots.ravel(), ".", color=look["color"], ms=4, alpha=0.45, mew=0)
            if line.band is not None:
                # An end of 0 or below has no logarithm: it is drawn at the smallest positive value.
                low, high = (
                    np.where(line.band <= 0, self._smallest_positive, line.band) if self.log else line.band
                )
                axes.fill_between(x, low, high, color=look["color"], alpha=0.22, lw=0)
            if line.level is not None and (line.level > 0 or not self.log):
                axes.axhline(line.level, color=look["color"], lw=1, ls="--", alpha=0.6)
            if self.filled and not line.control:
                axes.fill_between(x, values, color=look["color"], lw=0, label=line.name)
            else:
                axes.plot(x, values, label=None if line.faint else line.name, **look)
        self._scales(axes, x, has_labels)
        if self.apart:
            paper.baselines(axes, [line.name for line in self.lines])
        elif len(named) > AT_ENDS:
            # In the colour of text: a pale curve's colour would be hard to read.
            ends = [(_last_finite(self._drawable(line.values)), line.name, paper.SOFT) for line in named]
            paper.name_ends(axes, float(x[-1]), ends)
        else:
            faint = [line for line in self.lines if line.faint and line.name]
            ends = [(_last_finite(self._drawable(line.values)), line.name, paper.FAINT) for line in faint]
            paper.name_ends(axes, float(x[-1]), ends)
        if 1 < len(named) <= AT_ENDS and not self.apart:
            beside: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
            axes.legend(frameon=False, fontsize=8, **(beside if len(named) > BESIDE else {"loc": "best"}))

    def _drawable(self, values: Array) -> Array:
        """Values with NaN in place of those that a logarithmic y axis cannot show; others unchanged."""
        return np.where(values > 0, values, np.nan) if self.log else values

    @property
    def _smallest_positive(self) -> float:
        """The smallest positive value of all curves and bands; infinity if there is none."""
        arrays = [array for line in self.lines for array in (line.values, line.band) if array is not None]
        # Flat, as curves are [x] and bands [2, x].
        values = np.concatenate(list(map(np.ravel, arrays)))
        return float(np.min(values[values > 0], initial=np.inf))

    def _shades(self, lines: list[Line]) -> list[Any]:
        """Colour of each curve: tints of one hue within a family, else one hue per curve.

        Arguments:
            lines: The curves that are neither controls nor emphasised.
        """
        # A curve without a family is a family of its own.
        families = [line.family or line.name for line in lines]
        n_families = len(set(families))
        if n_families < len(families) and n_families <= len(paper.SHADES):
            hues = dict(zip(dict.fromkeys(families), paper.shades(n_families, in_order=False), strict=True))
            tints = {family: iter(paper.tints(hue, families.count(family))) for family, hue in hues.items()}
            return [next(tints[family]) for family in families]
        # Too many curves for distinct hues: light to dark, in their order.
        return paper.shades(len(lines), in_order=len(lines) > len(paper.SHADES) or self.filled)

    def _scales(self, axes: Any, x: Array, has_labels: bool) -> None:
        """Set limits, labels and ticks of both axes.

        Arguments:
            axes: Matplotlib axes.
            x: Positions of the points on the x axis.
            has_labels: Whether the x axis has text labels instead of numbers.
        """
        paper.name_axes(axes, self.x_name, self.y_name, self.unit, log=self.log, log_x=self.log_x)
        if has_labels:
            paper.ticks(axes.xaxis, [str(label) for label in self.x])
        elif self.log_x:
            paper.logarithmic(axes.xaxis)
        elif np.array_equal(x, np.round(x)):
            paper.integers(axes.xaxis)
        if self.at is not None:
            axes.axvline(self.at, color=paper.ACCENT, lw=0.8, alpha=0.6, zorder=0)
        if self.log:
            paper.logarithmic(axes.yaxis)
            ends = [*axes.get_ylim(), *(end for end in (self.low, self.high) if end is not None and end > 0)]
            axes.set_ylim(min(ends), max(ends))
            if self.unplaced:
                omission = f"not drawn: {self.unplaced} value{'s' * (self.unplaced > 1)} of 0 or below"
                axes.text(0.01, 0.01, omission, transform=axes.transAxes, fontsize=7, color=paper.FAINT)
        if self.log or self.apart:
            return
        bottom, top = axes.get_ylim()
        # A curve that runs along `low` or `high` is not cut by the border of the axes.
        extent = (top if self.high is None else self.high) - (bottom if self.low is None else self.low)
        margin = 0.03 * extent
        low = bottom if self.low is None else min(bottom, self.low - margin)
        axes.set_ylim(low, top if self.high is None else max(top, self.high + margin))
        if self.floor is not None:
            axes.set_ylim(bottom=max(self.floor, axes.get_ylim()[0]))
        if low < 0 < axes.get_ylim()[1]:
            axes.axhline(0, color=paper.RULE, lw=0.8, zorder=0)


@dataclass(frozen=True, kw_only=True)
class Bars(View):
    """A bar chart over text labels, with one or several series; a NaN value has no bar and takes no space."""

    kind: ClassVar[str] = "bars"
    on_page: ClassVar[bool] = False
    x: tuple[str, ...]
    """Label of each group of bars, which has one bar per series."""
    lines: tuple[Line, ...]
    """The series; `values` are the heights of its bars."""
    x_name: str
    """Label of the category axis."""
    y_name: str
    """Label of the value axis."""
    unit: str = ""
    """Unit of the value axis; "" for none."""
    stacked: bool = False
    """Whether the bars of a label are stacked instead of side by side."""
    across: bool = False
    """Whether bars are horizontal, with the first label at the bottom."""
    signed: bool = False
    """Whether bars are orange above and blue below zero, as in a diverging heatmap, instead of by series."""
    low: float | None = None
    """Start of the value axis; None for automatic."""
    high: float | None = None
    """End of the value axis; None for automatic."""
    levels: tuple[tuple[float, str], ...] = ()
    """(value, name) of each horizontal reference line."""
    log: bool = False
    """Whether the value axis is logarithmic; then `low` is required."""

    @classmethod
    def of(cls, array: xr.DataArray, title: str = "", caption: str = "", **view_fields: Any) -> Bars:
        """Build bars from a labelled array [series, x]; labels and unit are read from it as by `Lines.of`.

        Arguments:
            array: Heights of the bars, one series per label of the first dim.
            title: Title of the view.
            caption: Caption of the view.
            view_fields: Other fields of the view; they override those derived from the array.
        """
        lines = Lines.of(array)
        shared = {name: getattr(lines, name) for name in ("lines", "x_name", "y_name", "unit")}
        return cls(title=title, caption=caption, **{**shared, "x": tuple(map(str, lines.x)), **view_fields})

    def __post_init__(self) -> None:
        for line in self.lines:
            labels.expect(f"values of {line.name!r}", line.values, (len(self.x),))

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches; the side along the category axis grows with the number of labels."""
        if self.across:
            return 4.8, min(14.0, 0.9 + 0.24 * len(self.x))
        return min(14.0, max(4.6, 1.6 + 0.34 * len(self.x))), 3.2

    def draw(self, axes: Any) -> None:
        """Draw the bars, and a legend if there are several series."""
        x, base = np.arange(len(self.x)), np.zeros(len(self.x))
        is_finite = np.isfinite([line.values for line in self.lines])
        # The bars of one label share its width: a series without a value there leaves no gap.
        widths = np.full(len(x), 0.8) if self.stacked else 0.8 / np.maximum(1, is_finite.sum(0))
        coloured = [line for line in self.lines if not (line.control or line.strong)]
        ordered = self.stacked and len(coloured) > len(paper.SHADES)
        shades = iter(paper.shades(len(coloured), in_order=ordered)[:: -1 if ordered else 1])
        draw_bars, draw_bands, base_name = (
            (axes.barh, axes.hlines, "left") if self.across else (axes.bar, axes.vlines, "bottom")
        )
        for i, line in enumerate(self.lines):
            colour: Any = paper.CONTROL if line.control else paper.ACCENT if line.strong else next(shades)
            if self.signed:
                colour = np.where(np.nan_to_num(line.values) < 0, paper.BELOW, paper.ABOVE)
            # Centre of each bar: n finite bars of a label lie symmetrically around it.
            centres = x if self.stacked else x + (is_finite[:i].sum(0) - (is_finite.sum(0) - 1) / 2) * widths
            draw_bars(centres, line.values, widths * 0.94, **{base_name: base}, color=colour, label=line.name)
            base = base + line.values if self.stacked else base
            if line.band is not None:
                draw_bands(centres, *line.band, color=paper.INK, lw=1)
            if line.dots is not None:
                dot_x = centres[:, None] + np.linspace(-0.2, 0.2, line.dots.shape[1]) * widths[:, None]
                points = (line.dots, dot_x) if self.across else (dot_x, line.dots)
                axes.plot(*map(np.ravel, points), ".", color=paper.INK, ms=3, alpha=0.6)
        if self.across:
            value_label = f"{self.y_name}, {self.unit}" if self.unit else self.y_name
            axes.set(ylabel=self.x_name, xlabel=value_label)
            axes.axvline(0, color=paper.SOFT, lw=0.8)
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
        else:
            paper.name_axes(axes, self.x_name, self.y_name, self.unit, log=self.log)
        if self.log:
            paper.logarithmic(axes.yaxis)
        paper.ticks(axes.yaxis if self.across else axes.xaxis, self.x, int(11 * (self.inches()[0] - 1.2)))
        for height, name in self.levels:
            axes.axhline(height, color=paper.CONTROL, lw=1.0, ls="--")
            at_right_end = {"xycoords": axes.get_yaxis_transform(), "annotation_clip": False, "va": "center"}
            axes.annotate(f" {name}", (1.0, height), fontsize=7, color=paper.SOFT, **at_right_end)
        # After the levels, which extend the axis: None keeps the automatic limit.
        (axes.set_xlim if self.across else axes.set_ylim)(self.low, self.high)
        if len(self.lines) > 1:
            beside: Any = {"bbox_to_anchor": (1.0, 0.5), "loc": "center left"}
            location = {"loc": "best"} if self.levels or self.across else beside
            # Reversed, so that the legend has the order of the stack, which grows upward.
            axes.legend(frameon=False, fontsize=8, reverse=self.stacked or self.across, **location)


def best_view(points: Array) -> tuple[int, int]:
    """(elevation, azimuth), in degrees, of the line of sight that shows most of the variance of points.

    Searched in steps of 5 degrees among the lines of sight that show three sides of the box.

    Arguments:
        points: Float [point, 3]; each axis is scaled to the side of BOX, as matplotlib draws it.
    """
    spans = np.ptp(points, axis=0)
    scaled = points / np.where(spans > 0, spans, 1.0) * np.array(BOX)
    # Variance along the line of sight, which a drawing in the plane cannot show.
    hidden_variance: dict[tuple[int, int], float] = {}
    for elevation in range(15, 61, 5):
        for azimuth in range(-180, 180, 5):
            # Nearer to a multiple of 90 degrees, one side of the box would be seen edge-on.
            if 15 <= azimuth % 90 <= 75:
                theta, phi = np.radians(elevation), np.radians(azimuth)
                sight = np.array([np.cos(theta) * np.cos(phi), np.cos(theta) * np.sin(phi), np.sin(theta)])
                # Rounded, so that rounding errors do not choose among equally good views of symmetric points.
                hidden_variance[elevation, azimuth] = round(float((scaled @ sight).var()), 12)
    return min(hidden_variance, key=lambda angles: hidden_variance[angles])


@dataclass(frozen=True, kw_only=True)
class Curve(View):
    """A curve in three dimensions, coloured along its points, seen from the direction of `best_view`."""

    kind: ClassVar[str] = "curve"
    on_page: ClassVar[bool] = False
    projection: ClassVar[str | None] = "3d"
    points: Array
    """Coordinates of the points, in order along the curve, float [point, 3]."""
    values: Array
    """Number that colours each point, float [point]."""
    value_name: str
    """Name of this number; label of the colour bar."""
    names: tuple[str, str, str]
    """Labels of the three axes."""

    def __post_init__(self) -> None:
        labels.expect("points", self.points, (len(self.values), 3))

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches: a square box and a colour bar."""
        return 5.2, 4.2

    def draw(self, axes: Any) -> None:
        """Draw the curve in a box whose axes have no tick labels."""
        axes.plot(*self.points.T, color=paper.FAINT, lw=0.8, alpha=0.7)
        # depthshade=False: matplotlib fades points that are farther away, but here the colour is a number.
        shades = axes.scatter(*self.points.T, c=self.values, cmap="viridis", s=22, depthshade=False)
        for name, text in zip("xyz", self.names, strict=True):
            getattr(axes, f"set_{name}label")(text, labelpad=-8, fontsize=8)
            getattr(axes, f"set_{name}ticklabels")([])
            side = getattr(axes, f"{name}axis")
            side.pane.set_facecolor("#f8f9fb")
            side.pane.set_edgecolor("#d5d8df")
            side.line.set_color("#c5c9d3")
            # matplotlib has no public setting for the grid of a single 3D axis.
            side._axinfo["grid"].update(color="#e6e8ed", linewidth=0.6)
            side.set_tick_params(length=0, width=0)
        axes.set_box_aspect(BOX, zoom=0.92)  # the axis labels are outside the box and need space
        elevation, azimuth = best_view(self.points)
        axes.view_init(elev=elevation, azim=azimuth)
        colour_bar = axes.figure.colorbar(shades, ax=axes, fraction=0.035, pad=0.08, shrink=0.7)
        colour_bar.set_label(self.value_name)
        colour_bar.outline.set_visible(False)


def _last_finite(values: Array) -> float:
    """The last finite one of the values; NaN if none is finite."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else float("nan")
