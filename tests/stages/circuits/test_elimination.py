"""Leaving edges out one after the other: the literal loop, and how many steps are run at once."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.circuits.elimination import downwards, eliminated
from mizarr.stages.circuits.pairs import Pair, checked
from mizarr.stages.circuits.runs import Measured
from mizarr.stages.circuits.search import CircuitSearch
from mizarr.stages.forward.edges.layout import Layout
from mizarr.store.errors import StageError

from .random_pairs import draw_pairs

LAYOUT = Layout(2, (False, True))


def test_edges_are_tried_from_the_logits_down():
    order = downwards(LAYOUT)
    assert len(order) == len(set(order)) == int(LAYOUT.edges.sum())
    names = [LAYOUT.name(*edge) for edge in order]
    assert names[:2] == ["m1->logits", "a1.h1->logits"] and names[-1] == "input->a0.h0<q>"


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
        for edge in order:
            node = LAYOUT.owner[edge[1]]
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
    ascending = sorted(downwards(LAYOUT), key=lambda edge: weights[edge])
    for order, rule in (
        (downwards(LAYOUT), lambda after, before: after - before < middle),
        (ascending, lambda after, before: after <= budget),
    ):
        ways = [eliminated(LAYOUT, order, measure, rule, at_once) for at_once in (1, 3, 16, 1000)]
        wanted = literal(order, rule)
        assert 0 < wanted.sum() < LAYOUT.edges.sum()
        for way in ways:
            assert (way.chosen == wanted).all() and way.steps == len(order)
        assert ways[0].runs <= len(order)


def test_acdc_on_a_model_is_its_literal_loop(model):
    drawn = draw_pairs(2, length=5, seed=3)
    pairs = tuple(Pair(pair.clean, pair.corrupted, KL()) for pair in drawn)
    layout = checked(pairs, "corrupted", model.config)
    runs = Measured(model, layout, pairs, "corrupted")
    threshold = float(runs.values(np.zeros_like(layout.edges)[None]).mean()) / 20
    found = CircuitSearch(pairs=pairs, threshold=threshold).dataset(model, {}, ())
    held, worse = layout.edges.copy(), 0.0
    for source, destination in downwards(layout)[:150]:
        without = held.copy()
        without[source, destination] = False
        now = float(runs.values(without[None]).mean())
        if now - worse < threshold:
            held, worse = without, now
    tried = np.zeros_like(held)
    tried[tuple(np.array(downwards(layout)[:150]).T)] = True
    assert (found["chosen"].values[tried] == held[tried]).all()
    assert 0 < held[tried].sum() < 150
    whole = runs.values((found["chosen"].values > 0)[None]).mean()
    assert float(found["worse"]) == pytest.approx(whole, abs=1e-5)


def test_a_budget_is_kept(model):
    pairs = draw_pairs(2, length=5, seed=4)
    search = CircuitSearch(pairs=pairs, rule="budget", threshold=0.2, method="EAP")
    found = search.dataset(model, {}, ())
    layout = checked(pairs, "corrupted", model.config)
    runs = Measured(model, layout, pairs, "corrupted")
    left, nothing = runs.values(np.stack([found["chosen"].values > 0, np.zeros_like(layout.edges)])).mean(1)
    clean = runs.clean.mean()
    assert (clean - left) / (clean - nothing) <= 0.2 + 1e-5
    assert 0 < int(found["chosen"].sum()) < int(layout.edges.sum())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"threshold": -0.1}, "a threshold of at least 0, found -0.1"),
        ({"threshold": float("nan")}, "a threshold of at least 0"),
        ({"threshold": 1.0, "rule": "best"}, "rule acdc or budget, found 'best'"),
    ],
)
def test_what_is_no_search_is_refused(model, told, said):
    with pytest.raises(StageError, match=said):
        CircuitSearch(pairs=draw_pairs(1), **told).cells(model.config)
