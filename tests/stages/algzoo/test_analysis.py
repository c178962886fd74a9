"""Analyses of RNNs against the references, hook ablations, sampling, and networks whose account is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xarray as xr

from mizarr import HookSpec, Zero
from mizarr.stages.algzoo.analysis.ablation import neuron_ablation, random_ablation
from mizarr.stages.algzoo.analysis.cones import gaussian_accuracy, measure, second_moment, split
from mizarr.stages.algzoo.analysis.probing import absolute_correlation, neuron_roles, references
from mizarr.stages.algzoo.analysis.regions import gates_of, linear_maps, linear_regions
from mizarr.stages.algzoo.analysis.standardized import standardized_rnn
from mizarr.stages.algzoo.model import FOLDER, SHIPPED, load_model
from mizarr.stages.algzoo.networks import labelled, shape_of
from mizarr.stages.algzoo.rnn import require_rnn
from mizarr.stages.algzoo.samples import PROBE_STATE, SURPRISE_STATE, algzoo_samples, drawn
from mizarr.stages.algzoo.tasks import TASKS
from mizarr.store.errors import ConfigError, WeightsError

from .reference import CLASSES, REFERENCE, RNNS, file_of, needs_reference, random_rnn, told

SMALL = [name for name in RNNS if name.endswith(("_n2", "_n3"))]


def weights_of(seed: int, hidden: int, outputs: int) -> xr.Dataset:
    tensors = random_rnn(seed, hidden, outputs)
    return labelled(tensors, shape_of(tensors, "random"))


def lcg_samples(name: str, count: int, state: int) -> xr.Dataset:
    model = load_model(file_of(name))
    return algzoo_samples(
        task=model.task.name, sequence=model.sequence, samples=count, seed=state, source="lcg"
    )


# -- standardisation


@needs_reference
@pytest.mark.parametrize("name", [name for name in RNNS if "h22" not in name])
def test_standardised_weights_are_the_reference_and_say_the_same(name):
    expected, model = told(name)["standardized"], load_model(file_of(name))
    found = standardized_rnn(model.weights)
    for key, ours in (
        ("scales", "scale"),
        ("weight_ih", "weight_ih"),
        ("weight_hh", "weight_hh"),
        ("weight_oh", "weight_oh"),
    ):
        np.testing.assert_allclose(found[ours].values.squeeze(), np.array(expected[key]).squeeze(), atol=1e-9)
    x = drawn(model.task, model.sequence, 500, seed=1)
    np.testing.assert_allclose(require_rnn(found, "").outputs(x), model.outputs(x), rtol=1e-9, atol=1e-9)
    assert np.abs(np.abs(found["weight_ih"]) - 1.0).max() < 1e-12


@needs_reference
def test_the_published_network_of_two_has_the_signs_that_were_published():
    found = standardized_rnn(load_model(REFERENCE / "rnn_2nd_argmax_h2_n2.safetensors").weights)
    order = np.argsort(-found["weight_ih"].values[:, 0])
    assert found["weight_ih"].values[order, 0].tolist() == [1.0, -1.0]
    hh, oh = found["weight_hh"].values[np.ix_(order, order)], found["weight_oh"].values[:, order]
    assert (np.diag(hh) < 0).all()
    assert (np.abs(np.diag(hh)) <= 1).all()
    assert hh[0, 1] >= 1 and hh[1, 0] >= 1
    assert np.sign(oh).tolist() == [[1, -1], [-1, 1]]


def test_a_neuron_that_reads_no_input_has_no_unit():
    with pytest.raises(WeightsError, match="found 0 at neuron 0"):
        standardized_rnn(load_model("handcrafted-2nd-argmax-10").weights)


# -- ablation


@needs_reference
@pytest.mark.parametrize("name", CLASSES)
def test_ablations_are_the_reference(name):
    expected = told(name)
    found = neuron_ablation(load_model(file_of(name)).weights, lcg_samples(name, 1000, SURPRISE_STATE))
    assert float(found["baseline"]) == pytest.approx(expected["accuracy_lcg1000"], abs=1e-12)
    assert found["order"].values.tolist() == [each["neuron"] for each in expected["ablation_single"]]
    for each in expected["ablation_single"]:
        assert float(found["delta"][each["neuron"]]) == pytest.approx(each["accuracy_delta"], abs=1e-12)
    for each in expected["ablation_pairs"]:
        pair = found.isel(neuron=each["a"], neuron_=each["b"])
        assert float(pair["pair_delta"]) == pytest.approx(each["accuracy_delta"], abs=1e-12)
        assert float(pair["interaction"]) == pytest.approx(each["interaction"], abs=1e-12)


@pytest.mark.parametrize(("hidden", "sequence", "task"), [(5, 4, "argmedian"), (3, 5, "median")])
def test_ablating_weights_is_what_zeroing_at_the_hook_point_does(hidden, sequence, task, tmp_path):
    from mizarr.stages.algzoo.files import write_tensors

    tensors = random_rnn(9, hidden, TASKS[task].outputs(sequence))
    model = load_model(write_tensors(tmp_path / f"{task}.pth", tensors), sequence=sequence)
    samples = algzoo_samples(task=task, sequence=sequence, samples=400, seed=3)
    found = neuron_ablation(model.weights, samples)

    def by_hook(*neurons: int) -> float:
        hooks = HookSpec().intervene("rnn.hook_hidden.*", Zero(neurons=neurons))
        said, target = model.forward(samples["x"].values, hooks).logits.numpy(), samples["target"].values
        if TASKS[task].is_scalar:
            return -np.sqrt(np.mean((said[:, 0] - target) ** 2))
        return np.mean(said.argmax(1) == target)

    for j in range(hidden):
        assert float(found["ablated"][j]) == pytest.approx(by_hook(j), abs=1e-12)
    assert float(found["pair_ablated"][0, 2]) == pytest.approx(by_hook(0, 2), abs=1e-12)


def test_a_random_direction_along_an_axis_would_be_a_neuron(monkeypatch):
    weights = load_model("handcrafted-2nd-argmax-3").weights
    samples = algzoo_samples(task="2nd_argmax", sequence=3, samples=500, seed=0)

    class Axes:
        def standard_normal(self, shape):
            return np.broadcast_to(np.eye(4), shape)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Axes())
    found = random_ablation(weights, samples, draws=2)
    for row in found.values:
        np.testing.assert_allclose(row, neuron_ablation(weights, samples)["delta"])


def test_random_directions_are_bases_and_follow_the_seed():
    weights = weights_of(1, 3, 3)
    samples = algzoo_samples(task="argmax", sequence=3, samples=200, seed=0)
    first, again, other = (random_ablation(weights, samples, draws=3, seed=seed) for seed in (0, 0, 1))
    assert first.dims == ("draw", "direction") and first.shape == (3, 3)
    assert first.equals(again) and not first.equals(other)


# -- regions


@needs_reference
@pytest.mark.parametrize("name", RNNS)
def test_regions_are_the_reference(name):
    expected = told(name)
    found = linear_regions(load_model(file_of(name)).weights, lcg_samples(name, 1000, SURPRISE_STATE))
    assert found.sizes["region"] == expected["regions_lcg1000"]["distinct"]
    assert found["count"].values[:20].tolist() == expected["regions_lcg1000"]["counts_sorted"]
    if "active_fraction" in expected:
        assert float(found["active_fraction"]) == pytest.approx(expected["active_fraction"], abs=1e-12)
    first = int(found["region_id"][0])
    linear = expected["region_linear_map_of_input0"]
    np.testing.assert_allclose(found["map"][first], linear["A"], atol=1e-9)
    steps, hidden = np.array(linear["gates"]).shape
    bits = np.unpackbits(found["pattern"].values[first], bitorder="little")[: steps * hidden]
    assert bits.reshape(steps, hidden).tolist() == linear["gates"]


@pytest.mark.parametrize(("hidden", "sequence", "seed"), [(4, 3, 0), (9, 6, 1), (32, 11, 2)])
def test_the_map_of_a_region_is_what_the_network_says_there(hidden, sequence, seed):
    weights = weights_of(seed, hidden, sequence)
    samples = algzoo_samples(task="argmax", sequence=sequence, samples=3000, seed=seed)
    found, rnn, x = linear_regions(weights, samples), require_rnn(weights, ""), samples["x"].values
    said = np.einsum("sot,st->so", found["map"].values[found["region_id"].values], x)
    np.testing.assert_allclose(said, rnn.outputs(x), rtol=1e-9, atol=1e-9)
    assert int(found["count"].sum()) == 3000
    assert (np.diff(found["count"]) <= 0).all()
    own = found["region_id"].values[found["representative"].values]
    assert own.tolist() == list(range(found.sizes["region"]))
    gates = gates_of(rnn, x)
    np.testing.assert_array_equal(found["active"][found["region_id"]], gates.sum((1, 2)))
    np.testing.assert_allclose(found["active_by_time"], gates.mean((0, 2)))


def test_an_overflow_is_an_error():
    rnn = require_rnn(weights_of(0, 3, 3), "")
    huge = type(rnn)(rnn.ih * 1e300, rnn.hh * 1e300, rnn.oh)
    with pytest.raises(WeightsError, match="overflow float64 over 4 time steps"):
        linear_maps(huge, np.ones((1, 4, 3), bool))


# -- probing


@needs_reference
@pytest.mark.parametrize("name", RNNS)
def test_roles_are_the_reference(name):
    found = neuron_roles(load_model(file_of(name)).weights, lcg_samples(name, 500, PROBE_STATE))
    for each in told(name)["probe_500"]:
        here = found.isel(neuron=each["neuron"])
        assert str(here["role"].values) == each["role"]
        assert str(here["best"].values).partition("(")[0] == each["best_unthresholded"]
        assert float(here["correlation"]) == pytest.approx(each["correlation"], abs=1e-6)


def test_correlations_are_those_of_numpy_and_zero_without_variance():
    x = drawn(TASKS["argmax"], 4, 300, seed=1)
    names, values = references(x)
    states = np.column_stack([values[:, 0] * 3 + 1, -values[:, 7], np.full(300, 2.0)])
    found = absolute_correlation(states, values)
    for j, k in itertools.product(range(2), range(len(names))):
        assert found[j, k] == pytest.approx(abs(np.corrcoef(states[:, j], values[:, k])[0, 1]), abs=1e-9)
    assert not found[2].any()
    assert names[found[0].argmax()] == "RunningMax" and names[found[1].argmax()] == names[7]


def test_what_the_written_network_of_ten_holds_is_found():
    found = neuron_roles(
        load_model("handcrafted-2nd-argmax-10").weights,
        algzoo_samples(task="2nd_argmax", sequence=10, samples=2000, seed=0),
    )
    roles = found["role"].values.tolist()
    assert (roles[9], roles[19], roles[21]) == ("RecentInput", "MaxIncrement", "LeaveOneOutMax")
    assert float(found["by_time"].sel(role_="RecentInput")[4, 9]) == pytest.approx(1.0)


# -- cones


def test_orthants_have_equal_measure_and_halves_of_a_cone_add_up():
    for n in (2, 3):
        orthant = np.eye(n)
        assert measure(orthant) == pytest.approx(2.0**-n)
        rng = np.random.default_rng(n)
        for _ in range(20):
            parts = [half for half in split(orthant, rng.normal(size=n)) if half is not None]
            assert sum(map(measure, parts)) == pytest.approx(2.0**-n, abs=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_second_moments_of_cones_are_those_of_samples(n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((400_000, n))
    cone, plane = np.eye(n), rng.normal(size=n)
    half = split(cone, plane)[0]
    inside = (x > 0).all(1) & (x @ plane > 0)
    expected = x[inside].T @ x[inside] / len(x)
    np.testing.assert_allclose(second_moment(half), expected, atol=4e-3)
    whole = sum(second_moment(np.diag(signs)) for signs in itertools.product((1.0, -1.0), repeat=n))
    np.testing.assert_allclose(whole, np.eye(n), atol=1e-12)


@needs_reference
@pytest.mark.parametrize("name", SMALL)
def test_exact_accuracy_is_that_of_samples_and_of_the_fine_grid(name):
    expected, model = told(name), load_model(file_of(name))
    found = gaussian_accuracy(model.weights, task=model.task.name, sequence=model.sequence)
    assert float(found["measure"].sum()) == pytest.approx(1.0, abs=1e-9)
    if "accuracy_gaussian_exact_angle_grid" in expected:
        assert float(found["accuracy"]) == pytest.approx(
            expected["accuracy_gaussian_exact_angle_grid"], abs=1e-5
        )
    if model.task.is_scalar:
        assert float(found["rmse"]) == pytest.approx(expected["rmse_normal200k"], rel=0.01)
    else:
        p = float(found["accuracy"])
        assert abs(p - expected["accuracy_normal200k"]) < 5 * np.sqrt(p * (1 - p) / 200_000) + 1e-9


@pytest.mark.parametrize(
    ("task", "n", "hidden", "seed"),
    [
        ("argmax", 2, 3, 0),
        ("argmedian", 3, 5, 1),
        ("argoutlier", 3, 4, 2),
        ("2nd_argmax", 3, 8, 3),
        ("median", 2, 6, 4),
        ("median", 3, 5, 5),
    ],
)
def test_exact_scores_of_random_networks_are_those_of_samples(task, n, hidden, seed):
    weights = weights_of(seed, hidden, TASKS[task].outputs(n))
    found, rnn = gaussian_accuracy(weights, task=task, sequence=n), require_rnn(weights, "")
    x = np.random.default_rng(seed).standard_normal((300_000, n))
    said, target = rnn.outputs(x), TASKS[task].targets(x)
    if TASKS[task].is_scalar:
        assert float(found["rmse"]) == pytest.approx(np.sqrt(np.mean((said[:, 0] - target) ** 2)), rel=0.01)
    else:
        p = np.mean(said.argmax(1) == target)
        assert float(found["accuracy"]) == pytest.approx(p, abs=5 * np.sqrt(0.25 / 300_000))
    shares = {}
    for pattern, share in zip(found["pattern"].values, found["measure"].values, strict=True):
        shares[pattern.tobytes()] = shares.get(pattern.tobytes(), 0.0) + share
    sampled = linear_regions(weights, xr.Dataset({"x": (("sample", "time"), x[:100_000])}))
    for pattern, count in zip(sampled["pattern"].values[:10], sampled["count"].values[:10], strict=True):
        assert shares[pattern.tobytes()] == pytest.approx(count / 100_000, abs=0.008)


def test_cones_of_four_numbers_are_refused():
    with pytest.raises(ConfigError, match="tasks on 2 or 3 normally distributed numbers"):
        gaussian_accuracy(weights_of(0, 3, 4), task="argmax", sequence=4)


def test_a_transformer_is_no_piecewise_linear_rnn():
    weights = load_model("specimen-longest-cycle-4").weights
    with pytest.raises(WeightsError, match=r"needs an RNN, .*, found a transformer"):
        linear_regions(weights, xr.Dataset())


def test_networks_that_ship_are_as_right_as_their_card_says():
    card = (FOLDER / "README.md").read_text()
    for name in SHIPPED:
        model = load_model(name)
        assert f"| {model.parameters} |" in card.partition(f"`{name}`")[2].splitlines()[0]
        if model.is_rnn:
            found = gaussian_accuracy(model.weights, task=model.task.name, sequence=model.sequence)
            assert f"{100 * float(found['accuracy']):.3f} %, exact" in card
        else:
            x = np.array(list(itertools.product(range(4), repeat=4)))
            assert (model.outputs(x).argmax(1) == model.task.targets(x)).all()
