"""The randomised solver against eigh, on spectra that fall slowly and quickly."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

from mizarr.stages.geometry import pca as pca_module
from mizarr.stages.geometry.pca import moments, pca, scree
from mizarr.stages.geometry.randomized_pca import randomized_components
from mizarr.store.errors import ShapeError


def cloud(decay: float, n: int = 3000, width: int = 96, offset: float = 30.0) -> xr.DataArray:
    """Rows whose standard deviations fall as k^-decay, turned at random, far from the origin."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(width, width)))[0]
    spread = np.arange(1, width + 1) ** -decay
    rows = rng.normal(size=(n, width)) * spread @ axes + offset * rng.normal(size=width)
    return xr.DataArray(rows.astype(np.float32), dims=("token", "hidden"))


@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
def test_the_randomised_solver_finds_the_components_of_eigh(decay: float):
    states = cloud(decay)
    exact, found = pca(states, n_components=6), pca(states, n_components=6, solver="randomized")
    np.testing.assert_allclose(found["explained_variance"], exact["explained_variance"], rtol=2e-3)
    np.testing.assert_allclose(
        found["explained_variance_ratio"], exact["explained_variance_ratio"], rtol=2e-3
    )
    np.testing.assert_allclose(found["mean"], exact["mean"], rtol=1e-6)
    overlap = np.linalg.svd(found["components"].values @ exact["components"].values.T)[1]
    assert overlap.min() > 0.999  # cosine of the largest angle between the two spaces
    np.testing.assert_allclose(
        found["components"].values @ found["components"].values.T, np.eye(6), atol=1e-9
    )
    assert found["n"] == exact["n"] == 3000


def test_the_same_seed_gives_the_same_bytes_and_another_the_same_answer():
    states = cloud(1.0)
    first, again, other = (randomized_components(states, n_components=3, seed=seed) for seed in (1, 1, 2))
    xr.testing.assert_identical(first, again)
    assert not np.array_equal(first["components"], other["components"])
    np.testing.assert_allclose(first["components"], other["components"], atol=1e-2)


def test_leading_components_are_left_out_as_eigh_leaves_them_out():
    states = cloud(2.0)
    found = pca(states, n_components=2, n_omit=3, solver="randomized")
    assert found["component"].values.tolist() == [3, 4]
    exact = pca(states, n_components=2, n_omit=3)
    np.testing.assert_allclose(found["explained_variance"], exact["explained_variance"], rtol=1e-3)


def test_components_beyond_the_rank_are_zero():
    rng = np.random.default_rng(1)
    plane = rng.normal(size=(400, 2)) @ rng.normal(size=(2, 64)) + 5
    found = pca(xr.DataArray(plane, dims=("token", "hidden")), n_components=4, solver="randomized")
    assert np.count_nonzero(found["explained_variance"]) == 2
    assert not found["components"].values[2:].any()
    flat = xr.DataArray(np.full((50, 8), 0.1, np.float32), dims=("token", "hidden"))
    still = pca(flat, n_components=2, solver="randomized")
    assert not np.isnan(still["explained_variance_ratio"]).any()


def test_auto_turns_to_it_only_for_very_wide_states(monkeypatch: pytest.MonkeyPatch):
    states = cloud(1.0)
    xr.testing.assert_identical(pca(states, n_components=2), pca(states, n_components=2, solver="eigh"))
    monkeypatch.setattr(pca_module, "WIDE", 95)
    xr.testing.assert_identical(
        pca(states, n_components=2, seed=3), randomized_components(states, n_components=2, seed=3)
    )


def test_layers_bfloat16_and_dask_are_as_for_eigh():
    both = xr.concat([cloud(1.0), cloud(2.0)], dim=xr.Variable("layer", [3, 7]))
    found = pca(both, n_components=2, solver="randomized")
    assert found["layer"].values.tolist() == [3, 7]
    single = pca(both.sel(layer=7), n_components=2, solver="randomized")
    np.testing.assert_array_equal(found["components"].sel(layer=7), single["components"])
    lazy = pca(both.chunk(token=700), n_components=2, solver="randomized")
    np.testing.assert_allclose(lazy["components"], found["components"], atol=1e-4)
    narrow = both.astype(ml_dtypes.bfloat16)
    widened = pca(narrow.astype(np.float32), n_components=2, solver="randomized")
    np.testing.assert_allclose(
        pca(narrow, n_components=2, solver="randomized")["explained_variance"],
        widened["explained_variance"],
        rtol=1e-4,
    )


def test_unknown_solvers_and_too_many_components_are_refused():
    with pytest.raises(ShapeError, match="one of auto, eigh, randomized as the solver"):
        pca(cloud(1.0), n_components=1, solver="svd")
    with pytest.raises(ShapeError, match="n_components <= 96"):
        pca(cloud(1.0), n_components=97, solver="randomized")
    with pytest.raises(ShapeError, match="at least one state"):
        pca(cloud(1.0).isel(token=slice(0, 0)), n_components=1, solver="randomized")


def test_a_scree_tells_a_line_from_a_ball():
    rng = np.random.default_rng(2)
    ball = xr.DataArray(rng.normal(size=(20000, 5)), dims=("token", "hidden"))
    line = xr.DataArray(rng.normal(size=(100, 1)) * np.ones(5), dims=("token", "hidden"))
    assert float(scree(moments(ball))["participation_ratio"]) == pytest.approx(5, abs=0.05)
    told = scree(moments(line))
    assert float(told["participation_ratio"]) == pytest.approx(1)
    np.testing.assert_allclose(told["cumulative_ratio"], 1)
    flat = scree(moments(line * 0))
    assert float(flat["participation_ratio"]) == 0
