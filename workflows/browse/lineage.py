"""Drawing of a run's or result's lineage: its inputs and its derived results.

Inputs are in columns on the left, the entry itself in the middle, results computed from it on the right. At
most `MOST` entries per side are drawn; the caption says how many are omitted. A dashed frame marks entries
that `mizarr gc` would delete. This module computes coordinates; the template browse.html writes the SVG.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ...pipeline.plan import human_bytes
from ..holdings import HeldFolder, Snapshot
from ..views import View, paper

__all__ = ["Box", "Lineage", "lineage"]

MOST = 24
"""Largest number of entries drawn on each side."""
WIDE, HIGH, ACROSS, DOWN = 216, 48, 270, 64
"""Width and height of a box, horizontal and vertical distance between boxes, in SVG units."""
LETTERS = 26
"""Number of characters that fit into a box, in the monospaced font of browse.css: 7.3 SVG units each."""


@dataclass(frozen=True)
class Box:
    """Box of a run or result in the drawing."""

    name: str
    """Label of the entry, such as "lens/2": the first line in the box."""
    told: str
    """Second line in the box: first digits of the digest, and size on disk."""
    href: str
    """Relative address of the entry's page; "" for no link."""
    fate: str
    """Whether and when `mizarr gc` deletes the entry, as `Snapshot.fate` says it."""
    x: float
    """Left edge of the box, in SVG units."""
    y: float
    """Upper edge of the box, in SVG units."""
    is_freed: bool
    """Whether `mizarr gc` would delete the entry, at once or to meet a quota."""
    is_self: bool
    """Whether this is the entry that the page is about."""

    @property
    def shown(self) -> str:
        """The label, cut to the width of the box."""
        return paper.fit(self.name, LETTERS)


@dataclass(frozen=True, kw_only=True)
class Lineage(View):
    """Drawing of the lineage of one run or result, in SVG units."""

    kind: ClassVar[str] = "lineage"
    boxes: tuple[Box, ...]
    """One box per run or result, from left to right."""
    paths: tuple[str, ...]
    """SVG path of each connection, from the box of an input to the box of a derived entry."""
    width: float
    """Width of the drawing."""
    height: float
    """Height of the drawing."""
    box: tuple[int, int] = (WIDE, HIGH)
    """(width, height) of every box."""


def lineage(snapshot: Snapshot, folder: HeldFolder, link_of: Callable[[HeldFolder], str]) -> Lineage:
    """Draw the lineage of a run or result.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the run or result.
        link_of: Function from the folder of an entry to the link of its box; "" for no link.
    """
    inputs, n_omitted_inputs = _walk(folder, snapshot.made_from)
    dependents, n_omitted_dependents = _walk(folder, snapshot.made_of)
    # Column of each entry: negative for inputs, 0 for the entry itself, positive for its dependents.
    depth = {**{name: -steps for name, steps in inputs.items()}, **dependents, folder.data: 0}
    columns: dict[int, list[str]] = {}
    for name, column in depth.items():
        columns.setdefault(column, []).append(name)
    leftmost, tallest = min(columns), max(map(len, columns.values()))
    corners = {}
    for column, names in columns.items():
        top = (tallest - len(names)) * DOWN / 2
        # The folder breaks ties of labels, so that equal stores give equal drawings.
        for row, name in enumerate(sorted(names, key=lambda name: (snapshot.folders[name].label, name))):
            # A margin of 6 on each side: `width` and `height` below add 12.
            corners[name] = (6.0 + (column - leftmost) * ACROSS, 6.0 + top + row * DOWN)
    boxes = []
    for name, (x, y) in corners.items():
        entry = snapshot.folders[name]
        second_line = f"{name.rpartition('/')[2][:8]} · {human_bytes(entry.usage.bytes) or '0 B'}"
        is_freed = snapshot.removal(entry) != "never"
        is_self = name == folder.data
        fate = snapshot.fate(entry)
        boxes.append(Box(entry.label, second_line, link_of(entry), fate, x, y, is_freed, is_self))
    paths = [
        _curve(corners[source.data], corners[name])
        for name in corners
        for source in snapshot.made_from(snapshot.folders[name])
        # Only connections that run to the right: damaged records may name each other as inputs.
        if source.data in corners and depth[source.data] < depth[name]
    ]
    width = 12 + WIDE + ACROSS * (max(columns) - leftmost)
    caption = (
        "Each box is a run or result of this store; lines lead to what was computed from it. Thick frame: "
        "the entry of this page. Dashed frame: `mizarr gc` would delete it, at once or to meet a quota."
    )
    if n_omitted := n_omitted_inputs + n_omitted_dependents:
        caption += f" {n_omitted} more runs and results are not drawn."
    return Lineage(
        title="Lineage",
        caption=caption,
        boxes=tuple(sorted(boxes, key=lambda box: (box.x, box.y))),
        paths=tuple(paths),
        width=width,
        height=12 + tallest * DOWN - (DOWN - HIGH),
    )


def _walk(folder: HeldFolder, step: Callable[[HeldFolder], list[HeldFolder]]) -> tuple[dict[str, int], int]:
    """Breadth-first search along the lineage of an entry in one direction, for at most MOST entries.

    Arguments:
        folder: The entry to start from; not part of the result.
        step: Function from an entry to its direct inputs, or to the entries computed directly from it.

    Returns:
        (folder of each entry reached -> length of the longest path to it; number of entries left out).
    """
    reached: dict[str, HeldFolder] = {}
    omitted: set[str] = set()
    queue = [folder]
    # Breadth first; the list grows while it is iterated over.
    for entry in queue:
        for neighbour in step(entry):
            if neighbour.data in reached or neighbour.data == folder.data:
                continue
            if len(reached) == MOST:
                omitted.add(neighbour.data)
                continue
            reached[neighbour.data] = neighbour
            queue.append(neighbour)
    # Longest paths, so that every connection runs to the right. The rounds are limited, because damaged
    # records could name each other as inputs.
    steps = dict.fromkeys(reached, 1)
    for _ in reached:
        for name, entry in reached.items():
            for neighbour in step(entry):
                if neighbour.data in steps and neighbour.data != name:
                    steps[neighbour.data] = min(max(steps[neighbour.data], steps[name] + 1), len(reached))
    return steps, len(omitted)


def _curve(source: tuple[float, float], target: tuple[float, float]) -> str:
    """SVG path of a curve from the right edge of one box to the left edge of another.

    Arguments:
        source: Upper left corner of the first box, (x, y).
        target: Upper left corner of the second box.
    """
    x, y = source[0] + WIDE, source[1] + HIGH / 2
    to_x, to_y = target[0], target[1] + HIGH / 2
    bend = (to_x - x) / 2
    return f"M{x:g} {y:g}C{x + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x:g} {to_y:g}"
