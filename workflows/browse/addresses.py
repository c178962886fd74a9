"""Addresses of pages: paths below the root of a site, the same for the server and for files.

Border: words and numbers; whether a page of that name exists is asked where it is made.
"""

from __future__ import annotations

import posixpath

__all__ = ["INDEX", "LEFT_OUT", "SEARCH", "listing", "prompt", "question", "result", "run", "to", "token"]

INDEX = "index.html"
SEARCH = "search.html"
LEFT_OUT = "left-out.html"
"""Where links of a site lead whose pages it leaves out."""


def listing(name: str, number: int = 1) -> str:
    """A page of a long list: "runs", "questions", "results" or "cells"; pages count from 1."""
    return f"{name}/{number}.html"


def run(digest: str, number: int = 1) -> str:
    """A run, and a page of its prompts."""
    return f"run/{digest}/prompts/{number}.html"


def prompt(digest: str, prompt: int, number: int = 1) -> str:
    """A prompt of a run, and a page of its tokens."""
    return f"run/{digest}/prompt/{prompt}/{number}.html"


def token(digest: str, token: int) -> str:
    """A token of a run, by its place on the packed axis."""
    return f"run/{digest}/token/{token}.html"


def question(digest: str) -> str:
    """A workflow that was computed, by the digest of the question."""
    return f"question/{digest}.html"


def result(key: str) -> str:
    """A result, by its whole key."""
    return f"result/{key}.html"


def to(here: str, there: str) -> str:
    """The way from one page to another, as a link has it.

    >>> to(token("ab", 7), INDEX), to(INDEX, result("cd"))
    ('../../../index.html', 'result/cd.html')
    """
    return posixpath.relpath(there, posixpath.dirname(here) or ".")
