"""A terminal's tables as a page's: the same cells, titles and captions, none of them cut short."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..views import Column, Run, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["from_rich"]

STYLES = ("bold", "dim", "italic")
PROSE = 24
"""Characters beyond which a cell may take several lines, unless the terminal's may not."""


def from_rich(table: RichTable, sources: tuple[str, ...] = ()) -> Table:
    """What `rich` would print, with its markup as styles of runs. sources: results it tells of."""
    cells = zip(*(column.cells for column in table.columns), strict=True)
    rows = tuple(
        tuple(
            tuple(_runs(cell, column.style, row.style))
            for cell, column in zip(line, table.columns, strict=True)
        )
        for line, row in zip(cells, table.rows, strict=True)
    )
    longest = [0] * len(table.columns)
    for row in rows:
        longest = [max(n, sum(len(run.text) for run in cell)) for n, cell in zip(longest, row, strict=True)]
    columns = tuple(
        Column(_text(column.header), column.justify == "right", not column.no_wrap and width > PROSE)
        for column, width in zip(table.columns, longest, strict=True)
    )
    title, caption = _text(table.title), _text(table.caption)
    return Table(title=title, caption=caption, sources=sources, columns=columns, rows=rows)


def _text(given: Any) -> str:
    return "".join(run.text for run in _runs(given or ""))


def _runs(given: Any, *around: Any) -> Iterator[Run]:
    """Text with markup, cut where its style changes; `around`: styles of its column and row."""
    from rich.text import Text

    text = given if isinstance(given, Text) else Text.from_markup(str(given))
    outer = [name for style in (*around, text.style) for name in _names(style)]
    edges = sorted({0, len(text), *(edge for span in text.spans for edge in (span.start, span.end))})
    for start, end in pairwise(edges):
        inner = [
            n for span in text.spans if span.start <= start and end <= span.end for n in _names(span.style)
        ]
        yield Run(text.plain[start:end], " ".join(name for name in STYLES if name in {*outer, *inner}))


def _names(style: Any) -> list[str]:
    from rich.style import Style

    read = style if isinstance(style, Style) else Style.parse(str(style or ""))
    return [name for name in STYLES if getattr(read, name)]
