"""View of cones in 2 or 3 dimensions: the regions of directions on which a piecewise function is constant."""

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
"""Number of points with which the arc between two rays is drawn."""
RIM = 1e-9
"""Distance to a plane below which a point counts as lying in it."""


@dataclass(frozen=True, kw_only=True)
class Cones(View):
    """Cones with apex at the origin, coloured by class, optionally marked.

    In 2 dimensions a cone is a sector of a disc. In 3 dimensions two discs show the half spaces on both sides
    of the plane x + y + z = 0, seen along the diagonal, which is their centre. Areas on the discs are
    proportional to solid angles (Lambert's azimuthal equal-area projection).
    """

    kind: ClassVar[str] = "cones"
    on_page: ClassVar[bool] = False
    rays: Array
    """Unit vectors along the edges of each cone, in order around it, float [cone, ray, axis]; axis is 2 or 3
    long, and unused rays are NaN."""
    classes: Array
    """Class of each cone, int [cone]: index into `names`."""
    marked: Array
    """Whether a cone is marked, bool [cone]; marked cones are orange."""
    names: tuple[str, ...]
    """Names of the classes."""
    mark_name: str
    """Meaning of a mark."""
    axes_names: tuple[str, ...] = field(default=())
    """Names of the axes, drawn as dots at both of their ends; empty for none."""

    def __post_init__(self) -> None:
        if self.rays.ndim != 3 or self.rays.shape[2] not in (2, 3):
            raise ShapeError(f"expected rays [cone, ray, 2 or 3 axes], found shape {list(self.rays.shape)}")

    @property
    def is_flat(self) -> bool:
        """Whether the cones are two-dimensional."""
        return bool(self.rays.shape[2] == 2)

    def inches(self) -> tuple[float, float]:
        """Size of one disc or two, and the legend; see `View.inches`."""
        return (5.4, 4.0) if self.is_flat else (9.6, 4.2)

    def draw(self, axes: Any) -> None:
        """Draw the cones in the colours of their classes, marked ones in orange, and the axes as dots."""
        from matplotlib.patches import Patch

        shades = paper.shades(len(self.names), in_order=False)
        for rays, class_index, is_marked in zip(
            self.rays, self.classes.tolist(), self.marked.tolist(), strict=True
        ):
            edges = rays[np.isfinite(rays[:, 0])]
            for outline in _sector(edges) if self.is_flat else _disc_outlines(edges):
                axes.fill(
                    *outline.T,
                    facecolor=paper.ACCENT if is_marked else shades[class_index],
                    alpha=0.95 if is_marked else 0.38,
                    # A thin marked cone would vanish under a white edge.
                    edgecolor=paper.ACCENT if is_marked else "white",
                    linewidth=0.7,
                )
        for axis, name in enumerate(self.axes_names):
            for sign in (1, -1):
                point = np.eye(self.rays.shape[2])[axis] * sign
                xy = point if self.is_flat else _disc_point(point)
                label = f"{name} {'>' if sign > 0 else '<'} 0"
                axes.plot(*xy, "o", color=paper.INK, ms=2.5)
                axes.annotate(label, xy, xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set_aspect("equal")
        axes.set_axis_off()
        legend = [
            Patch(facecolor=shade, alpha=0.38, label=n) for shade, n in zip(shades, self.names, strict=True)
        ]
        if self.marked.any():
            legend.append(Patch(facecolor=paper.ACCENT, label=self.mark_name))
        axes.legend(handles=legend, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.1, 0.5))


def _sector(rays: Array) -> list[Array]:
    """Outline of a two-dimensional cone: its apex and an arc, as a list of one array [point, 2]."""
    return [np.vstack([np.zeros(2), _arc(*rays)])]


def _arc(a: Array, b: Array) -> Array:
    """Points [ARC, axis] on the shorter arc between two unit vectors (spherical linear interpolation)."""
    share = np.linspace(0.0, 1.0, ARC)[:, None]
    # Rounding may put the product of unit vectors just above 1, where arccos is NaN.
    angle = np.arccos(np.clip(a @ b, -1.0, 1.0))
    # sin(angle) would divide by zero.
    if angle < 1e-9:
        return np.array([a, b])
    points: Array = (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)
    return points


FRAME = np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, 2.0], [1.0, -1.0, 0.0]])
FRAME /= np.linalg.norm(FRAME, axis=1, keepdims=True)
"""Orthonormal rows: the viewing direction (the diagonal), the directions drawn upward and to the right."""


def _disc_outlines(rays: Array) -> list[Array]:
    """Outlines [point, 2] of a three-dimensional cone on the discs of the two half spaces it reaches into."""
    # Each arc without its last point, which is the first of the next arc.
    edge = np.vstack([_arc(a, b)[:-1] for a, b in zip(rays, np.roll(rays, -1, axis=0), strict=True)])
    outlines = []
    for sign in (1, -1):
        part = _clipped(edge, sign * FRAME[0])
        if len(part) > 2:
            outlines.append(_projected(part, sign))
    return outlines


def _clipped(outline: Array, normal: Array) -> Array:
    """Clip an outline on the unit sphere by a plane through the origin.

    Arguments:
        outline: Points of a closed curve, float [point, 3].
        normal: Normal of the plane; the side it points to is kept.

    Returns:
        Points [point, 3] of the clipped curve, closed along the great circle in the plane.
    """
    side = outline @ normal
    parts: list[Array] = []
    for i, point in enumerate(outline):
        # -1 for the first point, as the outline is closed.
        before = i - 1
        # The edge crosses the plane: the crossing point is interpolated and put back onto the sphere.
        if side[before] * side[i] < 0:
            between = abs(side[i]) * outline[before] + abs(side[before]) * point
            parts.append(between[None] / np.linalg.norm(between))
        if side[i] >= 0:
            parts.append(point[None])
    points = np.vstack(parts) if parts else np.empty((0, 3))
    on_rim = np.abs(points @ normal) < RIM
    following = np.roll(points, -1, axis=0)
    both_on_rim = on_rim & np.roll(on_rim, -1)
    pieces = [
        _arc(a, b) if is_rim else a[None] for a, b, is_rim in zip(points, following, both_on_rim, strict=True)
    ]
    return np.vstack(pieces) if pieces else points


def _projected(points: Array, sign: int) -> Array:
    """Lambert's azimuthal equal-area projection of points on one half of the unit sphere.

    Arguments:
        points: Unit vectors, float [point, 3].
        sign: 1 for the half around the diagonal, whose disc is on the left, -1 for the other half.

    Returns:
        Coordinates on the drawing, float [point, 2].
    """
    depth, y, x = (points @ FRAME.T).T
    # The usual factor sqrt(2 / (1 + depth)) over sqrt(2): both discs have radius 1.
    scale = np.sqrt(1.0 / (1.0 + np.clip(sign * depth, 0.0, 1.0)))
    # Each half is seen from outside, which swaps left and right of the other one. Discs of radius 1 whose
    # centres are 2.3 apart.
    return np.column_stack([sign * x * scale - 1.15 * sign, y * scale])


def _disc_point(point: Array) -> Array:
    """Coordinates (x, y) of a direction on the disc of its half space."""
    (xy,) = _projected(point[None], 1 if point @ FRAME[0] >= 0 else -1)
    return np.asarray(xy)
