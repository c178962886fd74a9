"""The data of a page: title, address and a sequence of views.

Tables, heatmaps and curves are the views of ../views. Five views exist for a site only: clickable tokens,
links, the pages of a long list, a search form, and the progress of a capture. This module depends on neither
the store nor HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..views import View

__all__ = ["Link", "Links", "Page", "PageLinks", "HarvestProgress", "SearchForm", "TokenLinks"]


@dataclass(frozen=True)
class Link:
    """A text with a link."""

    text: str
    """Text of the link."""
    href: str
    """Relative address that the link leads to; "" for none."""
    about: str = ""
    """Tooltip of the link."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of a page."""

    address: str
    """Path of the page, relative to the root of the site."""
    title: str
    """Heading of the page."""
    over: str
    """Line above the heading: the kind of entry, or its run and model."""
    up: tuple[Link, ...] = ()
    """Links to the parent pages, outermost first."""
    views: tuple[View, ...]
    """Content of the page, in order."""
    live: str = ""
    """Path of the JSON document with progress that the page's script polls; "" for none."""


@dataclass(frozen=True, kw_only=True)
class TokenLinks(View):
    """Consecutive tokens, each with a link to its page."""

    kind: ClassVar[str] = "token_links"
    tokens: tuple[Link, ...]
    """Links of the tokens."""
    at: int = -1
    """Index into `tokens` of the page's subject, which is highlighted; -1 for no highlight."""


@dataclass(frozen=True, kw_only=True)
class Links(View):
    """Links to other pages, side by side."""

    kind: ClassVar[str] = "links"
    links: tuple[Link, ...]
    """The links."""


@dataclass(frozen=True, kw_only=True)
class PageLinks(View):
    """Navigation in a long list: links to its first, previous, next and last page."""

    kind: ClassVar[str] = "page_links"
    number: int
    """Number of the current page, from 1."""
    pages: int
    """Number of pages of the list."""
    links: tuple[Link, ...]
    """Links to other pages of the list."""

    @classmethod
    def of(cls, number: int, pages: int, hrefs: dict[int, str]) -> PageLinks:
        """Navigation between the pages of a list.

        Arguments:
            number: Number of the page, from 1.
            pages: Number of pages of the list.
            hrefs: Page number -> link, of the pages that may be linked.
        """
        targets = {"first": 1, "previous": number - 1, "next": number + 1, "last": pages}
        links = [
            Link(name, hrefs[target])
            for name, target in targets.items()
            if 1 <= target <= pages and target != number and target in hrefs
        ]
        return cls(number=number, pages=pages, links=tuple(links))


@dataclass(frozen=True, kw_only=True)
class SearchForm(View):
    """Input field for a search in the texts of prompts."""

    kind: ClassVar[str] = "search_form"
    action: str
    """Relative address of the search page."""
    words: str = ""
    """Words that were searched for."""
    filters: bool = False
    """Whether a script filters the rows of the table below instead, as pages in files have no server."""


@dataclass(frozen=True, kw_only=True)
class HarvestProgress(View):
    """Progress bar of the capture of a run, or of reading the store."""

    kind: ClassVar[str] = "progress"
    name: str
    """Name of the run."""
    done: int
    """Number of complete segments."""
    claimed: int
    """Number of segments that a process is computing now."""
    total: int
    """Number of segments."""
    told: str
    """The progress in words."""
    href: str = ""
    """Relative address of the run's page; "" for no link."""
