"""Small HTML for notebooks: titles, tables and captions, everything given as plain text and escaped here.

Border: text in, text out; knows nothing of what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["details", "shown", "table"]


def shown(title: str, body: str, caption: str = "") -> str:
    """What stands between a title and a caption; body is HTML.

    >>> shown("a < b", "<hr>")
    '<div><p><b>a &lt; b</b></p><hr></div>'
    """
    head = f"<p><b>{escape(title)}</b></p>" if title else ""
    foot = f"<p><small>{escape(caption)}</small></p>" if caption else ""
    return f"<div>{head}{body}{foot}</div>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> str:
    """Rows of cells under heads; right: numbers of columns aligned to the right."""
    chosen = set(right)
    sides = ["right" if i in chosen else "left" for i in range(len(columns))]

    def line(cells: Iterable[object], tag: str) -> str:
        pairs = zip(cells, sides, strict=True)
        inner = (f'<{tag} style="text-align:{side}">{escape(str(cell))}</{tag}>' for cell, side in pairs)
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(columns, 'th')}</thead><tbody>{body}</tbody></table>"


def details(summary: str, body: str) -> str:
    """HTML that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
