"""Principal components on data whose answer is known beforehand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mizarr.stages.geometry.pca import (
    merge_moments,
    moments,
    pca,
    principal_components,
    project_to_pcs,
    reconstruct_from_pcs,
)
from mizarr.store.errors import ShapeError


def states(values: object, dims: tuple[str, ...] = ("token", "hidden")) -> xr.DataArray:
    return xr.DataArray(np.asarray(values), dims=dims)


@pytest.fixture
def cloud() -> xr.DataArray:
    """3000 rows, 24 wide, variances falling by powers of two, and a mean a thousand times their spread."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(24, 24)))[0]
    rows = rng.normal(size=(3000, 24)) * 2.0 ** -np.arange(24) @ axes + 1000 * rng.normal(size=24)
    return states(rows)


def test_points_on_a_diagonal_have_one_component_along_it_with_n_minus_one_variance():
    # (1,1), (2,2), (3,3): along (1,1)/sqrt 2 they lie at -sqrt 2, 0, sqrt 2; variance 4 / (3 - 1) = 2.
    found = pca(states([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), n_components=2)
    np.testing.assert_allclose(found.components[0], [0.5**0.5, 0.5**0.5])
    np.testing.assert_allclose(found.explained_variance, [2.0, 0.0])
    np.testing.assert_allclose(found.explained_variance_ratio, [1.0, 0.0])
    np.testing.assert_allclose(found["mean"], [2.0, 2.0])


def test_components_beyond_the_rank_are_zero_and_never_nan():
    rng = np.random.default_rng(1)
    plane = rng.normal(size=(500, 2)) @ rng.normal(size=(2, 16))
    for dtype in (np.float32, np.float64):
        found = pca(states(plane.astype(dtype)), n_components=16)
        assert (found.explained_variance[:2] > 0).all()
        assert not found.explained_variance[2:].any()
        assert not found.components[2:].any()
    few = pca(states(rng.normal(size=(3, 16))), n_components=16)
    assert np.count_nonzero(few.explained_variance) == 2  # three points span a plane


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_equal_rows_have_no_variance_and_nothing_is_nan(dtype: type):
    found = pca(states(np.full((100, 8), 0.1, dtype)), n_components=3)
    assert not found.explained_variance.any()
    assert not found.explained_variance_ratio.any()
    single = pca(states(np.full((1, 8), 0.1, dtype)), n_components=3)
    assert not single.explained_variance.any()
    assert np.isfinite(single["mean"]).all()


def test_a_large_common_offset_does_not_eat_the_variance(cloud: xr.DataArray):
    exact = np.linalg.eigvalsh(np.cov(cloud.values.T))[::-1]
    found = pca(cloud.astype(np.float32), n_components=6)
    np.testing.assert_allclose(found.explained_variance, exact[:6], rtol=1e-4)


def test_components_agree_with_an_svd_of_the_centred_rows(cloud: xr.DataArray):
    centred = cloud.values - cloud.values.mean(axis=0)
    _, singular, rows = np.linalg.svd(centred, full_matrices=False)
    found = pca(cloud, n_components=8)
    np.testing.assert_allclose(found.explained_variance, singular[:8] ** 2 / (len(cloud) - 1), rtol=1e-9)
    np.testing.assert_allclose(np.abs(np.sum(found.components.values * rows[:8], axis=1)), 1, atol=1e-9)


def test_the_sign_of_a_component_is_that_of_its_largest_entry():
    found = pca(states([[0.0, 0.0], [1.0, -3.0], [2.0, -6.0]]), n_components=1)
    np.testing.assert_allclose(found.components[0], np.array([-1.0, 3.0]) / 10**0.5)


def test_omitted_components_leave_the_others_and_the_total_variance_alone(cloud: xr.DataArray):
    full, rest = pca(cloud, n_components=6), pca(cloud, n_components=4, n_omit=2)
    assert rest.component.values.tolist() == [2, 3, 4, 5]
    xr.testing.assert_identical(full.isel(component=slice(2, 6)), rest)


def test_moments_of_segments_merge_to_the_moments_of_the_whole(cloud: xr.DataArray):
    pieces = [moments(cloud.isel(token=slice(i, i + 777))) for i in range(0, 3000, 777)]
    merged, whole = merge_moments(pieces), moments(cloud)
    assert int(merged.n) == 3000
    np.testing.assert_allclose(merged["mean"], whole["mean"], rtol=1e-12)
    np.testing.assert_allclose(merged.scatter, whole.scatter, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**16))
def test_merging_two_segments_is_exact_whatever_their_sizes_and_offsets(n: int, m: int, seed: int):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(5, 1, (n, 3)), rng.normal(-50, 3, (m, 3))
    merged = merge_moments([moments(states(left)), moments(states(right))])
    both = np.concatenate([left, right])
    centred = both - both.mean(axis=0)
    np.testing.assert_allclose(merged.scatter, centred.T @ centred, rtol=1e-9, atol=1e-7)


def test_block_size_changes_rounding_only(cloud: xr.DataArray):
    np.testing.assert_allclose(moments(cloud, block=64).scatter, moments(cloud).scatter, rtol=1e-9, atol=1e-8)


def test_bfloat16_rows_give_what_their_widened_values_give(cloud: xr.DataArray):
    narrow = cloud.values.astype(ml_dtypes.bfloat16)
    exact = moments(states(narrow.astype(np.float64)))
    found = moments(states(narrow), block=512)
    np.testing.assert_allclose(found["mean"], exact["mean"], rtol=1e-6)
    np.testing.assert_allclose(
        found.scatter, exact.scatter, rtol=1e-4, atol=1e-4 * float(exact.scatter.max())
    )


def test_layers_are_kept_apart_and_labelled():
    rng = np.random.default_rng(2)
    both = xr.DataArray(
        rng.normal(size=(2, 50, 4)), dims=("layer", "token", "hidden"), coords={"layer": [3, 7]}
    )
    found = pca(both, n_components=2)
    assert found.layer.values.tolist() == [3, 7]
    np.testing.assert_array_equal(
        found.components.sel(layer=7), pca(both.sel(layer=7, drop=True), n_components=2).components
    )
    np.testing.assert_allclose(merge_moments([moments(both), moments(both)]).n, [100, 100])


def test_prompt_and_position_are_both_samples():
    rng = np.random.default_rng(3)
    padded = xr.DataArray(rng.normal(size=(5, 7, 4)), dims=("prompt", "position", "hidden"))
    flat = states(padded.values.reshape(35, 4))
    np.testing.assert_allclose(moments(padded).scatter, moments(flat).scatter)


def test_projecting_and_reconstructing_with_all_components_gives_the_states_back(cloud: xr.DataArray):
    fitted = pca(cloud, n_components=24)
    for centre in (True, False):
        back = reconstruct_from_pcs(project_to_pcs(cloud, fitted, centre=centre), fitted, centred=centre)
        np.testing.assert_allclose(back, cloud, rtol=1e-9)


def test_centred_projections_average_to_zero_and_uncentred_ones_to_the_projected_mean(cloud: xr.DataArray):
    fitted = pca(cloud, n_components=3)
    np.testing.assert_allclose(project_to_pcs(cloud, fitted).mean("token"), 0, atol=1e-8)
    np.testing.assert_allclose(
        project_to_pcs(cloud, fitted, centre=False).mean("token"),
        fitted.components @ fitted["mean"],
        rtol=1e-9,
    )


def test_dask_backed_states_give_the_same_moments(cloud: xr.DataArray):
    xr.testing.assert_allclose(moments(cloud.chunk(token=500), block=1000), moments(cloud), rtol=1e-9)


def test_more_components_than_dimensions_is_refused(cloud: xr.DataArray):
    with pytest.raises(ShapeError, match="n_components <= 24"):
        principal_components(moments(cloud), n_components=20, n_omit=5)
    with pytest.raises(ShapeError, match="at least one state"):
        moments(cloud.isel(token=slice(0, 0)))
    with pytest.raises(ShapeError, match="a dim named 'hidden'"):
        moments(states([[1.0]], ("token", "width")))
