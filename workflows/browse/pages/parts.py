"""What several pages say alike: links in tables, moments, sizes, pages of a long list, lists of folders.

Border: plain values in, cells and parts of pages out.
"""

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
    "home",
    "linked",
    "moment",
    "paged",
    "results_table",
    "runs_table",
    "sized",
    "way_to",
]

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


def runs_table(runs: Sequence[HeldFolder], here: str, *, title: str = "", caption: str = "") -> Table:
    """A line per run, linked to its page."""
    return Table.of(
        [each for each in runs if each.run is not None],
        ("run", lambda each: linked(each.run.run[:12], here, addresses.run(digest_of(each)))),
        ("model", lambda each: model_label(each.run.model)),
        ("prompts", lambda each: each.run.prompts, ",d"),
        ("tokens", lambda each: each.run.tokens, ",d"),
        ("on disk", lambda each: each.usage.bytes, sized),
        ("written (UTC)", lambda each: moment(each.written)),
        ("stored as", lambda each: dim(each.run.dtype)),
        ("hook points", lambda each: ", ".join(each.run.hooks) or "none finished"),
        title=title,
        caption=caption,
    )


def results_table(
    held: Snapshot,
    results: Sequence[HeldFolder],
    here: str,
    *,
    names: Mapping[str, str] | None = None,
    title: str = "",
    caption: str = "",
) -> Table:
    """A line per result, linked to its page. names: of the results in their workflow, by folder."""
    return Table.of(
        results,
        ("result", lambda each: linked(each.label, here, addresses.result(each.records[0].key))),
        *([("name", lambda each: names.get(each.data, ""))] if names else ()),
        ("key", lambda each: dim(each.records[0].short)),
        ("on disk", lambda each: each.usage.bytes, sized),
        ("written (UTC)", lambda each: moment(each.written)),
        ("pinned as", lambda each: held.pin(each) or "–"),
        title=title,
        caption=caption,
    )
