"""Influence, thresholds and pruning, on matrices one can do on paper and against dense algebra."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, strategies as st

from mizarr.stages.graph.pruning import cumulative_scores, kept_part, pruned_graph
from mizarr.stages.graph.quantile import share_threshold, sorted_threshold
from mizarr.stages.graph.rows import influence as module
from mizarr.stages.graph.rows.influence import GraphRows, influence, partial_influence, scores
from mizarr.stages.graph.rows.nodes import NodeCounts, node_labels
from mizarr.store.errors import ShapeError, StageError


def dataset(layers: list[int], n_layers: int, positions: int, weights, probabilities) -> xr.Dataset:
    """A graph with one feature of each of these layers."""
    features = np.array([[layer, positions - 1, number] for number, layer in enumerate(layers)]).reshape(
        -1, 3
    )
    return xr.Dataset(
        {
            "weights": (("target", "source"), np.asarray(weights, np.float32)),
            "active_features": (("active", "axis"), features),
            "activation_values": ("active", np.ones(len(layers), np.float32)),
            "selected_features": ("selected", np.arange(len(layers))),
            "input_tokens": ("input_position", np.arange(positions)),
            "logit_token_ids": ("logit", np.arange(len(probabilities))),
            "logit_probabilities": ("logit", np.asarray(probabilities, float)),
        },
        attrs={"n_layers": n_layers},
    )


def chain() -> xr.Dataset:
    """token -> feature of layer 0 -> feature of layer 1 -> logit; the error of layer 0 takes a half of one
    edge."""
    #           f0  f1  e0  e1  token
    weights = [[0, 0, 0, 0, 2.0], [-3.0, 0, 3.0, 0, 0], [0, 5.0, 0, 0, 0]]
    return dataset([0, 1], 2, 1, weights, [0.8])


def test_influence_of_a_chain():
    found = influence(GraphRows.of(chain()))
    np.testing.assert_allclose(found.node, [0.4, 0.8, 0.4, 0, 0.4, 0])
    told = scores(GraphRows.of(chain()), found)
    assert told["replacement_score"] == pytest.approx(0.5)
    # What enters: f0 all but 0, f1 half an error, the logit none; weights 0.4, 0.8, 0.8; others are whole.
    assert told["completeness_score"] == pytest.approx(1 - 0.5 * 0.8 / (0.4 + 0.8 + 0.4 + 0.4 + 0.8))


def test_a_pruned_chain_keeps_what_leads_somewhere():
    kept = kept_part(GraphRows.of(chain()), node_threshold=0.4, edge_threshold=1.0)
    # f1 has 0.4 of all influence; without f0 and the error nothing leads to it, so it goes as well.
    assert kept.nodes.tolist() == [False, False, False, False, True, True]
    assert not len(kept.weight)
    whole = kept_part(GraphRows.of(chain()), node_threshold=1.0, edge_threshold=1.0)
    assert whole.nodes.tolist() == [True, True, True, False, True, True]
    assert list(zip(whole.source.tolist(), whole.target.tolist(), whole.weight.tolist(), strict=True)) == [
        (4, 0, 2.0),
        (0, 1, -3.0),
        (2, 1, 3.0),
        (1, 5, 5.0),
    ]


def random_graph(seed: int, blank: float = 0.3) -> xr.Dataset:
    rng = np.random.default_rng(seed)
    layers = sorted(rng.integers(0, 4, 12).tolist())
    count = NodeCounts(12, 4, 3, 2)
    weights = rng.standard_normal((count.targets, count.sources)) * (
        rng.random((count.targets, count.sources)) > blank
    )
    lowest = np.array([*layers, 4, 4])
    source_layer = np.array([*layers, *np.repeat(np.arange(4), 3), -1, -1, -1])
    weights[source_layer[None] >= lowest[:, None]] = 0
    return dataset(layers, 4, 3, weights, rng.random(2))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("block_bytes", [1, 1 << 26])
def test_influence_is_that_of_dense_algebra(seed: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    graph = random_graph(seed)
    rows = GraphRows.of(graph)
    count = rows.counts
    matrix = np.zeros((count.nodes, count.nodes))
    matrix[count.target_nodes, : count.sources] = np.abs(graph["weights"])
    matrix /= np.maximum(matrix.sum(1, keepdims=True), 1e-10)
    weight = np.zeros(count.nodes)
    weight[count.sources :] = graph["logit_probabilities"]
    expected = weight @ (np.linalg.inv(np.eye(count.nodes) - matrix) - np.eye(count.nodes))
    np.testing.assert_allclose(influence(rows).node, expected, atol=1e-12)
    blocks = [(count.target_nodes[::-1], graph["weights"].values[::-1])]
    np.testing.assert_allclose(partial_influence(blocks, weight), expected, atol=1e-6)


def test_edges_that_run_downwards_are_refused():
    graph = chain()
    graph["weights"][0, 1] = 1.0
    with pytest.raises(ShapeError, match="transposed"):
        influence(GraphRows.of(graph))


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=60), st.floats(0, 1), st.integers(1, 5))
def test_a_threshold_is_that_of_a_full_sort(values, share, pieces):
    scores_ = np.array(values)
    with np.errstate(over="ignore"):
        if not np.isfinite(scores_.sum()):
            return
    blocks = np.array_split(scores_, pieces)
    found = share_threshold(lambda: iter(blocks), share)
    ranked = np.sort(scores_[scores_ > 0])[::-1]
    if not len(ranked):
        assert found == np.inf
        return
    cumulative = np.cumsum(ranked)
    place = min(int(np.searchsorted(cumulative, share * cumulative[-1])), len(ranked) - 1)
    # Sums in another order may differ in the last bit, which moves the place where they are equal.
    assert found in ranked[max(0, place - 1) : place + 2]
    assert scores_[scores_ >= found].sum() >= share * scores_.sum() * (1 - 1e-12)


def test_many_scores_in_one_bin_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    from mizarr.stages.graph import quantile

    monkeypatch.setattr(quantile, "SORTED", 4)
    scores_ = 1 + np.arange(1000) / 1e9
    for share in (0.001, 0.5, 0.999, 1.0):
        place = min(int(np.ceil(share * 1000)) - 1, 999)
        assert sorted_threshold(scores_, share) == pytest.approx(np.sort(scores_)[::-1][place], abs=1e-9)
    assert sorted_threshold(np.full(1000, 0.25), 0.5) == 0.25


def test_cumulative_scores_rank_nodes():
    np.testing.assert_allclose(cumulative_scores(np.array([1.0, 2.0, 1.0, 0.0])), [0.75, 0.5, 1.0, 1.0])
    np.testing.assert_array_equal(cumulative_scores(np.zeros(3)), np.zeros(3))


def test_thresholds_outside_0_to_1_are_refused():
    with pytest.raises(StageError, match=r"node_threshold to be a share from 0 to 1, found 1\.2"):
        kept_part(GraphRows.of(chain()), node_threshold=1.2)


def test_the_stage_gives_what_the_function_gives():
    graph = random_graph(1)
    found = pruned_graph.compute({"graph": graph}, {"node_threshold": 0.7, "edge_threshold": 0.9})
    kept = kept_part(GraphRows.of(graph), node_threshold=0.7, edge_threshold=0.9)
    np.testing.assert_array_equal(found["kept"], kept.nodes)
    np.testing.assert_array_equal(found["edge_weight"], kept.weight)
    assert (
        float(found["replacement_score"])
        == scores(GraphRows.of(graph), influence(GraphRows.of(graph)))["replacement_score"]
    )


def test_labels_follow_the_order_of_nodes():
    labels = node_labels(chain())
    assert labels["kind"].tolist() == ["feature", "feature", "error", "error", "token", "logit"]
    assert labels["layer"].tolist() == [0, 1, 0, 1, -1, 2]
    assert labels["feature"].tolist() == [0, 1, -1, -1, 0, 0]
    assert np.isnan(labels["activation"][2:]).all()
