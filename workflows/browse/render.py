"""Pages as HTML, in the looks of reports: the same templates, styles and script, and little more.

Border: values of a page in, text out; all of it escaped by the template.
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
"""Folder of styles and scripts, below the root of a site."""


def render(page: Page, foot: str = "", *, policy: str = "") -> str:
    """A page as HTML. foot: what stands at its end. policy: content security policy for a page that is a
    file, and has no server to send one; news of harvests are for pages that have."""
    static = addresses.to(page.address, STATIC)
    text: str = _template().render(
        page=page,
        foot=foot,
        policy=policy,
        static=static,
        news=addresses.to(page.address, page.live) if page.live and not policy else "",
        version=__version__,
    )
    return text


def static_files() -> Mapping[str, tuple[str, str]]:
    """Styles and scripts: name -> media type, text."""
    style = asset("report.css") + asset("graph.css") + _own("browse.css")
    return {
        "browse.css": ("text/css", style),
        "views.js": ("text/javascript", script()),
        "browse.js": ("text/javascript", _own("browse.js")),
    }


@cache
def _template() -> Any:
    ours = jinja2.FunctionLoader(lambda name: _own(name) if name == "browse.html" else None)
    shared = environment()
    return shared.overlay(loader=jinja2.ChoiceLoader([ours, shared.loader])).get_template("browse.html")


def _own(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")
