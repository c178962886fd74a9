"""One self-contained HTML page per workflow: settings, results and provenance.

The page loads nothing: styles, script, numbers and figures are embedded, and its content security policy
forbids every request. Equal results give equal bytes: times on a page are those of the computation, never of
the writing.

Border: writes the views and figures of a workflow; assets/ defines their appearance.
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
"""Largest number of embedded bytes; browsers open larger pages slowly."""
STYLES = ("report.css", "graph.css")
"""Style sheets of a page, in order."""
# parts.html has the ratio of both: 96 / 160 = 0.6.
DPI = 160
"""Pixels per inch of a picture, which is shown at 96 per inch."""


def write(workflow: Reported, path: Path) -> Path:
    """Write the page of a workflow that has run, unless the file already has these contents.

    Arguments:
        workflow: the workflow.
        path: the file.

    Raises:
        ConfigError: no file can be written at the path.
    """
    check_output(path)
    return write_whole(path, render(workflow).encode())


def write_whole(path: Path, text: bytes) -> Path:
    """Write a file, unless it already has these contents. A temporary file is renamed, so that the file is
    always complete.

    Arguments:
        path: the file.
        text: its contents.
    """
    if path.is_file() and path.read_bytes() == text:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, as a file is only replaced atomically within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def check_output(path: Path) -> None:
    """Raise ConfigError if no file can be written at `path`; call it before long computations."""
    if path.is_dir():
        raise ConfigError(
            f"expected a file to write, such as {path / 'report.html'}, found the folder {path}"
        )
    # A broken link does not `exist`, yet no folder can be made in its place.
    folder = next(parent for parent in path.absolute().parents if parent.exists() or parent.is_symlink())
    if not folder.is_dir():
        raise ConfigError(f"expected a folder for {path.name}, found the file {folder}; choose another path")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"expected a folder that can be written, found {folder}; choose another path")


def render(workflow: Reported) -> str:
    """The page as HTML. Views that exceed the size limit are thinned or left out, with a note."""
    pictures, missing = _pictures(workflow)
    # A `Figure` is not listed itself: `_panels` adds those of its panels that the page lacks.
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
    """Panels of figures that are not among `views`, as views if a page supports their kind, else as pictures.

    drawn: whether pictures can be drawn.
    """
    figures = [view for view in workflow.shown if isinstance(view, Figure)]
    kinds = {panel.panel().kind for figure in figures for panel in figure.panels}
    # Only a view of a panel's kind can equal it: the others are not encoded and hashed.
    seen = {_content(view) for view in _options(views) if view.kind in kinds}
    seen |= {_cells(view.overview) for view in views if isinstance(view, Attention)}  # its grid of heads
    additional: list[View] = []
    for figure in figures:
        for panel in (source.panel() for source in figure.panels):
            content = _content(panel)
            if content in seen or not (panel.on_page or drawn):
                continue
            if isinstance(panel, Heatmap) and _cells(panel.values) in seen:
                continue
            seen.add(content)
            titles: dict[str, Any] = {"title": panel.title or figure.title, "caption": panel.caption}
            if panel.on_page:
                additional.append(replace(panel, **titles))
            else:
                # The page writes title and caption around the picture: they are not drawn into it as well.
                untitled = replace(panel, title="", caption="")
                additional.append(Picture(png=paper.png([untitled], dpi=DPI), alt=titles["title"], **titles))
    return additional


def _options(views: Iterable[View]) -> Iterator[View]:
    """Views, including the options of a `Choice`."""
    for view in views:
        yield view
        if isinstance(view, Choice):
            yield from _options(option for _, option in view.options)


def _content(view: View) -> str:
    """Digest of a view's contents, without title and caption."""
    # `sources` are links to recipes: without them, as they change nothing that is drawn.
    shown = plain(replace(view, title="", caption="", sources=()))
    return hashlib.sha256(f"{view.kind}{shown}".encode()).hexdigest()


def _cells(values: Array) -> str:
    """Numbers of a grid, encoded for embedding in a page."""
    return str(block(values))


def _pictures(workflow: Reported) -> tuple[list[View], str]:
    """(figures of the workflow as pictures, which a browser without scripts shows; why they cannot be drawn,
    or "")."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            drawn = workflow.draw(Path(folder))
        # Without matplotlib the page still has its interactive charts.
        except MissingExtra as error:
            return [], str(error)
        return [
            Picture(title=path.stem, png=path.read_bytes(), alt=f"{workflow.question} Figure {path.stem}.")
            for path in drawn
        ], ""


def _fitted(*groups: list[View]) -> list[list[View]]:
    """Reduce views to the size limit: small ones stay complete, large ones share the remaining bytes
    equally."""
    # Ascending, so that bytes which small views leave over are shared among the larger ones.
    sizes = sorted(size(view) for group in groups for view in group)
    remaining, share = LIMIT, LIMIT
    for number, n_bytes in enumerate(sizes):
        share = remaining // (len(sizes) - number)
        if n_bytes > share:
            break
        remaining -= n_bytes
    else:
        # The loop did not break: every view fits.
        share = LIMIT
    return [[view.within(share) for view in group] for group in groups]


def policy(style: str, drawing: str, beside: str = "") -> str:
    """Content security policy of a page: one inline style, one inline script and embedded images.

    Arguments:
        style: text of the style.
        drawing: text of the script.
        beside: further source of scripts; empty for none.
    """
    allowed = (
        # By hash, so that no other inline script, such as one in a prompt, can run; data: for embedded PNGs.
        f"style-src {hashed(style)}; script-src {hashed(drawing)}{beside and ' '}{beside}; img-src data:"
    )
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
