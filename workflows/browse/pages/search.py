"""Page that searches the prompts of all runs for a text; a long search continues on further pages."""

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

__all__ = ["Hit", "SearchResult", "match_range", "search_page", "search_prompts"]

MOST = 100
"""Largest number of matching prompts per page."""
SECONDS = 0.5
"""Time limit, in seconds, of the search for one page; a link continues an unfinished search."""
AROUND = 70
"""Number of characters of a prompt that the table shows before and after a match."""


@dataclass(frozen=True)
class Hit:
    """A prompt that contains the searched text."""

    digest: str
    """Digest of the run."""
    model: str
    """Name of the run's model."""
    prompt: int
    """Index of the prompt in the run."""
    text: str
    """Text of the prompt."""
    start: int
    """Character offset of the first match in the text."""
    stop: int
    """Character offset after the first match."""


@dataclass(frozen=True)
class SearchResult:
    """Prompts that contain the searched text, and how much of the store was searched."""

    hits: tuple[Hit, ...]
    """The matching prompts, in the order of runs and prompts."""
    resume_at: tuple[int, int] | None
    """(index of the run in `Snapshot.runs`, index of the prompt) where the search was interrupted and can be
    continued; None if it reached the end of the store."""
    n_runs: int
    """Number of completely searched runs."""
    n_prompts: int
    """Number of searched prompts."""
    n_without_texts: int
    """Number of runs that were skipped, because they have no texts or cannot be read."""


def search_page(
    snapshot: Snapshot, words: str, start: tuple[int, int] = (0, 0), *, is_static: bool = False
) -> Page:
    """Page with the search form and the matching prompts.

    Arguments:
        snapshot: Content of the store.
        words: Text to search for, case-insensitive; "" shows the form only.
        start: (index of the run, index of the prompt) at which the search starts.
        is_static: Whether the page is written to a file. It then lists the first prompts of the store, which
            a script filters, as there is no server to search.
    """
    address = addresses.SEARCH
    action = addresses.relative(address, addresses.SEARCH)
    views: list[View] = [SearchForm(action=action, words=words, filters=is_static)]
    if words.strip() or is_static:
        # No time limit for a file: it has no link that continues the search. The text "" matches all prompts.
        seconds = float("inf") if is_static else SECONDS
        result = search_prompts(snapshot, words.strip(), start, seconds=seconds)
        views += _matches_and_continuation(result, address, words.strip(), is_static=is_static)
    return Page(
        address=address,
        title=f"Prompts with {cut(words, 60)!r}" if words.strip() else "Search prompts",
        over="mizarr store",
        up=(home(address),),
        views=tuple(views),
    )


def search_prompts(
    snapshot: Snapshot, words: str, start: tuple[int, int] = (0, 0), *, seconds: float = SECONDS
) -> SearchResult:
    """Search the texts of all prompts, case-insensitively, until the time is over or MOST prompts match.

    Arguments:
        snapshot: Content of the store.
        words: Text to search for.
        start: (index of the run, index of the prompt) at which the search starts.
        seconds: Time limit of the search.
    """
    pattern, deadline = words.casefold(), time.monotonic() + seconds
    hits: list[Hit] = []
    n_prompts = n_without_texts = 0
    runs = snapshot.runs
    for run_index in range(start[0], len(runs)):
        folder = runs[run_index]
        try:
            texts = read_texts(snapshot.store.files, folder.data)
        # A damaged run is skipped like one without texts: it must not hide the matches in other runs.
        except MizarrError:
            texts = None
        if texts is None:
            n_without_texts += 1
            continue
        for prompt in range(start[1] if run_index == start[0] else 0, len(texts)):
            # The clock is read for every 64th prompt only, which is faster.
            if len(hits) == MOST or (prompt % 64 == 0 and time.monotonic() > deadline):
                n_runs = run_index - start[0]
                return SearchResult(tuple(hits), (run_index, prompt), n_runs, n_prompts, n_without_texts)
            text = texts[prompt]
            n_prompts += 1
            match = match_range(text, pattern)
            if match is not None:
                assert folder.run is not None
                hits.append(Hit(digest_of(folder), folder.run.model, prompt, text, *match))
    return SearchResult(tuple(hits), None, len(runs) - start[0], n_prompts, n_without_texts)


def match_range(text: str, pattern: str) -> tuple[int, int] | None:
    """Character offsets (start, stop) of the first match in a text, ignoring case; None without a match.

    A character of which only a part matches, such as the first "s" of "ß", belongs to the match.

    Arguments:
        text: Text to search in.
        pattern: Case-folded text to search for.

    >>> match_range("Die Straße ist lang", "ist")
    (11, 14)
    """
    folded = text.casefold()
    start = folded.find(pattern)
    if start < 0:
        return None
    stop = start + len(pattern)
    # Folding lengthens some characters ("ß" becomes "ss") and shortens none: equal lengths, equal offsets.
    if len(folded) == len(text) or not pattern:
        return start, stop
    # Offset in the text of each character of the folded text.
    original_offset = [i for i, character in enumerate(text) for _ in character.casefold()]
    return original_offset[start], original_offset[stop - 1] + 1


def _matches_and_continuation(
    result: SearchResult, address: str, words: str, *, is_static: bool
) -> Iterator[View]:
    """Table of the matching prompts, or a note without matches; then a link that continues the search.

    Arguments:
        result: Result of the search.
        address: Address of the page.
        words: The text that was searched for.
        is_static: Whether the page is written to a file.
    """
    if is_static:
        summary = f"The first {len(result.hits):,} prompts of the store; `mizarr browse` searches all of them"
    else:
        n_matches, n_prompts, n_runs = len(result.hits), result.n_prompts, result.n_runs
        summary = f"{n_matches:,} of the {n_prompts:,} searched prompts in {n_runs:,} runs contain this text"
    if result.n_without_texts:
        summary += f"; {result.n_without_texts:,} runs have no texts that could be searched"
    if result.hits:
        yield Table.of(
            result.hits,
            (
                "prompt",
                lambda hit: linked(f"{hit.prompt:,}", address, addresses.prompt(hit.digest, hit.prompt)),
            ),
            ("run", lambda hit: linked(hit.digest[:12], address, addresses.run(hit.digest))),
            ("model", lambda hit: hit.model),
            ("text around the match", _excerpt),
            caption=f"{summary}.",
        )
    else:
        yield Note(text=f"{summary}.")
    if result.resume_at is not None and not is_static:
        run, prompt = result.resume_at
        query = urlencode({"q": words, "run": run, "prompt": prompt})
        yield Links(links=(Link("continue the search", f"{addresses.relative(address, address)}?{query}"),))


def _excerpt(hit: Hit) -> tuple[Styled, ...]:
    """Text around a search match, with the match in bold; "…" marks a cut."""
    before = ("…" if hit.start > AROUND else "") + hit.text[max(0, hit.start - AROUND) : hit.start]
    match = hit.text[hit.start : hit.stop]
    after = hit.text[hit.stop : hit.stop + AROUND]
    before, match, after = (text.replace("\n", " ") for text in (before, match, after))
    ellipsis = "…" if hit.stop + AROUND < len(hit.text) else ""
    return Styled(before), Styled(match, "bold"), Styled(after + ellipsis)
