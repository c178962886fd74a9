"""Addresses of pages: paths relative to the root of the site, the same for the server and for files.

The functions only compose paths; `find_page` decides whether there is a page at an address.
"""

from __future__ import annotations

import posixpath

__all__ = [
    "INDEX",
    "LEFT_OUT",
    "SEARCH",
    "listing",
    "prompt",
    "question",
    "result",
    "run",
    "relative",
    "token",
]

INDEX = "index.html"
"""The first page."""
SEARCH = "search.html"
"""The page that searches prompts."""
LEFT_OUT = "left-out.html"
"""Target of the links in a written site whose pages are beyond its limits."""


def listing(name: str, number: int = 1) -> str:
    """Page `number`, counted from 1, of the list "runs", "questions", "results" or "cells"."""
    return f"{name}/{number}.html"


def run(digest: str, number: int = 1) -> str:
    """Page of a run, with page `number` (from 1) of its list of prompts."""
    return f"run/{digest}/prompts/{number}.html"


def prompt(digest: str, prompt: int, number: int = 1) -> str:
    """Page of a prompt of a run (index from 0), with page `number` (from 1) of its tokens."""
    return f"run/{digest}/prompt/{prompt}/{number}.html"


def token(digest: str, token: int) -> str:
    """Page of a token, given by its index along the packed token axis of the run."""
    return f"run/{digest}/token/{token}.html"


def question(digest: str) -> str:
    """Page of a computed workflow, given by the digest of its `Question`."""
    return f"question/{digest}.html"


def result(key: str) -> str:
    """Page of a result, given by its full key."""
    return f"result/{key}.html"


def relative(address: str, target: str) -> str:
    """Relative link from the page at `address` to the page at `target`.

    >>> relative(token("ab", 7), INDEX), relative(INDEX, result("cd"))
    ('../../../index.html', 'result/cd.html')
    """
    return posixpath.relpath(target, posixpath.dirname(address) or ".")
