"""HTML fragments for notebooks: titles, tables and captions. Arguments are plain text and escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["details", "shown", "table"]


def shown(title: str, body: str, caption: str = "") -> str:
    """HTML block with a title above and a caption below.

    Arguments:
        title: Plain text; "" for none.
        body: HTML between them.
        caption: Plain text; "" for none.

    >>> shown("a < b", "<hr>")
    '<div><p><b>a &lt; b</b></p><hr></div>'
    """
    head = f"<p><b>{escape(title)}</b></p>" if title else ""
    foot = f"<p><small>{escape(caption)}</small></p>" if caption else ""
    return f"<div>{head}{body}{foot}</div>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> str:
    """HTML table with a head row.

    Arguments:
        columns: Column heads, plain text.
        rows: Cells of each row, converted with `str` and escaped.
        right: Numbers of the columns that are aligned to the right.
    """
    right_columns = set(right)
    alignments = ["right" if i in right_columns else "left" for i in range(len(columns))]

    def line(cells: Iterable[object], tag: str) -> str:
        pairs = zip(cells, alignments, strict=True)
        inner = (
            f'<{tag} style="text-align:{alignment}">{escape(str(cell))}</{tag}>' for cell, alignment in pairs
        )
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(columns, 'th')}</thead><tbody>{body}</tbody></table>"


def details(summary: str, body: str) -> str:
    """HTML block that is collapsed until its summary is clicked.

    Arguments:
        summary: Plain text that is always shown.
        body: HTML that is shown when the block is open.
    """
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
