"""The report of a workflow: one self-contained HTML page with its settings, results and provenance.

The page loads nothing: styles, script, numbers and figures are embedded, and its content security policy
forbids every request. Equal results give equal bytes: times on a page are those of the computation, never of
the writing.

Border: writes the views and figures of a workflow; the templates in assets/ define their appearance.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""Largest number of bytes that the views of a page may take; browsers open larger pages slowly."""
STYLES = ("report.css", "graph.css")
"""File names of the style sheets of a page, in order."""
# parts.html scales pictures by 96 / 160 = 0.6.
DPI = 160
"""Pixels per inch of a picture; the page shows it at 96 pixels per inch, so that it is sharp when
magnified."""


def write(workflow: Reported, path: Path) -> Path:
    """Write the page of a workflow that has run, unless the file already has these contents.

    Arguments:
        workflow: The workflow, after its computation.
        path: HTML file to write.

    Returns:
        `path`.

    Raises:
        ConfigError: No file can be written at the path.
    """
    check_output(path)
    return write_whole(path, render(workflow).encode())


def write_whole(path: Path, text: bytes) -> Path:
    """Write a file, unless it already has these contents.

    A temporary file is written and renamed, so that an interruption leaves no partial file.

    Arguments:
        path: File to write; its folder is created if needed.
        text: Contents of the file.

    Returns:
        `path`.
    """
    if path.is_file() and path.read_bytes() == text:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, as a rename is atomic only within a file system.
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
            f"cannot write the file {path}, because it is a folder; name a file in it, such as "
            f"{path / 'report.html'}"
        )
    # A broken link does not `exist`, yet no folder can be made in its place.
    nearest_parent = next(
        parent for parent in path.absolute().parents if parent.exists() or parent.is_symlink()
    )
    if not nearest_parent.is_dir():
        raise ConfigError(
            f"cannot write {path.name}, because {nearest_parent} is a file, not a folder; choose another path"
        )
    if not os.access(nearest_parent, os.W_OK):
        raise ConfigError(
            f"cannot write {path.name}, because you may not write into the folder {nearest_parent}; choose "
            "another path"
        )


def render(workflow: Reported) -> str:
    """HTML of the page of a workflow that has run.

    If its views exceed the size limit of a page, large ones are reduced or replaced by a note.
    """
    pictures, missing = _figures_as_pictures(workflow)
    # A `Figure` is no part of the page itself: those of its panels that the page lacks are added as views.
    views = [view for view in workflow.shown if view.on_page]
    panels = _panels_not_on_page(workflow, views, has_matplotlib=not missing)
    views, pictures = _within_limit([*views, *panels], pictures)
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


def _panels_not_on_page(workflow: Reported, views: list[View], *, has_matplotlib: bool) -> list[View]:
    """Panels of the workflow's figures that show something that none of the page's views shows.

    Arguments:
        workflow: The workflow.
        views: The views of the page.
        has_matplotlib: Whether panels can be drawn.

    Returns:
        The panels: as views if a page can show their kind, else drawn as pictures.
    """
    figures = [view for view in workflow.shown if isinstance(view, Figure)]
    panel_kinds = {panel.panel().kind for figure in figures for panel in figure.panels}
    # Only a view of a panel's kind can equal it: the others are not encoded and hashed.
    seen = {_content_digest(view) for view in _with_options(views) if view.kind in panel_kinds}
    # The grid of heads of an attention view shows the same cells as a heatmap of its overview.
    seen |= {str(block(view.overview)) for view in views if isinstance(view, Attention)}
    additional: list[View] = []
    for figure in figures:
        for panel in (source.panel() for source in figure.panels):
            content = _content_digest(panel)
            if content in seen or not (panel.on_page or has_matplotlib):
                continue
            if isinstance(panel, Heatmap) and str(block(panel.values)) in seen:
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


def _with_options(views: Iterable[View]) -> Iterator[View]:
    """All views, each `Choice` followed by the views to select from."""
    for view in views:
        yield view
        if isinstance(view, Choice):
            yield from _with_options(option for _, option in view.options)


def _content_digest(view: View) -> str:
    """Digest of what a view shows, without its title and caption: equal for views that look the same."""
    # `sources` are links to the provenance: they change nothing that is drawn.
    shown = plain(replace(view, title="", caption="", sources=()))
    return hashlib.sha256(f"{view.kind}{shown}".encode()).hexdigest()


def _figures_as_pictures(workflow: Reported) -> tuple[list[View], str]:
    """Draw the workflow's figures for browsers that run no script.

    Returns:
        (pictures, ""), or ([], the reason why no figure can be drawn) without matplotlib.
    """
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


def _within_limit(*groups: list[View]) -> list[list[View]]:
    """Reduce views until all groups together take at most LIMIT bytes.

    Small views stay complete; large ones share the remaining bytes equally.

    Returns:
        The groups, in order, with the same number of views each.
    """
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
    """Content security policy of a page that allows one inline style, one inline script and embedded images.

    Arguments:
        style: Text of the inline style.
        drawing: Text of the inline script.
        beside: Further source of scripts, such as "'self'"; "" for none.
    """
    allowed = (
        # By hash, so that no other inline script, such as one in a prompt, can run; data: for embedded PNGs.
        f"style-src {hashed(style)}; script-src {hashed(drawing)}{beside and ' '}{beside}; img-src data:"
    )
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
