"""What an answer is said in: a view is one thing that is shown, once, wherever it is shown.

A view holds labels, numbers, units, a title and a caption. A terminal prints its `rich()`, a figure has it as
a panel (`draw`), a page of report/ embeds its fields, a JSON document takes the values under `json`, a
notebook shows `_repr_html_`. All of them read the same fields, so that they cannot disagree.

Border: knows no workflow and no page. matplotlib and rich are imported when something is drawn or printed.
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
    """One thing that is shown, with a title above it and a caption below."""

    kind: ClassVar[str]
    """Names the macro of report/assets/page.html that writes it, or the script's function that draws it."""
    is_drawn: ClassVar[bool] = False
    """Whether a page's script draws it, from its fields as JSON."""
    on_page: ClassVar[bool] = True
    """Whether a page has it among its results; if not, it is seen there in a figure, or not at all."""
    projection: ClassVar[str | None] = None
    """Of its axes in a figure; None: plain ones."""

    title: str = ""
    caption: str = ""
    sources: tuple[str, ...] = ()
    """Names of results of the workflow; none means all of them."""
    json: Mapping[str, Any] = field(default_factory=dict, compare=False, metadata={"page": False})
    """What a JSON document says of this: names of its top level, with arrays, numbers, dicts, lists."""

    def rich(self) -> RichTable | None:
        """As a terminal shows it; None for what cannot be told in letters."""
        return None

    def inches(self) -> tuple[float, float]:
        """Width and height it wants as a panel of a figure, without title and caption."""
        raise NotImplementedError(f"{type(self).__name__} has no panel")

    @property
    def gutter(self) -> float:
        """Of these inches, those that names take left of the axes, where title and caption begin."""
        return 0.0

    def draw(self, axes: Any) -> None:
        """Draw it into matplotlib's axes, inside `paper.style()`."""
        raise NotImplementedError(f"{type(self).__name__} has no panel")

    def panel(self) -> View:
        """What a figure draws of it."""
        return self

    def within(self, room: int) -> View:
        """This view, or as much of it as takes `room` bytes; if nothing fits, a note that says so."""
        needed = size(self)
        if needed <= room:
            return self
        return Note(
            title=self.title,
            text=f"Left out: it takes {_megabytes(needed)} and the page is limited. The numbers are in the "
            "store; mizarr compute --json prints them.",
        )

    def body(self) -> str:
        """HTML of what is between title and caption, for a notebook; a drawing as PNG."""
        picture = paper.png([self]) if type(self).draw is not View.draw else b""
        return f'<img alt="{escape(self.title)}" src="data:image/png;base64,{paper.encoded(picture)}">'

    def _repr_html_(self) -> str:
        return html.shown(self.title, self.body(), self.caption)


@dataclass(frozen=True, kw_only=True)
class Data(View):
    """Values that only a JSON document has: sizes of the model, token ids, settings that were worked out."""

    kind: ClassVar[str] = "data"
    on_page: ClassVar[bool] = False

    def body(self) -> str:
        """See `View`: the names of its values alone."""
        return f"<p>{escape(', '.join(self.json))}</p>"


@dataclass(frozen=True, kw_only=True)
class Values(View):
    """Names and values: what a table of one row would say."""

    kind: ClassVar[str] = "values"
    pairs: tuple[tuple[str, str], ...]

    def rich(self) -> RichTable:
        """A line per value."""
        table = paper.rich_table(self.title, self.caption, show_header=False)
        table.add_column(style="dim", overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for pair in self.pairs:
            table.add_row(*map(paper.literal, pair))
        return table

    def body(self) -> str:
        """See `View`."""
        return f"<dl>{''.join(f'<dt>{escape(n)}</dt><dd>{escape(v)}</dd>' for n, v in self.pairs)}</dl>"


@dataclass(frozen=True, kw_only=True)
class Note(View):
    """A paragraph of plain text."""

    kind: ClassVar[str] = "note"
    text: str

    def rich(self) -> RichTable:
        """The paragraph, wrapped."""
        table = paper.rich_table(self.title, self.caption, show_header=False)
        table.add_row(paper.literal(self.text))
        return table

    def body(self) -> str:
        """See `View`."""
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True, kw_only=True)
class Picture(View):
    """A PNG that is there already, embedded."""

    kind: ClassVar[str] = "picture"
    png: bytes
    alt: str

    @property
    def shape(self) -> tuple[int, int]:
        """Width and height in pixels, from the header of the file."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height

    def body(self) -> str:
        """See `View`: itself."""
        data = base64.b64encode(self.png).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{data}">'


@dataclass(frozen=True, kw_only=True)
class Choice(View):
    """Several views of which one is shown: prompts, kinds, layers. Without scripts all are, in order.

    name: what is chosen ("prompt").  options: (label, view).  start: index of the one shown first.
    """

    kind: ClassVar[str] = "choice"
    name: str
    options: tuple[tuple[str, View], ...]
    start: int = 0

    @classmethod
    def of(cls, name: str, labels: Iterable[Any], make: Callable[[Any], View], **told: Any) -> Choice:
        """A view for each label, as `make` gives it; start, if told, is the label shown first."""
        labels = list(labels)
        told["start"] = labels.index(told.get("start", labels[0]))
        options = tuple(
            (f"{label:g}" if isinstance(label, float) else str(label), make(label)) for label in labels
        )
        return cls(name=name, options=options, **told)

    @property
    def chosen(self) -> View:
        """The one shown first."""
        return self.options[self.start][1]

    def panel(self) -> View:
        """The one shown first, under the title of them all."""
        chosen = self.chosen
        told = replace(chosen, title=chosen.title or self.title, caption=chosen.caption or self.caption)
        return told.panel()

    def within(self, room: int) -> View:
        """As many options as fit, from the first on; the caption tells what is left out."""
        sizes = [size(view) for _, view in self.options]
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

    def body(self) -> str:
        """The one shown first, with its label."""
        return f"<p>{escape(self.name)}: {escape(self.options[self.start][0])}</p>{self.chosen.body()}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
