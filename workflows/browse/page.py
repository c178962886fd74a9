"""The content of an HTML page about a store: title, address and a sequence of views.

Tables, heatmaps and curves are the views of ../views. The five views of this module exist on these pages
only: clickable tokens, links, navigation in a long list, a search form, and the progress of a capture. This
module depends on neither the store nor HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..views import View

__all__ = ["Link", "Links", "Page", "PageLinks", "HarvestProgress", "SearchForm", "TokenLinks"]


@dataclass(frozen=True)
class Link:
    """A text that links to a page."""

    text: str
    """Text of the link."""
    href: str
    """Relative address of the page."""
    about: str = ""
    """Tooltip of the link; "" for a link without tooltip."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of an HTML page, without its HTML."""

    address: str
    """Path of the page, relative to the root of the site."""
    title: str
    """Heading of the page."""
    over: str
    """Line above the heading: what the page is about, such as "result 3f9a0c" or the model and run."""
    up: tuple[Link, ...] = ()
    """Links to the parent pages, the first page first."""
    views: tuple[View, ...]
    """The views that the page shows, in order."""
    live: str = ""
    """Path of the JSON document with the progress of captures, which the page's script requests again and
    again; "" for a page without progress."""


@dataclass(frozen=True, kw_only=True)
class TokenLinks(View):
    """Consecutive tokens, each with a link to its page."""

    kind: ClassVar[str] = "token_links"
    tokens: tuple[Link, ...]
    """Text and link of each token, in order."""
    at: int = -1
    """Index into `tokens` of the highlighted token, the page's subject; -1 without a highlighted token."""


@dataclass(frozen=True, kw_only=True)
class Links(View):
    """A row of links to other pages."""

    kind: ClassVar[str] = "links"
    links: tuple[Link, ...]
    """The links, in order."""


@dataclass(frozen=True, kw_only=True)
class PageLinks(View):
    """Navigation in a long list: links to its first, previous, next and last page."""

    kind: ClassVar[str] = "page_links"
    number: int
    """Number of the current page, from 1."""
    pages: int
    """Number of pages of the list."""
    links: tuple[Link, ...]
    """Links named "first", "previous", "next" and "last"; those that lead nowhere are left out."""

    @classmethod
    def of(cls, number: int, pages: int, hrefs: dict[int, str]) -> PageLinks:
        """Navigation from a list page to its neighbours and to the first and last page.

        Arguments:
            number: Number of the current page, from 1.
            pages: Number of pages of the list.
            hrefs: Page number -> relative address; pages that are missing here are not linked.
        """
        targets = {"first": 1, "previous": number - 1, "next": number + 1, "last": pages}
        links = [
            Link(name, hrefs[target])
            for name, target in targets.items()
            if target in hrefs and target != number
        ]
        return cls(number=number, pages=pages, links=tuple(links))


@dataclass(frozen=True, kw_only=True)
class SearchForm(View):
    """Input field for a search in the texts of prompts."""

    kind: ClassVar[str] = "search_form"
    action: str
    """Relative address of the page that shows the matching prompts."""
    words: str = ""
    """Initial text of the field: the current search text; "" without a search."""
    filters: bool = False
    """Whether a script filters the rows of the table below instead, as for pages in files, without a
    server."""


@dataclass(frozen=True, kw_only=True)
class HarvestProgress(View):
    """Progress bar of the capture of a run, or of reading the store; the page's script updates it."""

    kind: ClassVar[str] = "progress"
    name: str
    """Name of what is in progress: model and run, or "Reading the store"."""
    done: int
    """Number of finished segments of the run, or of store entries read."""
    claimed: int
    """Number of segments that a process is computing now."""
    total: int
    """Number of segments of the run, or of entries of the store."""
    told: str
    """The progress as a sentence."""
    href: str = ""
    """Relative address of the run's page; "" for no link."""
