"""Tables: rows of text in a few styles, the same in a terminal and on a page."""

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
"""Characters beyond which a column of text may take several lines."""


@dataclass(frozen=True)
class Styled:
    """Text in one style: "", or some of "bold dim italic". link: where it leads on a page, "" for nowhere."""

    text: str
    style: str = ""
    link: str = field(default="", repr=False)


def dim(text: str) -> Styled:
    """Text that stands back."""
    return Styled(text, "dim")


def bold(text: str) -> Styled:
    """Text that stands out."""
    return Styled(text, "bold")


def points(share: float) -> str:
    """A difference of shares, in percentage points."""
    return f"{100 * share:+.2f} pp"


def dash(value: Any, how: Any = str) -> str:
    """A value formatted by `how` (see `Table.of`); a dash for None and NaN."""
    if value is None or value != value:  # noqa: PLR0124 - NaN alone differs from itself
        return "–"
    return str(how(value)) if callable(how) else format(value, how)


@dataclass(frozen=True)
class Column:
    """Head of a column; `right` aligns numbers, `wraps` lets prose take several lines."""

    name: str
    right: bool = False
    wraps: bool = False


@dataclass(frozen=True, kw_only=True)
class Table(View):
    """Rows of cells, each a sequence of runs."""

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    rows: tuple[tuple[tuple[Styled, ...], ...], ...]

    @classmethod
    def of(
        cls,
        records: Iterable[Any],
        *columns: tuple[Any, ...],
        strong: Callable[[Any], bool] = lambda record: False,
        **told: Any,
    ) -> Table:
        """A row per record. A column is (name, what) for text, (name, what, how) for numbers, to the right.

        what: key of a record, or a function of it: text, a run, several of them, None.  how: a format such as
        ".3f", or a function of a number.  strong: which rows are bold.

        >>> table = Table.of([{"layer": 1, "kl": 0.5}], ("layer", "layer", "d"), ("KL", "kl", ".2f"))
        >>> table.columns[1], table.rows[0][1]
        (Column(name='KL', right=True, wraps=False), (Styled(text='0.50', style=''),))
        """
        records = list(records)
        cells = [
            [_runs(_value(record, *column[1:]), "bold" if strong(record) else "") for record in records]
            for column in columns
        ]
        longest = [max((sum(len(run.text) for run in cell) for cell in each), default=0) for each in cells]
        heads = tuple(
            Column(column[0], len(column) > 2, len(column) == 2 and width > PROSE)
            for column, width in zip(columns, longest, strict=True)
        )
        return cls(columns=heads, rows=tuple(zip(*cells, strict=True)), **told)

    def rich(self) -> RichTable:
        """The table as the terminal has it: in a narrow one text and heads take several lines, and nothing is
        cut."""
        table = paper.rich_table(self.title, self.caption)
        for i, column in enumerate(self.columns):
            longest = max((sum(len(run.text) for run in row[i]) for row in self.rows), default=0)
            told: dict[str, Any] = {"justify": "right", "min_width": longest} if column.right else {}
            table.add_column(paper.literal(column.name), overflow="fold", **told)
        for row in self.rows:
            table.add_row(*("".join(map(_markup, cell)) for cell in row))
        return table

    def body(self) -> str:
        """See `View`; text without its styles."""
        return html.table(
            [column.name for column in self.columns],
            (["".join(run.text for run in cell) for cell in row] for row in self.rows),
            [i for i, column in enumerate(self.columns) if column.right],
        )


def _value(record: Any, what: Any, how: Any = None) -> Any:
    found = record[what] if isinstance(what, str) else what(record)
    if found is None or how is None:
        return found
    return how(found) if callable(how) else format(found, how)


def _runs(cell: Any, style: str) -> tuple[Styled, ...]:
    """A cell as runs, in one more style."""
    parts = cell if isinstance(cell, tuple) else () if cell is None else (cell,)
    runs = (part if isinstance(part, Styled) else Styled(str(part)) for part in parts)
    return tuple(Styled(run.text, f"{style} {run.style}".strip(), run.link) for run in runs if run.text)


def _markup(run: Styled) -> str:
    text = paper.literal(run.text)
    return f"[{run.style}]{text}[/]" if run.style else text
