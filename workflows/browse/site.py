"""The pages as files, which open anywhere without mizarr: up to a stated number of them.

From the first page on every link is followed, nearest pages first; of each run only some prompts, of each
prompt only some tokens. A link beyond the limits leads to a page that says so, so that none leads nowhere.

Border: pages in, a folder out, which is there whole or not at all.
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
"""Tells a folder that `mizarr site` wrote, and may write again."""
POLICY = "default-src 'none'; style-src 'self' file:; script-src 'self' file:; img-src data:; base-uri 'none'"
_HREF = re.compile(r'(<a\b[^>]*?\bhref=")([^"#?]+)(")')


@dataclass(frozen=True)
class Limits:
    """pages: in all. prompts: of a run. tokens: of a prompt page."""

    pages: int = 1000
    prompts: int = 20
    tokens: int = 32


@dataclass
class Written:
    """What was written: pages; links that lead to what was left out; bytes."""

    pages: int = 0
    left_out: int = 0
    bytes: int = 0


@dataclass
class _Front:
    """Which pages a site has: those that were met while there was room."""

    limits: Limits
    known: set[str] = field(default_factory=lambda: {addresses.INDEX, addresses.SEARCH})
    waiting: deque[str] = field(default_factory=lambda: deque([addresses.INDEX, addresses.SEARCH]))
    met: Counter[tuple[str, str]] = field(default_factory=Counter)

    def admits(self, address: str, source: str) -> bool:
        """Whether there will be a page at an address, linked from another."""
        if address in self.known:
            return True
        if len(self.known) >= self.limits.pages or not is_below(address):
            return False
        if not self._has_room(address, source):
            return False
        self.known.add(address)
        self.waiting.append(address)
        return True

    def _has_room(self, address: str, source: str) -> bool:
        kind = address.split("/")[2] if address.startswith("run/") else ""
        most = {"prompt": self.limits.prompts, "token": self.limits.tokens}.get(kind)
        if most is None:
            return True
        # Of a run the prompts, of a prompt the tokens.
        self.met[kind, address.split("/")[1] if kind == "prompt" else source] += 1
        return self.met[kind, address.split("/")[1] if kind == "prompt" else source] <= most


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless a site can be written there: nothing, an empty folder, or a site of ours."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"expected a folder for the site, found the file {folder}; name another")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ConfigError(
            f"expected a new or empty folder, or a site that mizarr wrote, found other things in {folder}; "
            "name another"
        )


def write_site(
    store: Store,
    folder: Path,
    limits: Limits = Limits(),
    progress: Callable[[int, int], None] = lambda done, known: None,
) -> Written:
    """Write a store's pages into a folder; a site that was there is replaced when the new one is whole.

    progress: called with pages written, and those known of.
    """
    check_folder(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        written = _write(Holdings(store).look(), temporary, limits, progress)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return written


def _write(held: Snapshot, folder: Path, limits: Limits, progress: Callable[[int, int], None]) -> Written:
    written, front = Written(), _Front(limits)
    foot = (
        f"A copy of a store as files: at most {limits.pages:,} pages, {limits.prompts:,} prompts of a run "
        f"and {limits.tokens:,} tokens of a page of a prompt. mizarr browse shows all of it."
    )
    for name, (_, text) in static_files().items():
        _put(folder, f"{STATIC}/{name}", text, written)
    while front.waiting:
        address = front.waiting.popleft()
        page = (
            search_page(held, "", is_static=True) if address == addresses.SEARCH else find_page(held, address)
        )
        if page is None:  # a link of a page that leads nowhere is a defect; its readers are told the same
            page = _left_out(address, "This was removed from the store while its pages were written.")
        text = render(page, foot, policy=POLICY)
        _put(folder, address, _rewritten(text, address, front, written), written)
        written.pages += 1
        progress(written.pages, len(front.known))
    told = f"This page is beyond the limits of this copy of the store. {foot}"
    _put(folder, addresses.LEFT_OUT, render(_left_out(addresses.LEFT_OUT, told), policy=POLICY), written)
    _put(folder, MARK, "Written by mizarr site, which may write this folder again.\n", written)
    return written


def _rewritten(text: str, address: str, front: _Front, written: Written) -> str:
    """A page whose links lead to pages that are there. Attributes of links hold no quotes: all is escaped."""

    def link(found: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(posixpath.dirname(address), unescape(found[2])))
        if front.admits(there, address):
            return found[0]
        written.left_out += 1
        return f"{found[1]}{addresses.to(address, addresses.LEFT_OUT)}{found[3]}"

    return _HREF.sub(link, text)


def _left_out(address: str, told: str) -> Page:
    up = (Link("store", addresses.to(address, addresses.INDEX)),)
    return Page(address=address, title="Left out", over="mizarr store", up=up, views=(Note(text=told),))


def _put(folder: Path, name: str, text: str, written: Written) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    written.bytes += path.stat().st_size
