"""Attention steering: formulae on paper, and dose-response against the reference implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, strategies as st

from mizarr.pipeline import run
from mizarr.stages.causal.steering import (
    DOSE_LEVELS,
    DoseResponse,
    DoseResponseCurve,
    SteeringCalibration,
    exact_factor,
    measure_attention_to_targets,
    steered_weight,
)
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.hooks.edges import SteeringSpec
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.runs.run import stream
from mizarr.store import open_store
from mizarr.store.errors import InterventionError, StageError

from ..forward.attention_models import FAMILIES, IDS, both
from ..forward.attention_reference import attention, biased, kl, logits

pytest.importorskip("transformers")
LAST = len(IDS) - 1
KEY = LAST - 3  # within every window


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return both(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return both(tmp_path_factory.mktemp("llama"), "llama")


def computed(experiment, model, folder):
    store = open_store(folder)
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


# -- against the reference


def test_every_dose_in_every_layer_agrees_with_the_reference(pair, tmp_path):
    model, reference = pair
    found = computed(DoseResponse(IDS, ((-1, KEY),), target=(42,)), model, tmp_path)
    assert found["dose"].values.tolist() == list(DOSE_LEVELS)
    plain, weights = logits(reference, IDS)[LAST], attention(reference, IDS)
    for layer in range(model.config.num_layers):
        own = weights[layer][:, LAST, KEY]
        assert float(found["baseline_attention"][layer]) == pytest.approx(own.mean(), abs=1e-5)
        np.testing.assert_allclose(found["baseline_head_attention"][layer], own, atol=1e-5)
        for number, dose in enumerate(DOSE_LEVELS):
            here = found.isel(layer=layer, dose=number)
            np.testing.assert_allclose(here["head_attention"], dose * own / (1 + (dose - 1) * own), atol=1e-5)
            assert float(here["attention"]) == pytest.approx(float(here["head_attention"].mean()))
            with biased(reference, [layer], [(LAST, KEY)], math.log(dose)):
                steered = logits(reference, IDS)[LAST]
            assert float(here["kl"]) == pytest.approx(kl(plain, steered), rel=2e-3, abs=1e-7)
            assert float(here["logit_diff"]) == pytest.approx(plain[42] - steered[42], abs=2e-4)


def test_a_window_of_layers_is_steered_together(pair, tmp_path):
    model, reference = pair
    layers = model.config.num_layers
    experiment = DoseResponse(IDS, ((-1, KEY), (-1, LAST)), doses=(3.0,), window=2, heads=(0,))
    found = computed(experiment, model, tmp_path)
    assert found["layer"].values.tolist() == list(range(layers - 1))
    plain = logits(reference, IDS)[LAST]
    for layer in range(layers - 1):
        with biased(reference, [layer, layer + 1], [(LAST, KEY), (LAST, LAST)], math.log(3), [0]):
            steered, weights = logits(reference, IDS)[LAST], attention(reference, IDS)
        assert float(found["kl"][layer, 0]) == pytest.approx(kl(plain, steered), rel=2e-3, abs=1e-7)
        after = np.mean([weights[i][0, LAST, [KEY, LAST]].mean() for i in (layer, layer + 1)])
        assert float(found["attention"][layer, 0]) == pytest.approx(after, abs=1e-5)


def test_a_dose_of_one_changes_nothing(pair, tmp_path):
    found = computed(DoseResponse(IDS, ((-1, KEY),), doses=(1.0,)), pair[0], tmp_path)
    assert (found["kl"] < 1e-9).all()
    np.testing.assert_allclose(found["attention"][:, 0], found["baseline_attention"], atol=1e-6)


def test_a_dose_of_nought_is_a_knockout(pair, tmp_path):
    from mizarr.stages.causal.knockout import EdgeKnockout

    model, _ = pair
    steered = computed(DoseResponse(IDS, ((-1, KEY),), doses=(0.0,)), model, tmp_path / "a")
    cut = computed(EdgeKnockout(IDS, ((-1, KEY),)), model, tmp_path / "b")
    np.testing.assert_allclose(steered["kl"][:, 0], cut["kl"][:, 0], rtol=1e-3, atol=1e-8)
    assert (steered["attention"] == 0).all()


@pytest.mark.parametrize("kind", ["scale", "set_value"])
def test_steered_rows_sum_to_one_and_never_see_the_future(pair, kind):
    model, _ = pair
    spec = (SteeringSpec.scale(5.0) if kind == "scale" else SteeringSpec.set_value(0.3)).to_position(2)
    hooks = spec.keep_self().hooks(model.config, len(IDS)).capture("blocks.*.attn.hook_pattern")
    cache = model.forward(IDS, hooks)
    plain = model.forward(IDS, HookSpec().capture("blocks.*.attn.hook_pattern"))
    for layer in range(model.config.num_layers):
        pattern, before = (one[HookPoint.pattern(layer)][0].double().numpy() for one in (cache, plain))
        np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-5)
        assert (pattern[:, np.triu_indices(len(IDS), 1)[0], np.triu_indices(len(IDS), 1)[1]] == 0).all()
        if layer == 0:  # above it the rows have other inputs
            np.testing.assert_allclose(pattern[:, :3], before[:, :3], atol=1e-6)


def test_setting_a_weight_gives_it_exactly(llama, tmp_path):
    experiment = DoseResponse(IDS, ((-1, KEY),), doses=(0.0, 0.125, 0.5), kind="set_value")
    found = computed(experiment, llama[0], tmp_path)
    for layer in range(3):
        np.testing.assert_allclose(found["attention"][layer], [0, 0.125, 0.5], atol=1e-6)


def test_a_killed_experiment_goes_on_and_one_more_layer_computes_one(llama, tmp_path, monkeypatch):
    model, _ = llama
    store = open_store(tmp_path)
    asked = []

    def dying(model, runs, **options):
        for number, done in enumerate(stream(model, runs, **options)):
            if number == len(DOSE_LEVELS) + 1:
                raise KeyboardInterrupt
            yield done

    node = DoseResponse(IDS, ((-1, KEY),), layers=(0, 1)).on(model)
    with monkeypatch.context() as patch:
        patch.setattr("mizarr.stages.forward.runs.experiment.stream", dying)
        with pytest.raises(KeyboardInterrupt):
            run(node, store)
    left = len(node.missing(store))
    assert left < 2

    def counted(model, runs, **options):
        asked.append(len(runs))
        return stream(model, runs, **options)

    monkeypatch.setattr("mizarr.stages.forward.runs.experiment.stream", counted)
    run(node, store)
    run(DoseResponse(IDS, ((-1, KEY),)).on(model), store)
    assert asked == [len(DOSE_LEVELS) * left] * bool(left) + [len(DOSE_LEVELS)]


BASE = {"tokens": IDS, "edges": ((-1, KEY),)}


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": IDS[:-1]},
        {"edges": ((-1, 5),)},
        {"doses": (0.5, 1.0)},
        {"layers": (0,)},
        {"window": 2},
        {"heads": (1,)},
        {"kind": "set_value", "doses": (0.5,)},
        {"target": (7,)},
        {"top_k": 2},
    ],
)
def test_the_key_moves_with_every_parameter(llama, tmp_path, changed):
    store = open_store(tmp_path)
    plain, other = (DoseResponse(**given).on(llama[0]).key(store) for given in (BASE, BASE | changed))
    assert plain.digest != other.digest


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"doses": ()}, StageError, "each dose once, found none"),
        ({"doses": (1.0, 1.0)}, StageError, r"each dose once, found \[1.0, 1.0\]"),
        ({"doses": (-1.0,)}, InterventionError, "factor >= 0, found -1.0"),
        ({"doses": (float("nan"),)}, InterventionError, "found nan"),
        ({"kind": "add"}, StageError, "'scale' or 'set_value', found 'add'"),
        ({"kind": "set_value", "doses": (2.0,)}, InterventionError, r"weight in \[0, 1\]"),
        ({"edges": ()}, InterventionError, "at least one edge"),
        ({"edges": ((3, 5),)}, InterventionError, "no weight there"),
        ({"window": 4}, InterventionError, "window from 1 to 3, the number of layers, found 4"),
        ({"window": 2, "layers": (2,)}, InterventionError, "layers from 0 to 1, each once, found 2"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(llama, tmp_path, given, error, message):
    with pytest.raises(error, match=message) as found:
        DoseResponse(**BASE | given).on(llama[0]).status(open_store(tmp_path))
    assert "\n" not in str(found.value)


# -- on paper


def test_a_uniform_row_of_four_doubled_at_one_place():
    assert steered_weight(0.25, 2.0) == pytest.approx(0.4)
    np.testing.assert_allclose(steered_weight(np.array([0.0, 1.0, 0.5]), 3.0), [0, 1, 0.75])


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_the_exact_factor_of_one_weight_gives_the_target(weight, target):
    assert steered_weight(weight, exact_factor(weight, target)) == pytest.approx(target, rel=1e-9)


@given(st.lists(st.floats(0.001, 0.9), min_size=2, max_size=8), st.floats(0.01, 0.99))
def test_the_exact_factor_of_a_mean_gives_the_target(weights, target):
    factor = exact_factor(weights, target)
    assert steered_weight(np.array(weights), factor).mean() == pytest.approx(target, rel=1e-6)


def test_a_mean_no_factor_reaches_is_refused():
    assert exact_factor(0.3, 0.0) == 0.0
    assert exact_factor([0.0, 0.5], 0.4) == pytest.approx(4.0)
    for weights, target in ((0.0, 0.5), (0.3, 1.0), ([1.0, 0.5], 0.4), ([0.0, 0.5], 0.6)):
        with pytest.raises(InterventionError, match="expected a target attention weight between"):
            exact_factor(weights, target)


def test_the_exact_factor_steers_the_heads_of_a_model_to_the_mean_asked_for(llama, tmp_path):
    model, _ = llama
    before = computed(DoseResponse(IDS, ((-1, KEY),), doses=(1.0,)), model, tmp_path / "a")
    heads = before["baseline_head_attention"][1].values
    factor = exact_factor(heads, 0.5)
    after = computed(DoseResponse(IDS, ((-1, KEY),), doses=(factor,), layers=(1,)), model, tmp_path / "b")
    assert float(after["attention"][0, 0]) == pytest.approx(0.5, abs=1e-5)


def test_calibration_by_the_numbers_of_candle_mi():
    calibration = SteeringCalibration(0.09, 0.025, layer=3, n_source=5, n_target=4)
    assert calibration.attention_ratio == pytest.approx(3.6)
    assert calibration.scale_factor_to_source() == pytest.approx(3.6)
    assert calibration.scale_factor_for_target(0.05) == pytest.approx(2.0)
    assert calibration.dose_levels_absolute[0] == pytest.approx((0.5, 0.0125))
    assert calibration.recommended_target == 0.09
    assert calibration.with_target(0.2).recommended_target == 0.2


def test_linear_doses_leave_renormalisation_out_and_exact_ones_do_not():
    calibration = SteeringCalibration(0.9, 0.4, layer=0)
    assert calibration.dose_levels_absolute[-1][1] == pytest.approx(2.4), "no weight is above 1"
    assert calibration.dose_levels_exact[-1][1] == pytest.approx(6 * 0.4 / (1 + 5 * 0.4))
    exact = calibration.exact_factor_for_target(0.9)
    assert exact == pytest.approx(0.9 * 0.6 / (0.4 * 0.1))
    assert exact > calibration.scale_factor_to_source()


def test_without_attention_to_scale_no_factor_is_recommended():
    calibration = SteeringCalibration(0.5, 0.0, layer=0)
    assert calibration.attention_ratio == 0.0
    assert calibration.scale_factor_for_target(0.3) == calibration.exact_factor_for_target(0.3) == 1.0
    with pytest.raises(InterventionError, match="source_baseline"):
        SteeringCalibration(1.5, 0.1, layer=0)


def curve(*points):
    made = DoseResponseCurve("sample", "target", 2, 0.1)
    for scale, level in points:
        made = made.with_point(scale, level, 0.0)
    return made


def test_a_curve_interpolates_between_the_first_points_that_bracket():
    assert curve((1, 0.1), (2, 0.3), (4, 0.5)).scale_for_target(0.2) == pytest.approx(1.5)
    assert curve((1, 0.1), (2, 0.3), (4, 0.5)).scale_for_target(0.5) == pytest.approx(4)
    assert curve((4, 0.5), (2, 0.3), (1, 0.1)).scale_for_target(0.4) == pytest.approx(3)
    assert curve((1, 0.1), (2, 0.1), (3, 0.2)).scale_for_target(0.1) == pytest.approx(2), "a flat pair"
    assert curve((1, 0.1), (2, 0.3)).scale_for_target(0.31) is None
    assert curve((1, 0.1)).scale_for_target(0.1) is None


def test_a_curve_of_a_response_holds_its_numbers(llama, tmp_path):
    found = computed(DoseResponse(IDS, ((-1, KEY),)), llama[0], tmp_path)
    made = DoseResponseCurve.of(found, 1, sample_id="prompt", condition="all heads")
    assert [point.scale_factor for point in made.points] == list(DOSE_LEVELS)
    assert made.baseline_attention == float(found["baseline_attention"][1])
    assert made.points[2].kl_divergence == float(found["kl"][1, 2])
    assert made.scale_for_target(made.points[3].attention_level) == pytest.approx(3.0)


def test_attention_to_targets_is_a_mean_over_prompts_heads_and_targets():
    pattern = np.zeros((2, 3, 4, 4))
    pattern[..., 3, 0], pattern[..., 3, 1] = 0.5, 0.25
    pattern[0, 0, 3, 0] = 0.1
    for values in (pattern, torch.from_numpy(pattern)):
        assert measure_attention_to_targets(values, 3, [0]) == pytest.approx((0.1 + 5 * 0.5) / 6)
    assert measure_attention_to_targets(xr.DataArray(pattern), -1, [0, 1]) == pytest.approx(
        ((0.1 + 5 * 0.5) / 6 + 0.25) / 2
    )


@pytest.mark.parametrize(("query", "keys"), [(4, [0]), (-5, [0]), (0, [4]), (0, [])])
def test_attention_to_what_is_not_there_is_an_error(query, keys):
    with pytest.raises(InterventionError, match="expected"):
        measure_attention_to_targets(np.zeros((4, 4)), query, keys)
