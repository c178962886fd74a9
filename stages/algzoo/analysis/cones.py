"""Exact accuracy of the RNN on two or three standard normal numbers: angles and solid angles instead of
samples.

Task and network are linear on cones, and a cone has the Gaussian measure of its angle. The orthants are cut
by the planes at which the right answer changes, by those at which a ReLU opens, step by step, and by those at
which what the network says changes; then every piece is right as a whole, or wrong. Answers that are numbers
have their squared error instead, whose mean over a cone follows from its faces (Stein's identity, below).

Border: labelled weights in.

Axes: cone; ray (extreme rays of a cone in order, 2 in the plane, padded with NaN in space); axis (the
numbers).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array, Floats
from ....store.errors import ConfigError
from ..rnn import RnnWeights, require_rnn
from ..tasks import Task, task_named
from .regions import pattern_bits

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["DIMENSIONS", "gaussian_accuracy", "measure", "second_moment", "split"]

DIMENSIONS = (2, 3)
"""Numbers of a sequence whose cones are measured exactly."""
ON_PLANE = 1e-12
"""Sine of the angle below which a ray lies in a plane: rounding of float64, with room."""


@dataclass(frozen=True, eq=False)
class ConePiece:
    """A cone, and the network on it.  rays [ray, axis], of length one. state: h = state x [neuron, axis].
    gates: open ReLUs so far."""

    rays: Floats
    state: Floats
    gates: tuple[bool, ...] = ()

    @property
    def inside(self) -> Floats:
        """The mean of its rays [axis], which is not of length one: a point within, as the cone is convex."""
        middle: Floats = self.rays.mean(axis=0)
        return middle


def split(rays: Floats, plane: Floats) -> tuple[Floats | None, Floats | None]:
    """The parts of a cone where plane · x is not negative, and where it is not positive; None for an empty
    one.

    rays [ray, axis] in order around the cone.
    """
    size = np.linalg.norm(plane)
    side = rays @ plane / size if size > 0 else np.zeros(len(rays))
    side = np.where(np.abs(side) < ON_PLANE, 0.0, side)
    if (side >= 0).all():
        return rays, None
    if (side <= 0).all():
        return None, rays
    above, below = [], []
    many = len(rays)
    for i in range(many):
        if side[i] >= 0:
            above.append(rays[i])
        if side[i] <= 0:
            below.append(rays[i])
        after = (i + 1) % many
        if side[i] * side[after] < 0 and (many > 2 or i == 0):
            between = np.abs(side[after]) * rays[i] + np.abs(side[i]) * rays[after]
            between /= np.linalg.norm(between)
            above.append(between)
            below.append(between)
    return np.array(above), np.array(below)


def measure(rays: Floats) -> float:
    """Share of standard normal points in a cone: its angle over 2 pi, or its solid angle over 4 pi."""
    if rays.shape[1] == 2:
        a, b = rays
        return float(np.arctan2(abs(a[0] * b[1] - a[1] * b[0]), a @ b) / (2 * np.pi))
    total = 0.0
    for i in range(1, len(rays) - 1):
        a, b, c = rays[0], rays[i], rays[i + 1]
        # Van Oosterom and Strackee 1983, eq. 8.
        total += 2 * np.arctan2(abs(a @ np.cross(b, c)), 1 + a @ b + b @ c + c @ a)
    return total / (4 * np.pi)


def second_moment(rays: Floats) -> Floats:
    """E[x x' 1(x in cone)] of standard normal x, [axis, axis].

    Stein's identity with g = x 1(cone): P(cone) I plus, for every face, its inward normal times the integral
    of x times the density over it: r / (2 pi) for a ray in the plane; (a + b) tan(angle / 2) / (4 pi) for the
    sector between rays a and b in space, whose integral of directions is (a + b) tan(angle / 2).
    """
    inside, found = rays.mean(axis=0), measure(rays) * np.eye(rays.shape[1])
    if rays.shape[1] == 2:
        faces = [(np.array([-ray[1], ray[0]]), ray / (2 * np.pi)) for ray in rays]
    else:
        faces = []
        for a, b in zip(rays, np.roll(rays, -1, axis=0), strict=True):
            normal = np.cross(a, b)
            size = np.linalg.norm(normal)
            if size > ON_PLANE:
                half = np.tan(np.arctan2(size, a @ b) / 2)
                faces.append((normal / size, (a + b) * half / (4 * np.pi)))
    for normal, integral in faces:
        found = found + np.outer(normal * np.sign(normal @ inside), integral)
    return found


@stage(
    version=1,
    inputs={"weights": None},
    outputs={
        "accuracy": Output((), "1", "exact accuracy", is_optional=True),
        "rmse": Output((), "1", "exact root mean squared error", is_optional=True),
        "measure": Output(("cone",), "1", "share of inputs in the cone"),
        "rays": Output(("cone", "ray", "axis"), "1", "its extreme rays in order"),
        "pattern": Output(("cone", "byte"), "1", "open gates, packed as in regions.py"),
        "target": Output(("cone",), "1", "the right class there; -1 for a number"),
        "said": Output(("cone",), "1", "the class the network says there; -1 for a number"),
    },
)
def gaussian_accuracy(weights: xr.Dataset, *, task: str, sequence: int) -> xr.Dataset:
    """Accuracy on all standard normal inputs of 2 or 3 numbers, and the cones it is made of.

    Raises ConfigError for longer sequences, whose cones have no such formula, and for tasks of integers.
    """
    import xarray as xr

    rnn, chosen = require_rnn(weights, "exact accuracy"), task_named(task)
    if sequence not in DIMENSIONS or chosen.draws != "normal":
        raise ConfigError(
            f"expected a task of 2 or 3 normal numbers for an exact accuracy, found {task} of {sequence}; "
            "count samples instead (sampled_accuracy)"
        )
    pieces = _through_network(rnn, _through_task(chosen, sequence, rnn.hidden), sequence)
    if not chosen.is_scalar:
        pieces = [part for each in pieces for part in _cut([each], _differences(rnn.oh @ each.state))]
    inside = np.array([piece.inside for piece in pieces])
    shares = np.array([measure(piece.rays) for piece in pieces])
    maps = np.array([rnn.oh @ piece.state for piece in pieces])
    rays = np.full((len(pieces), max(len(piece.rays) for piece in pieces), sequence), np.nan)
    for place, piece in zip(rays, pieces, strict=True):
        place[: len(piece.rays)] = piece.rays
    gates = np.array([piece.gates for piece in pieces]).reshape(len(pieces), sequence, -1)
    nothing = np.full(len(pieces), -1, np.int64)
    if chosen.is_scalar:
        target = said = nothing
        errors = maps[:, 0] - np.array([_median_of(point) for point in inside])
        squares = [
            error @ second_moment(piece.rays) @ error for error, piece in zip(errors, pieces, strict=True)
        ]
        told = {"rmse": float(np.sqrt(max(sum(squares), 0.0)))}
    else:
        target = chosen.targets(inside)
        said = np.einsum("cot,ct->co", maps, inside).argmax(axis=1)
        told = {"accuracy": float(shares[target == said].sum())}
    return xr.Dataset(
        {
            **told,
            "measure": ("cone", shares),
            "rays": (("cone", "ray", "axis"), rays),
            "pattern": (("cone", "byte"), pattern_bits(gates)),
            "target": ("cone", target),
            "said": ("cone", said),
        }
    )


def _through_task(task: Task, sequence: int, hidden: int) -> list[ConePiece]:
    """The orthants, cut where the order of the numbers changes, or of their distances from the mean."""
    state = np.zeros((hidden, sequence))
    orthants = [
        ConePiece(np.diag(np.array(signs, float)), state)
        for signs in itertools.product((1, -1), repeat=sequence)
    ]
    planes = _differences(np.eye(sequence))
    if task.name == "argoutlier":
        apart = np.eye(sequence) - 1.0 / sequence
        planes += [apart[i] + apart[j] for i, j in itertools.combinations(range(sequence), 2)]
    return _cut(orthants, planes)


def _through_network(rnn: RnnWeights, pieces: list[ConePiece], sequence: int) -> list[ConePiece]:
    """The pieces, cut where a ReLU opens, step by step; each with its gates and last state."""
    for step in range(sequence):
        reads = np.zeros(sequence)
        reads[step] = 1.0
        found = []
        for piece in pieces:
            before = np.outer(rnn.ih, reads) + rnn.hh @ piece.state
            for part in _cut([piece], list(before)):
                # A row that is zero reads 0 everywhere, which counts as open.
                is_open = before @ part.inside >= -ON_PLANE * np.linalg.norm(before, axis=1)
                found.append(
                    replace(part, state=before * is_open[:, None], gates=(*part.gates, *is_open.tolist()))
                )
        pieces = found
    return pieces


def _cut(pieces: list[ConePiece], planes: list[Floats]) -> list[ConePiece]:
    """All pieces, cut by all planes."""
    found = []
    for piece in pieces:
        parts = [piece.rays]
        for plane in planes:
            parts = [half for rays in parts for half in split(rays, plane) if half is not None]
        found += [replace(piece, rays=rays) for rays in parts]
    return found


def _differences(rows: Array) -> list[Floats]:
    """Differences of any two rows."""
    return [rows[i] - rows[j] for i, j in itertools.combinations(range(len(rows)), 2)]


def _median_of(point: Floats) -> Floats:
    """The median as a linear function [axis] of points that are ordered as this one."""
    order, many = np.argsort(point), len(point)
    found = np.zeros(many)
    found[order[[(many - 1) // 2, many // 2]]] = 1.0 / len({(many - 1) // 2, many // 2})
    return found
