"""Directions of two sets of states by every method: compared with other implementations, and held out."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr import open_store
from mizarr.pipeline import run
from mizarr.stages.geometry.directions import (
    METHODS,
    contrastive_direction,
    side_sums,
    steering_direction,
)
from mizarr.stages.geometry.separation import auroc, oracle_shrinkage
from mizarr.store.errors import ShapeError, StageError

PAIRS, WIDTH, LAYERS = 60, 8, (1, 4)


def drawn(seed: int = 0, shift: float = 4.0) -> dict[str, xr.DataArray]:
    """Pairs of states with correlated noise, shifted along axis 0; every other pair is held out."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(WIDTH, WIDTH))
    values = rng.normal(size=(len(LAYERS), 2 * PAIRS, WIDTH)) @ mixing
    side = np.tile([1, -1], PAIRS)
    values[:, side == 1, 0] += shift * 4
    pair = np.repeat(np.arange(PAIRS), 2)
    order = rng.permutation(2 * PAIRS)
    states = xr.DataArray(
        values[:, order], dims=("layer", "token", "hidden"), coords={"layer": list(LAYERS)}, name="states"
    )
    labels = {"side": side, "pair": pair, "held_out": pair % 2 == 1}
    return {"states": states} | {
        name: xr.DataArray(value[order], dims="token", name=name) for name, value in labels.items()
    }


def fitted(inputs: dict[str, xr.DataArray], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """(states, sides) of a layer that are not held out."""
    kept = ~inputs["held_out"].values
    return inputs["states"].sel(layer=layer).values[kept], inputs["side"].values[kept]


@pytest.mark.parametrize("method", METHODS)
def test_directions_are_unit_vectors_that_separate_held_out_states(method):
    pytest.importorskip("sklearn")
    found = steering_direction(**drawn(), method=method)
    np.testing.assert_allclose(np.linalg.norm(found["unit"], axis=1), 1)
    assert (found["auc"] > 0.9).all()
    assert found["n"].values.tolist() == [[30, 30], [30, 30]]
    nothing = steering_direction(**drawn(shift=0.0), method=method)
    assert (abs(nothing["auc"] - 0.5) < 0.3).all(), "a direction of noise separates nothing that is held out"


def test_the_mean_is_that_of_side_sums_over_what_is_not_held_out():
    inputs = drawn()
    found = steering_direction(**inputs)
    side = inputs["side"].where(~inputs["held_out"], 0)
    expected = contrastive_direction(side_sums(inputs["states"], side))
    np.testing.assert_allclose(found["unit"], expected["unit"], rtol=1e-6)
    np.testing.assert_allclose(found["norm"], expected["norm"], rtol=1e-6)


def test_held_out_states_change_no_direction():
    inputs = drawn()
    moved = inputs | {"states": inputs["states"] + 100.0 * inputs["held_out"]}
    for method in ("mean", "pca", "lda"):
        one, other = (steering_direction(**given, method=method)["unit"] for given in (inputs, moved))
        xr.testing.assert_equal(one, other)


def test_pca_is_the_first_eigenvector_of_the_pairs_differences():
    inputs = drawn()
    states, sides = fitted(inputs, 4)
    pair = inputs["pair"].values[~inputs["held_out"].values]
    order = np.argsort(pair * 2 - sides, kind="stable")
    differences = states[order][0::2] - states[order][1::2]
    eigenvector = np.linalg.eigh(differences.T @ differences)[1][:, -1]
    unit = steering_direction(**inputs, method="pca")["unit"].sel(layer=4).values
    assert abs(unit @ eigenvector) == pytest.approx(1)
    assert unit @ differences.mean(0) > 0


def test_the_share_of_the_identity_is_that_of_scikit_learn():
    covariance = pytest.importorskip("sklearn.covariance")
    rows = np.random.default_rng(0).normal(size=(12, 30)) @ np.diag(np.arange(1, 31))
    rows -= rows.mean(0)
    _, share = covariance.oas(rows, assume_centered=True)
    assert 0.05 < share < 0.95
    # scikit-learn leaves out the terms in 2 / width of the paper.
    assert oracle_shrinkage(rows.T @ rows / 12, 12, 30) == pytest.approx(share, rel=0.05)


def test_lda_undoes_the_correlations_of_the_noise():
    inputs = drawn(seed=3)
    aucs = {
        method: float(steering_direction(**inputs, method=method)["auc"].mean()) for method in ("mean", "lda")
    }
    assert aucs["lda"] >= aucs["mean"]


def test_auroc_counts_ordered_pairs():
    rng = np.random.default_rng(0)
    positive, negative = rng.integers(0, 5, 40).astype(float), rng.integers(-2, 4, 30).astype(float)
    pairs, is_positive = positive[:, None] - negative, np.arange(70) < 40
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert auroc(np.concatenate([positive, negative]), is_positive) == pytest.approx(expected)
    assert np.isnan(auroc(positive, np.ones(40, bool)))


def test_a_direction_is_a_keyed_result_of_a_store(tmp_path):
    inputs, store = drawn(), open_store(tmp_path)
    node = steering_direction.on(**inputs, method="mean")
    run(node, store, quiet=True)
    xr.testing.assert_allclose(
        node.open(store).load().drop_attrs(), steering_direction(**inputs).drop_attrs()
    )
    assert steering_direction.on(**inputs, method="pca").key(store) != node.key(store)


@pytest.mark.parametrize(
    ("change", "method", "message"),
    [
        ({"side": 1}, "mean", "found none on the negative side; label some tokens with side -1"),
        ({"held_out": True}, "mean", "needs states of both sides that are not held out"),
        ({"pair": 0}, "pca", "found 30 positive and 30 negative states with 1 numbers"),
        ({}, "median", "expected a method among mean, pca, logistic, lda, found 'median'"),
        ({"states": 0.0}, "mean", "found equal means at layer 1"),
    ],
)
def test_what_makes_no_direction_is_refused_in_one_line(change, method, message):
    inputs = drawn()
    for name, value in change.items():
        inputs[name] = xr.full_like(inputs[name], value)
    with pytest.raises(StageError, match=message) as error:
        steering_direction(**inputs, method=method)
    assert "\n" not in str(error.value)


def test_labels_of_other_tokens_are_refused():
    inputs = drawn()
    with pytest.raises(ShapeError, match="a value for each of the 120 tokens"):
        steering_direction(**inputs | {"pair": inputs["pair"][:-1]})
