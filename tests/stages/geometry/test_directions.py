"""Differences of means and projections on them, by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mizarr.stages.geometry.directions import contrastive_direction, projection_scores, side_sums
from mizarr.store.errors import ShapeError, StageError


def states(values: object, layers: list[int] | None = None) -> xr.DataArray:
    values = np.asarray(values, np.float32)
    return xr.DataArray(
        values, dims=("layer", "token", "hidden"), coords={"layer": layers or range(len(values))}
    )


def sides(*values: int) -> xr.DataArray:
    return xr.DataArray(list(values), dims="token")


HAND = states([[[1, 0], [3, 0], [0, 4], [9, 9]]])  # means (2, 0) and (0, 4); the last takes no part
LABELS = sides(1, 1, -1, 0)


def test_the_direction_points_from_the_negative_to_the_positive_mean():
    found = contrastive_direction(side_sums(HAND, LABELS))
    np.testing.assert_allclose(found["direction"], [[2, -4]])
    np.testing.assert_allclose(found["norm"], [20**0.5])
    np.testing.assert_allclose(found["unit"], [[2 / 20**0.5, -4 / 20**0.5]])
    np.testing.assert_allclose(found["mean"].sel(side="negative"), [[0, 4]])
    assert found["n"].values.tolist() == [2, 1]


def test_scores_count_from_the_midpoint_and_the_means_lie_half_the_norm_from_it():
    found = contrastive_direction(side_sums(HAND, LABELS))
    score = projection_scores(HAND, found)["score"].values[0]
    half = 20**0.5 / 2
    np.testing.assert_allclose(score[:2].mean(), half, rtol=1e-6)
    np.testing.assert_allclose(score[2], -half, rtol=1e-6)
    # (9, 9) - midpoint (1, 2) = (8, 7); along (2, -4)/sqrt 20: (16 - 28)/sqrt 20
    np.testing.assert_allclose(score[3], -12 / 20**0.5, rtol=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 2**16), st.lists(st.integers(1, 59), max_size=3, unique=True))
def test_cells_of_layers_and_segments_give_what_the_whole_gives(seed: int, cuts: list[int]):
    rng = np.random.default_rng(seed)
    whole = states(rng.normal(size=(3, 60, 4)), layers=[0, 2, 5])
    labels = sides(*rng.choice([-1, 0, 1], size=58).tolist(), 1, -1)
    edges = [0, *sorted(cuts), 60]
    cells = [([i], slice(*pair)) for i in range(3) for pair in pairwise(edges)]
    parts = [side_sums(whole.isel(layer=i, token=at), labels.isel(token=at)) for i, at in cells]
    joined = side_sums.joined(parts)
    xr.testing.assert_allclose(joined, side_sums(whole, labels), rtol=1e-6)
    found = contrastive_direction(joined)
    scores = [projection_scores(whole.isel(layer=i, token=at), found) for i, at in cells]
    xr.testing.assert_identical(projection_scores.joined(scores), projection_scores(whole, found))


@settings(max_examples=20)
@given(st.integers(0, 2**16))
def test_swapping_the_sides_turns_the_direction_and_every_score_round(seed: int):
    rng = np.random.default_rng(seed)
    x = states(rng.normal(size=(1, 12, 3)))
    labels = sides(*([1] * 5 + [-1] * 7))
    one, other = (contrastive_direction(side_sums(x, kind)) for kind in (labels, -labels))
    np.testing.assert_allclose(one["unit"], -other["unit"])
    np.testing.assert_allclose(
        projection_scores(x, one)["score"], -projection_scores(x, other)["score"], atol=1e-6
    )


def test_a_side_without_tokens_and_equal_means_have_no_direction():
    with pytest.raises(StageError, match="found none on the negative side; label some tokens with -1"):
        contrastive_direction(side_sums(HAND, sides(1, 1, 0, 0)))
    same = states([[[1, 2], [1, 2]]], layers=[4])
    with pytest.raises(StageError, match=r"difference of 0 at layers \[4\]"):
        contrastive_direction(side_sums(same, sides(1, -1)))


def test_labels_and_contrasts_of_something_else_are_refused():
    with pytest.raises(ShapeError, match="a side for each of the"):
        side_sums(HAND, sides(1, -1))
    with pytest.raises(ShapeError, match="left out\\), found 2"):
        side_sums(HAND, sides(1, 1, 2, 0))
    found = contrastive_direction(side_sums(HAND, LABELS))
    with pytest.raises(
        ShapeError, match=r"layers \[0\] of width 2, found states of layers \[3\] and width 2"
    ):
        projection_scores(states(HAND.values, layers=[3]), found)
