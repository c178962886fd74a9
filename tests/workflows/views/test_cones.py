"""Cones on a disc: areas are the angles they stand for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mizarr.stages.algzoo.analysis.cones import measure, split
from mizarr.store.errors import ShapeError
from mizarr.workflows.views import Cones
from mizarr.workflows.views.cones import _disc_outlines, _sector_outlines


def area(outline: np.ndarray) -> float:
    x, y = outline.T
    return abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def pieces(n: int) -> list[np.ndarray]:
    """Orthants, cut by random planes."""
    parts = [np.diag(signs) for signs in itertools.product((1.0, -1.0), repeat=n)]
    for plane in np.random.default_rng(n).normal(size=(4, n)):
        parts = [half for rays in parts for half in split(rays, plane) if half is not None]
    return parts


@pytest.mark.parametrize(("n", "outlines"), [(2, _sector_outlines), (3, _disc_outlines)])
def test_areas_on_the_discs_are_probabilities(n, outlines):
    whole = np.pi if n == 2 else 2 * np.pi
    for rays in pieces(n):
        drawn = sum(area(outline) for outline in outlines(rays))
        assert drawn == pytest.approx(measure(rays) * whole, rel=0.02, abs=2e-3)


def test_points_lie_on_the_two_discs():
    for rays in pieces(3):
        for outline in _disc_outlines(rays):
            centre = np.array([np.sign(outline[:, 0].mean()) * 1.15, 0.0])
            assert np.linalg.norm(outline - centre, axis=1).max() <= 1 + 1e-9


def test_cones_of_four_numbers_cannot_be_seen():
    with pytest.raises(ShapeError, match="2 or 3 axes"):
        Cones(
            rays=np.zeros((1, 4, 4)),
            classes=np.zeros(1, int),
            marked=np.zeros(1, bool),
            names=("a",),
            mark_name="wrong",
        )
