"""Exact accuracy of the RNN on two or three standard normal numbers, from angles and solid angles.

Task and network are piecewise linear on cones, and the Gaussian measure of a cone is its (solid) angle.
Orthants are cut by the planes at which the correct answer changes, at which a ReLU opens, step by step, and
at which the network's answer changes; each piece is then right or wrong as a whole. For scalar answers the
squared error over a cone follows from its faces (Stein's identity, `second_moment`).

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
"""Numbers per input for which cones are measured exactly."""
ON_PLANE = 1e-12
"""Sine of the angle below which a ray lies in a plane: float64 rounding with a margin."""


@dataclass(frozen=True, eq=False)
class ConePiece:
    """A cone of inputs on which the RNN is linear, and the RNN's state there."""

    rays: Floats
    """Extreme rays of the cone, unit vectors in order around it, [ray, axis]."""
    state: Floats
    """Matrix of the RNN's state as a linear function of the input x, h = state x, [neuron, axis]."""
    gates: tuple[bool, ...] = ()
    """Whether each ReLU of the time steps processed so far is open, in order of time step and neuron."""

    @property
    def inside(self) -> Floats:
        """A point inside the cone, the mean of its rays [axis]; not of unit length."""
        middle: Floats = self.rays.mean(axis=0)
        return middle


def split(rays: Floats, plane: Floats) -> tuple[Floats | None, Floats | None]:
    """Cut a cone along a plane through the origin.

    Arguments:
        rays: extreme rays of the cone in order around it, [ray, axis].
        plane: normal vector of the plane, [axis].

    Returns:
        Extreme rays of the part with plane . x >= 0, and of the part with plane . x <= 0; None for an empty
        part.
    """
    length = np.linalg.norm(plane)
    distance = rays @ plane / length if length > 0 else np.zeros(len(rays))
    # Rays of earlier cuts lie on their planes except for rounding errors. Without setting these distances to
    # 0, slivers of width 1e-16 would be cut off.
    distance = np.where(np.abs(distance) < ON_PLANE, 0.0, distance)
    if (distance >= 0).all():
        return rays, None
    if (distance <= 0).all():
        return None, rays
    above, below = [], []
    n_rays = len(rays)
    for i in range(n_rays):
        if distance[i] >= 0:
            above.append(rays[i])
        if distance[i] <= 0:
            below.append(rays[i])
        next_ray = (i + 1) % n_rays
        # A cone in the plane has one pair of neighbouring rays, not two.
        if distance[i] * distance[next_ray] < 0 and (n_rays > 2 or i == 0):
            crossing = np.abs(distance[next_ray]) * rays[i] + np.abs(distance[i]) * rays[next_ray]
            crossing /= np.linalg.norm(crossing)
            above.append(crossing)
            below.append(crossing)
    return np.array(above), np.array(below)


def measure(rays: Floats) -> float:
    """Probability that a standard normal vector lies in a cone: angle / 2 pi in 2D, solid angle / 4 pi in 3D.

    Arguments:
        rays: extreme rays of the cone, unit vectors in order around it, [ray, axis].
    """
    if rays.shape[1] == 2:
        a, b = rays
        # arctan2 of |cross| and dot: arccos of the dot product loses digits for small angles.
        return float(np.arctan2(abs(a[0] * b[1] - a[1] * b[0]), a @ b) / (2 * np.pi))
    total = 0.0
    # The cone is fanned into triangles from its first ray.
    for i in range(1, len(rays) - 1):
        a, b, c = rays[0], rays[i], rays[i + 1]
        # Solid angle of a triangle of unit vectors, Van Oosterom and Strackee 1983, eq. 8.
        total += 2 * np.arctan2(abs(a @ np.cross(b, c)), 1 + a @ b + b @ c + c @ a)
    return total / (4 * np.pi)


def second_moment(rays: Floats) -> Floats:
    """Second moment E[x x^T 1(x in cone)] of a standard normal vector x within a cone, [axis, axis].

    By Stein's identity with g = x 1(x in cone), it is P(cone) I plus, for every face of the cone, the outer
    product of its inward normal with the integral of x times the normal density over the face. That integral
    is r / (2 pi) for a ray r in the plane, and (a + b) tan(angle / 2) / (4 pi) for the sector between rays a
    and b in space.

    Arguments:
        rays: extreme rays of the cone, unit vectors in order around it, [ray, axis].
    """
    inside, moment = rays.mean(axis=0), measure(rays) * np.eye(rays.shape[1])
    if rays.shape[1] == 2:
        faces = [(np.array([-ray[1], ray[0]]), ray / (2 * np.pi)) for ray in rays]
    else:
        faces = []
        for a, b in zip(rays, np.roll(rays, -1, axis=0), strict=True):
            normal = np.cross(a, b)
            length = np.linalg.norm(normal)
            if length > ON_PLANE:
                half_tangent = np.tan(np.arctan2(length, a @ b) / 2)
                faces.append((normal / length, (a + b) * half_tangent / (4 * np.pi)))
    for normal, integral in faces:
        moment = moment + np.outer(normal * np.sign(normal @ inside), integral)
    return moment


@stage(
    version=1,
    inputs={"weights": None},
    outputs={
        "accuracy": Output((), "1", "exact accuracy", is_optional=True),
        "rmse": Output((), "1", "exact root mean squared error", is_optional=True),
        "measure": Output(("cone",), "1", "share of inputs in the cone"),
        "rays": Output(("cone", "ray", "axis"), "1", "extreme rays of the cone in order"),
        "pattern": Output(("cone", "byte"), "1", "open gates, packed as in regions.py"),
        "target": Output(("cone",), "1", "correct class in the cone; -1 for a scalar task"),
        "said": Output(("cone",), "1", "class that the network answers there; -1 for a scalar task"),
    },
)
def gaussian_accuracy(weights: xr.Dataset, *, task: str, sequence: int) -> xr.Dataset:
    """Exact accuracy over standard normal inputs of 2 or 3 numbers, and the cones from which it is computed.

    Arguments:
        weights: labelled weights of an RNN.
        task: name of the task.
        sequence: number of numbers per input, 2 or 3.

    Raises:
        ConfigError: another sequence length, for which there is no closed form, or a task on integers.
    """
    import xarray as xr

    rnn, zoo_task = require_rnn(weights, "exact accuracy"), task_named(task)
    if sequence not in DIMENSIONS or zoo_task.draws != "normal":
        raise ConfigError(
            "an exact accuracy is known only for tasks on 2 or 3 normally distributed numbers, found the "
            f"task {task} with sequence={sequence}; use the stage sampled_accuracy instead"
        )
    pieces = _through_network(rnn, _through_task(zoo_task, sequence, rnn.hidden), sequence)
    if not zoo_task.is_scalar:
        pieces = [part for uncut in pieces for part in _cut([uncut], _differences(rnn.oh @ uncut.state))]
    inside = np.array([piece.inside for piece in pieces])
    shares = np.array([measure(piece.rays) for piece in pieces])
    maps = np.array([rnn.oh @ piece.state for piece in pieces])
    rays = np.full((len(pieces), max(len(piece.rays) for piece in pieces), sequence), np.nan)
    for row, piece in zip(rays, pieces, strict=True):
        row[: len(piece.rays)] = piece.rays
    gates = np.array([piece.gates for piece in pieces]).reshape(len(pieces), sequence, -1)
    no_class = np.full(len(pieces), -1, np.int64)
    if zoo_task.is_scalar:
        target = answer = no_class
        errors = maps[:, 0] - np.array([_median_of(point) for point in inside])
        squares = [
            error @ second_moment(piece.rays) @ error for error, piece in zip(errors, pieces, strict=True)
        ]
        # Rounding may leave a sum of -1e-18 for a perfect network.
        result = {"rmse": float(np.sqrt(max(sum(squares), 0.0)))}
    else:
        target = zoo_task.targets(inside)
        answer = np.einsum("cot,ct->co", maps, inside).argmax(axis=1)
        result = {"accuracy": float(shares[target == answer].sum())}
    return xr.Dataset(
        {
            **result,
            "measure": ("cone", shares),
            "rays": (("cone", "ray", "axis"), rays),
            "pattern": (("cone", "byte"), pattern_bits(gates)),
            "target": ("cone", target),
            "said": ("cone", answer),
        }
    )


def _through_task(task: Task, sequence: int, hidden: int) -> list[ConePiece]:
    """Cones, each with a constant correct answer of the task, which together cover all inputs.

    They are the orthants, cut where the order of the numbers changes, or, for the task argoutlier, where the
    order of their distances from the mean changes.

    Arguments:
        task: the task.
        sequence: number of numbers per input.
        hidden: number of neurons; the state of each cone is zero, as before the first time step.
    """
    state = np.zeros((hidden, sequence))
    orthants = [
        ConePiece(np.diag(np.array(signs, float)), state)
        for signs in itertools.product((1, -1), repeat=sequence)
    ]
    planes = _differences(np.eye(sequence))
    if task.name == "argoutlier":
        # Distances |d_i| and |d_j| from the mean are equal where d_i = d_j, above, or d_i = -d_j.
        deviations = np.eye(sequence) - 1.0 / sequence
        planes += [deviations[i] + deviations[j] for i, j in itertools.combinations(range(sequence), 2)]
    return _cut(orthants, planes)


def _through_network(rnn: RnnWeights, pieces: list[ConePiece], sequence: int) -> list[ConePiece]:
    """Cut cones where a ReLU opens or closes, time step by time step; return them with gates and final state.

    Arguments:
        rnn: the network.
        pieces: cones with the state before the first time step.
        sequence: number of time steps.
    """
    for step in range(sequence):
        input_row = np.zeros(sequence)
        input_row[step] = 1.0
        cut_pieces = []
        for piece in pieces:
            pre_activation = np.outer(rnn.ih, input_row) + rnn.hh @ piece.state
            for part in _cut([piece], list(pre_activation)):
                # A pre-activation that is 0 everywhere counts as open, as in regions.gates_of.
                is_open = pre_activation @ part.inside >= -ON_PLANE * np.linalg.norm(pre_activation, axis=1)
                cut_pieces.append(
                    replace(
                        part, state=pre_activation * is_open[:, None], gates=(*part.gates, *is_open.tolist())
                    )
                )
        pieces = cut_pieces
    return pieces


def _cut(pieces: list[ConePiece], planes: list[Floats]) -> list[ConePiece]:
    """Cut every cone by every plane (normal vector [axis]); the parts keep state and gates of their cone."""
    cut_pieces = []
    for piece in pieces:
        parts = [piece.rays]
        for plane in planes:
            parts = [half for rays in parts for half in split(rays, plane) if half is not None]
        cut_pieces += [replace(piece, rays=rays) for rays in parts]
    return cut_pieces


def _differences(rows: Array) -> list[Floats]:
    """Differences between any two of some rows: normals of the planes on which two linear functions are
    equal."""
    return [rows[i] - rows[j] for i, j in itertools.combinations(range(len(rows)), 2)]


def _median_of(point: Floats) -> Floats:
    """The median as a linear function [axis] of the numbers, valid for all points ordered as `point`."""
    order, size = np.argsort(point), len(point)
    # One rank for an odd number of numbers, two for an even number, whose mean is the median.
    middle_ranks = sorted({(size - 1) // 2, size // 2})
    weights = np.zeros(size)
    weights[order[middle_ranks]] = 1.0 / len(middle_ranks)
    return weights
