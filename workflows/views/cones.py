"""Cones of a plane or of space, seen from their tip: where a function of directions is what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError
from . import paper
from .view import View

__all__ = ["Cones"]

ARC = 24
"""Points an edge between two rays is drawn with."""
RIM = 1e-9
"""Distance from a plane below which a point lies in it."""


@dataclass(frozen=True, kw_only=True)
class Cones(View):
    """Cones with their tip at zero, filled by a class each, and marked where something is wrong.

    rays: [cone, ray, axis] in order around each, 2 or 3 axes, NaN past the last. classes: index into `names`
    of each cone. marked: which are. names: of the classes; mark_name: what a mark means; axes_names: of the
    axes. In the plane a cone is a sector of a disc. Space is seen along its diagonal from both sides: two
    discs, on which areas are solid angles (Lambert's azimuthal projection), the diagonal in their middle.
    """

    kind: ClassVar[str] = "cones"
    on_page: ClassVar[bool] = False
    rays: Array
    classes: Array
    marked: Array
    names: tuple[str, ...]
    mark_name: str
    axes_names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.rays.ndim != 3 or self.rays.shape[2] not in (2, 3):
            raise ShapeError(f"expected rays [cone, ray, 2 or 3 axes], found shape {list(self.rays.shape)}")

    @property
    def is_flat(self) -> bool:
        """Whether the cones are of a plane."""
        return bool(self.rays.shape[2] == 2)

    def inches(self) -> tuple[float, float]:
        """One disc or two, and room for the legend."""
        return (5.4, 4.0) if self.is_flat else (9.6, 4.2)

    def draw(self, axes: Any) -> None:
        """The discs, the classes in shades, what is marked in orange, and the axes as dots."""
        from matplotlib.patches import Patch

        shades = paper.shades(len(self.names), in_order=False)
        for rays, place, is_marked in zip(
            self.rays, self.classes.tolist(), self.marked.tolist(), strict=True
        ):
            held = rays[np.isfinite(rays[:, 0])]
            for outline in _sector(held) if self.is_flat else _on_discs(held):
                axes.fill(
                    *outline.T,
                    facecolor=paper.ACCENT if is_marked else shades[place],
                    alpha=0.95 if is_marked else 0.38,
                    edgecolor=paper.ACCENT if is_marked else "white",  # so that slivers are seen
                    linewidth=0.7,
                )
        for axis, name in enumerate(self.axes_names):
            for sign in (1, -1):
                point = np.eye(self.rays.shape[2])[axis] * sign
                (place,) = [point] if self.is_flat else _seen(point)
                told = f"{name} {'>' if sign > 0 else '<'} 0"
                axes.plot(*place, "o", color=paper.INK, ms=2.5)
                axes.annotate(told, place, xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set_aspect("equal")
        axes.set_axis_off()
        legend = [
            Patch(facecolor=shade, alpha=0.38, label=n) for shade, n in zip(shades, self.names, strict=True)
        ]
        if self.marked.any():
            legend.append(Patch(facecolor=paper.ACCENT, label=self.mark_name))
        axes.legend(handles=legend, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.1, 0.5))


def _sector(rays: Array) -> list[Array]:
    """Outline of a cone in the plane: its tip and an arc."""
    return [np.vstack([np.zeros(2), _arc(*rays)])]


def _arc(a: Array, b: Array) -> Array:
    """Points of the short way round from one direction to another."""
    share = np.linspace(0.0, 1.0, ARC)[:, None]
    angle = np.arccos(np.clip(a @ b, -1.0, 1.0))
    if angle < 1e-9:
        return np.array([a, b])
    found: Array = (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)
    return found


FRAME = np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, 2.0], [1.0, -1.0, 0.0]])
FRAME /= np.linalg.norm(FRAME, axis=1, keepdims=True)
"""The diagonal, and what is up and to the right of it."""


def _on_discs(rays: Array) -> list[Array]:
    """Outlines of a cone in space on the disc before the plane across the diagonal, and on that behind."""
    edge = np.vstack([_arc(a, b)[:-1] for a, b in zip(rays, np.roll(rays, -1, axis=0), strict=True)])
    found = []
    for sign in (1, -1):
        part = _clipped(edge, sign * FRAME[0])
        if len(part) > 2:
            found.append(_flat(part, sign))
    return found


def _clipped(outline: Array, normal: Array) -> Array:
    """The part of an outline on the sphere on one side of a plane, closed along its rim."""
    side = outline @ normal
    parts: list[Array] = []
    for i, point in enumerate(outline):
        before = i - 1
        if side[before] * side[i] < 0:
            between = abs(side[i]) * outline[before] + abs(side[before]) * point
            parts.append(between[None] / np.linalg.norm(between))
        if side[i] >= 0:
            parts.append(point[None])
    points = np.vstack(parts) if parts else np.empty((0, 3))
    on_rim = np.abs(points @ normal) < RIM
    after = np.roll(points, -1, axis=0)
    both = on_rim & np.roll(on_rim, -1)
    pieces = [_arc(a, b) if rim else a[None] for a, b, rim in zip(points, after, both, strict=True)]
    return np.vstack(pieces) if pieces else points


def _flat(points: Array, sign: int) -> Array:
    """Lambert's projection of points [point, 3] of one half of the sphere, the halves side by side."""
    along, up, right = (points @ FRAME.T).T
    scale = np.sqrt(1.0 / (1.0 + np.clip(sign * along, 0.0, 1.0)))
    return np.column_stack([sign * right * scale - 1.15 * sign, up * scale])


def _seen(point: Array) -> list[Array]:
    """Where a direction lies on its disc."""
    return [_flat(point[None], 1 if point @ FRAME[0] >= 0 else -1)[0]]
