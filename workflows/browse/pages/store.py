"""The first page: what a store holds by model, its runs and results; and the long lists behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....store.upkeep.listing import model_label
from ...holdings import AskedQuestion, HeldFolder, Snapshot
from ...views import Note, Table, Values, View, dim
from .. import addresses
from ..opened import harvest
from ..page import HarvestProgress, Link, Links, Page, SearchForm
from .parts import cut, digest_of, home, linked, moment, paged, results_table, runs_table, sized

__all__ = ["PER_PAGE", "harvests", "listing", "lists", "reading", "store_page"]

FIRST, PER_PAGE = 20, 100
"""Lines of a list on the first page, and on pages of its own."""
_TITLES = {
    "questions": "Computed workflows",
    "runs": "Runs",
    "results": "Results",
    "cells": "Pieces of results",
}
SETTINGS = 120
"""Characters of the settings of a workflow in a table."""
LOOKED_AT = 8
"""Runs, of those written last, that are asked whether somebody is at them."""


def store_page(held: Snapshot) -> Page:
    """The first page: sums, what is being computed or damaged, models, and the first runs and results."""
    here = addresses.INDEX
    whole = lists(held)["results"]
    tokens = sum(each.run.tokens for each in held.runs if each.run)
    values = Values(
        pairs=(
            ("runs", f"{len(held.runs):,}"),
            ("prompts", f"{sum(each.run.prompts for each in held.runs if each.run):,}"),
            ("tokens", f"{tokens:,}"),
            ("results", f"{len(whole):,}"),
            ("on disk", sized(sum(each.usage.bytes for each in held.folders.values()))),
        ),
        caption=_freed(held),
    )
    views: list[View] = [
        SearchForm(action=addresses.to(here, addresses.SEARCH)),
        values,
        *reading(held),
        *harvests(held, here),
        *_damaged(held),
    ]
    if held.runs:
        runs = held.asked_runs
        views.append(_models(held))
        views.append(runs_table(runs[:FIRST], here, title="Captured runs", caption=_some(len(runs))))
    else:
        views.append(Note(title="Captured runs", text="None yet: `mizarr capture MODEL PROMPTS` makes one."))
    if questions := held.questions:
        caption = _some(len(questions))
        views.append(_questions(questions[:FIRST], here, title=_TITLES["questions"], caption=caption))
    if others := held.other_results:
        caption = _some(len(others))
        views.append(results_table(held, others[:FIRST], here, title="Other results", caption=caption))
    views.append(_all_of(held, here))
    return Page(
        address=here,
        title=held.store.address.rstrip("/").rpartition("/")[2],
        over="mizarr store",
        views=tuple(views),
        live="live.json",
    )


def lists(held: Snapshot) -> dict[str, list[Any]]:
    """The long lists by name: of questions as AskedQuestion, all others of HeldFolder."""
    return {
        "questions": held.questions,
        "runs": held.runs,
        "results": [each for each in held.results if not each.is_cell],
        "cells": [each for each in held.results if each.is_cell],
    }


def listing(held: Snapshot, name: str, number: int) -> Page | None:
    """A page of a long list; None where there is none."""
    here, items = addresses.listing(name, number), lists(held)[name]
    part, links = paged(items, number, PER_PAGE, here, lambda to: addresses.listing(name, to))
    if not part and number != 1:
        return None
    if name == "questions":
        table = _questions(part, here)
    else:
        table = runs_table(part, here) if name == "runs" else results_table(held, part, here)
    views = [each for each in (links, table, links) if each is not None]
    return Page(
        address=here,
        title=f"{_TITLES[name]}, {len(items):,}",
        over="mizarr store",
        up=(home(here),),
        views=tuple(views if len(part) > FIRST else views[:2] if links else views),
    )


def reading(held: Snapshot) -> Iterator[HarvestProgress]:
    """How much of a store was looked at, right after the start."""
    if held.unread:
        found, total = len(held.folders), len(held.folders) + held.unread
        words = f"{found:,} of {total:,} runs and results so far, the newest first"
        yield HarvestProgress(name="Reading the store", done=found, claimed=0, total=total, told=words)


def harvests(held: Snapshot, here: str) -> Iterator[HarvestProgress]:
    """Runs that somebody is at, of those written to last."""
    for folder in [each for each in held.runs if each.run][:LOOKED_AT]:
        assert folder.run is not None
        state = harvest(held.store, folder)
        if not state.is_live:
            continue
        yield HarvestProgress(
            name=f"{folder.run.model} {folder.run.run[:12]}",
            done=state.done,
            claimed=state.claimed,
            total=state.total,
            told=told(state.done, state.total, state.claimed, state.tokens),
            href=addresses.to(here, addresses.run(digest_of(folder))),
        )


def told(done: int, total: int, claimed: int, tokens: int) -> str:
    """How far a harvest is, in words."""
    whole = f"{done:,} of {total:,} segments committed ({tokens:,} tokens)"
    if claimed:
        return f"{whole}, {claimed:,} being computed"
    return whole if done == total else f"{whole}; nobody is at it, the same capture goes on from here"


def _models(held: Snapshot) -> Table:
    """A line per model: by the digest of its weights and configuration, as two may share a name."""
    groups: dict[tuple[str, str], list[HeldFolder]] = {}
    for each in held.runs:
        if each.run is not None:
            groups.setdefault((each.run.model, each.model), []).append(each)
    rows = sorted(groups.items(), key=lambda group: -sum(each.usage.bytes for each in group[1]))

    def hooks(group: Sequence[HeldFolder]) -> str:
        names = {hook.partition(" ")[0] for each in group for hook in (each.run.hooks if each.run else ())}
        return ", ".join(sorted(names)) or "none finished"

    return Table.of(
        rows,
        ("model", lambda row: model_label(row[0][0])),
        ("digest", lambda row: dim(row[0][1][:12])),
        ("runs", lambda row: len(row[1]), ",d"),
        ("prompts", lambda row: sum(each.run.prompts for each in row[1] if each.run), ",d"),
        ("tokens", lambda row: sum(each.run.tokens for each in row[1] if each.run), ",d"),
        ("on disk", lambda row: sum(each.usage.bytes for each in row[1]), sized),
        ("hook points", lambda row: hooks(row[1])),
        title="Models",
    )


def _questions(questions: Sequence[AskedQuestion], here: str, *, title: str = "", caption: str = "") -> Table:
    """A line per workflow that was computed, linked to its page."""
    return Table.of(
        questions,
        (
            "workflow",
            lambda asked: linked(asked.question.workflow, here, addresses.question(asked.question.digest)),
        ),
        ("model", lambda asked: model_label(asked.question.model)),
        ("settings", lambda asked: cut(asked.question.settings_line, SETTINGS)),
        ("results", lambda asked: len(asked.results), ",d"),
        ("on disk", lambda asked: asked.bytes, sized),
        ("asked (UTC)", lambda asked: moment(asked.question.at)),
        title=title,
        caption=caption,
    )


def _some(count: int) -> str:
    """What stands below the first lines of a list."""
    return (
        f"All {count:,}, the one written last first."
        if count <= FIRST
        else f"The {FIRST} written last of {count:,}."
    )


def _all_of(held: Snapshot, here: str) -> Links:
    """The ways to the long lists."""
    links = [
        Link(f"all {len(items):,} {_TITLES[name].lower()}", addresses.to(here, addresses.listing(name)))
        for name, items in lists(held).items()
        if items
    ]
    caption = "From pieces of results a computation that was stopped goes on." if lists(held)["cells"] else ""
    return Links(title="Everything", links=tuple(links), caption=caption)


def _freed(held: Snapshot) -> str:
    """What gc would free, over all."""
    gone = [each for each in held.folders.values() if held.fate(each).startswith("goes:")]
    room = [each for each in held.folders.values() if held.fate(each).startswith("goes when")]
    now = f"mizarr gc would free {sized(sum(each.usage.bytes for each in gone))} now"
    return f"{now}, and with a quota up to {sized(sum(each.usage.bytes for each in room))} more."


def _damaged(held: Snapshot) -> Iterator[Note]:
    if held.damaged:
        told = "; ".join(held.damaged[:3])
        yield Note(
            title=f"{len(held.damaged)} unreadable",
            text=f"{told}. They are left out here; `mizarr verify` lists what is damaged.",
        )
