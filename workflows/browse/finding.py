"""The page at an address. What an address names is looked up among what the catalog lists: no word of it ever
becomes a path of a file.

Border: addresses in, pages out; knows no server.
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
"""Numbers in addresses, short enough for any array."""
_RUN = r"run/([0-9a-f]{64})"


def find_page(held: Snapshot, address: str) -> Page | None:
    """The page at an address; None where there is none."""
    for pattern, make in _PAGES:
        if found := re.fullmatch(pattern, address):
            return make(held, *found.groups())
    return None


def find_news(held: Snapshot, address: str) -> dict[str, Any] | None:
    """What a page that is live asks for: harvests in progress as plain values; None where there are none."""
    if address == "live.json":
        found = [*reading(held), *harvests(held, addresses.INDEX)]
    elif match := re.fullmatch(rf"{_RUN}/live\.json", address):
        folder = _run(held, match[1])
        if folder is None:
            return None
        found = list(progress(folder, harvest(held.store, folder)))
    else:
        return None
    told = ("name", "done", "claimed", "total", "told")
    return {"progress": [{name: getattr(each, name) for name in told} for each in found]}


def _run(held: Snapshot, digest: str) -> HeldFolder | None:
    folder = held.folders.get(f"data/{digest[:2]}/{digest}")
    return folder if folder is not None and folder.run is not None else None


def _of_run(make: Callable[..., Page | None]) -> Callable[..., Page | None]:
    """A page of a run, which is looked up, and numbers."""

    def page(held: Snapshot, digest: str, *numbers: str) -> Page | None:
        folder = _run(held, digest)
        return None if folder is None else make(held, folder, *map(int, numbers))

    return page


def _list(held: Snapshot, name: str, number: str) -> Page | None:
    return listing(held, name, int(number)) if int(number) else None


def _result(held: Snapshot, key: str) -> Page | None:
    for folder in held.results:
        if any(record.key == key for record in folder.records):
            return result_page(held, folder)
    return None


def _question(held: Snapshot, digest: str) -> Page | None:
    asked = next((asked for asked in held.questions if asked.question.digest == digest), None)
    return None if asked is None else question_page(held, asked)


_PAGES: tuple[tuple[str, Callable[..., Page | None]], ...] = (
    (r"(?:index\.html)?", store_page),
    (r"search\.html", lambda held: search_page(held, "")),
    (rf"(runs|questions|results|cells)/{NUMBER}\.html", _list),
    (r"question/([0-9a-f]{64})\.html", _question),
    (r"result/([0-9a-f]{64})\.html", _result),
    (rf"{_RUN}/prompts/([1-9][0-9]{{0,11}})\.html", _of_run(run_page)),
    (rf"{_RUN}/prompt/{NUMBER}/([1-9][0-9]{{0,11}})\.html", _of_run(prompt_page)),
    (rf"{_RUN}/token/{NUMBER}\.html", _of_run(token_page)),
)
