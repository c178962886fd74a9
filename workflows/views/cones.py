"""View of cones in 2 or 3 dimensions: sets of input directions on which a piecewise-linear network is
linear."""

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
"""A point counts as lying in a plane if its distance to the plane is below this; for rounding errors."""


@dataclass(frozen=True, kw_only=True)
class Cones(View):
    """Cones with apex at the origin, coloured by class; some may be marked.

    In 2 dimensions a cone is drawn as a sector of a disc. In 3 dimensions two discs show the half spaces on
    both sides of the plane x + y + z = 0: the centre of one is the diagonal direction (1, 1, 1), that of the
    other its opposite. Areas on the discs are proportional to solid angles (Lambert's azimuthal equal-area
    projection).
    """

    kind: ClassVar[str] = "cones"
    on_page: ClassVar[bool] = False
    rays: Array
    """Unit vectors along the edges of each cone, in order around it, float [cone, ray, axis], with 2 or 3
    axes; cones with fewer edges are padded with NaN rays."""
    classes: Array
    """Class of each cone, int [cone]: index into `names`."""
    marked: Array
    """Whether each cone is marked, bool [cone]; marked cones are drawn in orange."""
    names: tuple[str, ...]
    """Names of the classes, for the legend."""
    mark_name: str
    """What a marked cone means, for the legend."""
    axes_names: tuple[str, ...] = field(default=())
    """Names of the coordinate axes; a dot shows each axis in both directions. Empty for no dots."""

    def __post_init__(self) -> None:
        if self.rays.ndim != 3 or self.rays.shape[2] not in (2, 3):
            raise ShapeError(
                "expected rays of shape [cone, ray, axis] with 2 or 3 axes, "
                f"found shape {list(self.rays.shape)}"
            )

    @property
    def is_flat(self) -> bool:
        """Whether the cones are two-dimensional."""
        return bool(self.rays.shape[2] == 2)

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches: one disc for 2 axes, two for 3, and the legend beside them."""
        return (5.4, 4.0) if self.is_flat else (9.6, 4.2)

    def draw(self, axes: Any) -> None:
        """Draw the cones in the colours of their classes, marked cones in orange, and the axes as dots."""
        from matplotlib.patches import Patch

        shades = paper.shades(len(self.names), in_order=False)
        cones = zip(self.rays, self.classes.tolist(), self.marked.tolist(), strict=True)
        for padded_rays, class_index, is_marked in cones:
            rays = padded_rays[np.isfinite(padded_rays[:, 0])]
            for outline in _sector_outlines(rays) if self.is_flat else _disc_outlines(rays):
                axes.fill(
                    *outline.T,
                    facecolor=paper.ACCENT if is_marked else shades[class_index],
                    alpha=0.95 if is_marked else 0.38,
                    # A thin marked cone would vanish under a white edge.
                    edgecolor=paper.ACCENT if is_marked else "white",
                    linewidth=0.7,
                )
        for axis, axis_name in enumerate(self.axes_names):
            for sign in (1, -1):
                direction = np.eye(self.rays.shape[2])[axis] * sign
                xy = direction if self.is_flat else _disc_point(direction)
                label = f"{axis_name} {'>' if sign > 0 else '<'} 0"
                axes.plot(*xy, "o", color=paper.INK, ms=2.5)
                axes.annotate(label, xy, xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set_aspect("equal")
        axes.set_axis_off()
        legend = [
            Patch(facecolor=shade, alpha=0.38, label=name)
            for shade, name in zip(shades, self.names, strict=True)
        ]
        if self.marked.any():
            legend.append(Patch(facecolor=paper.ACCENT, label=self.mark_name))
        axes.legend(handles=legend, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.1, 0.5))


def _sector_outlines(rays: Array) -> list[Array]:
    """Outline of a two-dimensional cone, as a list of one array [point, 2]: its apex, then an arc.

    Arguments:
        rays: Unit vectors along its two edges, float [2, 2].
    """
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
"""Orthonormal rows: the viewing direction (the diagonal), the direction drawn upward, that drawn to the
right."""


def _disc_outlines(rays: Array) -> list[Array]:
    """Outlines of a three-dimensional cone on the drawing: one on the disc of each half space it reaches
    into.

    Arguments:
        rays: Unit vectors along the edges of the cone, in order around it, float [ray, 3].

    Returns:
        One or two arrays of coordinates, float [point, 2].
    """
    # Each arc without its last point, which is the first of the next arc.
    boundary = np.vstack([_arc(a, b)[:-1] for a, b in zip(rays, np.roll(rays, -1, axis=0), strict=True)])
    outlines = []
    for sign in (1, -1):
        part = _clipped(boundary, sign * FRAME[0])
        # Fewer than three points enclose no area: the cone only touches this half space.
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
    distance = outline @ normal
    kept: list[Array] = []
    for i, point in enumerate(outline):
        # -1, the last point, for the first one: the outline is closed.
        before = i - 1
        # The curve crosses the plane here: the crossing point is interpolated and put back onto the sphere.
        if distance[before] * distance[i] < 0:
            crossing = abs(distance[i]) * outline[before] + abs(distance[before]) * point
            kept.append(crossing[None] / np.linalg.norm(crossing))
        if distance[i] >= 0:
            kept.append(point[None])
    points = np.vstack(kept) if kept else np.empty((0, 3))
    # Two successive points in the plane: the arc between them on the great circle closes the clipped curve.
    in_plane = np.abs(points @ normal) < RIM
    is_gap = in_plane & np.roll(in_plane, -1)
    successors = np.roll(points, -1, axis=0)
    pieces = [
        _arc(a, b) if is_closed_by_arc else a[None]
        for a, b, is_closed_by_arc in zip(points, successors, is_gap, strict=True)
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
    # Lambert's factor sqrt(2 / (1 + depth)), divided by sqrt(2) so that both discs have radius 1.
    scale = np.sqrt(1.0 / (1.0 + np.clip(sign * depth, 0.0, 1.0)))
    # Each half is seen from outside, so that left and right are swapped on the second disc. The centres of
    # the discs are 2.3 apart.
    return np.column_stack([sign * x * scale - 1.15 * sign, y * scale])


def _disc_point(point: Array) -> Array:
    """Coordinates (x, y) on the drawing of a direction, float [3], on the disc of the half space it points
    to."""
    (xy,) = _projected(point[None], 1 if point @ FRAME[0] >= 0 else -1)
    return np.asarray(xy)
