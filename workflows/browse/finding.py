"""Routing: from a request's address to the displayed page.

Digests and keys in an address are looked up among the entries of a snapshot of the store. No part of an
address becomes a file path, so a request cannot reach other files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..holdings import HeldFolder, Snapshot
from . import addresses
from .opened import harvest
from .page import Page
from .pages.prompt import prompt_page
from .pages.question import question_page
from .pages.result import result_page
from .pages.run import progress, run_page
from .pages.search import search_page
from .pages.store import harvests, listing, reading, store_page
from .pages.token import token_page

__all__ = ["NUMBER", "find_news", "find_page"]

NUMBER = r"(0|[1-9][0-9]{0,11})"
"""Regular expression of a number in an address: at most 12 digits, enough for any index of a store."""
_RUN = r"run/([0-9a-f]{64})"
"""Regular expression of the first part of the addresses of a run's pages; its group is the digest of the
run."""


def find_page(snapshot: Snapshot, address: str) -> Page | None:
    """The page at an address.

    Arguments:
        snapshot: Content of the store.
        address: Path relative to the root of the site, as the functions of `addresses` compose it.

    Returns:
        The page, or None if there is none at this address.
    """
    for pattern, make in _PAGES:
        if match := re.fullmatch(pattern, address):
            return make(snapshot, *match.groups())
    return None


def find_news(snapshot: Snapshot, address: str) -> dict[str, Any] | None:
    """Progress of captures as JSON values; the script of a page with `Page.live` requests it again and again.

    Arguments:
        snapshot: Content of the store.
        address: Address that the script requests.

    Returns:
        {"progress": [fields of a `HarvestProgress`, ...]}, or None if no progress document has this address.
    """
    if address == "live.json":
        states = [*reading(snapshot), *harvests(snapshot, addresses.INDEX)]
    elif match := re.fullmatch(rf"{_RUN}/live\.json", address):
        folder = _run(snapshot, match[1])
        if folder is None:
            return None
        states = list(progress(folder, harvest(snapshot.store, folder)))
    else:
        return None
    names = ("name", "done", "claimed", "total", "told")
    return {"progress": [{name: getattr(state, name) for name in names} for state in states]}


def _run(snapshot: Snapshot, digest: str) -> HeldFolder | None:
    """Folder of a run, looked up by digest; None for an unknown digest or a folder without a run."""
    folder = snapshot.folders.get(f"data/{digest[:2]}/{digest}")
    return folder if folder is not None and folder.run is not None else None


def _of_run(make: Callable[..., Page | None]) -> Callable[..., Page | None]:
    """Convert a page function of a run folder to a page function for `_PAGES`.

    Arguments:
        make: Function of (snapshot, folder of the run, numbers in the address).

    Returns:
        Function of (snapshot, digest of the run, numbers as text); None for an unknown digest.
    """

    def page(snapshot: Snapshot, digest: str, *numbers: str) -> Page | None:
        folder = _run(snapshot, digest)
        return None if folder is None else make(snapshot, folder, *map(int, numbers))

    return page


def _list(snapshot: Snapshot, name: str, number: str) -> Page | None:
    """A page of a long list, such as "runs"; None for number 0, as pages count from 1."""
    return listing(snapshot, name, int(number)) if int(number) else None


def _result(snapshot: Snapshot, key: str) -> Page | None:
    """Page of a stored result, looked up by key; None for an unknown key."""
    for folder in snapshot.results:
        if any(record.key == key for record in folder.records):
            return result_page(snapshot, folder)
    return None


def _question(snapshot: Snapshot, digest: str) -> Page | None:
    """Page of a computed workflow, looked up by digest; None for an unknown digest."""
    computed = next((entry for entry in snapshot.questions if entry.question.digest == digest), None)
    return None if computed is None else question_page(snapshot, computed)


_PAGES: tuple[tuple[str, Callable[..., Page | None]], ...] = (
    # The root of the site, "", is the first page, too.
    (r"(?:index\.html)?", store_page),
    (r"search\.html", lambda snapshot: search_page(snapshot, "")),
    (rf"(runs|questions|results|cells)/{NUMBER}\.html", _list),
    (r"question/([0-9a-f]{64})\.html", _question),
    (r"result/([0-9a-f]{64})\.html", _result),
    # Pages of a list are counted from 1, prompts and tokens from 0.
    (rf"{_RUN}/prompts/([1-9][0-9]{{0,11}})\.html", _of_run(run_page)),
    (rf"{_RUN}/prompt/{NUMBER}/([1-9][0-9]{{0,11}})\.html", _of_run(prompt_page)),
    (rf"{_RUN}/token/{NUMBER}\.html", _of_run(token_page)),
)
"""(pattern of an address, function from the snapshot and the groups of the pattern to the page) of all
pages."""
