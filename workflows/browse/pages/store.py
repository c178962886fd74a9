"""The first page about a store: totals, models, newest runs and results; and the pages of the complete
lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....store.upkeep.listing import model_label
from ...holdings import AskedQuestion, HeldFolder, Removal, Snapshot
from ...views import Note, Styled, Table, Values, View, dim
from .. import addresses
from ..opened import harvest
from ..page import HarvestProgress, Link, Links, Page, SearchForm
from .parts import cut, digest_of, home, linked, moment, page_of, results_table, runs_table, sized

__all__ = ["PER_PAGE", "harvests", "listing", "lists", "progress_text", "reading", "store_page"]

FIRST, PER_PAGE = 20, 100
"""Number of rows of a table on the first page, and on each page of a complete list."""
_TITLES = {
    "questions": "Computed workflows",
    "runs": "Runs",
    "results": "Results",
    "cells": "Partial results",
}
"""Name of a list in addresses -> its heading."""
SETTINGS = 120
"""Largest number of characters of a workflow's settings in a table."""
LOOKED_AT = 8
"""Captures in progress are looked for among this many runs, the most recently written ones."""


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
        caption=_deletable_bytes(snapshot),
    )
    views: list[View] = [
        SearchForm(action=addresses.relative(address, addresses.SEARCH)),
        values,
        *reading(snapshot),
        *harvests(snapshot, address),
        *_damage_note(snapshot),
    ]
    if snapshot.runs:
        # Without the runs that workflows captured for themselves.
        runs = snapshot.asked_runs
        views.append(_models_table(snapshot))
        caption = _rows_caption(len(runs))
        views.append(runs_table(runs[:FIRST], address, title="Captured runs", caption=caption))
    else:
        text = "There are none yet: `mizarr capture MODEL PROMPTS` captures one."
        views.append(Note(title="Captured runs", text=text))
    if questions := snapshot.questions:
        caption = _rows_caption(len(questions))
        views.append(
            _workflows_table(questions[:FIRST], address, title=_TITLES["questions"], caption=caption)
        )
    if other_results := snapshot.other_results:
        caption = f"Results that belong to no workflow. {_rows_caption(len(other_results))}"
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
    """Name of a list -> all its entries: "questions" holds `AskedQuestion`, the other lists `HeldFolder`."""
    return {
        "questions": snapshot.questions,
        "runs": snapshot.runs,
        "results": [folder for folder in snapshot.results if not folder.is_cell],
        "cells": [folder for folder in snapshot.results if folder.is_cell],
    }


def listing(snapshot: Snapshot, name: str, number: int) -> Page | None:
    """A page of a complete list.

    Arguments:
        snapshot: Content of the store.
        name: Name of the list, a key of `lists`.
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
        table = _workflows_table(page_items, address)
    elif name == "runs":
        table = runs_table(page_items, address)
    else:
        table = results_table(snapshot, page_items, address)
    # Navigation above the table, and below a long one.
    below = links if len(page_items) > FIRST else None
    return Page(
        address=address,
        title=f"{_TITLES[name]}, {len(items):,}",
        over="mizarr store",
        up=(home(address),),
        views=tuple(view for view in (links, table, below) if view is not None),
    )


def reading(snapshot: Snapshot) -> Iterator[HarvestProgress]:
    """View of the progress of reading the store, which begins when the server starts; none once all is
    read."""
    if snapshot.unread:
        n_read, total = len(snapshot.folders), len(snapshot.folders) + snapshot.unread
        text = f"{n_read:,} of {total:,} runs and results have been read, the newest first"
        yield HarvestProgress(name="Reading the store", done=n_read, claimed=0, total=total, told=text)


def harvests(snapshot: Snapshot, address: str) -> Iterator[HarvestProgress]:
    """Views of the progress of captures that a process is working on now.

    Arguments:
        snapshot: Content of the store.
        address: Address of the page that shows the progress.
    """
    # Not all runs: the segments of each run are listed, and a store may hold thousands of runs.
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
    """Progress of a capture as a sentence.

    Arguments:
        done: Number of complete segments of the run.
        total: Number of segments of the run.
        claimed: Number of segments that a process is computing now.
        tokens: Number of tokens in complete segments.
    """
    stored = f"{done:,} of {total:,} segments stored ({tokens:,} tokens)"
    if claimed:
        return f"{stored}, {claimed:,} being computed"
    if done == total:
        return stored
    return f"{stored}; no process is capturing this run: the same `mizarr capture` command continues it"


def _models_table(snapshot: Snapshot) -> Table:
    """Table with one row per model: its runs, prompts, tokens, size on disk and captured hook points."""
    # By name and by digest of weights and configuration, as different models may have the same name.
    groups: dict[tuple[str, str], list[HeldFolder]] = {}
    for folder in snapshot.runs:
        if folder.run is not None:
            groups.setdefault((folder.run.model, folder.model), []).append(folder)
    rows = sorted(groups.items(), key=lambda group: -sum(folder.usage.bytes for folder in group[1]))

    def hooks(runs: Sequence[HeldFolder]) -> str:
        # A hook is "resid_post 0-5": the name without its layers.
        hooks = [hook for folder in runs for hook in (folder.run.hooks if folder.run else ())]
        return ", ".join(sorted({hook.partition(" ")[0] for hook in hooks})) or "none finished"

    # A row is ((name, digest), folders of the model's runs).
    return Table.of(
        rows,
        ("model", lambda row: model_label(row[0][0])),
        ("digest of the weights", lambda row: dim(row[0][1][:12])),
        ("runs", lambda row: len(row[1]), ",d"),
        ("prompts", lambda row: sum(folder.run.prompts for folder in row[1] if folder.run), ",d"),
        ("tokens", lambda row: sum(folder.run.tokens for folder in row[1] if folder.run), ",d"),
        ("on disk", lambda row: sum(folder.usage.bytes for folder in row[1]), sized),
        ("captured hook points", lambda row: hooks(row[1])),
        title="Models",
    )


def _workflows_table(
    questions: Sequence[AskedQuestion], address: str, *, title: str = "", caption: str = ""
) -> Table:
    """Table with one row per computed workflow, which links to the page of the workflow.

    Arguments:
        questions: The computed workflows with their settings.
        address: Address of the page that shows the table.
        title: Title of the table.
        caption: Caption of the table.
    """

    def name(computed: AskedQuestion) -> Styled:
        question = computed.question
        return linked(question.workflow, address, addresses.question(question.digest))

    return Table.of(
        questions,
        ("workflow", name),
        ("model", lambda computed: model_label(computed.question.model)),
        ("settings", lambda computed: cut(computed.question.settings_line, SETTINGS)),
        ("results", lambda computed: len(computed.results), ",d"),
        ("on disk", lambda computed: computed.bytes, sized),
        ("requested (UTC)", lambda computed: moment(computed.question.at)),
        title=title,
        caption=caption,
    )


def _rows_caption(count: int) -> str:
    """Caption of a table that shows the first entries of a list, newest first: "The newest 20 of 1,234."

    count: number of entries of the whole list.
    """
    return f"All {count:,}, newest first." if count <= FIRST else f"The newest {FIRST} of {count:,}."


def _list_links(snapshot: Snapshot, address: str) -> Links:
    """View of links to the complete lists, with the number of their entries."""
    links = [
        Link(
            f"all {len(items):,} {_TITLES[name].lower()}",
            addresses.relative(address, addresses.listing(name)),
        )
        for name, items in lists(snapshot).items()
        if items
    ]
    has_partial_results = bool(lists(snapshot)["cells"])
    caption = "An interrupted computation continues from its partial results." if has_partial_results else ""
    return Links(title="Complete lists", links=tuple(links), caption=caption)


def _deletable_bytes(snapshot: Snapshot) -> str:
    """Sentence with the sizes of the data that `mizarr gc` would delete without and with a quota."""

    def total_bytes(removal: Removal) -> str:
        folders = [folder for folder in snapshot.folders.values() if snapshot.removal(folder) == removal]
        return sized(sum(folder.usage.bytes for folder in folders))

    now, with_quota = total_bytes("now"), total_bytes("with a quota")
    return (
        f"`mizarr gc` would delete {now} of unfinished data; `mizarr gc --quota SIZE`, at most {with_quota} "
        "more."
    )


def _damage_note(snapshot: Snapshot) -> Iterator[Note]:
    """Yield a note that names the first three damaged entries; yields nothing if no entry is damaged."""
    if snapshot.damaged:
        examples = "; ".join(snapshot.damaged[:3])
        yield Note(
            title=f"{len(snapshot.damaged)} damaged runs or results",
            text=f"{examples}. These pages do not list them; `mizarr verify` lists the damaged files.",
        )
