"""Leaving edges out one after the other: the literal loop, and how many steps are run at once."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr import Model
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.circuits.elimination import downwards, eliminated
from mizarr.stages.circuits.pairs import Pair, checked_layout
from mizarr.stages.circuits.runs import CircuitRuns
from mizarr.stages.circuits.search import CircuitSearch
from mizarr.stages.forward.edges.layout import Layout
from mizarr.store.errors import StageError
from tests.stages.forward.random_models import save_random_model

from .random_pairs import draw_pairs

LAYOUT = Layout(2, (False, True))


EDGES = [step for step in downwards(LAYOUT) if step[0] is not None]


def test_edges_are_tried_from_the_logits_down():
    order = downwards(LAYOUT)
    assert len(EDGES) == len(set(EDGES)) == int(LAYOUT.edges.sum())
    names = [LAYOUT.name(*edge) for edge in EDGES]
    assert names[:2] == ["m1->logits", "a1.h1->logits"] and names[-1] == "input->a0.h0<q>"
    wholes = [LAYOUT.destinations[column] for source, column in order if source is None]
    assert wholes[:3] == ["a1.h1<v>", "a1.h0<v>", "a1.h1<k>"] and len(wholes) == 2 * 3 * 2
    assert order.index((None, LAYOUT.inputs(1).start)) < order.index((LAYOUT.read_by_heads(1) - 1, 11))


@pytest.mark.parametrize("seed", range(4))
def test_steps_run_at_once_are_those_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    weights = rng.random(LAYOUT.edges.shape)

    def measure(masks, first):
        below = slice(0, LAYOUT.inputs(first).start)
        assert all((mask | ~LAYOUT.edges)[:, below].all() for mask in masks)
        return np.array([(weights * (LAYOUT.edges & ~mask)).sum() for mask in masks])

    def literal(order, rule):
        held, worse = LAYOUT.edges.copy(), 0.0
        for source, destination in order:
            node, edge = LAYOUT.owner[destination], (slice(None) if source is None else source, destination)
            if node >= 0 and not held[node].any():
                held[edge] = False
                continue
            without = held.copy()
            without[edge] = False
            found = (weights * (LAYOUT.edges & ~without)).sum()
            if rule(found, worse):
                held, worse = without, found
        return held

    middle, budget = np.median(weights[:, -1]), weights[LAYOUT.edges].sum() / 3
    ascending = sorted(EDGES, key=lambda edge: weights[edge])
    for order, rule in (
        (downwards(LAYOUT), lambda after, before: after - before < middle),
        (ascending, lambda after, before: after <= budget),
    ):
        ways = [eliminated(LAYOUT, order, measure, rule, at_once) for at_once in (1, 3, 16, 1000)]
        wanted = literal(order, rule)
        assert 0 < wanted.sum() < LAYOUT.edges.sum()
        for way in ways:
            assert (way.chosen == wanted).all() and len(EDGES) <= way.steps + len(order) - len(EDGES)
        assert ways[0].runs <= len(order)


class Published:
    """ACDC as its repository has it (TLACDCExperiment.step), for a graph with separate q, k and v inputs.

    Nodes stand in the order in which TransformerLens meets their hooks, turned round, the last head first.
    Edges of type ADDITION (a sender into a receiver's stream) and DIRECT_COMPUTATION (a head's input into its
    query, key or value) are put to the test one by one; those of type PLACEHOLDER are not. A node that no
    present edge leaves loses all edges into it, untested.
    """

    def __init__(self, layers, heads, threshold, metric):
        self.threshold, self.metric = threshold, metric
        self.nodes = [("logits", None)]
        self.edges = {("logits", None): {}}  # child -> parent -> [type, present]
        streams = [("logits", None)]
        for layer in reversed(range(layers)):
            out, read = (f"{layer}.mlp_out", None), (f"{layer}.mlp_in", None)
            for child in streams:
                self.edges[child][out] = ["ADDITION", True]
            self.edges[out] = {read: ["PLACEHOLDER", True]}
            self.edges[read] = {}
            streams.append(read)
            entering = []
            for head in reversed(range(heads)):
                result = (f"{layer}.result", head)
                for child in streams:
                    self.edges[child][result] = ["ADDITION", True]
                self.edges[result] = {}
                for letter in "qkv":
                    made, given = (f"{layer}.{letter}", head), (f"{layer}.{letter}_input", head)
                    self.edges[result][made] = ["PLACEHOLDER", True]
                    self.edges[made] = {given: ["DIRECT_COMPUTATION", True]}
                    self.edges[given] = {}
                    entering.append(given)
            streams += entering
            met = [f"{letter}_input" for letter in "qkv"] + list("qkv") + ["result"]
            self.nodes += [out, read]
            for name in reversed(met):
                self.nodes += [(f"{layer}.{name}", head) for head in reversed(range(heads))]
        for child in streams:
            self.edges[child]["input", None] = ["ADDITION", True]

    def is_connected(self, node):
        if node[0] == "logits" or any(into.get(node, (0, False))[1] for into in self.edges.values()):
            return True
        self.edges[node].clear()
        return False

    def run(self):
        current = self.metric(self)
        for node in self.nodes:
            if not self.is_connected(node):
                continue
            for parent, edge in list(self.edges[node].items()):
                if edge[0] == "PLACEHOLDER":
                    continue
                edge[1] = False
                evaluated = self.metric(self)
                if evaluated - current < self.threshold:
                    del self.edges[node][parent]
                    current = evaluated
                else:
                    edge[1] = True
        return self.present()

    def present(self):
        """Names of the additions that carry what their sender computes: into a query, key or value that is
        computed."""
        found = set()
        for (name, head), into in self.edges.items():
            layer, _, kind = name.partition(".")
            destination = {"logits": "logits", "mlp_in": f"m{layer}"}.get(kind or name)
            if kind.endswith("_input"):
                made = (f"{layer}.{kind[0]}", head)
                if not self.edges[made].get((name, head), (0, False))[1]:
                    continue
                destination = f"a{layer}.h{head}<{kind[0]}>"
            for (sender, which), (kind_of, is_present) in into.items():
                if kind_of == "ADDITION" and is_present:
                    at, _, part = sender.partition(".")
                    source = {"input": "input", "mlp_out": f"m{at}"}.get(part or sender, f"a{at}.h{which}")
                    found.add(f"{source}->{destination}")
        return found


def published(model, pairs, threshold):
    layout = checked_layout(pairs, "corrupted", model.config)
    runs = CircuitRuns(model, layout, pairs, "corrupted")

    def metric(graph):
        return float(runs.values(layout.chosen(sorted(graph.present()))[None]).mean())

    return Published(layout.num_layers, layout.num_heads, threshold, metric).run()


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_acdc_is_the_published_loop(tmp_path, share):
    save_random_model(tmp_path / "m", "qwen2", 5, tokenizer=False, num_hidden_layers=2)
    model = Model.from_pretrained(tmp_path / "m")
    drawn = draw_pairs(2, length=4, seed=3)
    pairs = tuple(Pair(pair.clean, pair.corrupted, KL()) for pair in drawn)
    layout = checked_layout(pairs, "corrupted", model.config)
    runs = CircuitRuns(model, layout, pairs, "corrupted")
    threshold = float(runs.values(np.zeros_like(layout.edges)[None]).mean()) * share
    found = CircuitSearch(pairs=pairs, threshold=threshold).dataset(model, {}, ())
    chosen = found["chosen"].values > 0
    assert set(layout.names(chosen)) == published(model, pairs, threshold)
    assert 0 < chosen.sum() < layout.edges.sum()
    assert float(found["worse"]) == pytest.approx(runs.values(chosen[None]).mean(), abs=1e-5)


def test_a_budget_is_kept(model):
    pairs = draw_pairs(2, length=5, seed=4)
    search = CircuitSearch(pairs=pairs, rule="budget", threshold=0.2, method="EAP")
    found = search.dataset(model, {}, ())
    layout = checked_layout(pairs, "corrupted", model.config)
    runs = CircuitRuns(model, layout, pairs, "corrupted")
    left, nothing = runs.values(np.stack([found["chosen"].values > 0, np.zeros_like(layout.edges)])).mean(1)
    clean = runs.clean.mean()
    assert (clean - left) / (clean - nothing) <= 0.2 + 1e-5
    assert 0 < int(found["chosen"].sum()) < int(layout.edges.sum())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"threshold": -0.1}, "threshold to be finite and at least 0, found -0.1"),
        ({"threshold": float("nan")}, "threshold to be finite and at least 0"),
        ({"threshold": 1.0, "rule": "best"}, "rule to be 'acdc' or 'budget', found 'best'"),
    ],
)
def test_what_is_no_search_is_refused(model, told, said):
    with pytest.raises(StageError, match=said):
        CircuitSearch(pairs=draw_pairs(1), **told).cells(model.config)
