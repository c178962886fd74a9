"""Statistics per token and outlier dimensions, on states whose answer can be done on paper."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mizarr.stages.corpus.token_statistics import dimension_sums, outlier_dimensions, token_statistics
from mizarr.store.errors import ShapeError


def states(values: object, layers: list[int] | None = None) -> xr.DataArray:
    values = np.asarray(values, np.float32)
    return xr.DataArray(
        values, dims=("layer", "token", "hidden"), coords={"layer": layers or range(len(values))}
    )


def test_norm_mean_spread_and_kurtosis_of_two_states():
    # (3, 4, 0, 0): mean 7/4, variance 25/4 - 49/16 = 51/16. (1, -1, 1, -1): a coin, kurtosis 1.
    found = token_statistics(states([[[3, 4, 0, 0], [1, -1, 1, -1]]]))
    np.testing.assert_allclose(found["norm"], [[5, 2]], rtol=1e-6)
    np.testing.assert_allclose(found["mean"], [[1.75, 0]], rtol=1e-6)
    np.testing.assert_allclose(found["std"], [[(51 / 16) ** 0.5, 1]], rtol=1e-6)
    fourth = np.mean((np.array([3, 4, 0, 0]) - 1.75) ** 4)
    np.testing.assert_allclose(found["kurtosis"], [[fourth / (51 / 16) ** 2, 1]], rtol=1e-6)


def test_one_massive_dimension_gives_a_kurtosis_near_the_width():
    rows = np.zeros((1, 1, 64))
    rows[..., 5] = 1000
    assert float(token_statistics(states(rows))["kurtosis"].item()) == pytest.approx(62, abs=0.1)


def test_a_flat_state_has_no_kurtosis():
    found = token_statistics(states(np.full((1, 1, 8), 2.0)))
    assert np.isnan(found["kurtosis"]).all()
    assert found["std"].item() == 0


def test_tokens_keep_their_labels():
    labelled = states(np.ones((2, 3, 4))).assign_coords(position=("token", [0, 1, 0]))
    assert token_statistics(labelled)["position"].values.tolist() == [0, 1, 0]


def outlying() -> np.ndarray:
    """Four layers of 100 tokens, 32 wide, small; dimension 3 large in one layer, 7 in too few tokens."""
    rng = np.random.default_rng(0)
    x = rng.normal(scale=0.5, size=(4, 100, 32))
    x[1, :10, 3] = -8  # 10 % of the tokens, in 25 % of the layers: an outlier, by magnitude whatever the sign
    x[:, :5, 7] = 9  # 5 % of the tokens in every layer: not one
    x[2, :, 11] = 5.5  # never reaches 6, but its mean is far from all others
    return x


def test_outliers_are_large_in_enough_tokens_of_enough_layers():
    found = outlier_dimensions(dimension_sums(states(outlying())))
    assert np.flatnonzero(found["is_outlier"]).tolist() == [3]
    assert found["share"].values[1, 3] == 0.1
    assert found["layer_share"].values[3] == 0.25
    assert found["largest"].values[0, 7] == 9
    stricter = outlier_dimensions(dimension_sums(states(outlying())), layer_share=0.26)
    assert not stricter["is_outlier"].any()


def test_a_dimension_can_be_far_from_the_others_below_any_threshold():
    found = outlier_dimensions(dimension_sums(states(outlying())))
    assert np.flatnonzero(found["is_far"].values[2]).tolist() == [11]
    assert not found["is_outlier"].values[11]
    means = outlying()[2].mean(axis=0)
    np.testing.assert_allclose(found["z_score"][2], (means - means.mean()) / means.std(), rtol=1e-4)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 99), max_size=4, unique=True), st.floats(0.2, 9))
def test_segments_and_layers_add_up_to_the_whole(cuts: list[int], magnitude: float):
    whole = states(outlying(), layers=[1, 2, 4, 8])
    edges = [0, *sorted(cuts), 100]
    cells = [
        (whole.isel(layer=[layer], token=slice(*pair))) for layer in range(4) for pair in pairwise(edges)
    ]
    joined = dimension_sums.joined([dimension_sums(cell, magnitude=magnitude) for cell in cells])
    expected = dimension_sums(whole, magnitude=magnitude)
    xr.testing.assert_allclose(joined, expected, rtol=1e-9)
    xr.testing.assert_identical(joined["above"], expected["above"])
    tokens = token_statistics.joined([token_statistics(cell) for cell in cells])
    xr.testing.assert_identical(tokens, token_statistics(whole))


def test_no_tokens_are_no_outliers_but_an_error():
    with pytest.raises(ShapeError, match="at least one token"):
        outlier_dimensions(dimension_sums(states(np.zeros((1, 0, 4)))))
    with pytest.raises(ShapeError, match="expected states with the dimensions layer, token and hidden"):
        token_statistics(xr.DataArray(np.ones((2, 3)), dims=("token", "hidden")))
