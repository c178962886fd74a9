"""The first page: totals, models, newest runs and results of a store; and the pages of the complete lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....store.upkeep.listing import model_label
from ...holdings import AskedQuestion, HeldFolder, Removal, Snapshot
from ...views import Note, Table, Values, View, dim
from .. import addresses
from ..opened import harvest
from ..page import HarvestProgress, Link, Links, Page, SearchForm
from .parts import cut, digest_of, home, linked, moment, page_of, results_table, runs_table, sized

__all__ = ["PER_PAGE", "harvests", "listing", "lists", "progress_text", "reading", "store_page"]

FIRST, PER_PAGE = 20, 100
"""Number of rows of a list on the first page, and on each page of the complete list."""
_TITLES = {
    "questions": "Computed workflows",
    "runs": "Runs",
    "results": "Results",
    "cells": "Partial results",
}
"""Headings of the lists."""
SETTINGS = 120
"""Largest number of characters of a workflow's settings in a table."""
LOOKED_AT = 8
"""Number of the most recently written runs that are checked for a capture in progress."""


def store_page(snapshot: Snapshot) -> Page:
    """The first page: totals, captures in progress, damaged entries, models, newest runs and results."""
    address = addresses.INDEX
    results = lists(snapshot)["results"]
    values = Values(
        pairs=(
            ("runs", f"{len(snapshot.runs):,}"),
            ("prompts", f"{sum(folder.run.prompts for folder in snapshot.runs if folder.run):,}"),
            ("tokens", f"{sum(folder.run.tokens for folder in snapshot.runs if folder.run):,}"),
            ("results", f"{len(results):,}"),
            ("on disk", sized(sum(folder.usage.bytes for folder in snapshot.folders.values()))),
        ),
        caption=_freed(snapshot),
    )
    views: list[View] = [
        SearchForm(action=addresses.relative(address, addresses.SEARCH)),
        values,
        *reading(snapshot),
        *harvests(snapshot, address),
        *_damaged(snapshot),
    ]
    if snapshot.runs:
        runs = snapshot.asked_runs
        views.append(_models(snapshot))
        views.append(runs_table(runs[:FIRST], address, title="Captured runs", caption=_shown_rows(len(runs))))
    else:
        views.append(Note(title="Captured runs", text="None yet: `mizarr capture MODEL PROMPTS` makes one."))
    if questions := snapshot.questions:
        caption = _shown_rows(len(questions))
        views.append(_questions(questions[:FIRST], address, title=_TITLES["questions"], caption=caption))
    if other_results := snapshot.other_results:
        caption = _shown_rows(len(other_results))
        views.append(
            results_table(snapshot, other_results[:FIRST], address, title="Other results", caption=caption)
        )
    views.append(_list_links(snapshot, address))
    return Page(
        address=address,
        title=snapshot.store.address.rstrip("/").rpartition("/")[2],
        over="mizarr store",
        views=tuple(views),
        live="live.json",
    )


def lists(snapshot: Snapshot) -> dict[str, list[Any]]:
    """The complete lists by name: "questions" holds `AskedQuestion`, the other lists `HeldFolder`."""
    return {
        "questions": snapshot.questions,
        "runs": snapshot.runs,
        "results": [folder for folder in snapshot.results if not folder.is_cell],
        "cells": [folder for folder in snapshot.results if folder.is_cell],
    }


def listing(snapshot: Snapshot, name: str, number: int) -> Page | None:
    """Page of a complete list.

    Arguments:
        snapshot: Content of the store.
        name: Key of `lists`.
        number: Number of the page, from 1.

    Returns:
        The page; None if the list has fewer pages.
    """
    address, items = addresses.listing(name, number), lists(snapshot)[name]
    page_items, links = page_of(
        items, number, PER_PAGE, address, lambda page_number: addresses.listing(name, page_number)
    )
    if not page_items and number != 1:
        return None
    if name == "questions":
        table = _questions(page_items, address)
    elif name == "runs":
        table = runs_table(page_items, address)
    else:
        table = results_table(snapshot, page_items, address)
    views = [view for view in (links, table, links) if view is not None]
    return Page(
        address=address,
        title=f"{_TITLES[name]}, {len(items):,}",
        over="mizarr store",
        up=(home(address),),
        # A short page has its links above the table only.
        views=tuple(views if len(page_items) > FIRST else views[:2] if links else views),
    )


def reading(snapshot: Snapshot) -> Iterator[HarvestProgress]:
    """Progress of reading the store after the server has started; no view once all entries are read."""
    if snapshot.unread:
        n_read, total = len(snapshot.folders), len(snapshot.folders) + snapshot.unread
        text = f"{n_read:,} of {total:,} runs and results so far, the newest first"
        yield HarvestProgress(name="Reading the store", done=n_read, claimed=0, total=total, told=text)


def harvests(snapshot: Snapshot, address: str) -> Iterator[HarvestProgress]:
    """Progress of the captures that a process is working on, among the LOOKED_AT last written runs."""
    # Not all runs: the segments of each are listed, and a store may hold thousands of runs.
    for folder in [folder for folder in snapshot.runs if folder.run][:LOOKED_AT]:
        assert folder.run is not None
        state = harvest(snapshot.store, folder)
        if not state.is_live:
            continue
        yield HarvestProgress(
            name=f"{folder.run.model} {folder.run.run[:12]}",
            done=state.done,
            claimed=state.claimed,
            total=state.total,
            told=progress_text(state.done, state.total, state.claimed, state.tokens),
            href=addresses.relative(address, addresses.run(digest_of(folder))),
        )


def progress_text(done: int, total: int, claimed: int, tokens: int) -> str:
    """Progress of a capture in words; arguments as the fields of `Harvest`."""
    committed = f"{done:,} of {total:,} segments committed ({tokens:,} tokens)"
    if claimed:
        return f"{committed}, {claimed:,} being computed"
    if done == total:
        return committed
    return f"{committed}; no process is capturing it, the same `mizarr capture` command continues it"


def _models(snapshot: Snapshot) -> Table:
    """Table of models, grouped by name and by digest of weights and configuration, as names can repeat."""
    groups: dict[tuple[str, str], list[HeldFolder]] = {}
    for folder in snapshot.runs:
        if folder.run is not None:
            groups.setdefault((folder.run.model, folder.model), []).append(folder)
    rows = sorted(groups.items(), key=lambda group: -sum(folder.usage.bytes for folder in group[1]))

    def hooks(group: Sequence[HeldFolder]) -> str:
        names = {
            hook.partition(" ")[0] for folder in group for hook in (folder.run.hooks if folder.run else ())
        }
        return ", ".join(sorted(names)) or "none finished"

    return Table.of(
        rows,
        ("model", lambda row: model_label(row[0][0])),
        ("digest", lambda row: dim(row[0][1][:12])),
        ("runs", lambda row: len(row[1]), ",d"),
        ("prompts", lambda row: sum(folder.run.prompts for folder in row[1] if folder.run), ",d"),
        ("tokens", lambda row: sum(folder.run.tokens for folder in row[1] if folder.run), ",d"),
        ("on disk", lambda row: sum(folder.usage.bytes for folder in row[1]), sized),
        ("hook points", lambda row: hooks(row[1])),
        title="Models",
    )


def _questions(
    questions: Sequence[AskedQuestion], address: str, *, title: str = "", caption: str = ""
) -> Table:
    """Table of computed workflows with links from the page at `address` to their pages."""
    return Table.of(
        questions,
        (
            "workflow",
            lambda computed: linked(
                computed.question.workflow, address, addresses.question(computed.question.digest)
            ),
        ),
        ("model", lambda computed: model_label(computed.question.model)),
        ("settings", lambda computed: cut(computed.question.settings_line, SETTINGS)),
        ("results", lambda computed: len(computed.results), ",d"),
        ("on disk", lambda computed: computed.bytes, sized),
        ("asked (UTC)", lambda computed: moment(computed.question.at)),
        title=title,
        caption=caption,
    )


def _shown_rows(count: int) -> str:
    """Caption of a list on the first page: which of its `count` entries are shown."""
    return f"All {count:,}, newest first." if count <= FIRST else f"The newest {FIRST} of {count:,}."


def _list_links(snapshot: Snapshot, address: str) -> Links:
    """Links to the complete lists."""
    links = [
        Link(
            f"all {len(items):,} {_TITLES[name].lower()}",
            addresses.relative(address, addresses.listing(name)),
        )
        for name, items in lists(snapshot).items()
        if items
    ]
    caption = (
        "An interrupted computation continues from its partial results." if lists(snapshot)["cells"] else ""
    )
    return Links(title="Everything", links=tuple(links), caption=caption)


def _freed(snapshot: Snapshot) -> str:
    """Sentence with the bytes that `mizarr gc` would free now, and at most with a quota."""

    def total_bytes(removal: Removal) -> str:
        folders = [folder for folder in snapshot.folders.values() if snapshot.removal(folder) == removal]
        return sized(sum(folder.usage.bytes for folder in folders))

    now, with_quota = total_bytes("now"), total_bytes("with a quota")
    return f"mizarr gc would free {now} now, and with a quota up to {with_quota} more."


def _damaged(snapshot: Snapshot) -> Iterator[Note]:
    """Note with the first three damaged entries; no view if there are none."""
    if snapshot.damaged:
        examples = "; ".join(snapshot.damaged[:3])
        yield Note(
            title=f"{len(snapshot.damaged)} unreadable",
            text=f"{examples}. They are not listed on these pages; `mizarr verify` lists damaged files.",
        )
