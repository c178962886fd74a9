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
    """Address of a page of a list: runs, questions, results or cells of a store.

    Arguments:
        name: "runs", "questions", "results" or "cells".
        number: number of the page, from 1.
    """
    return f"{name}/{number}.html"


def run(digest: str, number: int = 1) -> str:
    """Address of the page of a run.

    Arguments:
        digest: digest of the run.
        number: number of the page of its list of prompts, from 1.
    """
    return f"run/{digest}/prompts/{number}.html"


def prompt(digest: str, prompt: int, number: int = 1) -> str:
    """Address of the page of a prompt.

    Arguments:
        digest: digest of the run.
        prompt: index of the prompt, from 0.
        number: number of the page of its tokens, from 1.
    """
    return f"run/{digest}/prompt/{prompt}/{number}.html"


def token(digest: str, token: int) -> str:
    """Address of the page of a token.

    Arguments:
        digest: digest of the run.
        token: index of the token along the packed token axis of the run.
    """
    return f"run/{digest}/token/{token}.html"


def question(digest: str) -> str:
    """Page of a computed workflow, given by the digest of its `Question`."""
    return f"question/{digest}.html"


def result(key: str) -> str:
    """Page of a result, given by its full key."""
    return f"result/{key}.html"


def relative(address: str, target: str) -> str:
    """Relative link from one page to another.

    Arguments:
        address: Address of the page with the link.
        target: Address of the page that the link leads to.

    >>> relative(token("ab", 7), INDEX), relative(INDEX, result("cd"))
    ('../../../index.html', 'result/cd.html')
    """
    return posixpath.relpath(target, posixpath.dirname(address) or ".")
