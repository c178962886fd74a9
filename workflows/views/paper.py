"""Appearance of figures and terminal tables: colours, fonts, titles, footers, layout of panels, PNG files.

This module depends on no workflow and no store; of a view it uses only the methods of `Panel`. Importing it
imports neither matplotlib nor rich; drawing without matplotlib raises MissingExtra. Figures are built without
pyplot, which has global state and may open a window.

Colours are those of the HTML pages (report/assets/core.js): a number has the same colour in both.
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

DRAWING = 12
"""Version of the appearance of figures: increased when it changes, so that existing files are drawn anew."""

INK, SOFT, FAINT, ACCENT, CONTROL = "#1f2430", "#5b6270", "#8a90a0", "#c2410c", "#9aa1b1"
BLUE, RULE = "#1d5b7f", "#d5d8df"
SHADES = ("#7e22ce", "#4d7c0f", "#0f766e", "#a16207", "#be185d", "#475569")
"""Colours of several curves or bars, in order. Without blue and orange, which mean a sign in heatmaps."""
RAMPS = {
    "sequential": ["#f4f6f8", "#cfe3ed", "#8cbdd5", "#3f86ad", "#123c5a"],
    "diverging": ["#134e6e", "#7db0ca", "#f5f5f3", "#eba47a", "#a63a0c"],
}
BELOW, ABOVE = RAMPS["diverging"][0], RAMPS["diverging"][-1]
"""Colours of numbers below and above zero: the ends of the diverging ramp, which heatmaps use."""
STYLE: Any = {
    "font.size": 9,
    # Comes with matplotlib, so that figures do not depend on the fonts of a machine.
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
    # A dollar sign in a prompt is text, not the start of a formula.
    "text.parse_math": False,
}
LEAST = 12
"""Smallest width, in characters, of a text column of a terminal table in which numbers are not wrapped."""
WIDEST = 17.0
"""Largest width, in inches, of a row of panels in a figure; further panels go into the next row."""
MARKS = 6
"""Largest number of ticks on a logarithmic axis."""
NAME_STEP = 0.045
"""Vertical space for a name written at the end of a curve, as a share of the height of the axes."""
LOG = ", log scale"
"""Text appended to the label of a logarithmic axis."""


class Panel(Protocol):
    """The attributes of a view that a figure reads to draw it as a panel; documented in `View`."""

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
    panels: Sequence[Panel], *, title: str = "", subtitle: str = "", foot: str = "", columns: int = 0
) -> Figure:
    """Draw panels in rows, each in the size of its `inches`, as one matplotlib figure.

    Arguments:
        panels: Views to draw.
        title: Title of the figure; "" for none.
        subtitle: One line below the title, cut to the figure's width; "" for none.
        foot: Text in the lower right corner; "" for none.
        columns: Largest number of panels per row; 0 for as many as fit into WIDEST inches.
    """
    with style():
        sizes = [panel.inches() for panel in panels]
        rows: list[list[int]] = [[]]
        for i, (width, _) in enumerate(sizes):
            row = rows[-1]
            if row and (len(row) == columns or sum(sizes[j][0] for j in row) + width > WIDEST):
                rows.append([])
            rows[-1].append(i)
        figure_width = min(WIDEST, max(5.5, *(sum(sizes[i][0] for i in row) for row in rows)))
        heights = [max(sizes[i][1] for i in row) + 0.75 for row in rows]
        figure = blank(figure_width, sum(heights) + (0.55 if title else 0) + 0.3)
        grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
        for row_index, row in enumerate(rows):
            widths = [sizes[i][0] for i in row]
            # A row shorter than the widest one ends with an empty column, so that its panels keep their size.
            unused = max(0.01, figure_width - sum(widths)) if len(rows) > 1 else 0.01
            inner = grid[row_index, 0].subgridspec(1, len(row) + 1, width_ratios=[*widths, unused])
            shares = [figure_width * width / (sum(widths) + unused) for width in widths]
            headings = [
                wrapped(panels[i], share - panels[i].gutter) for i, share in zip(row, shares, strict=True)
            ]
            tallest = max(map(points, headings))
            for column, i in enumerate(row):
                axes = figure.add_subplot(inner[0, column], projection=panels[i].projection)
                panels[i].draw(axes)
                entitle(axes, *headings[column], tallest - points(headings[column]))
        if title:
            lines = textwrap.wrap(format_text(title), int(9.5 * figure_width))
            lines += [fit(format_text(subtitle), int(9.5 * figure_width))] if subtitle else []
            text = "\n".join(lines) + "\n"
            figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")
        footer(figure, foot)
    return figure


def png(panels: Sequence[Panel], *, dpi: int = 100) -> bytes:
    """Draw panels and return the bytes of a PNG file, for a notebook or a page.

    Arguments:
        panels: Views to draw.
        dpi: Pixels per inch.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # The font lacks glyphs of many scripts in vocabularies: a missing one is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        compose(panels).savefig(buffer, dpi=dpi, format="png")
    return buffer.getvalue()


def encoded(data: bytes) -> str:
    """Bytes as base64 text, for a data URL."""
    return base64.b64encode(data).decode("ascii")


def save(figure: Figure, path: Path, *, recipe: str, footer: str) -> Path:
    """Write a figure as a PNG file; its folder is created if needed.

    The file is written under a temporary name and then renamed, so that an interruption leaves no partial
    file.

    Arguments:
        figure: The figure.
        path: File to write.
        recipe: Digest of what the figure shows, stored in the PNG's metadata; it tells whether an existing
            file is up to date.
        footer: Keys of the stored results that the figure shows, stored in the metadata.

    Returns:
        `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, as a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with style(), warnings.catch_warnings():
        # The font lacks glyphs of many scripts in vocabularies: a missing one is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        metadata = {"Software": "mizarr", "Description": footer, "Comment": f"recipe {recipe}"}
        figure.savefig(temporary, dpi=160, format="png", metadata=metadata)
    temporary.replace(path)
    return path


# -- parts of a drawing


def style() -> Any:
    """Context manager that sets matplotlib's rcParams to STYLE; MissingExtra if matplotlib is not
    installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra(
            "drawing a figure needs matplotlib, which is not installed; run pip install 'mizarr[plots]' "
            "(tables work without it)"
        ) from error
    return mpl.rc_context(STYLE)


def blank(width: float, height: float) -> Figure:
    """An empty figure with constrained layout.

    Arguments:
        width: Width in inches.
        height: Height in inches.
    """
    # Not pyplot.figure, which registers the figure globally and keeps it in memory.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def ramp(name: str) -> Any:
    """A matplotlib colour map of RAMPS: "sequential" or "diverging"."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, RAMPS[name])


def wrapped(panel: Panel, width: float) -> tuple[list[str], list[str]]:
    """Wrap title and caption of a panel to a width.

    Arguments:
        panel: The panel.
        width: Width in inches.

    Returns:
        (lines of the title, lines of the caption).
    """
    # 10.5 and 14 characters per inch at the font sizes of `entitle`.
    title = textwrap.wrap(panel.title, max(20, int(10.5 * width)))
    return title, textwrap.wrap(panel.caption, max(20, int(14 * width)))


def points(heading: tuple[list[str], list[str]]) -> float:
    """Height, in points, of a heading: (lines of the title, lines of the caption)."""
    title_lines, caption_lines = heading
    return 12 * len(title_lines) + 11 * len(caption_lines)


def entitle(axes: Any, title: list[str], caption: list[str], lift: float) -> None:
    """Write a title and, below it, a caption above axes.

    Arguments:
        axes: Matplotlib axes.
        title: Lines of the title.
        caption: Lines of the caption.
        lift: Additional distance from the axes, in points, so that all titles of a row start at one height.
    """
    from matplotlib.transforms import offset_copy

    # In points, not in shares of the axes: in tall axes the caption would overlap the title.
    transform = offset_copy(axes.transAxes, axes.figure, y=5 + lift, units="points")
    # `text` of 3D axes takes three data coordinates.
    write = axes.text2D if hasattr(axes, "text2D") else axes.text
    text = write(0, 1, "\n".join(caption), transform=transform, fontsize=8, color=SOFT, va="bottom")
    # Constrained layout ignores the caption: the pad of the title already reserves its height, and a caption
    # may be wider than its axes, as a title may.
    text.set_in_layout(not title)
    axes.set_title("\n".join(title), pad=8 + 11 * len(caption) + lift)


def footer(figure: Any, text: str) -> None:
    """Write a small text into the lower right corner of a figure.

    Arguments:
        figure: The figure.
        text: The text; wrapped to the width of the figure.
    """
    text = "\n".join(textwrap.wrap(text, int(20 * figure.get_figwidth())))
    # Constrained layout reserves space for supxlabel, not for Figure.text.
    figure.supxlabel(text, x=0.99, ha="right", fontsize=6.5, color=FAINT)


def frame(column: float, row: float, last_column: float, last_row: float) -> Any:
    """A matplotlib rectangle that frames a block of heatmap cells, given by two opposite corner cells.

    Arguments:
        column: Column of one corner cell.
        row: Row of this cell.
        last_column: Column of the opposite corner cell.
        last_row: Row of the opposite corner cell.
    """
    from matplotlib.patches import Rectangle

    # A cell extends 0.5 to each side of its centre; slightly less keeps neighbouring frames apart.
    corner = (min(column, last_column) - 0.47, min(row, last_row) - 0.45)
    sides = abs(last_column - column) + 0.94, abs(last_row - row) + 0.9
    return Rectangle(corner, *sides, fill=False, ec=ACCENT, lw=1.6)


def name_axes(
    axes: Any, x_name: str, y_name: str, unit: str, *, log: bool = False, log_x: bool = False
) -> None:
    """Set the labels of both axes; a long y label is wrapped.

    Arguments:
        axes: Matplotlib axes.
        x_name: Label of the x axis.
        y_name: Label of the y axis.
        unit: Unit of the y axis; "" for none.
        log: Whether the y axis is logarithmic; its label then ends with LOG.
        log_x: Whether the x axis is logarithmic; its label then ends with LOG.
    """
    y_label = (f"{y_name}, {unit}" if unit else y_name) + LOG * log
    axes.set(xlabel=x_name + LOG * log_x, ylabel=even(y_label, 44))


def integers(axis: Any) -> None:
    """Place the ticks of a matplotlib axis at integers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def logarithmic(axis: Any) -> None:
    """Make a matplotlib axis logarithmic, with ticks from `log_ticks` and tick labels from `mark`."""
    # Labels of our own: matplotlib's are formulas such as $10^3$, and STYLE switches formulas off.
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
    """Tick positions on a logarithmic axis from `low` to `high`.

    1, 2 and 5 times every power of ten; if these are more than `count`, the powers of ten alone, and if these
    are still too many, every second, third, ... power. If the first rule gives fewer than three ticks, round
    numbers in equal steps. `lines.js` implements the same rule, because only the browser knows the width.

    Arguments:
        low: Lower end of the axis, above 0.
        high: Upper end of the axis.
        count: Largest number of ticks.

    >>> log_ticks(1.0, 60.0, 6), log_ticks(0.001, 1.0, 6), log_ticks(1e-12, 1.0, 5)
    ([1.0, 2.0, 5.0, 10.0, 20.0, 50.0], [0.001, 0.01, 0.1, 1.0], [1e-12, 1e-09, 1e-06, 0.001, 1.0])
    >>> log_ticks(0.31, 0.38, 4)
    [0.32, 0.34, 0.36, 0.38]
    """
    dense = _decade_ticks(low, high, (1, 2, 5), 1)
    if len(dense) < 3:
        return _equal_ticks(low, high, count)
    if len(dense) <= count:
        return dense
    stride = 1
    while len(ticks := _decade_ticks(low, high, (1,), stride)) > count:
        stride += 1
    return ticks


def mark(value: float) -> str:
    """Label of a tick at a value: commas between thousands; powers of ten below 0.001 and from a million on.

    >>> mark(0.02), mark(1.0), mark(131072.0), mark(5e-07), mark(1e6), mark(1.5e8)
    ('0.02', '1', '131,072', '5e-7', '1e6', '1.5e8')
    """
    # 11 digits: rounding errors of a computed tick, such as 0.30000000000000004, are cut off.
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, _, power = f"{value:.11e}".partition("e")
        return f"{float(digits):.12g}e{int(power)}"
    # + 0.0 turns -0.0 into 0.0, which is not printed as "-0".
    return f"{value + 0.0:,.0f}" if value == round(value) else f"{value:.12g}"


def _decade_ticks(low: float, high: float, factors: Sequence[int], stride: int) -> list[float]:
    """`factors` times the powers of ten whose exponent is a multiple of `stride`, within low..high."""
    lowest, highest = math.floor(math.log10(low)), math.ceil(math.log10(high))
    exponents = [exponent for exponent in range(lowest, highest + 1) if exponent % stride == 0]
    # Parsed from text: 10.0 ** -3 * 2 would not be exactly 0.002.
    ticks = [float(f"{factor}e{exponent}") for exponent in exponents for factor in factors]
    # The tolerance keeps a tick that differs from an end of the axis by a rounding error only.
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def _equal_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of a round step (1, 2 or 5 times a power of ten) within low..high, about `count` of them."""
    smallest_step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(smallest_step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= smallest_step * 0.999)
    # 1e-9: rounding errors of the division must not drop a tick at either end.
    start, stop = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(start, stop + 1)]


def bare(axes: Any) -> None:
    """Remove tick marks and outline of axes, as a heatmap needs neither."""
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def bar(axes: Any, image: Any, label: str) -> None:
    """Add a colour bar to the axes of an image.

    Arguments:
        axes: Axes that show the image.
        image: Result of `axes.imshow`, which has the colour scale.
        label: Label of the colour bar; wrapped to 32 characters per line.
    """
    colour_bar = axes.figure.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
    colour_bar.set_label(even(label, 32))
    colour_bar.outline.set_visible(False)


def shades(count: int, *, in_order: bool) -> list[Any]:
    """Colours of several curves or bars: blue for a single one, else SHADES, repeated if needed.

    Arguments:
        count: Number of colours.
        in_order: Whether the curves have an order, such as layers: the colours then run from light to dark.
    """
    if count == 1:
        return [BLUE]
    if not in_order:
        return [SHADES[i % len(SHADES)] for i in range(count)]
    # Starts after the pale end of the ramp, which would vanish on white paper.
    return [ramp("sequential")((i + count / 3) / (count - 1 + count / 3)) for i in range(count)]


def tints(colour: str, count: int) -> list[Any]:
    """A colour and lighter tints of it, from dark to light.

    Arguments:
        colour: The colour, such as "#7e22ce".
        count: Number of colours returned, the first of which is the colour itself.
    """
    from matplotlib.colors import LinearSegmentedColormap

    pale = LinearSegmentedColormap.from_list(colour, [colour, "white"])
    # At most 65 % of the way to white, which would be invisible.
    return [pale(0.65 * i / max(2, count - 1)) for i in range(count)]


def baselines(axes: Any, names: Sequence[str]) -> None:
    """Draw a horizontal baseline for each curve, 2.2 below the previous one, with the name as tick label.

    Arguments:
        axes: Axes of the curves.
        names: Names of the curves, from the top.
    """
    for i in range(len(names)):
        axes.axhline(-2.2 * i, color="#e3e5ea", lw=0.8, zorder=0)
    axes.set_yticks([-2.2 * i for i in range(len(names))], names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def name_ends(axes: Any, x: float, ends: Sequence[tuple[float, str, Any]]) -> None:
    """Write names at the right end of curves, moved apart vertically so that they do not overlap.

    If there is no space for all names, as many curves as fit are named, evenly chosen in their vertical
    order, among them the highest and the lowest.

    Arguments:
        axes: Matplotlib axes.
        x: Position of the names on the x axis.
        ends: (y value, name, colour) of each curve; a NaN value has no name.
    """
    # Computed in the coordinates of the scale: on a logarithmic axis equal distances are equal factors.
    scale = axes.yaxis.get_transform()
    low, high = (float(end) for end in scale.transform(axes.get_ylim()))
    step = NAME_STEP * (high - low)
    # From top to bottom. Only NaN differs from itself.
    named = sorted((end for end in ends if end[0] == end[0]), key=lambda end: -end[0])
    if len(named) > (most := int(1 / NAME_STEP)):
        named = [named[round(i * (len(named) - 1) / (most - 1))] for i in range(most)]
    heights = [float(scale.transform(y)) for y, _, _ in named]
    for i in range(1, len(heights)):
        heights[i] = min(heights[i], heights[i - 1] - step)
    # Names that were moved below the axes are moved up again, with the names above them.
    for i in reversed(range(len(heights))):
        lowest = low if i == len(heights) - 1 else heights[i + 1] + step
        heights[i] = max(heights[i], lowest)
    for height, (_, text, colour) in zip(heights, named, strict=True):
        xy = x, scale.inverted().transform(height)
        axes.annotate(f" {text}", xy, fontsize=7, va="center", annotation_clip=False, color=colour)


def ticks(axis: Any, labels: Sequence[str], room: int = 0) -> None:
    """Set tick labels at 0, 1, 2, ...; if they are more than 40 numbers, only at multiples of a round step.

    Arguments:
        axis: Matplotlib axis. Long labels of an x axis are rotated if they do not fit.
        labels: Labels, which are cut to 14 characters on an x axis, 38 on a y axis.
        room: Number of characters that fit side by side along an x axis.
    """
    texts = [fit(label, 14 if axis.axis_name == "x" else 38) for label in labels]
    indices = list(range(len(texts)))
    if len(texts) > 40 and all(text.isdigit() for text in texts):
        step = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000) if len(texts) <= 10 * step)
        indices = [i for i in indices if int(texts[i]) % step == 0]
    longest = max(map(len, texts), default=0)
    is_rotated = axis.axis_name == "x" and longest > 3 and len(texts) * (longest + 2) > room
    rotation = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_rotated else {}
    axis.set_ticks(indices, [texts[i] for i in indices], **rotation)


def even(text: str, width: int) -> str:
    """Wrap a text into as few lines as possible, of nearly equal length.

    Arguments:
        text: The text.
        width: Largest number of characters of a line.
    """
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    # The smallest width that still needs as few lines gives the most even ones.
    while width > 1:
        width -= 1
        narrower = textwrap.wrap(text, width, break_on_hyphens=False)
        if len(narrower) > len(lines):
            break
        lines = narrower
    return "\n".join(lines)


def fit(text: str, width: int) -> str:
    """Cut a text to a width; "…" marks the cut.

    Arguments:
        text: The text.
        width: Largest number of characters.
    """
    return text if len(text) <= width else text[: width - 1] + "…"


# -- tables in a terminal


def rich_table(title: str, caption: str, **options: Any) -> RichTable:
    """An empty terminal table in the style of all views: without lines between the cells.

    Arguments:
        title: Title above the table.
        caption: Caption below the table.
        options: Further arguments of `rich.table.Table`.
    """
    from rich.table import Table

    return Table(title=literal(title), caption=literal(caption), box=None, pad_edge=False, **options)


def fitted(table: RichTable, width: int) -> RichTable:
    """Allow numbers to be wrapped if the terminal is too narrow for them beside text columns of LEAST
    characters.

    Arguments:
        table: The table; its columns are changed in place.
        width: Width of the terminal in characters.

    Returns:
        `table`.
    """
    if sum((column.min_width or LEAST) + 2 for column in table.columns) > width:
        for column in table.columns:
            column.min_width = None
    return table


def literal(text: str) -> str:
    """Escape a text so that rich prints brackets literally instead of reading them as markup."""
    from rich.markup import escape

    return escape(text)
