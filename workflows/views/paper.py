"""How figures and tables look: colours, type, titles, footers, the layout of panels, PNG files.

Border: numbers and words in, drawings out; knows no workflow and no store, and of a view only that it can say
how large a panel it wants (`inches`) and draw it (`draw`). Importing this module imports neither matplotlib
nor rich; drawing without matplotlib raises MissingExtra. Figures are built without pyplot: no global state,
no window.

Colours are those of a page (report/assets/core.js): a number has the same one wherever it is seen.
"""

from __future__ import annotations

import base64
import io
import math
import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...stages.logits.lens import format_text
from ...store.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable

DRAWING = 10
"""Moves when figures change their looks, so that files drawn before are drawn anew."""

INK, SOFT, FAINT, ACCENT, CONTROL = "#1f2430", "#5b6270", "#8a90a0", "#c2410c", "#9aa1b1"
BLUE, RULE = "#1d5b7f", "#d5d8df"
SHADES = ("#7e22ce", "#4d7c0f", "#0f766e", "#a16207", "#be185d", "#475569")
"""Of curves and bars that are several, in order: neither blue nor orange, which beside a grid mean a sign."""
RAMPS = {
    "sequential": ["#f4f6f8", "#cfe3ed", "#8cbdd5", "#3f86ad", "#123c5a"],
    "diverging": ["#134e6e", "#7db0ca", "#f5f5f3", "#eba47a", "#a63a0c"],
}
BELOW, ABOVE = RAMPS["diverging"][0], RAMPS["diverging"][-1]
"""Of numbers below and above zero, in bars as in grids."""
STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c5c9d3",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.grid": False,
    "figure.facecolor": "white",
    # Prompts are prose: a dollar sign is a dollar sign.
    "text.parse_math": False,
}
LEAST = 12
"""Characters that a column of text gets, before numbers of a table give way."""
WIDEST = 17.0
"""Inches of a row of panels; what does not fit goes into the next one."""
MARKS = 6
"""Numbers along a logarithmic axis, at most."""
NAME_STEP = 0.045
"""Share of the height of axes that a name at the end of a line takes."""
LOG = ", log scale"
"""Behind the name of such an axis."""


class Panel(Protocol):
    """What a figure needs to know of a view; see `View`."""

    projection: ClassVar[str | None]

    @property
    def title(self) -> str: ...  # noqa: D102

    @property
    def caption(self) -> str: ...  # noqa: D102

    @property
    def gutter(self) -> float: ...  # noqa: D102

    def inches(self) -> tuple[float, float]: ...  # noqa: D102

    def draw(self, axes: Any) -> None: ...  # noqa: D102


def compose(
    panels: Sequence[Panel], *, title: str = "", told: str = "", foot: str = "", columns: int = 0
) -> Figure:
    """Panels side by side in rows, each as large as it wants to be; a title above, a footer below.

    told: a line under the title.  columns: panels of a row at most; 0: as many as fit.
    """
    with style():
        wanted = [panel.inches() for panel in panels]
        rows: list[list[int]] = [[]]
        for i, (width, _) in enumerate(wanted):
            held = rows[-1]
            if held and (len(held) == columns or sum(wanted[j][0] for j in held) + width > WIDEST):
                rows.append([])
            rows[-1].append(i)
        wide = min(WIDEST, max(5.5, *(sum(wanted[i][0] for i in row) for row in rows)))
        heights = [max(wanted[i][1] for i in row) + 0.75 for row in rows]
        figure = blank(wide, sum(heights) + (0.55 if title else 0) + 0.3)
        grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
        for line, row in enumerate(rows):
            widths = [wanted[i][0] for i in row]
            rest = max(0.01, wide - sum(widths)) if len(rows) > 1 else 0.01  # of a row that others outdo
            inner = grid[line, 0].subgridspec(1, len(row) + 1, width_ratios=[*widths, rest])
            shares = [wide * width / (sum(widths) + rest) for width in widths]
            words = [
                wrapped(panels[i], share - panels[i].gutter) for i, share in zip(row, shares, strict=True)
            ]
            top = max(map(points, words))
            for column, i in enumerate(row):
                axes = figure.add_subplot(inner[0, column], projection=panels[i].projection)
                panels[i].draw(axes)
                entitle(axes, *words[column], top - points(words[column]))
        if title:
            lines = textwrap.wrap(format_text(title), int(9.5 * wide))
            lines += [fit(format_text(told), int(9.5 * wide))] if told else []
            text = "\n".join(lines) + "\n"
            figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")
        footer(figure, foot)
    return figure


def png(panels: Sequence[Panel], *, dpi: int = 100) -> bytes:
    """Panels as a PNG, for a notebook or a page."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        compose(panels).savefig(file, dpi=dpi, format="png")
    return file.getvalue()


def encoded(data: bytes) -> str:
    """Base64, as an address holds it."""
    return base64.b64encode(data).decode("ascii")


def save(figure: Figure, path: Path, *, recipe: str, footer: str) -> Path:
    """Write a PNG whose metadata names recipe and keys of what it shows; the folder is made if need be.

    Written beside and moved, so that a file under that name is always whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with style(), warnings.catch_warnings():
        # Vocabularies hold every script of the world, fonts do not; a missing glyph is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        metadata = {"Software": "mizarr", "Description": footer, "Comment": f"recipe {recipe}"}
        figure.savefig(temporary, dpi=160, format="png", metadata=metadata)
    temporary.replace(path)
    return path


# -- parts of a drawing


def style() -> Any:
    """The context in which everything is drawn."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra(
            "figures need matplotlib, which is not installed; pip install 'mizarr[plots]' (tables need none)"
        ) from error
    return mpl.rc_context(STYLE)


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def ramp(name: str) -> Any:
    """A colour map: "sequential", or "diverging" at zero."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, RAMPS[name])


def wrapped(panel: Panel, width: float) -> tuple[list[str], list[str]]:
    """Lines of the title and of the caption of a panel above so many inches."""
    names = textwrap.wrap(panel.title, max(20, int(10.5 * width)))
    return names, textwrap.wrap(panel.caption, max(20, int(14 * width)))


def points(words: tuple[list[str], list[str]]) -> float:
    """Height of the lines of a title and of a caption."""
    return 12 * len(words[0]) + 11 * len(words[1])


def entitle(axes: Any, title: list[str], caption: list[str], lift: float) -> None:
    """Title and caption above axes, raised by so many points: titles of a row begin at one height."""
    from matplotlib.transforms import offset_copy

    # In points, not in shares of the axes: in tall ones a caption would run into the title.
    where = offset_copy(axes.transAxes, axes.figure, y=5 + lift, units="points")
    write = axes.text2D if hasattr(axes, "text2D") else axes.text
    told = write(0, 1, "\n".join(caption), transform=where, fontsize=8, color=SOFT, va="bottom")
    # The title above it makes room for its lines; its width may reach beyond the axes, as a title's may.
    told.set_in_layout(not title)
    axes.set_title("\n".join(title), pad=8 + 11 * len(caption) + lift)


def footer(figure: Any, text: str) -> None:
    """What a figure was drawn from, in its lower right corner."""
    text = "\n".join(textwrap.wrap(text, int(20 * figure.get_figwidth())))
    figure.supxlabel(text, x=0.99, ha="right", fontsize=6.5, color=FAINT)


def frame(left: float, bottom: float, right: float, top: float) -> Any:
    """A frame around cells: column and row of its first and last one."""
    from matplotlib.patches import Rectangle

    corner = (min(left, right) - 0.47, min(bottom, top) - 0.45)
    sides = abs(right - left) + 0.94, abs(top - bottom) + 0.9
    return Rectangle(corner, *sides, fill=False, ec=ACCENT, lw=1.6)


def name_axes(
    axes: Any, x_name: str, y_name: str, unit: str, *, log: bool = False, log_x: bool = False
) -> None:
    """What runs along both axes; long names in several lines."""
    told = (f"{y_name}, {unit}" if unit else y_name) + LOG * log
    axes.set(xlabel=x_name + LOG * log_x, ylabel=even(told, 44))


def integers(axis: Any) -> None:
    """Whole numbers at the ticks."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def logarithmic(axis: Any) -> None:
    """Marks where a page has them, with plain labels: mathematics in text is switched off for all figures."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    class Marks(LogLocator):
        def __call__(self) -> list[float]:
            return self.tick_values(*axis.get_view_interval())

        def tick_values(self, vmin: float, vmax: float) -> list[float]:
            return log_ticks(min(vmin, vmax), max(vmin, vmax), MARKS)

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(Marks())
    axis.set_major_formatter(FuncFormatter(lambda value, _: mark(value)))
    axis.set_minor_formatter(NullFormatter())


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """1-2-5 of every decade within low..high, where these are more than `count` the decades alone, and of
    many decades every second, third, … one. Round numbers in equal steps where 1-2-5 has fewer than three.
    `lines.js` does the same, as a page alone knows how wide it is.

    >>> log_ticks(1.0, 60.0, 6), log_ticks(0.001, 1.0, 6), log_ticks(1e-12, 1.0, 5)
    ([1.0, 2.0, 5.0, 10.0, 20.0, 50.0], [0.001, 0.01, 0.1, 1.0], [1e-12, 1e-09, 1e-06, 0.001, 1.0])
    >>> log_ticks(0.31, 0.38, 4)
    [0.32, 0.34, 0.36, 0.38]
    """
    dense = _of_decades(low, high, (1, 2, 5), 1)
    if len(dense) < 3:
        return _in_equal_steps(low, high, count)
    if len(dense) <= count:
        return dense
    every = 1
    while len(found := _of_decades(low, high, (1,), every)) > count:
        every += 1
    return found


def mark(value: float) -> str:
    """A number at a tick: thousands by commas, very large and small ones by their power of ten.

    >>> mark(0.02), mark(1.0), mark(131072.0), mark(5e-07), mark(1e6), mark(1.5e8)
    ('0.02', '1', '131,072', '5e-7', '1e6', '1.5e8')
    """
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, _, power = f"{value:.11e}".partition("e")
        return f"{float(digits):.12g}e{int(power)}"
    return f"{value + 0.0:,.0f}" if value == round(value) else f"{value:.12g}"


def _of_decades(low: float, high: float, steps: Sequence[int], every: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [power for power in range(first, last + 1) if power % every == 0]
    found = [float(f"{step}e{power}") for power in powers for step in steps]
    return [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def _in_equal_steps(low: float, high: float, count: int) -> list[float]:
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= least * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def bare(axes: Any) -> None:
    """Cells need neither ticks nor an outline."""
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def bar(axes: Any, image: Any, label: str) -> None:
    """The colours of an image, and what they mean."""
    found = axes.figure.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
    found.set_label(even(label, 32))
    found.outline.set_visible(False)


def shades(count: int, *, in_order: bool) -> list[Any]:
    """Colours to tell things apart by, blue for a thing alone; in order, light to dark as on a page."""
    if count == 1:
        return [BLUE]
    if not in_order:
        return [SHADES[i % len(SHADES)] for i in range(count)]
    return [ramp("sequential")((i + count / 3) / (count - 1 + count / 3)) for i in range(count)]


def tints(colour: str, count: int) -> list[Any]:
    """A colour, and lighter ones of its hue."""
    from matplotlib.colors import LinearSegmentedColormap

    pale = LinearSegmentedColormap.from_list(colour, [colour, "white"])
    return [pale(0.65 * i / max(2, count - 1)) for i in range(count)]


def baselines(axes: Any, names: Sequence[str]) -> None:
    """A line to stand on for each curve, and its name beside it."""
    for i in range(len(names)):
        axes.axhline(-2.2 * i, color="#e3e5ea", lw=0.8, zorder=0)
    axes.set_yticks([-2.2 * i for i in range(len(names))], names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def name_ends(axes: Any, x: float, ends: Sequence[tuple[float, str, Any]]) -> None:
    """Names at the right end of lines, pushed apart so that none covers another and all lie beside the axes.

    Of more names than there is room for, the uppermost and the lowest line have theirs, and every so many
    between them.
    """
    scale = axes.yaxis.get_transform()  # of a logarithmic axis, equal steps are equal factors
    low, high = (float(end) for end in scale.transform(axes.get_ylim()))
    step = NAME_STEP * (high - low)
    known = sorted((end for end in ends if end[0] == end[0]), key=lambda end: -end[0])
    if len(known) > (most := int(1 / NAME_STEP)):
        known = [known[round(i * (len(known) - 1) / (most - 1))] for i in range(most)]
    places = [float(scale.transform(y)) for y, _, _ in known]
    for i in range(1, len(places)):
        places[i] = min(places[i], places[i - 1] - step)
    for i in reversed(range(len(places))):  # those pushed below the axes push back
        least = low if i == len(places) - 1 else places[i + 1] + step
        places[i] = max(places[i], least)
    for place, (_, text, colour) in zip(places, known, strict=True):
        where = x, scale.inverted().transform(place)
        axes.annotate(f" {text}", where, fontsize=7, va="center", annotation_clip=False, color=colour)


def ticks(axis: Any, labels: Sequence[str], room: int = 0) -> None:
    """Labels at 0, 1, 2, …: all of them as long as there is room, words aslant below an x axis unless so many
    characters hold them."""
    words = [fit(label, 14 if axis.axis_name == "x" else 38) for label in labels]
    places = list(range(len(words)))
    if len(words) > 40 and all(word.isdigit() for word in words):
        step = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000) if len(words) <= 10 * step)
        places = [place for place in places if int(words[place]) % step == 0]
    longest = max(map(len, words), default=0)
    aslant = axis.axis_name == "x" and longest > 3 and len(words) * (longest + 2) > room
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if aslant else {}
    axis.set_ticks(places, [words[place] for place in places], **turned)


def even(text: str, width: int) -> str:
    """A text in as few lines of so many characters as it takes, none much longer than the others."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    while width > 1:
        width -= 1
        closer = textwrap.wrap(text, width, break_on_hyphens=False)
        if len(closer) > len(lines):
            break
        lines = closer
    return "\n".join(lines)


def fit(text: str, width: int) -> str:
    """As much of a text as so many characters can hold."""
    return text if len(text) <= width else text[: width - 1] + "…"


# -- tables in a terminal


def rich_table(title: str, caption: str, **told: Any) -> RichTable:
    """An empty table as the terminal has them."""
    from rich.table import Table

    return Table(title=literal(title), caption=literal(caption), box=None, pad_edge=False, **told)


def fitted(table: RichTable, width: int) -> RichTable:
    """The table for a terminal of so many characters: numbers stay whole where there is room for them."""
    if sum((column.min_width or LEAST) + 2 for column in table.columns) > width:
        for column in table.columns:
            column.min_width = None
    return table


def literal(text: str) -> str:
    """Text that rich prints as it stands."""
    from rich.markup import escape

    return escape(text)
