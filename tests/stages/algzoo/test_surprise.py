"""Accounts of bits: the oracle against the reference, bounds that can be worked out, curves with a known
slope."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.algzoo.accuracy import sampled_accuracy
from mizarr.stages.algzoo.analysis.compute_curve import compute_curve
from mizarr.stages.algzoo.analysis.estimators import ESTIMATORS
from mizarr.stages.algzoo.analysis.surprise import (
    bits_per_number,
    noisy,
    residual_bits,
    surprise_accounting,
)
from mizarr.stages.algzoo.model import load_model
from mizarr.stages.algzoo.rnn import require_rnn
from mizarr.stages.algzoo.samples import SURPRISE_STATE, algzoo_samples
from mizarr.store.errors import ConfigError, ShapeError

from .reference import CLASSES, file_of, needs_reference, told
from .test_analysis import weights_of


def samples_of(sequence: int, seed: int, task: str = "2nd_argmax", count: int = 1000, **more) -> xr.Dataset:
    return algzoo_samples(task=task, sequence=sequence, samples=count, seed=seed, **more)


@needs_reference
@pytest.mark.parametrize("name", CLASSES)
def test_the_oracle_is_the_reference(name):
    expected, model = told(name)["surprise_oracle"], load_model(file_of(name))
    about = {"task": model.task.name, "sequence": model.sequence}
    scored = samples_of(**about, seed=SURPRISE_STATE, source="lcg")
    found = surprise_accounting(
        model.weights, scored, samples_of(**about, seed=1), task=model.task.name, realisations=1
    ).sel(estimator="oracle")
    for key in (
        "model_accuracy",
        "estimate_accuracy",
        "agreement_rate",
        "disagreement_rate",
        "chance_accuracy",
    ):
        assert float(found[key]) == pytest.approx(expected[key], abs=1e-12)
    assert found.attrs["param_count"] == expected["param_count"]
    assert found.attrs["samples"] == expected["n_samples"]


@pytest.mark.parametrize(("hidden", "sequence", "seed"), [(4, 3, 0), (8, 5, 1)])
def test_restating_the_network_agrees_always_and_costs_what_was_selected(hidden, sequence, seed):
    found = surprise_accounting(
        weights_of(seed, hidden, sequence),
        samples_of(sequence, 0, "argmax"),
        samples_of(sequence, 1, "argmax"),
        task="argmax",
        sigmas=(1e-6, 0.05),
        realisations=3,
    )
    piecewise = found.sel(estimator="piecewise")
    assert float(piecewise["agreement_rate"]) == 1.0
    np.testing.assert_allclose(piecewise["explanation_bits"], found["selection_bits"])
    assert float(piecewise["tightness"][0]) == pytest.approx(1.0, abs=0.02)
    assert (found["bound_satisfied"] == (found["tightness"] <= 1)).all()
    assert (found["bound_satisfied"] == (found["covered"] >= 1000)).all(), "or up to as many as were coded"
    assert found["estimator"].values.tolist() == list(ESTIMATORS)
    assert (found["noisy_agreement"][:, 0] - found["agreement_rate"]).max() < 0.01, "next to no noise"


def test_the_task_explains_a_network_that_does_it():
    model = load_model("handcrafted-2nd-argmax-2")
    found = surprise_accounting(
        model.weights, samples_of(2, 0), samples_of(2, 1), task="2nd_argmax", sigmas=(0.01,), realisations=5
    ).sel(estimator="oracle")
    assert float(found["agreement_rate"]) == 1.0
    assert float(found["explanation_bits"][0]) == pytest.approx(math.log2(6))
    q = 1.0 - float(found["noisy_agreement"][0])
    assert float(found["residual_surprise"][0]) == pytest.approx(residual_bits(q, 2, 1000))


@pytest.mark.parametrize(("sequence", "roles"), [(2, 1.0), (3, 0.5)])
def test_kept_neurons_and_roles_say_what_the_written_networks_say(sequence, roles):
    """All four neurons of three numbers go with a comparator to 0.9999, and their readout takes differences
    of a hundred of them: to know a role that well is not enough."""
    model = load_model(f"handcrafted-2nd-argmax-{sequence}")
    found = surprise_accounting(
        model.weights, samples_of(sequence, 0), samples_of(sequence, 1), task="2nd_argmax", realisations=1
    )
    agreement = found["agreement_rate"]
    assert float(agreement.sel(estimator="ablation")) == 1.0, "it needs them all"
    many = model.shape.hidden
    assert f"{many} of {many} neurons" in str(found["description"].sel(estimator="roles").values)
    at = float(agreement.sel(estimator="roles"))
    assert at == 1.0 if sequence == 2 else at < roles
    assert float(agreement.sel(estimator="top_regions")) > 0.9


def test_bits_are_those_of_a_gaussian_channel_and_of_a_binary_entropy():
    assert bits_per_number(1.0) == pytest.approx(0.5)
    assert bits_per_number(0.01) == pytest.approx(math.log2(100), abs=1e-3)
    assert residual_bits(0.0, 10, 1000) == 0.0
    assert residual_bits(0.5, 2, 1000) == pytest.approx(1000)
    assert residual_bits(0.9, 10, 1) == pytest.approx(math.log2(10)), "no more than a guess tells"


def test_noise_is_a_share_of_the_spread_of_each_matrix():
    rnn = require_rnn(weights_of(3, 40, 40), "")
    found = noisy(rnn, 0.05, np.random.default_rng(0))
    assert (found.hh - rnn.hh).std() == pytest.approx(0.05 * rnn.hh.std(), rel=0.05)
    assert (found.oh - rnn.oh).std() == pytest.approx(0.05 * rnn.oh.std(), rel=0.05)


def test_numbers_and_noise_that_is_none_are_refused():
    samples = samples_of(3, 0, "median")
    with pytest.raises(ConfigError, match="needs a task whose answer is a class"):
        surprise_accounting(weights_of(0, 3, 1), samples, samples, task="median")
    with pytest.raises(ConfigError, match="expected sigmas above 0"):
        surprise_accounting(weights_of(0, 3, 3), samples, samples, task="argmax", sigmas=(0.0,))


# -- error against compute


@pytest.fixture(scope="module")
def counted():
    model = load_model("specimen-2nd-argmax-3")
    blocks = xr.DataArray([400_000], {"block": [0]}, "block")
    return sampled_accuracy(model.weights, blocks, task="2nd_argmax", sequence=3, seed=5)


@pytest.fixture(scope="module")
def account():
    model = load_model("specimen-2nd-argmax-3")
    return surprise_accounting(
        model.weights, samples_of(3, 0), samples_of(3, 1), task="2nd_argmax", realisations=1
    )


def test_the_error_of_sampling_is_p_times_one_less_p_over_n(counted, account):
    found = compute_curve(counted, account, budgets=(1000, 4000, 10_000, 100_000))
    p = float(counted["right"].sum()) / 400_000
    np.testing.assert_allclose(found["baseline_expected"], p * (1 - p) / found["samples"])
    assert found["groups"].values.tolist() == [400, 100, 40, 4]
    # The variance of g groups scatters by sqrt(2 / (g - 1)) of itself; five times that is not chance.
    for place, groups in enumerate((400, 100, 40)):
        share = float(found["baseline_mse"][place] / found["baseline_expected"][place])
        assert abs(share - 1) < 5 * math.sqrt(2 / (groups - 1))
    assert np.isnan(found["baseline_mse"][3]), "four groups tell no variance"


def test_an_explanation_s_error_ends_at_its_bias(counted, account):
    found = compute_curve(counted, account, budgets=(1000, 10**9))
    np.testing.assert_allclose(found["estimator_mse"][:, 1], found["bias"] ** 2, atol=1e-9)
    assert (found["estimator_mse"][:, 0] >= found["estimator_mse"][:, 1]).all()
    assert float(found["bias"].sel(estimator="piecewise")) == 0.0
    with pytest.raises(ShapeError, match="multiples of 1000"):
        compute_curve(counted, account, budgets=(1500,))
