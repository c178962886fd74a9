"""Prompts that have some words, over all runs; a question that takes long is answered in parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlencode

from ....store.errors import MizarrError
from ....store.runs.coordinates import read_texts
from ...holdings import Snapshot
from ...views import Note, Styled, Table, View
from .. import addresses
from ..page import Link, Links, Page, SearchForm
from .parts import cut, digest_of, home, linked

__all__ = ["Hit", "Looked", "look", "search_page"]

MOST = 100
"""Prompts found per page."""
SECONDS = 0.5
"""Of looking per page; a longer search goes on by a link."""
AROUND = 70
"""Characters shown before and behind what was found."""


@dataclass(frozen=True)
class Hit:
    """A prompt that has the words. start, stop: where in its text."""

    digest: str
    model: str
    prompt: int
    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Looked:
    """What was found. onward: (run, prompt) where the search goes on, None at the end. runs, prompts: looked
    at. without: runs whose prompts have no texts."""

    hits: tuple[Hit, ...]
    onward: tuple[int, int] | None
    runs: int
    prompts: int
    without: int


def search_page(
    held: Snapshot, words: str, start: tuple[int, int] = (0, 0), *, is_static: bool = False
) -> Page:
    """Prompts with some words. start: run and prompt to begin at. is_static: of files, which cannot
    answer; the first prompts are listed, and a script filters them."""
    here = addresses.SEARCH
    action = addresses.to(here, addresses.SEARCH)
    views: list[View] = [SearchForm(action=action, words=words, filters=is_static)]
    if words.strip() or is_static:
        found = look(held, words.strip(), start, seconds=float("inf") if is_static else SECONDS)
        views += _answer(found, here, words.strip(), is_static=is_static)
    return Page(
        address=here,
        title=f"Prompts with {cut(words, 60)!r}" if words.strip() else "Search prompts",
        over="mizarr store",
        up=(home(here),),
        views=tuple(views),
    )


def look(held: Snapshot, words: str, start: tuple[int, int] = (0, 0), *, seconds: float = SECONDS) -> Looked:
    """Prompts whose text has the words, whatever their case; at most `MOST`, in about `seconds`."""
    wanted, until = words.casefold(), time.monotonic() + seconds
    hits: list[Hit] = []
    prompts = without = number = 0
    runs = held.runs
    for number in range(start[0], len(runs)):
        folder = runs[number]
        try:
            texts = read_texts(held.store.files, folder.data)
        except MizarrError:
            texts = None
        if texts is None:
            without += 1
            continue
        for prompt in range(start[1] if number == start[0] else 0, len(texts)):
            if len(hits) == MOST or (prompt % 64 == 0 and time.monotonic() > until):
                return Looked(tuple(hits), (number, prompt), number - start[0], prompts, without)
            text = texts[prompt]
            prompts += 1
            at = _found(text, wanted)
            if at >= 0:
                assert folder.run is not None
                hits.append(Hit(digest_of(folder), folder.run.model, prompt, text, at, at + len(words)))
    return Looked(tuple(hits), None, len(runs) - start[0], prompts, without)


def _found(text: str, wanted: str) -> int:
    """Where a text has the words, -1 for nowhere; its beginning where folding the case moved characters."""
    folded = text.casefold()
    at = folded.find(wanted)
    return at if at < 0 or len(folded) == len(text) else 0


def _answer(found: Looked, here: str, words: str, *, is_static: bool) -> Iterator[View]:
    told = f"{len(found.hits):,} found in {found.prompts:,} prompts of {found.runs:,} runs"
    if is_static:
        told = f"The first {len(found.hits):,} prompts of the store; mizarr browse searches all of them"
    if found.without:
        told += f"; {found.without:,} runs have no texts to search"
    if found.hits:
        yield Table.of(
            found.hits,
            ("prompt", lambda hit: linked(f"{hit.prompt:,}", here, addresses.prompt(hit.digest, hit.prompt))),
            ("run", lambda hit: linked(hit.digest[:12], here, addresses.run(hit.digest))),
            ("model", lambda hit: hit.model),
            ("text", _shown),
            caption=f"{told}.",
        )
    else:
        yield Note(text=f"{told}.")
    if found.onward is not None and not is_static:
        run, prompt = found.onward
        query = urlencode({"q": words, "run": run, "prompt": prompt})
        yield Links(links=(Link("go on searching", f"{addresses.to(here, here)}?{query}"),))


def _shown(hit: Hit) -> tuple[Styled, ...]:
    """The text around what was found, which stands out."""
    before, behind = hit.text[max(0, hit.start - AROUND) : hit.start], hit.text[hit.stop : hit.stop + AROUND]
    parts = (("…" if hit.start > AROUND else "") + before, hit.text[hit.start : hit.stop], behind)
    left, middle, right = (part.replace("\n", " ") for part in parts)
    end = "…" if hit.stop + AROUND < len(hit.text) else ""
    return Styled(left), Styled(middle, "bold"), Styled(right + end)
