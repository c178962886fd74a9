"""Tables of styled text, with the same content in a terminal and on a page."""

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
"""Number of characters in a table cell above which a page wraps the text column."""


@dataclass(frozen=True)
class Styled:
    """Piece of text in a single style; a table cell consists of one or more such pieces."""

    text: str
    """The text."""
    style: str = ""
    """Space-separated subset of "bold", "dim" and "italic"; "" for plain text."""
    link: str = field(default="", repr=False)
    """URL that the text links to on a page; "" for no link."""


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
    """Format a value; "–" for None and NaN.

    Arguments:
        value: Any value.
        formatter: Format specification such as ".3f", or a function from the value to its text.
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
    """A table; each cell consists of pieces of text that may differ in style."""

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    """Header and alignment of each column."""
    rows: tuple[tuple[tuple[Styled, ...], ...], ...]
    """Cells [row][column]: the styled pieces of text in order, none for an empty cell."""

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
            records: Objects of any type, one per row; mappings if `columns` name keys.
            columns: (header, value) for text, (header, value, format) for numbers, which are aligned right.
                `value` is a key of the record, or a function of the record that returns text, a `Styled`, a
                tuple of these, or None for an empty cell. `format` is a format specification such as ".3f",
                or a function from the value to its text.
            strong: Function that returns whether the row of a record is bold.
            view_fields: Other fields of the view, such as `title`.

        >>> table = Table.of([{"layer": 1, "kl": 0.5}], ("layer", "layer", "d"), ("KL", "kl", ".2f"))
        >>> table.columns[1], table.rows[0][1]
        (Column(name='KL', right=True, wraps=False), (Styled(text='0.50', style=''),))
        """
        records = list(records)
        styles = ["bold" if strong(record) else "" for record in records]
        headers, cells_by_column = [], []
        for name, *value_and_format in columns:
            values = [_formatted_value(record, *value_and_format) for record in records]
            cells = [_styled_texts(value, style) for value, style in zip(values, styles, strict=True)]
            is_number = len(value_and_format) == 2
            headers.append(Column(name, right=is_number, wraps=not is_number and _widest(cells) > PROSE))
            cells_by_column.append(cells)
        return cls(columns=tuple(headers), rows=tuple(zip(*cells_by_column, strict=True)), **view_fields)

    def rich(self) -> RichTable:
        """The table for the terminal. In a narrow terminal text and headers are wrapped; nothing is cut."""
        table = paper.rich_table(self.title, self.caption)
        for i, column in enumerate(self.columns):
            # A number broken into two lines could be misread: its column is as wide as its longest number.
            min_width = _widest([row[i] for row in self.rows])
            layout: dict[str, Any] = {"justify": "right", "min_width": min_width} if column.right else {}
            # Folded: rich would otherwise cut long words with an ellipsis.
            table.add_column(paper.literal(column.name), overflow="fold", **layout)
        for row in self.rows:
            table.add_row(*("".join(map(_rich_markup, cell)) for cell in row))
        return table

    def body(self) -> str:
        """HTML table for a notebook, without the styles of the text."""
        return html.table(
            [column.name for column in self.columns],
            (["".join(piece.text for piece in cell) for cell in row] for row in self.rows),
            [i for i, column in enumerate(self.columns) if column.right],
        )


def _formatted_value(record: Any, getter: Any, formatter: Any = None) -> Any:
    """Value of a record in a column of `Table.of`, formatted unless it is None.

    Arguments:
        record: A mapping or any other object.
        getter: Key of the record, or function of the record.
        formatter: Format specification or function of the value; None to leave the value as it is.
    """
    value = record[getter] if isinstance(getter, str) else getter(record)
    if value is None or formatter is None:
        return value
    return formatter(value) if callable(formatter) else format(value, formatter)


def _styled_texts(value: Any, style: str) -> tuple[Styled, ...]:
    """Non-empty pieces of text of a table cell.

    Arguments:
        value: A `Styled`, any value that `str` converts, a tuple of these, or None for an empty cell.
        style: Style that is added to the style of each piece.
    """
    parts = value if isinstance(value, tuple) else () if value is None else (value,)
    pieces = (part if isinstance(part, Styled) else Styled(str(part)) for part in parts)
    return tuple(
        Styled(piece.text, f"{style} {piece.style}".strip(), piece.link) for piece in pieces if piece.text
    )


def _widest(cells: list[tuple[Styled, ...]]) -> int:
    """Number of characters of the longest of some cells; 0 without cells."""
    return max((sum(len(piece.text) for piece in cell) for cell in cells), default=0)


def _rich_markup(piece: Styled) -> str:
    """A styled piece of text in the markup of rich, such as "[bold]0.5[/]"."""
    text = paper.literal(piece.text)
    return f"[{piece.style}]{text}[/]" if piece.style else text
