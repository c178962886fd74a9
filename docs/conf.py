"""Sphinx: the pages of docs/ as a site in build/site. Nothing in the site is fetched from anywhere.

`make docs` builds it with warnings as errors. What is generated (site/reference.py) is written beside the
sources first, and is not under version control.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "site"))

import reference
from sphinx import addnodes

project = "mizarr"
author = "the mizarr authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["site", "examples"]
nitpicky = False

html_theme = "furo"
html_title = "mizarr"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_extra_path = ["notebooks"]
html_theme_options = {"top_of_page_buttons": []}

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
toc_object_entries = False  # else every page carries the names of all
add_module_names = False

CLASSES = reference.classes()
DRAWING = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+\.svg)\)$", re.MULTILINE)


def one_title(app: Any, docname: str, source: list[str]) -> None:
    """Of a page with several titles all but the first one level lower, or each would be in the menu."""
    title, found, rest = source[0].partition("\n")
    if re.search(r"^# ", found + rest, re.MULTILINE) and docname == "seed":
        source[0] = title + re.sub(r"^#", "##", found + rest, flags=re.MULTILINE)


def inline_drawings(app: Any, docname: str, source: list[str]) -> None:
    """Put drawings into the page they stand on, where they take its colours."""
    folder = (HERE / docname).parent

    def inline(found: re.Match[str]) -> str:
        svg = (folder / found["path"]).read_text("utf-8")
        svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL).replace("\n", "")
        return f'<div class="drawing" role="img" aria-label="{found["alt"]}">{svg}</div>'

    source[0] = DRAWING.sub(inline, source[0])


def link_types(app: Any, doctree: Any) -> None:
    """Types in signatures by their full names: Sphinx would look through all names for each, in seconds."""
    for node in [*doctree.findall(addnodes.pending_xref)]:
        if node.get("refdomain") != "py" or node.get("refexplicit"):
            continue
        if full := CLASSES.get(node["reftarget"].rpartition(".")[2]):
            node["reftarget"], node["refspecific"] = full, False
        else:
            node.replace_self(node.children)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    reference.write(HERE)
    app.connect("doctree-read", link_types)
    app.connect("source-read", inline_drawings)
    app.connect("source-read", one_title)
