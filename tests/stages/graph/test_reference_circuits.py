"""Graphs, influence, scores and pruned graphs are those of circuit-tracer, case by case."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.stages.graph.graph import attribution_graph

from .reference import (
    CASES,
    arrays,
    dictionary_of,
    edge_mask,
    graph_of,
    meta,
    model_of,
    needs_reference,
    settings_of,
)

pytestmark = needs_reference
ADJACENCY, SCORES = 1e-5, 1e-5


@pytest.mark.parametrize("case", CASES)
def test_nodes_are_the_same(case: str):
    graph, expected = graph_of(case), arrays(case)
    np.testing.assert_array_equal(graph.input_tokens, expected["input_tokens"])
    np.testing.assert_array_equal(graph.active_features, expected["active_features"])
    np.testing.assert_array_equal(graph.selected_features, expected["selected_features"])
    np.testing.assert_allclose(graph.activation_values, expected["activation_values"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(graph.logit_token_ids, expected["logit_token_ids"])
    np.testing.assert_allclose(
        graph.logit_probabilities, expected["logit_probabilities"], rtol=1e-5, atol=1e-6
    )
    assert graph.logit_tokens == [target["token"] for target in meta(case)["logit_targets"]]


@pytest.mark.parametrize("arithmetic", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_edges_are_the_same(case: str, arithmetic: str):
    graph = attribution_graph(
        model_of(case), dictionary_of(case), meta(case)["prompt"], arithmetic=arithmetic, **settings_of(case)
    )
    difference = np.abs(graph.adjacency.values - arrays(case)["adjacency_matrix"]).max()
    print(f"{case} {arithmetic}: max |difference| {difference:.1e}")
    assert difference <= ADJACENCY


@pytest.mark.parametrize("case", CASES)
def test_influence_and_scores_are_the_same(case: str):
    graph, told = graph_of(case), meta(case)
    np.testing.assert_allclose(graph.influence, arrays(case)["node_influence"], rtol=0, atol=SCORES)
    assert graph.replacement_score == pytest.approx(told["replacement_score"], abs=SCORES)
    assert graph.completeness_score == pytest.approx(told["completeness_score"], abs=SCORES)


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_the_same(case: str):
    graph, expected = graph_of(case), arrays(case)
    for number, told in enumerate(meta(case)["prune"]):
        kept = graph.prune(told["node_threshold"], told["edge_threshold"])
        np.testing.assert_array_equal(kept.node_mask, expected[f"prune{number}_node_mask"])
        np.testing.assert_array_equal(kept.edge_mask, edge_mask(case, number))
        np.testing.assert_allclose(kept.cumulative_scores, expected["cumulative_scores"], rtol=0, atol=SCORES)


@pytest.mark.parametrize("case", ["clt_p1", "clt_p1_top60"])
def test_memory_of_a_megabyte_gives_the_same_graph(case: str):
    graph = attribution_graph(
        model_of(case), dictionary_of(case), meta(case)["prompt"], memory="1MiB", **settings_of(case)
    )
    np.testing.assert_array_equal(graph.selected_features, graph_of(case).selected_features)
    np.testing.assert_allclose(graph.adjacency, graph_of(case).adjacency, rtol=2e-6, atol=2e-6)


def test_what_a_greedy_choice_leaves_out_is_told():
    dropped = graph_of("clt_p1_top60").dataset["dropped"].values
    whole = np.abs(graph_of("clt_p1").dataset["weights"].values)
    left_out = np.setdiff1d(np.arange(195), graph_of("clt_p1_top60").selected_features)
    np.testing.assert_allclose(dropped[-1], whole[-1, left_out].sum() / whole[-1].sum(), rtol=1e-5)
    assert graph_of("clt_p1").dataset["dropped"].values.max() == 0
