"""Scores, exact effects, selections and circuits are those of EAP-IG's published code, on its three
shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr import Model
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference
from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.circuits.evaluation import CircuitValues, faithfulness
from mizarr.stages.circuits.pairs import Pair
from mizarr.stages.circuits.scores import EdgeEffects, EdgeScores
from mizarr.stages.circuits.search import CircuitSearch
from mizarr.stages.forward.edges.layout import Layout
from tests.stages.circuits.test_elimination import published

SET = Path(mizarr.__file__).parents[1] / "shared" / "reference" / "eap" / "a"
pytestmark = pytest.mark.skipif(not SET.is_dir(), reason="the reference scores are not here")
NAMES = ("gpt2", "llama", "qwen2")
ALTERNATIVES = {"patching": "corrupted", "zero": "zero", "mean-positional": "mean"}
LAYOUT = Layout(4, (False,) * 3)


@pytest.fixture(scope="module")
def models():
    return {name: Model.from_pretrained(SET / "models" / name) for name in NAMES}


def stored(name, what):
    return dict(np.load(SET / "cases" / name / f"{what}.npz"))


def pairs_of(name, metric):
    task = stored(name, "task")
    rows = zip(*(task[key].tolist() for key in ("clean_ids", "corrupted_ids", "target_ids")), strict=True)
    return tuple(
        Pair(tuple(clean), tuple(corrupted), LogitDifference(*targets) if metric == "ld" else KL())
        for clean, corrupted, targets in rows
    )


def assert_scores(found, wanted):
    found = np.where(LAYOUT.edges, found, 0.0) if found.ndim == 2 else found
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 1e-5 * max(scale, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_has_the_same_names_in_the_same_order(models, name):
    graph, layout = stored(name, "graph"), Layout.of(models[name].config)
    assert layout == LAYOUT
    assert list(graph["src_names"]) == list(layout.sources)
    assert list(graph["dst_names"]) == list(layout.destinations)
    assert (graph["real_edge_mask"].astype(bool) == layout.edges).all()
    for edge, (row, column) in zip(graph["edge_names"], graph["edge_index"], strict=True):
        assert layout.name(row, column) == edge


@pytest.mark.parametrize("name", NAMES)
def test_edge_and_node_scores_are_the_same(models, name):
    nodes = stored(name, "nodes")
    for key, wanted in stored(name, "edges").items():
        method, *rest = key.split(".")
        if method in ("exact", "quirk_mean", "raw_mean_metric"):
            continue
        metric, intervention = rest or ("ld", "patching")
        scores = EdgeScores(
            pairs=pairs_of(name, metric), method=method, alternative=ALTERNATIVES[intervention]
        )
        found = scores.dataset(models[name], {}, ())
        assert_scores(found["score"].values, wanted)
        if (at_output := nodes.get(f"at_output.{key}")) is not None:
            assert_scores(found["node_score"].values, at_output)


@pytest.mark.parametrize("name", NAMES)
def test_exact_effects_are_the_same(models, name):
    for key, wanted in stored(name, "edges").items():
        method, *rest = key.split(".")
        if method != "exact":
            continue
        effects = EdgeEffects(pairs=pairs_of(name, rest[0]), alternative=ALTERNATIVES[rest[1]])
        parts = [effects.dataset(models[name], cell, ()) for cell in effects.cells(models[name].config)]
        assert_scores(effects.joined(parts)["effect"].mean("pair").values, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_selections_and_what_circuits_give_are_the_same(models, name):
    edges, values = stored(name, "edges"), stored(name, "eval")
    meta = json.loads((SET / "meta.json").read_text())["models"][name]["circuits"]
    circuits = {}
    for key in values:
        if not key.endswith(".in_graph"):
            continue
        label = key.removesuffix(".in_graph")
        rank, selection = label.split(".")
        scores = edges[f"{rank}.ld.patching"]
        if selection.startswith("greedy"):
            found = Circuit.greedy(LAYOUT, scores, int(selection.removeprefix("greedy")))
        else:
            found = Circuit.top(LAYOUT, scores, int(selection.removeprefix("topn")))
            assert (found.chosen == values[f"{label}.in_graph_before_prune"].astype(bool)).all()
        circuits[label] = found.pruned()
        assert (circuits[label].chosen == values[key].astype(bool)).all()
        kept = [
            each for each, held in zip(LAYOUT.sources, values[f"{label}.nodes_in_graph"], strict=True) if held
        ]
        assert list(circuits[label].nodes) == [*kept, "logits"]
    for intervention, alternative in ALTERNATIVES.items():
        for metric in ("ld", "kl"):
            asked = CircuitValues(
                pairs=pairs_of(name, metric), circuits=tuple(circuits.values()), alternative=alternative
            )
            given = asked.dataset(models[name], {}, ())
            bar = 2e-3 if intervention == "zero" else 1e-4
            for row, label in enumerate(circuits):
                wanted = values[f"{label}.{intervention}.{metric}"]
                np.testing.assert_allclose(given["value"].values[row], wanted, atol=bar)
            if (intervention, metric) == ("patching", "ld"):
                np.testing.assert_allclose(given["clean"], values["baseline.clean.ld"], atol=1e-5)
                np.testing.assert_allclose(given["empty"], values["baseline.corrupted.ld"], atol=1e-5)
                told = [meta[label]["faithfulness_ld_patching"] for label in circuits if label in meta]
                ours = dict(zip(circuits, faithfulness(given), strict=True))
                np.testing.assert_allclose(
                    [ours[label] for label in circuits if label in meta], told, atol=1e-4
                )


@pytest.mark.parametrize("name", NAMES)
def test_acdc_chooses_what_its_published_loop_does(models, name):
    """The loop is written out beside test_elimination.py; its metric, the KL of the reference's runs."""
    pairs = pairs_of(name, "kl")[:2]
    threshold = 0.02 * float(stored(name, "task")["kl_corrupted"][:2].mean())
    found = CircuitSearch(pairs=pairs, threshold=threshold).dataset(models[name], {}, ())
    chosen = LAYOUT.names(found["chosen"].values > 0)
    assert set(chosen) == published(models[name], pairs, threshold)
    assert 0 < len(chosen) < int(LAYOUT.edges.sum())
