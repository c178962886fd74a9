"""What a page of the browser is: a title, where it lies, and views one after another.

Tables, heatmaps and curves are those of ../views; five kinds are of a site alone, as they lead to other
pages: tokens to click, links, the pages of a long list, a search, a harvest in progress.

Border: values; knows neither a store nor HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..views import View

__all__ = ["Link", "Links", "Page", "PageLinks", "HarvestProgress", "SearchForm", "TokenLinks"]


@dataclass(frozen=True)
class Link:
    """Text that leads somewhere; href "" leads nowhere. about: what a reader is told beside it."""

    text: str
    href: str
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page. address: of itself. up: the pages above it, the outermost first. over: what kind of thing it is
    about. live: address of what a script asks for news, "" for none."""

    address: str
    title: str
    over: str
    up: tuple[Link, ...] = ()
    views: tuple[View, ...]
    live: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenLinks(View):
    """Tokens in order, each leading to its page. at: the one that the page is about, -1 for none."""

    kind: ClassVar[str] = "token_links"
    tokens: tuple[Link, ...]
    at: int = -1


@dataclass(frozen=True, kw_only=True)
class Links(View):
    """Ways to other pages, side by side."""

    kind: ClassVar[str] = "links"
    links: tuple[Link, ...]


@dataclass(frozen=True, kw_only=True)
class PageLinks(View):
    """Where one is in a long list: number of pages, and the ways to the first, previous, next and last."""

    kind: ClassVar[str] = "page_links"
    number: int
    pages: int
    links: tuple[Link, ...]

    @classmethod
    def of(cls, number: int, pages: int, way: dict[int, str]) -> PageLinks:
        """way: href of each page that a link may lead to."""
        wanted = {"first": 1, "previous": number - 1, "next": number + 1, "last": pages}
        links = [
            Link(name, way[to])
            for name, to in wanted.items()
            if 1 <= to <= pages and to != number and to in way
        ]
        return cls(number=number, pages=pages, links=tuple(links))


@dataclass(frozen=True, kw_only=True)
class SearchForm(View):
    """A field for words; action: where they go. Where pages are files (`filters` set), a script hides the
    rows of the table below that do not have them."""

    kind: ClassVar[str] = "search_form"
    action: str
    words: str = ""
    filters: bool = False


@dataclass(frozen=True, kw_only=True)
class HarvestProgress(View):
    """How far a harvest is. done, claimed, total: segments; name: of the run; href: its page."""

    kind: ClassVar[str] = "progress"
    name: str
    done: int
    claimed: int
    total: int
    told: str
    href: str = ""
