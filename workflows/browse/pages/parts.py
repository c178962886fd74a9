"""Parts that several pages use: links in tables, dates, sizes, pages of a long list, tables of runs and
results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from ....pipeline.plan import human_bytes
from ....store.upkeep.listing import model_label
from ...holdings import HeldFolder, Snapshot
from ...views import Styled, Table, dim
from .. import addresses
from ..page import Link, PageLinks

__all__ = [
    "cut",
    "digest_of",
    "entry_links",
    "home",
    "linked",
    "moment",
    "page_of",
    "results_table",
    "runs_table",
    "sized",
]

T = TypeVar("T")


def linked(text: str, address: str, target: str, style: str = "") -> Styled:
    """Text of a table cell that links to another page.

    Arguments:
        text: The text.
        address: Address of the page that contains the cell.
        target: Address of the page that the link leads to.
        style: Style of the text, as in `Styled.style`.
    """
    return Styled(text, style, addresses.relative(address, target))


def home(address: str) -> Link:
    """Link named "store" from the page at an address to the first page."""
    return Link("store", addresses.relative(address, addresses.INDEX))


def digest_of(folder: HeldFolder) -> str:
    """Digest of a run: the last component of its folder's path."""
    return folder.data.rpartition("/")[2]


def entry_links(address: str) -> Callable[[HeldFolder], str]:
    """Make a function that links to the pages of runs and results.

    Arguments:
        address: Address of the page that contains the links.

    Returns:
        Function from the folder of a run or result to the relative link to its page; "" if it has no page.
    """

    def link(folder: HeldFolder) -> str:
        if folder.run is not None:
            return addresses.relative(address, addresses.run(digest_of(folder)))
        return addresses.relative(address, addresses.result(folder.records[0].key)) if folder.records else ""

    return link


def sized(n_bytes: float) -> str:
    """A number of bytes with a unit, such as "1.2 MB"; "0 B" for zero."""
    return human_bytes(int(n_bytes)) or "0 B"


def moment(seconds: float) -> str:
    """Date and time in UTC, to the minute, of a Unix time in seconds.

    UTC, so that a written site does not depend on the machine's time zone.
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def cut(text: str, most: int) -> str:
    """Put a text on a single line and cut it; "…" marks the cut.

    Arguments:
        text: The text.
        most: Largest number of characters.
    """
    # A long text is cut before its whitespace is normalised, which would read all of it.
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def page_of(
    items: Sequence[T], number: int, per_page: int, address: str, address_of: Callable[[int], str]
) -> tuple[Sequence[T], PageLinks | None]:
    """Select the items of a long list that one page shows.

    Arguments:
        items: The whole list.
        number: Number of the page, from 1.
        per_page: Number of items per page.
        address: Address of this page.
        address_of: Function from the number of a page of the list to its address.

    Returns:
        (items of this page, navigation to the other pages); the navigation is None if there is only one page.
    """
    # Rounded up; an empty list has one page.
    pages = max(1, -(-len(items) // per_page))
    page_items = items[(number - 1) * per_page : number * per_page]
    if pages == 1:
        return page_items, None
    targets = {1, number - 1, number + 1, pages}
    hrefs = {
        target: addresses.relative(address, address_of(target)) for target in targets if 1 <= target <= pages
    }
    return page_items, PageLinks.of(number, pages, hrefs)


def runs_table(runs: Sequence[HeldFolder], address: str, *, title: str = "", caption: str = "") -> Table:
    """Table with one row per run, which links to the page of the run.

    Arguments:
        runs: Folders of the runs.
        address: Address of the page that shows the table.
        title: Title of the table.
        caption: Caption of the table.
    """
    return Table.of(
        [folder for folder in runs if folder.run is not None],
        ("run", lambda folder: linked(folder.run.run[:12], address, addresses.run(digest_of(folder)))),
        ("model", lambda folder: model_label(folder.run.model)),
        ("prompts", lambda folder: folder.run.prompts, ",d"),
        ("tokens", lambda folder: folder.run.tokens, ",d"),
        ("on disk", lambda folder: folder.usage.bytes, sized),
        ("written (UTC)", lambda folder: moment(folder.written)),
        ("stored as", lambda folder: dim(folder.run.dtype)),
        ("captured hook points", lambda folder: ", ".join(folder.run.hooks) or "none finished"),
        title=title,
        caption=caption,
    )


def results_table(
    snapshot: Snapshot,
    results: Sequence[HeldFolder],
    address: str,
    *,
    names: Mapping[str, str] | None = None,
    title: str = "",
    caption: str = "",
) -> Table:
    """Table with one row per stored result, which links to the page of the result.

    Arguments:
        snapshot: Content of the store.
        results: Folders of the results.
        address: Address of the page that shows the table.
        names: Path of a result's folder -> name of the result within its workflow; None for no such column.
        title: Title of the table.
        caption: Caption of the table.
    """
    return Table.of(
        results,
        ("result", lambda folder: linked(folder.label, address, addresses.result(folder.records[0].key))),
        *([("name", lambda folder: names.get(folder.data, ""))] if names else ()),
        ("key", lambda folder: dim(folder.records[0].short)),
        ("on disk", lambda folder: folder.usage.bytes, sized),
        ("written (UTC)", lambda folder: moment(folder.written)),
        ("pinned as", lambda folder: snapshot.pin(folder) or "–"),
        title=title,
        caption=caption,
    )
