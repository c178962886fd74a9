"""Cosines and CKA between layers, against the formulas on Grams of tokens, which no corpus could afford."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mizarr.stages.geometry import similarity
from mizarr.stages.geometry.similarity import layer_cka, layer_cosine, merge_cosines
from mizarr.store.errors import ShapeError


def states(values: object, layers: list[int] | None = None) -> xr.DataArray:
    values = np.asarray(values)
    return xr.DataArray(
        values, dims=("layer", "token", "hidden"), coords={"layer": layers or range(len(values))}
    )


def random_states(n_layers: int = 3, n: int = 200, width: int = 8, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n_layers, n, width)) + 3 * rng.normal(size=(n_layers, 1, width))).astype(
        np.float32
    )


def hsic(k: np.ndarray, other: np.ndarray) -> float:
    """Biased, of Grams of tokens: tr(K H L H)."""
    centre = np.eye(len(k)) - 1 / len(k)
    return float(np.trace(k @ centre @ other @ centre))


def hsic_1(k: np.ndarray, other: np.ndarray) -> float:
    """Song et al. 2012, eq. 5, as printed."""
    n, one = len(k), np.ones(len(k))
    k, other = k - np.diag(np.diag(k)), other - np.diag(np.diag(other))
    total = np.trace(k @ other) + (one @ k @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
    return float((total - 2 / (n - 2) * (one @ k @ other @ one)) / (n * (n - 3)))


def cka(x: np.ndarray, measure) -> np.ndarray:
    grams = [rows.astype(np.float64) @ rows.T.astype(np.float64) for rows in x]
    found = np.array([[measure(one, other) for other in grams] for one in grams])
    return found / np.sqrt(np.outer(np.diag(found), np.diag(found)))


def test_two_layers_at_a_right_angle_and_one_turned_round():
    found = layer_cosine(
        states([[[1.0, 0.0], [2.0, 0.0]], [[0.0, 3.0], [0.0, 1.0]], [[-1.0, 0.0], [-5.0, 0.0]]])
    )
    expected = [[1, 0, -1], [0, 1, 0], [-1, 0, 1]]
    np.testing.assert_allclose(found["cosine"], expected, atol=1e-7)
    np.testing.assert_allclose(found["cosine_of_means"], expected, atol=1e-7)
    np.testing.assert_allclose(found["mean"], [[1.5, 0], [0, 2], [-3, 0]])


def test_the_mean_of_cosines_is_not_the_cosine_of_means():
    # Two tokens that turn in opposite directions: each has cosine 0 with itself earlier, their means agree.
    found = layer_cosine(states([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, -1.0]]]))
    assert found["cosine"].values[0, 1] == pytest.approx(0)
    assert found["cosine_of_means"].values[0, 1] == 0  # the second mean is the zero vector
    assert found["cosine_of_means"].values[0, 0] == pytest.approx(1)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 199), max_size=4, unique=True))
def test_cosines_of_segments_add_up_to_those_of_the_whole(cuts: list[int]):
    whole = states(random_states())
    edges = [0, *sorted(cuts), 200]
    parts = [layer_cosine(whole.isel(token=slice(*pair))) for pair in pairwise(edges)]
    xr.testing.assert_allclose(merge_cosines(parts), layer_cosine(whole), rtol=1e-6)


@pytest.mark.parametrize(("unbiased", "measure"), [(False, hsic), (True, hsic_1)])
@pytest.mark.parametrize("layers_at_once", [1, 2, 3])
def test_cka_is_that_of_the_grams_of_tokens_whatever_fits_at_once(
    unbiased: bool, measure, layers_at_once: int, monkeypatch: pytest.MonkeyPatch
):
    x = random_states()
    monkeypatch.setattr(similarity, "GRAM_BYTES", 12 * (8 * layers_at_once) ** 2)
    found = layer_cka(states(x), unbiased=unbiased)
    np.testing.assert_allclose(found["cka"], cka(x, measure), atol=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 2**16), st.floats(0.1, 100))
def test_cka_does_not_see_rotation_scale_or_offset(seed: int, scale: float):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(60, 5))
    turned = x @ np.linalg.qr(rng.normal(size=(5, 5)))[0] * scale + rng.normal(size=5)
    for unbiased in (False, True):
        found = layer_cka(states(np.stack([x, turned])), unbiased=unbiased)["cka"].values
        assert found[0, 1] == pytest.approx(1, abs=1e-4)


def test_unbiased_cka_of_unrelated_layers_is_zero_on_average_and_the_biased_one_is_not():
    rng = np.random.default_rng(0)
    pairs = [states(rng.normal(size=(2, 40, 20)).astype(np.float32)) for _ in range(60)]
    biased, unbiased = (
        np.mean([layer_cka(pair, unbiased=kind)["cka"].values[0, 1] for pair in pairs])
        for kind in (False, True)
    )
    assert abs(unbiased) < 0.02
    assert biased > 0.25  # about width / (tokens + width)


def test_bfloat16_and_dask_give_what_their_values_give():
    narrow = random_states().astype(ml_dtypes.bfloat16)
    exact = layer_cka(states(narrow.astype(np.float32)))
    np.testing.assert_allclose(layer_cka(states(narrow))["cka"], exact["cka"], atol=1e-7)
    lazy = states(narrow.astype(np.float32)).chunk(token=70, layer=1)
    np.testing.assert_allclose(layer_cka(lazy)["cka"], exact["cka"], atol=1e-6)
    np.testing.assert_allclose(
        layer_cosine(lazy)["cosine"], layer_cosine(states(narrow))["cosine"], atol=1e-6
    )


def test_layers_keep_their_numbers_on_both_axes():
    found = layer_cka(states(random_states(), layers=[2, 5, 9]))
    assert found["layer"].values.tolist() == found["other_layer"].values.tolist() == [2, 5, 9]


def test_a_layer_without_variance_has_no_cka():
    x = random_states(2)
    x[1] = 4.0
    found = layer_cka(states(x))["cka"].values
    assert found[0, 0] == pytest.approx(1)
    assert np.isnan(found[0, 1])
    assert np.isnan(found[1, 1])


def test_too_few_tokens_and_other_axes_are_refused():
    with pytest.raises(ShapeError, match="at least 4 tokens to compare layers by CKA, found 3"):
        layer_cka(states(random_states(2, 3)), unbiased=True)
    with pytest.raises(ShapeError, match="at least one token"):
        layer_cosine(states(np.zeros((2, 0, 4))))
    with pytest.raises(ShapeError, match="dimensions layer, token and hidden, found token, hidden"):
        layer_cosine(xr.DataArray(np.ones((2, 3)), dims=("token", "hidden")))
