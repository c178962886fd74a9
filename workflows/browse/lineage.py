"""What a run or a result was made from, and what was made from it, laid out as a drawing with links.

Columns flow to the right: sources, the thing itself, what reads it. Far relatives beyond `MOST` are left out,
which the drawing says. What `gc` would free has a dashed frame.

Border: folders of a store in, places in a drawing out; the template writes the SVG.
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
"""Folders drawn on either side."""
WIDE, HIGH, ACROSS, DOWN = 216, 48, 270, 64
"""Of a box, and from one to the next, in units of the drawing."""
LETTERS = 26
"""Characters of a name that a box holds, in the monospaced font of browse.css: 7.3 units each."""


@dataclass(frozen=True)
class Box:
    """A run or result.

    x, y: of its corner.  is_freed: whether gc would, given a quota, or at once, free it.
    """

    name: str
    told: str
    href: str
    fate: str
    x: float
    y: float
    is_freed: bool
    is_self: bool

    @property
    def shown(self) -> str:
        """The name, as far as the box holds it."""
        return paper.fit(self.name, LETTERS)


@dataclass(frozen=True, kw_only=True)
class Lineage(View):
    """Boxes and the curves between them, as SVG paths. left_out: relatives there was no room for."""

    kind: ClassVar[str] = "lineage"
    boxes: tuple[Box, ...]
    paths: tuple[str, ...]
    width: float
    height: float
    box: tuple[int, int] = (WIDE, HIGH)


def lineage(held: Snapshot, folder: HeldFolder, way: Callable[[HeldFolder], str]) -> Lineage:
    """The drawing around a run or result; way: where the box of a folder leads."""
    before, cut_before = _walk(folder, held.made_from)
    after, cut_after = _walk(folder, held.made_of)
    depth = {**{name: -steps for name, steps in before.items()}, **after, folder.data: 0}
    columns: dict[int, list[str]] = {}
    for name, column in depth.items():
        columns.setdefault(column, []).append(name)
    first, tallest = min(columns), max(map(len, columns.values()))
    places = {}
    for column, names in columns.items():
        top = (tallest - len(names)) * DOWN / 2
        for row, name in enumerate(sorted(names, key=lambda name: (held.folders[name].label, name))):
            places[name] = (6.0 + (column - first) * ACROSS, 6.0 + top + row * DOWN)
    boxes = []
    for name, (x, y) in places.items():
        each = held.folders[name]
        fate = held.fate(each)
        told = f"{name.rpartition('/')[2][:8]} · {human_bytes(each.usage.bytes) or '0 B'}"
        is_freed = fate.startswith("goes")
        boxes.append(Box(each.label, told, way(each), fate, x, y, is_freed, name == folder.data))
    paths = [
        _curve(places[source.data], places[name])
        for name in places
        for source in held.made_from(held.folders[name])
        if source.data in places and depth[source.data] < depth[name]
    ]
    width = 12 + WIDE + ACROSS * (max(columns) - first)
    caption = (
        "Left: what it was made from. Right: what was made from it. A dashed frame: mizarr gc would free it, "
    )
    caption += "given a quota and no room."
    if cut := cut_before + cut_after:
        caption += f" {cut} more relatives are not drawn."
    return Lineage(
        title="Lineage",
        caption=caption,
        boxes=tuple(sorted(boxes, key=lambda box: (box.x, box.y))),
        paths=tuple(paths),
        width=width,
        height=12 + tallest * DOWN - (DOWN - HIGH),
    )


def _walk(folder: HeldFolder, step: Callable[[HeldFolder], list[HeldFolder]]) -> tuple[dict[str, int], int]:
    """Relatives in one direction, nearest first, and how many steps away each is by its longest way; and how
    many were left out."""
    found: dict[str, HeldFolder] = {}
    left_out: set[str] = set()
    waiting = [folder]
    for each in waiting:
        for other in step(each):
            if other.data in found or other.data == folder.data:
                continue
            if len(found) == MOST:
                left_out.add(other.data)
                continue
            found[other.data] = other
            waiting.append(other)
    steps = dict.fromkeys(found, 1)
    for _ in found:  # as many rounds as the longest way can have, should some be made from each other
        for name, each in found.items():
            for other in step(each):
                if other.data in steps and other.data != name:
                    steps[other.data] = min(max(steps[other.data], steps[name] + 1), len(found))
    return steps, len(left_out)


def _curve(source: tuple[float, float], target: tuple[float, float]) -> str:
    """From the right edge of one box to the left edge of another."""
    x, y = source[0] + WIDE, source[1] + HIGH / 2
    to_x, to_y = target[0], target[1] + HIGH / 2
    bend = (to_x - x) / 2
    return f"M{x:g} {y:g}C{x + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x:g} {to_y:g}"
