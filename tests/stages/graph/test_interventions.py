"""Models run with features set to other values: the runs of circuit-tracer, and what a graph predicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mizarr.stages.graph.interventions import feature_intervention, generate_with_features
from mizarr.store.errors import DictionaryError, InterventionError, PromptError

from .reference import CIRCUITS, arrays, dictionary_of, graph_of, meta, model_of, needs_reference

pytestmark = needs_reference
CASES = ("clt_p0", "clt_p1", "plt_p1", "gemma2_p1")
RUNS = [
    (case, run["tag"])
    for case in (CASES if CIRCUITS.is_dir() else ())
    for run in meta(case)["intervention_runs"]
]


def given(told: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (layer, position if isinstance(position, int) else slice(*position[1:]), feature, value)
        for layer, position, feature, value in told
    ]


@pytest.mark.parametrize(("case", "tag"), RUNS)
def test_a_run_is_the_same(case: str, tag: str):
    run = next(each for each in meta(case)["intervention_runs"] if each["tag"] == tag)
    options = {name: value for name, value in run.items() if name not in ("tag", "interventions")}
    found = feature_intervention(
        model_of(case), dictionary_of(case), meta(case)["tokens"], given(run["interventions"]), **options
    )
    expected = arrays(case, "interventions")
    np.testing.assert_allclose(found.logits, expected[f"{tag}_logits"], rtol=0, atol=1e-4)
    assert found.activations is not None
    np.testing.assert_allclose(found.activations, expected[f"{tag}_activations"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_without_interventions_it_is_the_model(case: str):
    expected = arrays(case, "interventions")
    for before, name in ((False, "base_activations"), (True, "base_preactivations")):
        found = feature_intervention(
            model_of(case), dictionary_of(case), meta(case)["prompt"], apply_activation_function=not before
        )
        np.testing.assert_allclose(found.logits, expected["base_logits"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(found.activations, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_tokens_generated_are_the_same(case: str):
    told = meta(case)["generate"]
    found = generate_with_features(
        model_of(case),
        dictionary_of(case),
        meta(case)["tokens"],
        given(told["interventions"]),
        max_new_tokens=told["max_new_tokens"],
        freeze_attention=told["freeze_attention"],
    )
    expected = arrays(case, "interventions")
    np.testing.assert_array_equal(found.token_ids, expected["generate_tokens"])
    np.testing.assert_allclose(found.logits, expected["generate_logits"], rtol=0, atol=1e-4)
    assert found.activations is not None and found.activations.shape[1] == len(found.token_ids) - 1


@pytest.mark.parametrize("case", CASES)
def test_direct_effects_are_columns_of_the_graph(case: str):
    graph, model, dictionary = graph_of(case), model_of(case), dictionary_of(case)
    features = graph.active_features[graph.selected_features]
    options = {"constrained_layers": range(model.config.num_layers), "apply_activation_function": False}
    clean = feature_intervention(model, dictionary, meta(case)["prompt"], apply_activation_function=False)
    assert clean.activations is not None
    for number in np.random.default_rng(0).choice(len(features), 4, replace=False):
        layer, position, feature = features[number].tolist()
        doubled = 2 * float(graph.activation_values[graph.selected_features[number]])
        found = feature_intervention(
            model, dictionary, meta(case)["prompt"], [(layer, position, feature, doubled)], **options
        )
        assert found.activations is not None
        change = (found.activations - clean.activations)[tuple(torch.from_numpy(features).T)]
        column = graph.adjacency.values[: len(features), number]
        np.testing.assert_allclose(change, column, rtol=1e-4, atol=2e-5)


def test_reading_on_gives_what_reading_anew_gives():
    case, edit = "clt_p1", [(0, slice(1, None), 7, 4.0)]
    model, dictionary = model_of(case), dictionary_of(case)
    options = {"freeze_attention": False}
    found = generate_with_features(model, dictionary, meta(case)["tokens"], edit, max_new_tokens=3, **options)
    again = feature_intervention(model, dictionary, list(found.token_ids[:-1]), edit, **options)
    np.testing.assert_allclose(found.logits, again.logits[-3:], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.activations, again.activations, rtol=0, atol=1e-4)


def test_generation_ends_at_a_stop_token_and_draws_by_seed():
    case = "clt_p1"
    run = {"model": model_of(case), "dictionary": dictionary_of(case), "prompt": meta(case)["tokens"]}
    greedy = generate_with_features(**run, max_new_tokens=4)
    length = len(meta(case)["tokens"])
    stopped = generate_with_features(**run, max_new_tokens=4, stop=[greedy.token_ids[length]])
    assert stopped.token_ids == greedy.token_ids[: length + 1]
    drawn = [
        generate_with_features(**run, max_new_tokens=4, temperature=1.0, seed=s).token_ids for s in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_one_layer_need_not_return_what_it_reads():
    case = "clt_p0"
    edit = [(1, 4, 3, 2.0)]
    whole = feature_intervention(model_of(case), dictionary_of(case), meta(case)["tokens"], edit)
    brief = feature_intervention(
        model_of(case), dictionary_of(case), meta(case)["tokens"], edit, return_activations=False
    )
    assert brief.activations is None
    torch.testing.assert_close(brief.logits, whole.logits)


@pytest.mark.parametrize(
    ("edit", "options", "error", "told"),
    [
        ((9, 1, 0, 1.0), {}, DictionaryError, "layers 0 to 3"),
        ((0, 1, 64, 1.0), {}, DictionaryError, "0 to 63"),
        ((0, 40, 0, 1.0), {}, InterventionError, "position .* feature 0 of layer 0 from -9 to 8 .* found 40"),
        ((0, 1, 0, float("nan")), {}, InterventionError, "finite"),
        (
            (0, 1, 0, 1.0),
            {"constrained_layers": [4]},
            InterventionError,
            "constrained_layers among the model's layers 0 to 3, found 4",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(edit, options, error, told):
    case = "clt_p1"
    with pytest.raises(error, match=told):
        feature_intervention(model_of(case), dictionary_of(case), meta(case)["tokens"], [edit], **options)


def test_more_tokens_than_the_context_holds_are_refused():
    case = "clt_p1"
    with pytest.raises(
        PromptError, match=r"max_new_tokens from 1 to 247, .* 9 tokens and the context .* 256, found 400"
    ):
        generate_with_features(model_of(case), dictionary_of(case), meta(case)["tokens"], max_new_tokens=400)
