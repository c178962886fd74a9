"""Measures of detectors and pooling, by hand and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.geometry.separation import auroc
from mizarr.stages.monitors.measures import measure, swapped_differences
from mizarr.stages.monitors.pooling import pooled_states
from mizarr.store.errors import ConfigError, PromptError, ShapeError

OPTIONS = {"false_positives": 0.05, "resamples": 300, "seed": 0}


def test_measures_of_five_examples_are_those_on_paper():
    """Scores 2 and 0 are positive, 1, 0 and -1 negative: of six pairs 4 are right and one is a tie."""
    score, label = np.array([2.0, 0.0, 1.0, 0.0, -1.0]), np.array([1, 1, 0, 0, 0], bool)
    assert auroc(score, label) == pytest.approx(4.5 / 6)
    chance = 1 / (1 + np.exp(-score))
    value = measure(score, label, np.arange(5), **OPTIONS)[:, 0]
    # Above 1 lies half of the positives and no negative; from 1 on, a third of the negatives.
    assert value[1] == pytest.approx(0.5)
    assert measure(score, label, np.arange(5), **OPTIONS | {"false_positives": 2 / 3})[1, 0] == pytest.approx(
        1
    )
    assert value[2] == pytest.approx(np.mean((chance - label) ** 2))
    # Five examples in ten bins: each is alone, so the error is that of single probabilities.
    assert value[3] == pytest.approx(np.mean(abs(chance - label)))


@pytest.mark.parametrize("seed", range(3))
def test_areas_and_brier_scores_are_those_of_scikit_learn(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(seed)
    label = rng.integers(2, size=200).astype(bool)
    score = np.round(rng.normal(size=200) + label, 1)  # rounded: ties
    value = measure(score, label, np.arange(200), **OPTIONS)[:, 0]
    assert value[0] == pytest.approx(metrics.roc_auc_score(label, score))
    assert value[2] == pytest.approx(metrics.brier_score_loss(label, 1 / (1 + np.exp(-score))))
    false_rate, true_rate, _ = metrics.roc_curve(label, score, drop_intermediate=False)
    assert value[1] == pytest.approx(true_rate[false_rate <= 0.05].max())


def test_calibrated_scores_have_a_small_calibration_error_and_overconfident_ones_a_large_one():
    rng = np.random.default_rng(0)
    score = rng.normal(size=20_000)
    label = rng.random(20_000) < 1 / (1 + np.exp(-score))
    errors = [measure(scale * score, label, np.arange(20_000), **OPTIONS)[3, 0] for scale in (1, 4)]
    assert errors[0] < 0.015
    assert errors[1] > 0.15


def test_intervals_hold_the_area_of_the_population_nineteen_times_in_twenty():
    rng = np.random.default_rng(1)
    truth, inside = 0.76025, 0  # P(normal + 1 > normal) = Phi(1 / sqrt 2)
    for _ in range(100):
        label = rng.integers(2, size=150).astype(bool)
        score = rng.normal(size=150) + label
        _, low, high = measure(score, label, np.arange(150), **OPTIONS | {"resamples": 200})[0]
        inside += low <= truth <= high
    assert 88 <= inside <= 100


def test_intervals_over_groups_are_those_of_the_groups():
    rng = np.random.default_rng(2)
    label = rng.integers(2, size=40).astype(bool)
    score = rng.normal(size=40) + label
    alone = measure(score, label, np.arange(40), **OPTIONS)
    copied = measure(score.repeat(5), label.repeat(5), np.arange(40).repeat(5), **OPTIONS)
    np.testing.assert_allclose(copied[:3], alone[:3], rtol=1e-9)


def test_detectors_of_equal_quality_differ_by_chance_and_a_better_one_beyond_it():
    rng = np.random.default_rng(3)
    label = rng.integers(2, size=300).astype(bool)
    good, fair, blind = (signal * label + rng.normal(size=300) for signal in (2.5, 2.5, 0.3))
    for other, is_beyond in ((fair, False), (blind, True)):
        effect, (low, high), null = swapped_differences(good, other, label, np.arange(300), draws=99, seed=0)
        assert effect == pytest.approx(auroc(good, label) - auroc(other, label))
        assert (effect > null.max()) == is_beyond
        assert low <= effect <= high
        assert low > 0 or not is_beyond
        assert abs(null.mean()) < 0.02


@pytest.mark.parametrize("seed", range(4))
def test_ties_of_one_detector_do_not_widen_the_null(seed):
    """A detector with three scores against one without ties: exchanges vary as little as resamples."""
    rng = np.random.default_rng(seed)
    label = rng.integers(2, size=300).astype(bool)
    fine = 1.2 * label + rng.normal(size=300)
    coarse = np.clip(np.round(0.6 * label + 0.7 * rng.normal(size=300)), 0, 2)
    effect, (low, high), null = swapped_differences(fine, coarse, label, np.arange(300), draws=199, seed=0)
    assert null.std() == pytest.approx((high - low) / 3.92, rel=0.3)
    assert effect > null.max()


def test_a_missing_class_has_no_area():
    values = measure(np.arange(4.0), np.ones(4, bool), np.arange(4), **OPTIONS)
    assert np.isnan(values[0]).all()


def pooled(states, owner, pooling):
    inputs = {"states": states, "prompt": xr.DataArray(owner, dims="token")}
    return pooled_states.compute(inputs, {"pooling": pooling})["state"]


def test_pooled_states_are_those_of_each_prompt_however_they_are_read(monkeypatch):
    rng = np.random.default_rng(4)
    sizes = [3, 1, 700, 40]
    owner, rows = np.repeat(np.arange(4), sizes), rng.normal(size=(2, sum(sizes), 5)).astype(np.float32)
    states = xr.DataArray(rows, {"layer": [0, 9]}, ("layer", "token", "hidden"), name="resid_mid")
    expected = {
        "last": lambda part: part[:, -1],
        "mean": lambda part: part.mean(1, dtype=float),
        "max": lambda part: part.max(1),
    }
    for block_bytes in (1 << 24, 1):
        monkeypatch.setattr("mizarr.stages.corpus.token_blocks.BLOCK_BYTES", block_bytes)
        for pooling, pool in expected.items():
            found = pooled(states, owner, pooling)
            by_hand = np.stack([pool(rows[:, owner == prompt]) for prompt in range(4)], axis=1)
            np.testing.assert_allclose(found.values, by_hand, rtol=1e-6, atol=1e-7)
            assert found.attrs["point"] == "resid_mid"
            assert found.attrs["pooling"] == pooling


def test_pooling_refuses_what_it_does_not_know():
    states = xr.DataArray(np.zeros((1, 3, 2)), {"layer": [0]}, ("layer", "token", "hidden"))
    with pytest.raises(ConfigError, match="last, mean, max"):
        pooled(states, [0, 0, 1], "median")
    with pytest.raises(ShapeError, match="3 tokens"):
        pooled_states(states, xr.DataArray([0, 1], dims="token"), pooling="last")
    with pytest.raises(PromptError, match="rise by 1"):
        pooled(states, [0, 2, 2], "last")
