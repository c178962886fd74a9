"""Rendering of `Page` objects as HTML, with the templates, styles and scripts that reports use, too.

The templates escape all text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from ...store.version import __version__
from ..report.templates import asset, environment, script
from . import addresses
from .page import Page

__all__ = ["STATIC", "render", "static_files"]

STATIC = "static"
"""Folder of styles and scripts, relative to the root of the site."""


def render(page: Page, foot: str = "", *, policy: str = "") -> str:
    """Render a page as HTML.

    Arguments:
        page: The page.
        foot: Text at the end of the page.
        policy: Content security policy to embed, for a page in a file, which does not ask for progress; ""
            for a page of the server, which sends its policy in a header.
    """
    static = addresses.relative(page.address, STATIC)
    text: str = _template().render(
        page=page,
        foot=foot,
        policy=policy,
        static=static,
        news=addresses.relative(page.address, page.live) if page.live and not policy else "",
        version=__version__,
    )
    return text


def static_files() -> Mapping[str, tuple[str, str]]:
    """Styles and scripts of the pages: file name -> (media type, content)."""
    style = asset("report.css") + asset("graph.css") + _asset("browse.css")
    return {
        "browse.css": ("text/css", style),
        "views.js": ("text/javascript", script()),
        "browse.js": ("text/javascript", _asset("browse.js")),
    }


@cache
def _template() -> Any:
    """The template browse.html, which imports macros from a template of reports."""
    # Two loaders: browse.html imports parts.html, which lies in the assets of reports.
    loader = jinja2.FunctionLoader(lambda name: _asset(name) if name == "browse.html" else None)
    shared = environment()
    return shared.overlay(loader=jinja2.ChoiceLoader([loader, shared.loader])).get_template("browse.html")


def _asset(name: str) -> str:
    """Content of a file in the folder assets/ of this package, given by its name."""
    return files(__package__).joinpath("assets", name).read_text("utf-8")
