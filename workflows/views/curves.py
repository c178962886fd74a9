"""Numbers over a common x: curves, bars; and a curve through three dims."""

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
"""Sides of the box a curve through three dims is drawn in."""
BESIDE, AT_ENDS = 6, 10
"""Curves above which their names stand beside them, and at their ends."""


@dataclass(frozen=True)
class Line:
    """A curve: one value per point of x, NaN where there is none.

    control: dashed and grey.  strong: thick, before all others.  faint: thin, one of many, named at its end.
    band: low and high ends of an interval around it, [2, x].  level: what it is to be compared with, dashed.
    dots: single values that it sums up, [x, any].  family: curves of one have shades of one colour.
    """

    name: str
    values: Array
    control: bool = False
    strong: bool = False
    faint: bool = False
    band: Array | None = None
    level: float | None = None
    dots: Array | None = field(default=None, metadata={"page": False})
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class Lines(View):
    """Curves over a common x, which is numbers in rising order, or labels.

    low, high: what the y axis has to reach at least.  at: a place of x that is marked.  log, log_x: whether y
    or x is logarithmic. A value of 0 or below has no place on such a y axis: it is a gap in its curve, told
    by the cursor, and how many there are stands below; such an x is refused (ShapeError), as are labels.
    filled: figures fill what is below each curve.  apart: figures give each curve a baseline of its own, on
    a common scale.  floor: figures end there, however far below a curve falls.
    """

    kind: ClassVar[str] = "lines"
    is_drawn: ClassVar[bool] = True
    x: tuple[float, ...] | tuple[str, ...]
    lines: tuple[Line, ...]
    x_name: str
    y_name: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    at: float | None = None
    log: bool = False
    log_x: bool = False
    filled: bool = field(default=False, metadata={"page": False})
    apart: bool = field(default=False, metadata={"page": False})
    floor: float | None = field(default=None, metadata={"page": False})

    def __post_init__(self) -> None:
        for line in self.lines:
            labels.expect(f"values of {line.name!r}", line.values, (len(self.x),))
        wrong = [x for x in self.x if isinstance(x, str) or not x > 0] if self.log_x else []
        if wrong:
            raise ShapeError(
                f"expected numbers above 0 along a logarithmic {self.x_name!r}, found {wrong[0]!r}; leave "
                "out log_x"
            )

    @property
    def unplaced(self) -> int:
        """How many values a logarithmic y axis has no place for; those of a level count as one."""
        levels = [line.level for line in self.lines if line.level is not None]
        known = np.concatenate([*(np.ravel(line.values) for line in self.lines), levels])
        return int((known <= 0).sum()) if self.log else 0

    @classmethod
    def of(
        cls,
        array: xr.DataArray,
        title: str = "",
        caption: str = "",
        *,
        control: str = "",
        strong: Any = None,
        **told: Any,
    ) -> Lines:
        """From a labelled array [curve, x]: a curve per label of its first dim, names and unit its own unless
        `told`. A label that is text is a name by itself.  control: label of the one that is.  strong: label
        of the one that stands out; all others but the control are then faint.
        """
        by, across = map(str, array.dims)
        x = array[across].values.tolist()
        order = np.argsort(x, kind="stable") if not isinstance(x[0], str) else np.arange(len(x))
        is_named = array[by].dtype.kind in "UOT"
        stands_out = array[by].values == strong
        own = {
            "x": tuple(x[i] for i in order),
            "x_name": labels.word(across),
            "y_name": labels.name(array),
            "unit": labels.unit(array),
            "lines": tuple(
                Line(
                    label if is_named else f"{labels.word(by)} {label}",
                    row[order],
                    control=label == control,
                    strong=bool(is_strong),
                    faint=strong is not None and label != control and not is_strong,
                )
                for label, row, is_strong in zip(
                    labels.along(array, by), array.values, stands_out, strict=True
                )
            ),
        }
        return cls(title=title, caption=caption, **{**own, **told})

    def inches(self) -> tuple[float, float]:
        """The size of any plot; wider where x is many words, or names stand beside it."""
        wide = 0.34 * len(self.x) if self.x and isinstance(self.x[0], str) else 0.0
        names = [len(line.name) for line in self.lines if not line.faint]
        beside = 0.6 + 0.065 * max(names) if BESIDE < len(names) <= AT_ENDS else 0.0
        return min(14.0, max(5.2, 1.6 + wide) + beside), 3.5 if wide else 3.2

    def draw(self, axes: Any) -> None:
        """The curves, with a legend, or with their names at their ends where they are many."""
        named = [line for line in self.lines if not line.faint]
        own = [line for line in named if not line.control and not line.strong]
        controls = [id(line) for line in named if line.control]
        words = bool(self.x) and isinstance(self.x[0], str)
        x = np.arange(len(self.x)) if words else np.asarray(self.x, float)
        colours = {id(line): shade for line, shade in zip(own, self._shades(own), strict=True)}
        scale = max((np.nanmax(np.abs(line.values), initial=0.0) for line in self.lines), default=1.0) or 1.0
        for row, line in enumerate(self.lines):
            values = line.values / scale - 2.2 * row if self.apart else self._placed(line.values)
            look: dict[str, Any] = {"color": colours.get(id(line), paper.ACCENT), "lw": 1.9, "zorder": 2}
            if line.control:
                first = id(line) == controls[0]  # others beside it are dotted
                look |= {"color": paper.CONTROL, "lw": 1.4, "ls": "--" if first else ":", "zorder": 1}
            elif line.faint:
                look |= {"color": "#7aa6c2", "lw": 0.9, "alpha": 0.75, "zorder": 1}
            elif line.strong:
                look |= {"lw": 2.4, "zorder": 3}
            if len(x) <= 24 and not line.faint and not self.apart and (look.get("ls") != ":" or len(x) == 1):
                look |= {"marker": "o", "ms": 3.5}
            if line.dots is not None:
                scattered = np.random.default_rng(0).uniform(-0.07, 0.07, line.dots.shape)
                aside = 0.3 * (row - (len(self.lines) - 1) / 2)  # dots of one curve beside those of another
                places = (x[:, None] + (0.0 if self.log_x else aside + scattered)).ravel()
                axes.plot(places, line.dots.ravel(), ".", color=look["color"], ms=4, alpha=0.45, mew=0)
            if line.band is not None:
                # To the foot, where an end has no place: its own logarithm would be minus infinity.
                low, high = np.where(line.band <= 0, self._least, line.band) if self.log else line.band
                axes.fill_between(x, low, high, color=look["color"], alpha=0.22, lw=0)
            if line.level is not None and (line.level > 0 or not self.log):
                axes.axhline(line.level, color=look["color"], lw=1, ls="--", alpha=0.6)
            if self.filled and not line.control:
                axes.fill_between(x, values, color=look["color"], lw=0, label=line.name)
            else:
                axes.plot(x, values, label=None if line.faint else line.name, **look)
        self._scales(axes, x, words)
        if self.apart:
            paper.baselines(axes, [line.name for line in self.lines])
        elif len(named) > AT_ENDS:
            # In the colour of words, as curves may be pale.
            ends = [(_end(self._placed(line.values)), line.name, paper.SOFT) for line in named]
            paper.name_ends(axes, float(x[-1]), ends)
        else:
            faint = [line for line in self.lines if line.faint and line.name]
            ends = [(_end(self._placed(line.values)), line.name, paper.FAINT) for line in faint]
            paper.name_ends(axes, float(x[-1]), ends)
        if 1 < len(named) <= AT_ENDS and not self.apart:
            beside: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
            axes.legend(frameon=False, fontsize=8, **(beside if len(named) > BESIDE else {"loc": "best"}))

    def _placed(self, values: Array) -> Array:
        """Values, NaN where a logarithmic y axis has no place for one."""
        return np.where(values > 0, values, np.nan) if self.log else values

    @property
    def _least(self) -> float:
        """The smallest value above 0 of all curves and bands; infinite where there is none."""
        held = [each for line in self.lines for each in (line.values, line.band) if each is not None]
        known = np.concatenate(list(map(np.ravel, held)))
        return float(np.min(known[known > 0], initial=np.inf))

    def _shades(self, lines: list[Line]) -> list[Any]:
        """Colours of curves that are neither a control nor stand out."""
        kin = [line.family or line.name for line in lines]
        if len(set(kin)) < len(kin) and len(set(kin)) <= len(paper.SHADES):
            first = dict(zip(dict.fromkeys(kin), paper.shades(len(set(kin)), in_order=False), strict=True))
            tints = {name: iter(paper.tints(shade, kin.count(name))) for name, shade in first.items()}
            return [next(tints[name]) for name in kin]
        return paper.shades(len(lines), in_order=len(lines) > len(paper.SHADES) or self.filled)

    def _scales(self, axes: Any, x: Array, words: bool) -> None:
        """Ends, names and ticks of both axes."""
        paper.name_axes(axes, self.x_name, self.y_name, self.unit, log=self.log, log_x=self.log_x)
        if words:
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
                left_out = f"not drawn: {self.unplaced} value{'s' * (self.unplaced > 1)} of 0 or below"
                axes.text(0.01, 0.01, left_out, transform=axes.transAxes, fontsize=7, color=paper.FAINT)
        if self.log or self.apart:
            return
        bottom, top = axes.get_ylim()
        room = 0.03 * (
            (top if self.high is None else self.high) - (self.low if self.low is not None else bottom)
        )
        low = bottom if self.low is None else min(bottom, self.low - room)
        axes.set_ylim(
            low if self.low is None or bottom < self.low - room else self.low - room,
            top if self.high is None else max(top, self.high + room),
        )
        if self.floor is not None:
            axes.set_ylim(bottom=max(self.floor, axes.get_ylim()[0]))
        if low < 0 < axes.get_ylim()[1]:
            axes.axhline(0, color=paper.RULE, lw=0.8, zorder=0)


@dataclass(frozen=True, kw_only=True)
class Bars(View):
    """Bars over labels, one series beside the other, or on top of it (`stacked`); NaN takes no room.

    across: they lie, the first label at the bottom.  signed: coloured by their sign, as cells of a grid are.
    levels: heights that are marked, with their names.  log: a logarithmic y axis, which needs `low`.
    """

    kind: ClassVar[str] = "bars"
    on_page: ClassVar[bool] = False
    x: tuple[str, ...]
    lines: tuple[Line, ...]
    x_name: str
    y_name: str
    unit: str = ""
    stacked: bool = False
    across: bool = False
    signed: bool = False
    low: float | None = None
    high: float | None = None
    levels: tuple[tuple[float, str], ...] = ()
    log: bool = False

    @classmethod
    def of(cls, array: xr.DataArray, title: str = "", caption: str = "", **told: Any) -> Bars:
        """From a labelled array [series, x], as `Lines.of`."""
        own = Lines.of(array)
        shared = {name: getattr(own, name) for name in ("lines", "x_name", "y_name", "unit")}
        return cls(title=title, caption=caption, **{**shared, "x": tuple(map(str, own.x)), **told})

    def __post_init__(self) -> None:
        for line in self.lines:
            labels.expect(f"values of {line.name!r}", line.values, (len(self.x),))

    def inches(self) -> tuple[float, float]:
        """As many bars as there are."""
        if self.across:
            return 4.8, min(14.0, 0.9 + 0.24 * len(self.x))
        return min(14.0, max(4.6, 1.6 + 0.34 * len(self.x))), 3.2

    def draw(self, axes: Any) -> None:
        """The bars, with a legend for several series."""
        x, below = np.arange(len(self.x)), np.zeros(len(self.x))
        held = np.isfinite([line.values for line in self.lines])
        each = np.full(len(x), 0.8) if self.stacked else 0.8 / np.maximum(1, held.sum(0))
        own = [line for line in self.lines if not (line.control or line.strong)]
        ordered = self.stacked and len(own) > len(paper.SHADES)
        shades = iter(paper.shades(len(own), in_order=ordered)[:: -1 if ordered else 1])
        draw, span, end = (
            (axes.barh, axes.hlines, "left") if self.across else (axes.bar, axes.vlines, "bottom")
        )
        for i, line in enumerate(self.lines):
            colour: Any = paper.CONTROL if line.control else paper.ACCENT if line.strong else next(shades)
            if self.signed:
                colour = np.where(np.nan_to_num(line.values) < 0, paper.BELOW, paper.ABOVE)
            place = x if self.stacked else x + (held[:i].sum(0) - (held.sum(0) - 1) / 2) * each
            draw(place, line.values, each * 0.94, **{end: below}, color=colour, label=line.name)
            below = below + line.values if self.stacked else below
            if line.band is not None:
                span(place, *line.band, color=paper.INK, lw=1)
            if line.dots is not None:
                apart = place[:, None] + np.linspace(-0.2, 0.2, line.dots.shape[1]) * each[:, None]
                at = (line.dots, apart) if self.across else (apart, line.dots)
                axes.plot(*map(np.ravel, at), ".", color=paper.INK, ms=3, alpha=0.6)
        if self.across:
            told = f"{self.y_name}, {self.unit}" if self.unit else self.y_name
            axes.set(ylabel=self.x_name, xlabel=told)
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
            right = {"xycoords": axes.get_yaxis_transform(), "annotation_clip": False, "va": "center"}
            axes.annotate(f" {name}", (1.0, height), fontsize=7, color=paper.SOFT, **right)
        # As high as the highest level, if nothing else is told.
        (axes.set_xlim if self.across else axes.set_ylim)(self.low, self.high)
        if len(self.lines) > 1:
            beside: Any = {"bbox_to_anchor": (1.0, 0.5), "loc": "center left"}
            where = {"loc": "best"} if self.levels or self.across else beside
            axes.legend(frameon=False, fontsize=8, reverse=self.stacked or self.across, **where)


def best_view(points: Array) -> tuple[int, int]:
    """Elevation and azimuth, in degrees, from which most of the variance of points [point, 3] is seen, as
    they lie in their box: of the views, in steps of 5 degrees, that show three sides of it."""
    spans = np.ptp(points, axis=0)
    within = points / np.where(spans > 0, spans, 1.0) * np.array(BOX)
    hidden: dict[tuple[int, int], float] = {}
    for elevation in range(15, 61, 5):
        for azimuth in range(-180, 180, 5):
            if 15 <= azimuth % 90 <= 75:
                up, around = np.radians(elevation), np.radians(azimuth)
                flat = np.cos(up)
                towards = np.array([flat * np.cos(around), flat * np.sin(around), np.sin(up)])
                hidden[elevation, azimuth] = round(float((within @ towards).var()), 12)
    return min(hidden, key=lambda view: hidden[view])


@dataclass(frozen=True, kw_only=True)
class Curve(View):
    """A curve through three dims: `points` [point, 3], each with a number that shades it; seen from where
    most of its variance shows."""

    kind: ClassVar[str] = "curve"
    on_page: ClassVar[bool] = False
    projection: ClassVar[str | None] = "3d"
    points: Array
    values: Array
    value_name: str
    names: tuple[str, str, str]

    def __post_init__(self) -> None:
        labels.expect("points", self.points, (len(self.values), 3))

    def inches(self) -> tuple[float, float]:
        """A square, and room for what the shades mean."""
        return 5.2, 4.2

    def draw(self, axes: Any) -> None:
        """The curve in a box without numbers."""
        axes.plot(*self.points.T, color=paper.FAINT, lw=0.8, alpha=0.7)
        shades = axes.scatter(*self.points.T, c=self.values, cmap="viridis", s=22, depthshade=False)
        for name, text in zip("xyz", self.names, strict=True):
            getattr(axes, f"set_{name}label")(text, labelpad=-8, fontsize=8)
            getattr(axes, f"set_{name}ticklabels")([])
            side = getattr(axes, f"{name}axis")
            side.pane.set_facecolor("#f8f9fb")
            side.pane.set_edgecolor("#d5d8df")
            side.line.set_color("#c5c9d3")
            side._axinfo["grid"].update(color="#e6e8ed", linewidth=0.6)
            side.set_tick_params(length=0, width=0)
        axes.set_box_aspect(BOX, zoom=0.92)  # names of the axes stand outside of it
        elevation, azimuth = best_view(self.points)
        axes.view_init(elev=elevation, azim=azimuth)
        found = axes.figure.colorbar(shades, ax=axes, fraction=0.035, pad=0.08, shrink=0.7)
        found.set_label(self.value_name)
        found.outline.set_visible(False)


def _end(values: Array) -> float:
    """The last of some values that is a number; NaN where none is."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else float("nan")
