"""`mizarr site`: the pages of `mizarr browse` as static files, up to a limited number of pages.

Links are followed breadth first from the first page; the numbers of prompts per run and of tokens per page
are limited. A link to a page beyond the limits leads to a page that says so: no link is broken. An existing
site is replaced only when the new one is complete.
"""

from __future__ import annotations

import posixpath
import re
import secrets
import shutil
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path

from ...store import Store
from ...store.errors import ConfigError
from ...store.files import is_below
from ..holdings import Holdings, Snapshot
from ..views import Note
from . import addresses
from .finding import find_page
from .page import Link, Page
from .pages.search import search_page
from .render import STATIC, render, static_files

__all__ = ["Limits", "Written", "check_folder", "write_site"]

MARK = "mizarr-site.txt"
"""File that marks a folder as written by `mizarr site`, which may replace it."""
POLICY = "default-src 'none'; style-src 'self' file:; script-src 'self' file:; img-src data:; base-uri 'none'"
"""Content security policy embedded in every page: it may load only the styles and scripts of the site."""
# The template escapes quotes in attributes, so an address ends at the next quote. Links with a query or
# fragment lead within the search page or the same page, and are left as they are.
_HREF = re.compile(r'(<a\b[^>]*?\bhref=")([^"#?]+)(")')


@dataclass(frozen=True)
class Limits:
    """Limits of the pages that a site contains."""

    pages: int = 1000
    """Largest number of pages of the site."""
    prompts: int = 20
    """Largest number of prompts per run that have a page."""
    tokens: int = 32
    """Largest number of tokens per page of a prompt that have a page of their own."""


@dataclass
class Written:
    """Counts of a written site, as the JSON output of `mizarr site` contains them."""

    pages: int = 0
    """Number of pages written."""
    left_out: int = 0
    """Number of links to pages beyond the limits."""
    bytes: int = 0
    """Size of all files together, in bytes."""


@dataclass
class _Frontier:
    """Addresses of the pages of a site that is being written, in breadth-first order of the links to them."""

    limits: Limits
    """Limits that decide which pages the site contains."""
    known: set[str] = field(default_factory=lambda: {addresses.INDEX, addresses.SEARCH})
    """Addresses of all pages of the site."""
    queue: deque[str] = field(default_factory=lambda: deque([addresses.INDEX, addresses.SEARCH]))
    """Addresses of the pages that are not written yet."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """("prompt", digest of a run) -> number of its prompts linked so far; ("token", address of a page) ->
    number of tokens linked from it so far."""

    def admits(self, address: str, source: str) -> bool:
        """Whether the site has a page at an address; adds the page if the limits allow it.

        Arguments:
            address: Target of a link.
            source: Address of the page that the link is on.
        """
        if address in self.known:
            return True
        # An address becomes a file name here: it must not lead out of the folder.
        if len(self.known) >= self.limits.pages or not is_below(address):
            return False
        if not self._is_within_limits(address, source):
            return False
        self.known.add(address)
        self.queue.append(address)
        return True

    def _is_within_limits(self, address: str, source: str) -> bool:
        """Count a link to the page of a prompt or token, and return whether the count is within its limit.

        Arguments:
            address: Target of the link; other pages than those of prompts and tokens are not counted.
            source: Address of the page that the link is on.
        """
        # The address is run/DIGEST/prompt/… or run/DIGEST/token/…
        kind = address.split("/")[2] if address.startswith("run/") else ""
        limit = {"prompt": self.limits.prompts, "token": self.limits.tokens}.get(kind)
        if limit is None:
            return True
        # Prompts are counted per run, tokens per page.
        group = kind, address.split("/")[1] if kind == "prompt" else source
        self.counts[group] += 1
        return self.counts[group] <= limit


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder is missing, empty, or a site that mizarr wrote."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"cannot write a site to {folder}, because it is a file; name a folder that does not exist yet"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ConfigError(
            f"cannot write a site to {folder}, because the folder holds files that `mizarr site` did not "
            "write; name a new or empty folder"
        )


def write_site(
    store: Store,
    folder: Path,
    limits: Limits = Limits(),
    progress: Callable[[int, int], None] = lambda n_written, n_known: None,
) -> Written:
    """Write the pages of a store into a folder; an existing site is replaced when the new one is complete.

    Arguments:
        store: The store.
        folder: Folder to write; created if needed.
        limits: Largest numbers of pages, prompts and tokens.
        progress: Called after each page with the number of pages written, and of all pages known so far.

    Returns:
        Numbers of pages, links left out and bytes.

    Raises:
        ConfigError: The folder holds files that `mizarr site` did not write.
    """
    check_folder(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A random name: two processes may write the same site at once.
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        written = _write_pages(Holdings(store).look(), temporary, limits, progress)
        if folder.exists():
            # `rename` does not replace a folder that has files.
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return written


def _write_pages(
    snapshot: Snapshot, folder: Path, limits: Limits, progress: Callable[[int, int], None]
) -> Written:
    """Write all pages within the limits, styles and scripts into a new folder; returns the counts.

    Arguments:
        snapshot: Content of the store.
        folder: The folder, which does not exist yet.
        limits: Largest numbers of pages, prompts and tokens.
        progress: As in `write_site`.
    """
    written, frontier = Written(), _Frontier(limits)
    foot = (
        f"This copy of a store contains at most {limits.pages:,} pages, {limits.prompts:,} prompts per run "
        f"and {limits.tokens:,} tokens per page of a prompt; `mizarr browse` shows everything."
    )
    for name, (_, text) in static_files().items():
        _write_file(folder, f"{STATIC}/{name}", text, written)
    while frontier.queue:
        address = frontier.queue.popleft()
        page = (
            search_page(snapshot, "", is_static=True)
            if address == addresses.SEARCH
            else find_page(snapshot, address)
        )
        # The data was removed after the snapshot was taken, or a page has a link without a target (a defect).
        if page is None:
            page = _placeholder(
                address, "This entry was removed from the store while its pages were written."
            )
        text = render(page, foot, policy=POLICY)
        _write_file(folder, address, _with_valid_links(text, address, frontier, written), written)
        written.pages += 1
        progress(written.pages, len(frontier.known))
    notice = f"The page that the link led to is beyond the limits of this site. {foot}"
    left_out = render(_placeholder(addresses.LEFT_OUT, notice), policy=POLICY)
    _write_file(folder, addresses.LEFT_OUT, left_out, written)
    _write_file(folder, MARK, "Written by mizarr site, which may write this folder again.\n", written)
    return written


def _with_valid_links(text: str, address: str, frontier: _Frontier, written: Written) -> str:
    """HTML of a page in which links to pages beyond the limits lead to LEFT_OUT.

    Arguments:
        text: HTML of the page.
        address: Address of the page.
        frontier: Pages of the site; targets within the limits are added.
        written: Counts of the site; redirected links are counted.
    """

    def link(match: re.Match[str]) -> str:
        # The template has escaped the link, "&" as "&amp;".
        target = posixpath.normpath(posixpath.join(posixpath.dirname(address), unescape(match[2])))
        if frontier.admits(target, address):
            return match[0]
        written.left_out += 1
        return f"{match[1]}{addresses.relative(address, addresses.LEFT_OUT)}{match[3]}"

    return _HREF.sub(link, text)


def _placeholder(address: str, notice: str) -> Page:
    """Placeholder page with the reason why a link's target is missing on the site."""
    up = (Link("store", addresses.relative(address, addresses.INDEX)),)
    return Page(address=address, title="Left out", over="mizarr store", up=up, views=(Note(text=notice),))


def _write_file(folder: Path, name: str, text: str, written: Written) -> None:
    """Write a text file, and add its size to the counts of the site.

    Arguments:
        folder: Folder of the site.
        name: Path of the file, relative to the folder.
        text: Content of the file.
        written: Counts of the site.
    """
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    written.bytes += path.stat().st_size
