"""Tables of styled text, shown alike in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...store.display import html
from . import paper
from .view import View

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["Column", "Styled", "Table", "bold", "dash", "dim", "points"]

PROSE = 24
"""Longest cell, in characters, of a text column that is not wrapped."""


@dataclass(frozen=True)
class Styled:
    """A run of text in one style."""

    text: str
    """The text."""
    style: str = ""
    """Space-separated subset of "bold", "dim" and "italic"; "" for plain text."""
    link: str = field(default="", repr=False)
    """Address that the text links to on a page; "" for no link."""


def dim(text: str) -> Styled:
    """Text in a dimmed style."""
    return Styled(text, "dim")


def bold(text: str) -> Styled:
    """Text in bold."""
    return Styled(text, "bold")


def points(share: float) -> str:
    """A difference of shares (0 to 1) as percentage points: 0.012 becomes "+1.20 pp"."""
    return f"{100 * share:+.2f} pp"


def dash(value: Any, formatter: Any = str) -> str:
    """A formatted value; a dash for None and NaN.

    Arguments:
        value: Any value.
        formatter: Format such as ".3f", or a function of the value.
    """
    if value is None or value != value:  # noqa: PLR0124 - NaN is the only value that differs from itself
        return "–"
    return str(formatter(value)) if callable(formatter) else format(value, formatter)


@dataclass(frozen=True)
class Column:
    """Header and alignment of a column."""

    name: str
    """Text of the header."""
    right: bool = False
    """Whether cells are aligned right, as numbers are."""
    wraps: bool = False
    """Whether cells may be wrapped into several lines."""


@dataclass(frozen=True, kw_only=True)
class Table(View):
    """A table whose cells are sequences of styled runs of text."""

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    """Headers, in order."""
    rows: tuple[tuple[tuple[Styled, ...], ...], ...]
    """Cells [row][column], each a tuple of runs."""

    @classmethod
    def of(
        cls,
        records: Iterable[Any],
        *columns: tuple[Any, ...],
        strong: Callable[[Any], bool] = lambda record: False,
        **view_fields: Any,
    ) -> Table:
        """Build a table with one row per record.

        Arguments:
            records: Mappings or any other objects.
            columns: (name, value) for text, (name, value, format) for numbers, which are aligned right.
                `value` is a key of the record, or a function of it that returns text, a `Styled`, a tuple of
                them, or None. `format` is a format such as ".3f", or a function of the value.
            strong: Whether the row of a record is bold.
            view_fields: Other fields of the view, such as `title`.

        >>> table = Table.of([{"layer": 1, "kl": 0.5}], ("layer", "layer", "d"), ("KL", "kl", ".2f"))
        >>> table.columns[1], table.rows[0][1]
        (Column(name='KL', right=True, wraps=False), (Styled(text='0.50', style=''),))
        """
        records = list(records)
        cells = [
            [_runs(_value(record, *column[1:]), "bold" if strong(record) else "") for record in records]
            for column in columns
        ]
        widths = [max((sum(len(run.text) for run in cell) for cell in column), default=0) for column in cells]
        headers = tuple(
            Column(column[0], len(column) > 2, len(column) == 2 and width > PROSE)
            for column, width in zip(columns, widths, strict=True)
        )
        return cls(columns=headers, rows=tuple(zip(*cells, strict=True)), **view_fields)

    def rich(self) -> RichTable:
        """The table for the terminal. In a narrow terminal text and headers are wrapped; nothing is cut."""
        table = paper.rich_table(self.title, self.caption)
        for i, column in enumerate(self.columns):
            width = max((sum(len(run.text) for run in row[i]) for row in self.rows), default=0)
            # A number broken into two lines could be misread: its column is never narrower than it. Text is
            # folded, as rich would otherwise cut long words with an ellipsis.
            layout: dict[str, Any] = {"justify": "right", "min_width": width} if column.right else {}
            table.add_column(paper.literal(column.name), overflow="fold", **layout)
        for row in self.rows:
            table.add_row(*("".join(map(_markup, cell)) for cell in row))
        return table

    def body(self) -> str:
        """HTML table without the styles of the text; see `View.body`."""
        return html.table(
            [column.name for column in self.columns],
            (["".join(run.text for run in cell) for cell in row] for row in self.rows),
            [i for i, column in enumerate(self.columns) if column.right],
        )


def _value(record: Any, getter: Any, formatter: Any = None) -> Any:
    """Formatted value of a record; arguments as in the columns of `Table.of`. None is not formatted."""
    value = record[getter] if isinstance(getter, str) else getter(record)
    if value is None or formatter is None:
        return value
    return formatter(value) if callable(formatter) else format(value, formatter)


def _runs(cell: Any, style: str) -> tuple[Styled, ...]:
    """A cell as non-empty runs of text; `style` is added to the style of each."""
    parts = cell if isinstance(cell, tuple) else () if cell is None else (cell,)
    runs = (part if isinstance(part, Styled) else Styled(str(part)) for part in parts)
    return tuple(Styled(run.text, f"{style} {run.style}".strip(), run.link) for run in runs if run.text)


def _markup(run: Styled) -> str:
    """A run in the markup of rich."""
    text = paper.literal(run.text)
    return f"[{run.style}]{text}[/]" if run.style else text
