"""The base class of views, and the simplest views: values, a note, a picture, a choice between views.

A view is one displayed item of a workflow's result: labels, numbers, units, a title and a caption. A terminal
prints `rich()`, a figure shows `draw` as a panel, an HTML page of report/ embeds the fields, a JSON document
takes the values of `json`, a notebook shows `_repr_html_`. All read the same fields, so they cannot disagree.

This module depends on no workflow and no page. matplotlib and rich are imported when a view is drawn or
printed.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from ...store.display import html
from . import paper
from .blocks import size

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["Choice", "Data", "Note", "Picture", "Values", "View"]


@dataclass(frozen=True, kw_only=True)
class View:
    """Base class: one displayed item of a result, with a title above it and a caption below."""

    kind: ClassVar[str]
    """Name of the macro in report/assets/page.html, or of the JavaScript function, that renders the view."""
    is_drawn: ClassVar[bool] = False
    """Whether an HTML page draws the view by JavaScript, from its fields as JSON."""
    on_page: ClassVar[bool] = True
    """Whether an HTML page lists the view itself; if not, it appears there only as a panel of a figure."""
    projection: ClassVar[str | None] = None
    """Projection of its matplotlib axes, such as "3d"; None for plain axes."""

    title: str = ""
    """Heading above the view."""
    caption: str = ""
    """Explanation below the view."""
    sources: tuple[str, ...] = ()
    """Names of the workflow's results that the view shows; empty for all results."""
    json: Mapping[str, Any] = field(default_factory=dict, compare=False, metadata={"page": False})
    """Entries that the view adds to the workflow's JSON document, by key: arrays, numbers, dicts or lists, or
    functions without arguments that return such a value."""

    def rich(self) -> RichTable | None:
        """The view as a table for the terminal; None for a view that text cannot show."""
        return None

    def inches(self) -> tuple[float, float]:
        """Width and height of the view as a panel of a figure, in inches, without title and caption."""
        raise NotImplementedError(f"views of class {type(self).__name__} cannot be drawn in a figure")

    @property
    def gutter(self) -> float:
        """Width, in inches, of the row labels left of the axes: title and caption start at their left
        edge."""
        return 0.0

    def draw(self, axes: Any) -> None:
        """Draw the view into matplotlib axes, inside the context `paper.style()`."""
        raise NotImplementedError(f"views of class {type(self).__name__} cannot be drawn in a figure")

    def panel(self) -> View:
        """The view to draw as a panel of a figure: this view, or a copy with another title, caption or
        content."""
        return self

    def within(self, room: int) -> View:
        """This view, reduced until it takes at most `room` bytes on an HTML page.

        Returns:
            The view itself if it fits; else a smaller copy, or a `Note` that says that the view was left out.
        """
        n_bytes = size(self)
        if n_bytes <= room:
            return self
        return Note(
            title=self.title,
            text=f"Left out of this page: the view takes {_megabytes(n_bytes)}, more than the size limit of "
            "the page leaves for it. Its numbers are stored; mizarr compute --json prints them.",
        )

    def body(self) -> str:
        """HTML of the view without title and caption, for a notebook; a drawing is an embedded PNG."""
        picture = paper.png([self]) if type(self).draw is not View.draw else b""
        return f'<img alt="{escape(self.title)}" src="data:image/png;base64,{paper.encoded(picture)}">'

    def _repr_html_(self) -> str:
        return html.shown(self.title, self.body(), self.caption)


@dataclass(frozen=True, kw_only=True)
class Data(View):
    """A view that is not shown: it only adds values to the JSON document, such as token ids."""

    kind: ClassVar[str] = "data"
    on_page: ClassVar[bool] = False

    def body(self) -> str:
        """HTML paragraph with the names of the values, for a notebook."""
        return f"<p>{escape(', '.join(self.json))}</p>"


@dataclass(frozen=True, kw_only=True)
class Values(View):
    """A list of (name, value) pairs."""

    kind: ClassVar[str] = "values"
    pairs: tuple[tuple[str, str], ...]
    """(name, formatted value), in order."""

    def rich(self) -> RichTable:
        """A terminal table with one line per pair."""
        table = paper.rich_table(self.title, self.caption, show_header=False)
        table.add_column(style="dim", overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for pair in self.pairs:
            table.add_row(*map(paper.literal, pair))
        return table

    def body(self) -> str:
        """HTML definition list of the pairs, for a notebook."""
        entries = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in self.pairs)
        return f"<dl>{''.join(entries)}</dl>"


@dataclass(frozen=True, kw_only=True)
class Note(View):
    """A paragraph of plain text."""

    kind: ClassVar[str] = "note"
    text: str
    """The paragraph."""

    def rich(self) -> RichTable:
        """A terminal table whose only cell is the paragraph; rich wraps it to the terminal's width."""
        table = paper.rich_table(self.title, self.caption, show_header=False)
        table.add_row(paper.literal(self.text))
        return table

    def body(self) -> str:
        """HTML paragraph, for a notebook."""
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True, kw_only=True)
class Picture(View):
    """An image that already exists as a PNG file; pages and notebooks embed its bytes."""

    kind: ClassVar[str] = "picture"
    png: bytes
    """Content of the PNG file."""
    alt: str
    """Text for readers who cannot see the image."""

    @property
    def shape(self) -> tuple[int, int]:
        """(width, height) of the image in pixels, read from the header of the PNG."""
        # The IHDR chunk comes first in every PNG: width and height are its bytes 16 to 23, big-endian.
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height

    def body(self) -> str:
        """HTML image, for a notebook."""
        data = base64.b64encode(self.png).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{data}">'


@dataclass(frozen=True, kw_only=True)
class Choice(View):
    """Several views of which a page shows one at a time, such as one per prompt or layer; the reader selects
    it.

    A browser without JavaScript shows all of them, in order.
    """

    kind: ClassVar[str] = "choice"
    name: str
    """Label of the selector: the property that distinguishes the views, such as "prompt"."""
    options: tuple[tuple[str, View], ...]
    """(label, view) of each view to select from."""
    start: int = 0
    """Index into `options` of the view that a page shows before the reader selects another."""

    @classmethod
    def of(cls, name: str, labels: Iterable[Any], make: Callable[[Any], View], **view_fields: Any) -> Choice:
        """Build a choice with one view per label.

        Arguments:
            name: What the views differ in, such as "prompt".
            labels: Labels of the options, such as layer numbers; floats are shown in short form (`%g`).
            make: Function that builds the view of a label.
            view_fields: Other fields of the choice; `start` is the label (not the index) shown first.
        """
        labels = list(labels)
        view_fields["start"] = labels.index(view_fields.get("start", labels[0]))
        options = tuple(
            (f"{label:g}" if isinstance(label, float) else str(label), make(label)) for label in labels
        )
        return cls(name=name, options=options, **view_fields)

    @property
    def chosen(self) -> View:
        """The view that a page shows before the reader selects another."""
        return self.options[self.start][1]

    def panel(self) -> View:
        """The view that a figure shows: the initially selected one, as a figure has no buttons to select
        another.

        If this view has no title or caption, it takes those of the choice.
        """
        view = self.chosen
        titled = replace(view, title=view.title or self.title, caption=view.caption or self.caption)
        return titled.panel()

    def within(self, room: int) -> View:
        """Choice limited to the first options that fit into `room` bytes; the caption states their number."""
        sizes = [size(view) for _, view in self.options]
        if sum(sizes) <= room:
            return self
        n_options, n_bytes = 0, 0
        # Ends before the last option, as all of them together do not fit.
        while n_bytes + sizes[n_options] <= room:
            n_bytes += sizes[n_options]
            n_options += 1
        if not n_options:
            return super().within(room)
        omission = (
            f"The size limit of this page leaves room for {n_options} of {len(sizes)} views; "
            "mizarr compute --json prints the numbers of all."
        )
        return replace(
            self,
            options=self.options[:n_options],
            caption=f"{self.caption} {omission}".strip(),
            start=min(self.start, n_options - 1),
        )

    def body(self) -> str:
        """HTML of the view shown first and its label, for a notebook, which has no selector."""
        label = self.options[self.start][0]
        return f"<p>{escape(self.name)}: {escape(label)}</p>{self.chosen.body()}"


def _megabytes(n_bytes: int) -> str:
    """A number of bytes in MB (10^6 bytes), with one decimal."""
    return f"{n_bytes / 1e6:.1f} MB"
