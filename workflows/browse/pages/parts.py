"""What several pages say alike: links in tables, moments, sizes, pages of a long list.

Border: plain values in, cells and parts of pages out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from ....pipeline.plan import human_bytes
from ...views import Styled
from .. import addresses
from ..holdings import HeldFolder
from ..page import Link, PageLinks

__all__ = ["cut", "digest_of", "home", "linked", "moment", "paged", "sized", "way_to"]

T = TypeVar("T")


def linked(text: str, here: str, there: str, style: str = "") -> Styled:
    """Text of a table cell that leads to another page."""
    return Styled(text, style, addresses.to(here, there))


def home(here: str) -> Link:
    """The way to the first page."""
    return Link("store", addresses.to(here, addresses.INDEX))


def digest_of(folder: HeldFolder) -> str:
    """The name of a run's folder: its digest."""
    return folder.data.rpartition("/")[2]


def way_to(here: str) -> Callable[[HeldFolder], str]:
    """Of a folder the address of its page, from here; "" for one that has none."""

    def way(folder: HeldFolder) -> str:
        if folder.run is not None:
            return addresses.to(here, addresses.run(digest_of(folder)))
        return addresses.to(here, addresses.result(folder.records[0].key)) if folder.records else ""

    return way


def sized(count: float) -> str:
    """Bytes for people; "0 B" for none."""
    return human_bytes(int(count)) or "0 B"


def moment(seconds: float) -> str:
    """A moment as people write it, in UTC, so that a site is the same wherever it was written."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def cut(text: str, most: int) -> str:
    """A text on one line, and no longer than this."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def paged(
    items: Sequence[T], number: int, per_page: int, here: str, address: Callable[[int], str]
) -> tuple[Sequence[T], PageLinks | None]:
    """The items of one page of a list, and the ways to the others; None where there is one page."""
    pages = max(1, -(-len(items) // per_page))
    part = items[(number - 1) * per_page : number * per_page]
    if pages == 1:
        return part, None
    wanted = {1, number - 1, number + 1, pages}
    way = {to: addresses.to(here, address(to)) for to in wanted if 1 <= to <= pages}
    return part, PageLinks.of(number, pages, way)
