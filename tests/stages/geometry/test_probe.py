"""Linear probes on states that hold, or do not hold, what is asked of them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.geometry.probe import PENALTIES, _bootstrap_interval, _score, _Settings, probe
from mizarr.store.errors import ConfigError, MissingExtra, PromptError, ShapeError

PROMPTS, LENGTH, HIDDEN = 24, 25, 6


@pytest.fixture
def states() -> xr.DataArray:
    """[layer, token, hidden]: layers 2 and 5 of independent normal numbers."""
    values = np.random.default_rng(0).standard_normal((2, PROMPTS * LENGTH, HIDDEN)).astype(np.float32)
    return xr.DataArray(values, {"layer": [2, 5]}, ("layer", "token", "hidden"))


@pytest.fixture
def prompt() -> xr.DataArray:
    return xr.DataArray(np.repeat(np.arange(PROMPTS), LENGTH), dims="token")


def column(values) -> xr.DataArray:
    return xr.DataArray(np.asarray(values, np.float64), dims="token")


def scores(found: xr.Dataset, targets: str = "true") -> list[float]:
    return found["score"].sel(targets=targets).values.tolist()


def test_a_number_that_is_a_line_through_one_layer_is_read_off_there_and_nowhere_else(states, prompt):
    line = np.array([3.0, 0, -1, 0, 0, 0.5])
    target = column(states.sel(layer=5).values @ line + 40)
    found = probe(states, target, prompt, kind="number")
    elsewhere, there = scores(found)
    assert there == pytest.approx(1, abs=1e-3)
    assert elsewhere < 0.05
    assert found["baseline"] <= 0
    np.testing.assert_allclose(found["weight"].sel(layer=5)[0], line, atol=0.02)
    np.testing.assert_allclose(found["bias"].sel(layer=5)[0], 40, atol=0.02)


def test_a_label_that_a_plane_divides_is_told_and_shuffled_ones_are_not(states, prompt):
    target = column(states.sel(layer=2).values[:, 1] > 0.3)
    found = probe(states, target, prompt, kind="label")
    there, elsewhere = scores(found)
    assert there > 0.93
    chance = float(found["baseline"])
    assert elsewhere == pytest.approx(chance, abs=0.1)
    assert max(scores(found, "shuffled")) < chance + 0.1
    weight = found["weight"].sel(layer=2)[0].values
    assert np.abs(weight).argmax() == 1 and weight[1] > 0


def test_several_labels_are_told_by_one_score_each(states, prompt):
    kinds = states.sel(layer=5).values[:, :3].argmax(1)
    found = probe(states, column(kinds), prompt, kind="label")
    elsewhere, there = scores(found)
    assert there > 0.93
    assert elsewhere < 0.6
    raw = (
        states.sel(layer=5).values @ found["weight"].sel(layer=5).values.T + found["bias"].sel(layer=5).values
    )
    assert (raw.argmax(1) == kinds).mean() > 0.93


def test_what_only_tells_prompts_apart_does_not_help_on_other_prompts(prompt):
    """A state that is the prompt's name: a split by token would score 1."""
    rng = np.random.default_rng(1)
    names = rng.standard_normal((PROMPTS, 32))
    states = xr.DataArray(np.repeat(names, LENGTH, axis=0)[None], dims=("layer", "token", "hidden"))
    target = column(np.repeat(rng.standard_normal(PROMPTS), LENGTH))
    assert scores(probe(states, target, prompt, kind="number"))[0] < 0.3


def test_tokens_without_a_target_are_not_read(states, prompt):
    line = states.sel(layer=2).values[:, 0].astype(np.float64)
    some = np.random.default_rng(2).random(len(line)) < 0.5
    spoilt = states.copy(data=np.where(some[:, None], states.values, np.nan))
    found = probe(spoilt, column(np.where(some, line, np.nan)), prompt, kind="number")
    assert scores(found)[0] == pytest.approx(1, abs=1e-3)
    assert int(found["n_train"]) + int(found["n_test"]) == some.sum()


def test_units_of_the_states_do_not_matter(states, prompt):
    """Means and spreads are taken out, so that a large constant or a tiny unit changes nothing."""
    target = column(states.sel(layer=2).values[:, 0] + 0.5 * states.sel(layer=2).values[:, 1] ** 2)
    scale, shift = np.array([1e3, 1, 1e-3, 1, 1, 1]), np.array([1e3, 0, 0, 5, 0, 0])
    here = states.astype(np.float64)
    plain = probe(here, target, prompt, kind="number")
    moved = probe(here * scale + shift, target, prompt, kind="number")
    for name in ("score", "low", "high", "penalty"):
        np.testing.assert_allclose(moved[name], plain[name], rtol=1e-6)


def test_a_constant_dimension_does_no_harm(states, prompt):
    flat = states.copy()
    flat[..., 3] = 7
    target = column(states.sel(layer=2).values[:, 0])
    assert scores(probe(flat, target, prompt, kind="number"))[0] == pytest.approx(1, abs=1e-3)


def test_noise_is_best_met_with_the_largest_penalty(prompt):
    rng = np.random.default_rng(3)
    states = xr.DataArray(rng.standard_normal((1, PROMPTS * LENGTH, 200)), dims=("layer", "token", "hidden"))
    found = probe(states, column(rng.standard_normal(PROMPTS * LENGTH)), prompt, kind="number")
    assert found["penalty"].values.max() == max(PENALTIES)
    strict = probe(
        states, column(rng.standard_normal(PROMPTS * LENGTH)), prompt, kind="number", penalties=(1e-4,)
    )
    assert scores(strict)[0] < scores(found)[0] < 0.05


def test_the_seed_decides_the_split_and_nothing_else_does(states, prompt):
    target = column(states.sel(layer=2).values[:, 0] + states.sel(layer=5).values[:, 0])
    one, again, other = (probe(states, target, prompt, kind="number", seed=seed) for seed in (0, 0, 1))
    xr.testing.assert_identical(one, again)
    assert scores(one) != scores(other)
    order = np.random.default_rng(5).permutation(PROMPTS * LENGTH)
    mixed = probe(states[:, order], target[order], prompt[order], kind="number")
    np.testing.assert_allclose(mixed["score"].sel(targets="true"), one["score"].sel(targets="true"))


def test_scores_of_summed_columns_are_those_on_paper():
    assert _score(np.array([3.0, 4.0])) == 0.75
    # 1, 2, 3 told as 1, 2, 2: squared error 1, around the mean 2
    assert _score(np.array([1.0, 3.0, 0.0, 2.0])) == 0.5
    assert np.isnan(_score(np.array([1.0, 3.0, 3.0, 3.0])))


def test_the_interval_holds_the_score_and_is_empty_where_prompts_agree():
    settings = _Settings("label", 0.25, (1.0,), 500, 0)
    same = np.array([[3.0, 4.0]] * 10)
    assert _bootstrap_interval(same, settings) == (0.75, 0.75)
    low, high = _bootstrap_interval(np.array([[4.0, 4.0], [2.0, 4.0]] * 5), settings)
    assert 0.5 < low < 0.75 < high < 1
    # 20 prompts of accuracy 1 or 0.5: standard error 0.25 / sqrt(20)
    low, high = _bootstrap_interval(np.array([[4.0, 4.0], [2.0, 4.0]] * 10), settings)
    assert high - low == pytest.approx(2 * 1.96 * 0.25 / np.sqrt(20), rel=0.25)


def test_intervals_hold_the_scores(states, prompt):
    target = column(states.sel(layer=2).values[:, 0] + states.sel(layer=5).values[:, 0])
    found = probe(states, target, prompt, kind="number")
    assert (found["low"] <= found["score"]).all() and (found["score"] <= found["high"]).all()


def test_what_cannot_be_probed_is_an_error(states, prompt):
    target = column(np.arange(PROMPTS * LENGTH) % 2)
    with pytest.raises(PromptError, match=r"at least 3 prompts, .*found them in 1"):
        probe(states, target, prompt * 0, kind="label")
    with pytest.raises(PromptError, match="same label in all 600 examples"):
        probe(states, target * 0, prompt, kind="label")
    lonely = target.where(prompt == 0, 0)
    with pytest.raises(PromptError, match="another seed"):
        _ = [probe(states, lonely, prompt, kind="label", seed=seed, resamples=1) for seed in range(20)]
    with pytest.raises(ShapeError, match="a target and a prompt for each of the"):
        probe(states, target[:5], prompt, kind="label")
    for given, message in (
        ({"kind": "labels"}, "'label' or 'number' as the kind of a probe, found 'labels'"),
        ({"kind": "label", "test_share": 1.0}, "test_share of a probe between 0 and 1"),
        ({"kind": "label", "penalties": (0.0,)}, "penalties of a probe above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            probe(states, target, prompt, **given)


def test_without_scikit_learn_the_extra_is_named(states, prompt, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(MissingExtra, match=r"mizarr\[probing\]"):
        probe(states, column(np.arange(PROMPTS * LENGTH)), prompt, kind="number")
