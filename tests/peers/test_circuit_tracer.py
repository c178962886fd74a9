"""Graphs, pruned graphs, files and feature interventions agree with circuit-tracer on random weights.

Fresh models (Llama, Gemma 2, Qwen 2 and 3) and transcoders (CLT and per layer; ReLU, JumpReLU, TopK; with
and without skip; read before, in and behind the norm) for every seed. To run these: an environment with
circuit-tracer 0.5.0, transformer-lens 3.2, transformers 4.57 and mizarr's own requirements, and in it

    PYTHONPATH=.venv/src HF_HUB_OFFLINE=1 python -m pytest tests/peers/test_circuit_tracer.py -rP
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr.stages.graph.graph import AttributionGraph, attribution_graph
from mizarr.stages.graph.interventions import feature_intervention, generate_with_features

from ..stages.graph.circuit_models import save_model, tracer
from ..stages.graph.random_transcoders import save_random_transcoders

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-5
"""Of edges, beside 1e-5 of their size: both compute in float32, in another order."""
PAIRS = [
    ("llama", "clt-jumprelu"),
    ("llama", "clt-relu"),
    ("llama", "plt-relu-skip"),
    ("llama", "plt-jumprelu"),
    ("llama", "plt-topk"),
    ("gemma2", "clt-jumprelu"),
    ("gemma2", "clt-relu"),
    ("gemma2", "plt-jumprelu"),
    ("gemma2", "plt-relu-skip"),
    ("gemma2", "plt-topk"),
    ("qwen2", "clt-jumprelu"),
    ("qwen2", "plt-relu-skip"),
    ("qwen3", "plt-relu-skip"),
]
SHAPES: list[dict[str, int]] = [
    {},
    {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 40},
    {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 5},
]
"""Of the model, by seed; a sliding window is Gemma 2's alone."""


class Pair:
    """One random model and dictionary in both."""

    def __init__(self, family: str, kind: str, seed: int, folder: Path) -> None:
        pytest.importorskip("circuit_tracer", exc_type=ImportError)
        self.seed = seed
        shape = {k: v for k, v in SHAPES[seed].items() if k != "sliding_window" or family == "gemma2"}
        path = save_model(folder / "model", family, seed, **shape)
        self.model = mizarr.Model.from_pretrained(path)
        transcoders = save_random_transcoders(
            folder / "transcoders", self.model, kind, seed=seed + 1, features=40, density=0.12
        )
        self.dictionary = mizarr.Dictionary.from_pretrained(transcoders)
        self.peer = tracer(path, transcoders)
        rng = np.random.default_rng(seed)
        self.tokens = [0, *rng.integers(3, 300, 11).tolist()]

    def graphs(self, **options: Any) -> tuple[AttributionGraph, Any]:
        from circuit_tracer import attribute

        ours = attribution_graph(self.model, self.dictionary, self.tokens, **options)
        targets = options.pop("targets", None)
        if isinstance(targets, list) and isinstance(targets[0], int):
            targets = torch.tensor(targets)
        options.setdefault("batch_size", 64)
        theirs = attribute(
            torch.tensor(self.tokens), self.peer, attribution_targets=targets, verbose=False, **options
        )
        return ours, theirs


@pytest.fixture(
    scope="module",
    params=[(*pair, seed) for pair in PAIRS for seed in range(len(SHAPES))],
    ids=lambda each: "-".join(map(str, each)),
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*request.param, tmp_path_factory.mktemp("pair"))


def agree(ours: AttributionGraph, theirs: Any) -> None:
    from circuit_tracer.graph import compute_graph_scores, prune_graph

    np.testing.assert_array_equal(ours.active_features, theirs.active_features)
    np.testing.assert_array_equal(ours.selected_features, theirs.selected_features)
    np.testing.assert_array_equal(ours.logit_token_ids, theirs.logit_token_ids)
    expected = theirs.adjacency_matrix.numpy()
    difference = float(np.abs(ours.adjacency.values - expected).max())
    print(
        f"{os.environ.get('PYTEST_CURRENT_TEST', '')}: {len(ours.selected_features)} features, edges to "
        f"{np.abs(expected).max():.1f}, max |difference| {difference:.1e}"
    )
    np.testing.assert_allclose(ours.adjacency, expected, rtol=TOLERANCE, atol=TOLERANCE)
    replacement, completeness = compute_graph_scores(theirs)
    assert ours.replacement_score == pytest.approx(replacement, abs=TOLERANCE)
    assert ours.completeness_score == pytest.approx(completeness, abs=TOLERANCE)
    for thresholds in ((0.8, 0.98), (0.5, 0.9)):
        kept, expected_kept = ours.prune(*thresholds), prune_graph(theirs, *thresholds)
        np.testing.assert_array_equal(kept.node_mask, expected_kept.node_mask)
        np.testing.assert_array_equal(kept.edge_mask, expected_kept.edge_mask)
        cumulative_agree(kept.cumulative_scores, expected_kept.cumulative_scores.numpy(), ours)


def cumulative_agree(found: np.ndarray, expected: np.ndarray, graph: AttributionGraph) -> None:
    """The same sums; and of the same nodes, but where two are as influential to the rounding of either."""
    sources = graph.counts.sources
    np.testing.assert_allclose(np.sort(found[:sources]), np.sort(expected[:sources]), atol=TOLERANCE)
    influence = np.sort(graph.influence[:sources])
    gap = np.diff(influence, prepend=-1, append=2)
    near = np.minimum(gap[:-1], gap[1:])[np.argsort(np.argsort(graph.influence[:sources]))]
    clear = near > TOLERANCE * graph.influence[:sources]
    np.testing.assert_allclose(found[:sources][clear], expected[:sources][clear], atol=TOLERANCE)


def test_a_whole_graph_agrees(pair: Pair):
    agree(*pair.graphs())


@pytest.mark.parametrize(("most", "at_once"), [(40, (6, 2)), (25, (64, 1)), (33, (5, 3))])
def test_a_greedy_choice_agrees(pair: Pair, most: int, at_once: tuple[int, int]):
    batch, interval = at_once
    agree(*pair.graphs(max_feature_nodes=most, batch_size=batch, update_interval=interval))


def test_targets_agree(pair: Pair):
    agree(*pair.graphs(targets=[5, 77, 301]))
    vector = pair.peer.unembed.W_U[:, 9] - pair.peer.unembed.W_U[:, 4]
    agree(*pair.graphs(targets=[("nine - four", 1.0, vector)]))
    agree(*pair.graphs(targets=[("one", 0.7, vector), ("other", 0.3, -2 * vector)], max_feature_nodes=30))
    agree(*pair.graphs(max_n_logits=3, desired_logit_prob=0.5))
    agree(*pair.graphs(max_n_logits=40, desired_logit_prob=0.999))


def test_circuit_tracer_reads_our_file_and_draws_the_same_graph(pair: Pair, tmp_path: Path):
    from circuit_tracer.graph import Graph
    from circuit_tracer.utils.create_graph_files import create_graph_files

    ours, theirs = pair.graphs()
    read = Graph.from_pt(str(ours.to_pt(tmp_path / "graph.pt")))
    np.testing.assert_array_equal(read.adjacency_matrix, ours.adjacency)
    assert read.logit_targets == theirs.logit_targets
    assert read.cfg.n_layers == theirs.cfg.n_layers
    assert read.cfg.original_architecture == theirs.cfg.original_architecture
    create_graph_files(read, "graph", str(tmp_path / "theirs"))
    path = ours.prune().to_viewer(tmp_path / "ours", "graph")
    found, expected = (json.loads(each.read_text()) for each in (path, tmp_path / "theirs" / "graph.json"))
    assert found["metadata"] == expected["metadata"]
    for kind in ("nodes", "links"):
        assert len(found[kind]) == len(expected[kind])
        for mine, other in zip(found[kind], expected[kind], strict=True):
            for name in ("influence", "activation", "token_prob", "weight"):
                assert mine.pop(name, None) == pytest.approx(other.pop(name, None), abs=TOLERANCE)
            assert mine == other


def test_interventions_agree(pair: Pair):
    active = attribution_graph(pair.model, pair.dictionary, pair.tokens).active_features
    layer, position, feature = active[np.random.default_rng(pair.seed).integers(len(active))].tolist()
    edits = [(layer, position, feature, 4.0), (0, slice(2, 6), 3, 2.0), (layer, position, feature, 3.0)]
    layers = pair.model.config.num_layers
    modes: list[dict[str, Any]] = [
        {"constrained_layers": range(layers), "apply_activation_function": False},
        {"constrained_layers": range(layer, min(layer + 2, layers))},
        {},
        {"freeze_attention": False, "apply_activation_function": False},
    ]
    for mode in modes:
        ours = feature_intervention(pair.model, pair.dictionary, pair.tokens, edits, **mode)
        logits, activations = pair.peer.feature_intervention(torch.tensor(pair.tokens), edits, **mode)
        torch.testing.assert_close(ours.logits, logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.activations, activations, rtol=1e-4, atol=1e-4)


def test_generation_agrees(pair: Pair):
    edits = [(0, slice(1, None), 7, 3.0), (1, 4, 5, 2.0)]
    ours = generate_with_features(pair.model, pair.dictionary, pair.tokens, edits, max_new_tokens=4)
    tokens, logits, activations = pair.peer.feature_intervention_generate(
        torch.tensor(pair.tokens)[None],
        edits,
        do_sample=False,
        max_new_tokens=4,
        verbose=False,
        return_type="tokens",
        stop_at_eos=False,
    )
    assert ours.token_ids == tuple(tokens.reshape(-1).tolist())
    torch.testing.assert_close(ours.logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.activations, activations, rtol=1e-4, atol=1e-4)


def test_circuit_tracer_makes_viewer_files_of_a_graph_of_the_built_in_model(tmp_path: Path):
    """From the file alone: scan and tokenizer are found by what it says."""
    pytest.importorskip("circuit_tracer", exc_type=ImportError)
    from circuit_tracer.utils.create_graph_files import create_graph_files

    model, clt = mizarr.Model.from_pretrained("specimen"), mizarr.Dictionary.from_pretrained("specimen/clt")
    ours = attribution_graph(model, clt, "The mother tongue of John Calvin is")
    create_graph_files(str(ours.to_pt(tmp_path / "graph.pt")), "graph", str(tmp_path / "theirs"))
    told = json.loads((tmp_path / "theirs" / "graph.json").read_text())
    assert told["metadata"]["scan"] == "specimen/clt"
    assert told["metadata"]["prompt_tokens"] == [str(text) for text in ours.dataset["input_text"].values]
