"""Addresses of the HTML pages about a store: paths relative to the root of the site.

They are the same for the server (`mizarr browse`) and for files (`mizarr site`). The functions only compose
paths; `find_page` decides whether there is a page at an address.
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
"""Address of the first page."""
SEARCH = "search.html"
"""Address of the page that searches prompts."""
LEFT_OUT = "left-out.html"
"""Address that links in a written site lead to if their own page is beyond the limits of the site."""


def listing(name: str, number: int = 1) -> str:
    """Address of a page of a long list of a store's entries.

    Arguments:
        name: "runs", "questions" (computed workflows), "results" or "cells" (partial results).
        number: Number of the page of the list, from 1.
    """
    return f"{name}/{number}.html"


def run(digest: str, number: int = 1) -> str:
    """Address of the page of a run.

    Arguments:
        digest: Digest of the run.
        number: Number of the page of its list of prompts, from 1.
    """
    return f"run/{digest}/prompts/{number}.html"


def prompt(digest: str, prompt: int, number: int = 1) -> str:
    """Address of the page of a prompt.

    Arguments:
        digest: Digest of the run.
        prompt: Index of the prompt in the run, from 0.
        number: Number of the page of its tokens, from 1.
    """
    return f"run/{digest}/prompt/{prompt}/{number}.html"


def token(digest: str, token: int) -> str:
    """Address of the page of a token.

    Arguments:
        digest: Digest of the run.
        token: Index of the token along the packed axis, which joins the tokens of all prompts of the run.
    """
    return f"run/{digest}/token/{token}.html"


def question(digest: str) -> str:
    """Address of the page of a computed workflow, given by the digest of its `Question`."""
    return f"question/{digest}.html"


def result(key: str) -> str:
    """Address of the page of a stored result, given by its full key."""
    return f"result/{key}.html"


def relative(address: str, target: str) -> str:
    """Relative link from one page to another, to be written into an HTML page.

    Arguments:
        address: Address of the page with the link.
        target: Address of the page that the link leads to.

    >>> relative(token("ab", 7), INDEX), relative(INDEX, result("cd"))
    ('../../../index.html', 'result/cd.html')
    """
    return posixpath.relpath(target, posixpath.dirname(address) or ".")
