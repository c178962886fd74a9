"""CKA, Procrustes and SVCCA of two sets of states, against the definitions on whole matrices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st
from scipy.linalg import orthogonal_procrustes

from mizarr.stages.geometry import representations
from mizarr.stages.geometry.representations import representation_similarity
from mizarr.store.errors import ShapeError
from tests.memory import PEAK, printed


def states(values: np.ndarray, layers: list[int] | None = None) -> xr.DataArray:
    return xr.DataArray(
        values, dims=("layer", "token", "hidden"), coords={"layer": layers or list(range(len(values)))}
    )


def pair(seed: int, n: int = 300, one: int = 7, other: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Two layers and three of them, sharing some of what varies, off the origin, of unequal spread."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(n, 3))
    made = [
        common @ rng.normal(size=(3, width)) + rng.normal(size=(n, width)) * rng.uniform(0.05, 1, width) + 4
        for width in (one, one, other, other, other)
    ]
    return np.stack(made[:2]).astype("f4"), np.stack(made[2:]).astype("f4")


def cka(x: np.ndarray, y: np.ndarray) -> float:
    grams = [rows @ rows.T for rows in (x - x.mean(0), y - y.mean(0))]
    return float((grams[0] * grams[1]).sum() / np.prod([np.linalg.norm(gram) for gram in grams]))


def procrustes(x: np.ndarray, y: np.ndarray) -> float:
    """1 - d / 2 of Ding et al. 2021, of matrices padded to one width."""
    width = max(x.shape[1], y.shape[1])
    padded = [np.pad(z - z.mean(0), ((0, 0), (0, width - z.shape[1]))) for z in (x, y)]
    a, b = (z / np.linalg.norm(z) for z in padded)
    turn, _ = orthogonal_procrustes(a, b)
    return float(1 - np.square(a @ turn - b).sum() / 2)


def svcca(x: np.ndarray, y: np.ndarray, variance: float) -> float:
    """SVD of each, the first directions of that share of the variance, then CCA between their spans."""
    kept = []
    for rows in (x - x.mean(0), y - y.mean(0)):
        u, s, _ = np.linalg.svd(rows, full_matrices=False)
        kept.append(u[:, : int(np.searchsorted(np.cumsum(s**2) / (s**2).sum(), variance)) + 1])
    return float(np.linalg.svd(kept[0].T @ kept[1], compute_uv=False).mean())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_all_three_are_the_definitions_on_whole_matrices(seed, at_once, monkeypatch):
    x, y = pair(seed)
    monkeypatch.setattr(representations, "GRAM_BYTES", 20 * (17 * at_once) ** 2)
    found = representation_similarity(states(x), states(y, [2, 4, 9]), variance=0.95)
    assert found["other_layer"].values.tolist() == [2, 4, 9]
    assert int(found["n"]) == 300
    for i in range(2):
        for j in range(3):
            a, b = x[i].astype(float), y[j].astype(float)
            matched = found.sel(rows="matched").isel(layer=i, other_layer=j)
            assert float(matched["cka"]) == pytest.approx(cka(a, b), abs=1e-5)
            assert float(matched["procrustes"]) == pytest.approx(procrustes(a, b), abs=1e-5)
            assert float(matched["svcca"]) == pytest.approx(svcca(a, b, 0.95), abs=1e-4)


@settings(max_examples=15)
@given(st.integers(0, 2**16), st.floats(0.1, 100))
def test_none_sees_rotation_scale_or_offset_and_svcca_no_linear_map(seed, scale):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1, 200, 5))
    turned = x @ np.linalg.qr(rng.normal(size=(5, 5)))[0] * scale + rng.normal(size=5)
    found = representation_similarity(states(x), states(turned)).sel(rows="matched")
    for name in ("cka", "procrustes", "svcca"):
        assert float(found[name].squeeze()) == pytest.approx(1, abs=1e-3)
    mapped = x @ (rng.normal(size=(5, 5)) + 3 * np.eye(5))
    found = representation_similarity(states(x), states(mapped), variance=1.0).sel(rows="matched")
    assert float(found["svcca"].squeeze()) == pytest.approx(1, abs=1e-3)


def test_permuted_tokens_are_the_level_of_chance():
    """Of unrelated states matched and shuffled are alike; of related ones they are not."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 1, 400, 6)).astype("f4")
    found = representation_similarity(states(x), states(y))
    related = representation_similarity(states(x), states(x + 0.3 * y))
    for name in ("cka", "procrustes", "svcca"):
        matched, shuffled = found[name].values.ravel()
        assert abs(matched - shuffled) < 0.08
        matched, shuffled = related[name].values.ravel()
        assert matched > 0.8 and matched > shuffled + 0.6


def test_dask_bfloat16_and_one_layer_without_its_axis_give_the_same():
    x, y = pair(7)
    narrow = x.astype(ml_dtypes.bfloat16)
    exact = representation_similarity(states(narrow.astype("f4")), states(y))
    lazy = representation_similarity(states(narrow.astype("f4")).chunk(token=70), states(y).chunk(token=90))
    for found in (representation_similarity(states(narrow), states(y)), lazy):
        for name in ("cka", "procrustes", "svcca"):
            np.testing.assert_allclose(
                found[name].sel(rows="matched"), exact[name].sel(rows="matched"), atol=1e-5
            )
    one = representation_similarity(states(x).isel(layer=1), states(y).isel(layer=[2]))
    np.testing.assert_allclose(
        one["cka"].sel(rows="matched").squeeze(), cka(x[1].astype(float), y[2].astype(float)), atol=1e-5
    )


def test_a_layer_without_variance_has_none_and_what_does_not_fit_is_refused():
    x, y = pair(1)
    y[1] = 3.0
    found = representation_similarity(states(x), states(y))["cka"].sel(rows="matched")
    assert np.isnan(found[:, 1]).all() and found[:, [0, 2]].notnull().all()
    with pytest.raises(ShapeError, match="states of 300 and of 299 tokens"):
        representation_similarity(states(x), states(y[:, 1:]))
    with pytest.raises(ShapeError, match=r"above 0 and at most 1, found variance=1.5"):
        representation_similarity(states(x), states(y), variance=1.5)


@pytest.mark.slow
def test_two_arrays_of_a_million_rows_within_600_mb():
    script = f"""
import dask.array as da, numpy as np, xarray as xr
from mizarr.stages.geometry.representations import representation_similarity
def drawn(seed):
    rows = da.random.default_rng(seed).standard_normal((1_000_000, 512), chunks=(8192, 512), dtype=np.float32)
    return xr.DataArray(rows[None], dims=("layer", "token", "hidden"), coords={{"layer": [0]}})
found = representation_similarity(drawn(0), drawn(1))
assert float(abs(found["cka"]).max()) < 0.01
print({PEAK})
"""
    assert printed(script) < 600e6
