"""What pages are made from: templates, styles and scripts of assets/, and what a browser may do with them.

Border: text of files; knows no workflow and no page.
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
"""Parts of the one script of a page, in order; `start.js` draws what the others know to draw."""


@cache
def environment() -> Any:
    """Jinja's, by which all text is escaped; templates by their names in assets/."""
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters["plain"] = plain
    found.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return found


def asset(name: str) -> str:
    """Text of a file of assets/."""
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def script() -> str:
    """The script that draws views."""
    return "(() => {\n" + "\n".join(map(asset, SCRIPTS)) + "})();\n"


def hashed(text: str) -> str:
    """An inline style or script as a content security policy allows it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
