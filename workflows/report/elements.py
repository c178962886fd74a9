"""What a report page is made of: tables, values, notes, pictures, and a choice among any of these.

Border: small frozen values that hold what is shown and nothing of how it looks (`assets/`). Elements with
numbers to look into - heatmaps, lines, the lens, attention - are in plots.py.

An element may name the results it was made from (`sources`); the page links them to how they came about.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import ClassVar

from .blocks import size

__all__ = ["Choice", "Column", "Element", "Note", "Picture", "Run", "Table", "Values"]


@dataclass(frozen=True, kw_only=True)
class Element:
    """One thing on a page, with a title above it and a caption below."""

    kind: ClassVar[str]
    """Names the macro of assets/page.html that writes it, or the function of assets/*.js that draws it."""
    is_drawn: ClassVar[bool] = False
    """Whether the page's script draws it, from its fields as JSON."""

    title: str = ""
    caption: str = ""
    sources: tuple[str, ...] = ()
    """Names of results of the workflow; none means all of them."""

    def within(self, room: int) -> Element:
        """This element, or as much of it as takes `room` bytes; if nothing fits, a note that says so."""
        needed = size(self)
        if needed <= room:
            return self
        return Note(
            title=self.title,
            text=f"Left out: it takes {_megabytes(needed)} and the page is limited. The numbers are in the "
            "store; mizarr compute --json prints them.",
        )


@dataclass(frozen=True)
class Run:
    """Text in one style: "", or some of "bold dim italic"."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """Head of a column; `right` aligns numbers, `wraps` lets prose take several lines."""

    name: str
    right: bool = False
    wraps: bool = False


@dataclass(frozen=True, kw_only=True)
class Table(Element):
    """Rows of cells, each a sequence of runs; `tables.from_rich` makes one of a terminal's table."""

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    rows: tuple[tuple[tuple[Run, ...], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Values(Element):
    """Names and values: what a table of one row would say."""

    kind: ClassVar[str] = "values"
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Note(Element):
    """A paragraph."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, kw_only=True)
class Picture(Element):
    """A PNG, embedded."""

    kind: ClassVar[str] = "picture"
    png: bytes
    alt: str

    @property
    def shape(self) -> tuple[int, int]:
        """Width and height in pixels, from the header of the file."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height


@dataclass(frozen=True, kw_only=True)
class Choice(Element):
    """Several elements of which one is shown: prompts, kinds, layers. Without scripts all are, in order.

    name: what is chosen ("prompt").  options: (label, element).  start: index of the one shown first.
    """

    kind: ClassVar[str] = "choice"
    name: str
    options: tuple[tuple[str, Element], ...]
    start: int = 0

    def within(self, room: int) -> Element:
        """As many options as fit, from the first on; the caption tells what is left out."""
        sizes = [size(element) for _, element in self.options]
        if sum(sizes) <= room:
            return self
        kept, taken = 0, 0
        while taken + sizes[kept] <= room:
            taken += sizes[kept]
            kept += 1
        if not kept:
            return super().within(room)
        told = (
            f"{kept} of {len(sizes)} are on this page, which is limited; all are in the store "
            "(mizarr compute --json)."
        )
        caption = f"{self.caption} {told}".strip()
        return replace(self, options=self.options[:kept], caption=caption, start=min(self.start, kept - 1))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
