"""One self-contained page per workflow: what was asked, what came out, how it was made.

Border: asks a workflow for its views and figures and writes them down; what is shown is the workflow's
business, how it looks that of assets/. Nothing is loaded from anywhere: styles, script, numbers and figures
are in the file, and its content security policy forbids every request.

The same results give the same bytes. The time on a page is when a result was computed, never when the page
was written.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.arrays import Array
from ...store.errors import ConfigError, MissingExtra
from ...store.version import __version__
from ..views import Attention, Choice, Figure, Heatmap, Picture, View, paper
from ..views.blocks import block, plain, size
from .recipe import asked, command, made
from .reported import NO_CLAIM
from .templates import asset, environment, hashed, script

if TYPE_CHECKING:
    from .reported import Reported

__all__ = ["LIMIT", "check_output", "policy", "render", "write", "write_whole"]

LIMIT = 20 << 20
"""Bytes of what may be embedded; browsers open more, but not gladly."""
STYLES = ("report.css", "graph.css")
DPI = 160
"""Pixels per inch of a picture, which is shown at 96."""


def write(workflow: Reported, path: Path) -> Path:
    """The page of a workflow that has run, at `path`; a file that holds it already is left alone.

    Written beside and moved, so that a file under that name is always whole. Raises ConfigError for a path
    that cannot become a file.
    """
    check_output(path)
    return write_whole(path, render(workflow).encode())


def write_whole(path: Path, text: bytes) -> Path:
    """A file with these bytes, written beside and moved; one that holds them already is left alone."""
    if path.is_file() and path.read_bytes() == text:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def check_output(path: Path) -> None:
    """Raise ConfigError when nothing can be written at `path`; to be asked before hours of computing."""
    if path.is_dir():
        raise ConfigError(
            f"expected a file to write, such as {path / 'report.html'}, found the folder {path}"
        )
    folder = next(parent for parent in path.absolute().parents if parent.exists() or parent.is_symlink())
    if not folder.is_dir():
        raise ConfigError(f"expected a folder for {path.name}, found the file {folder}; choose another path")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"expected a folder that can be written, found {folder}; choose another path")


def render(workflow: Reported) -> str:
    """The page as HTML, which fetches nothing: what does not fit is thinned or left out, and says so."""
    pictures, missing = _pictures(workflow)
    views = [view for view in workflow.shown if view.on_page]
    views, pictures = _fitted([*views, *_panels(workflow, views, drawn=not missing)], pictures)
    style, drawing = "".join(map(asset, STYLES)), script()
    text: str = (
        environment()
        .get_template("page.html")
        .render(
            workflow=workflow,
            no_claim=NO_CLAIM,
            version=__version__,
            settings=asked(workflow.settings),
            command=command(workflow),
            views=views,
            pictures=pictures,
            missing=missing,
            made=made(workflow),
            style=style,
            script=drawing,
            policy=policy(style, drawing),
        )
    )
    return text


def _panels(workflow: Reported, views: list[View], *, drawn: bool) -> list[View]:
    """Panels of figures that `views` do not hold: as views where a page has their kind, else as pictures.

    drawn: whether pictures can be drawn.
    """
    figures = [view for view in workflow.shown if isinstance(view, Figure)]
    kinds = {panel.panel().kind for figure in figures for panel in figure.panels}
    seen = {_content(view) for view in _options(views) if view.kind in kinds}
    seen |= {_cells(view.overview) for view in views if isinstance(view, Attention)}  # its grid of heads
    found: list[View] = []
    for figure in figures:
        for panel in (each.panel() for each in figure.panels):
            content = _content(panel)
            if content in seen or not (panel.on_page or drawn):
                continue
            if isinstance(panel, Heatmap) and _cells(panel.values) in seen:
                continue
            seen.add(content)
            titles: dict[str, Any] = {"title": panel.title or figure.title, "caption": panel.caption}
            if panel.on_page:
                found.append(replace(panel, **titles))
            else:
                alone = replace(panel, title="", caption="")
                found.append(Picture(png=paper.png([alone], dpi=DPI), alt=titles["title"], **titles))
    return found


def _options(views: Iterable[View]) -> Iterator[View]:
    """Views, and those that a `Choice` among them offers."""
    for view in views:
        yield view
        if isinstance(view, Choice):
            yield from _options(option for _, option in view.options)


def _content(view: View) -> str:
    """Digest of what a view shows, without its title and caption."""
    shown = plain(replace(view, title="", caption="", sources=()))
    return hashlib.sha256(f"{view.kind}{shown}".encode()).hexdigest()


def _cells(values: Array) -> str:
    """The numbers of a grid, as a page embeds them."""
    return str(block(values))


def _pictures(workflow: Reported) -> tuple[list[View], str]:
    """The workflow's figures, which a browser without scripts shows; where they cannot be drawn, why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            drawn = workflow.draw(Path(folder))
        except MissingExtra as error:
            return [], str(error)
        return [
            Picture(title=path.stem, png=path.read_bytes(), alt=f"{workflow.question} Figure {path.stem}.")
            for path in drawn
        ], ""


def _fitted(*groups: list[View]) -> list[list[View]]:
    """Every view, or what of it fits: small ones whole, and large ones share what these leave."""
    sizes = sorted(size(view) for group in groups for view in group)
    left, share = LIMIT, LIMIT
    for number, each in enumerate(sizes):
        share = left // (len(sizes) - number)
        if each > share:
            break
        left -= each
    else:
        share = LIMIT
    return [[view.within(share) for view in group] for group in groups]


def policy(style: str, drawing: str, beside: str = "") -> str:
    """What a browser may do with a page: apply this style, run this script, show what is embedded. beside:
    where other scripts may come from."""
    allowed = (
        f"style-src {hashed(style)}; script-src {hashed(drawing)}{beside and ' '}{beside}; img-src data:"
    )
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
