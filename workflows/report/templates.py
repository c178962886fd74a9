"""Templates, styles and scripts of HTML pages, read from the folder assets/.

Border: returns the text of files; depends on no workflow and no page.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from ..views.blocks import plain

__all__ = ["asset", "environment", "hashed", "script"]

SCRIPTS = (
    "core.js",
    "grid.js",
    "heatmap.js",
    "lines.js",
    "tokens.js",
    "lens.js",
    "attention.js",
    "graph_parts.js",
    "graph_told.js",
    "graph.js",
    "start.js",
)
"""Parts of a page's script, in order; `start.js` calls the functions of the others."""


@cache
def environment() -> Any:
    """The jinja environment that renders pages; it escapes all text and loads templates from assets/."""
    import jinja2

    jinja = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        # Prompts, tokens and labels may contain HTML.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # jinja2 renders a missing field as an empty text by default: a misspelt one raises.
        undefined=jinja2.StrictUndefined,
    )
    jinja.filters["plain"] = plain
    jinja.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return jinja


def asset(name: str) -> str:
    """Content of a file in assets/, given by its name."""
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def script() -> str:
    """The JavaScript that draws the views of a page: all SCRIPTS, joined."""
    # In a function, so that no name is global. "use strict", the first line of core.js, holds for all of it.
    return "(() => {\n" + "\n".join(map(asset, SCRIPTS)) + "})();\n"


def hashed(text: str) -> str:
    """Hash of an inline style or script, in the form "'sha256-…'" that a content security policy takes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
