"""Circuits that tell positions apart: as values, by literal passes, by scores, and beside random ones."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import run
from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.circuits.evaluation import CircuitValues, without_each
from mizarr.stages.circuits.names import METHODS
from mizarr.stages.circuits.pairs import Pair
from mizarr.stages.circuits.runs import CircuitRuns
from mizarr.stages.circuits.scores import EdgeEffects, EdgeScores
from mizarr.stages.circuits.selected import SelectedCircuits
from mizarr.stages.forward.edges.layout import Layout
from mizarr.store.errors import ConfigError, PromptError, ShapeError
from tests.stages.circuits.random_pairs import draw_pairs

LAYOUT = Layout(2, (False, False))
LENGTH = 4


def drawn(size: int, seed: int) -> Circuit:
    return Circuit.at_random(LAYOUT, size, seed=seed, positions=LENGTH)


def literal_logits(literal, ids, other, circuit):
    names = circuit.anywhere.edges
    places = {}
    for name in names:
        source, _, destination = name.partition("->")
        held = [f"{name}@{position}" in circuit.edges for position in range(circuit.positions)]
        places[source, destination] = torch.tensor(held)[:, None]
    return literal.run(ids, {}, other, places)[0]


@pytest.mark.parametrize("size", [40, 150, 900])
def test_a_circuit_by_position_is_what_a_literal_pass_over_its_edges_gives(model, literal, size):
    pairs = draw_pairs(2, length=5, seed=size)
    layout = Layout.of(model.config)
    circuits = [
        Circuit.at_random(layout, size, seed=1, positions=5),
        Circuit.grown(layout, size, seed=2, positions=5),
    ]
    found = CircuitRuns(model, layout, pairs, "corrupted").values(
        np.stack([each.chosen for each in circuits])
    )
    for number, circuit in enumerate(circuits):
        for place, pair in enumerate(pairs):
            other = literal.run(list(pair.corrupted))[1]
            logits = literal_logits(literal, list(pair.clean), other, circuit)
            expected = logits[pair.metric.correct] - logits[pair.metric.wrong]
            assert found[number, place] == pytest.approx(
                expected.item(), abs=1e-5 * logits.abs().max().item()
            )


def test_the_same_edges_at_every_position_are_the_circuit_without_them(model):
    pairs, layout = draw_pairs(3, length=5), Layout.of(model.config)
    plain = Circuit.at_random(layout, 300, seed=4)
    runs = CircuitRuns(model, layout, pairs, "mean")
    np.testing.assert_allclose(
        runs.values(plain.at(5).chosen[None]), runs.values(plain.chosen[None]), rtol=0, atol=1e-5
    )
    assert plain.at(5).anywhere == plain and len(plain.at(5).edges) == len(plain.at(5))
    np.testing.assert_allclose(runs.values(Circuit.whole(layout, 5).chosen[None])[0], runs.clean, atol=1e-5)


@pytest.mark.parametrize("position", [0, 3, -1])
def test_one_edge_at_one_position_is_the_exact_effect_there(model, position):
    """The circuit of everything else, and the edge patched by itself: two roads to one number."""
    pairs = draw_pairs(1, length=5, seed=7)
    layout = Layout.of(model.config)
    effects = EdgeEffects(pairs=pairs, position=position)
    exact = effects.dataset(effects.prepare(model), effects.cells(model.config)[0], ())["effect"].values[0]
    runs, whole = CircuitRuns(model, layout, pairs, "corrupted"), Circuit.whole(layout, 5)
    rng = np.random.default_rng(1)
    edges = [tuple(each) for each in rng.permutation(np.argwhere(layout.edges))[:40]]
    masks = []
    for source, destination in edges:
        left = whole.chosen.copy()
        left[position, source, destination] = False
        masks.append(left)
    ours = runs.values(np.stack(masks))[:, 0] - runs.clean[0]
    scale = np.nanmax(np.abs(exact))
    np.testing.assert_allclose(ours, [exact[edge] for edge in edges], rtol=0, atol=1e-5 * max(scale, 1.0))


@pytest.mark.parametrize("method", METHODS)
def test_scores_by_position_add_up_to_those_of_all(model, method):
    """Products are sums over positions; a share of a stream is a mean."""
    pairs = draw_pairs(3, length=5, seed=3)
    plain, by_position = (
        EdgeScores(pairs=pairs, method=method, steps=2, by_position=chosen).dataset(model, {}, ())
        for chosen in (False, True)
    )
    assert by_position["score"].dims == ("position", "source", "destination")
    assert "node_score" not in by_position
    scores = by_position["score"]
    if method == "information-flow-routes":
        summed = scores.mean("position", skipna=False).where(scores.notnull().all("position"))
        expected = plain["score"].values
        summed = summed.values
        expected, summed = expected[:, :-1], summed[:, :-1]
    else:
        expected, summed = plain["score"].values, scores.sum("position", min_count=1).values
    np.testing.assert_allclose(summed, expected, rtol=0, atol=1e-5 * np.nanmax(np.abs(expected)))


def test_eap_by_position_is_the_slope_of_an_edge_there(model):
    """A corrupted prompt in small: what is put in instead is a hundredth of the way."""
    pairs, layout = draw_pairs(1, length=5, seed=11), Layout.of(model.config)
    score = EdgeScores(pairs=pairs, method="EAP", by_position=True).dataset(model, {}, ())["score"].values
    runs = CircuitRuns(model, layout, pairs, "corrupted")
    (batch,) = runs._batches
    step = 1e-2
    batch.replacement.copy_(batch.clean.added + step * batch.change)
    whole = Circuit.whole(layout, 5).chosen
    order = np.argsort(-np.abs(np.nan_to_num(score)), axis=None)[:30]
    places = [np.unravel_index(each, score.shape) for each in order]
    masks = np.repeat(whole[None], len(places), axis=0)
    for number, place in enumerate(places):
        masks[(number, *place)] = False
    found = (runs.values(masks)[:, 0] - runs.clean[0]) / step
    expected = np.array([score[place] for place in places])
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [12, 40, 70])
def test_pruning_leaves_what_lies_on_a_way_through_time(seed, size):
    """By networkx, what is read and what is written nodes of their own: keys and values at a position go into
    what a head writes there and later."""
    networkx = pytest.importorskip("networkx")
    circuit = drawn(size, seed)
    graph = networkx.DiGraph()
    for position, (column, name) in product(range(LENGTH), enumerate(LAYOUT.destinations)):
        node = "end" if name == "logits" else name.partition("<")[0]
        later = range(position, LENGTH if LAYOUT.is_seen_later[column] else position + 1)
        graph.add_edges_from(((name, position, "read"), (node, end)) for end in later)
    graph.add_edges_from(("start", ("input", position)) for position in range(LENGTH))
    ends = {}
    for edge in circuit.edges:
        name, _, position = edge.rpartition("@")
        source, _, destination = name.partition("->")
        ends[edge] = (source, int(position)), (destination, int(position), "read")
    graph.add_edges_from(ends.values())
    down = networkx.ancestors(graph, ("end", LENGTH - 1))
    up = networkx.descendants(graph, "start")
    expected = {edge for edge, (source, read) in ends.items() if source in up and read in down}
    assert set(circuit.pruned().edges) == expected


def test_networkx_reads_heads_that_attend():
    networkx = pytest.importorskip("networkx")
    names = ["input->a0.h1<k>@0", "input->a0.h1<q>@2", "a0.h1->logits@3", "a0.h1->m0@2", "m0->a1.h0<v>@2"]
    circuit = Circuit.of(LAYOUT, names, LENGTH)
    scores = np.where(circuit.chosen, 0.5, 0.0)
    graph = networkx.node_link_graph(circuit.node_link(scores), edges="edges")
    attends = {(one, other) for one, other, kind in graph.edges(keys=True) if kind == "attends"}
    assert attends == {("a0.h1@0", "a0.h1@2"), ("a0.h1@0", "a0.h1@3")}
    assert graph.number_of_edges() == len(names) + 2
    assert graph.edges["input@0", "a0.h1@0", "k"]["weight"] == 0.5


def test_a_greedy_circuit_through_time_on_paper():
    """Into a head's output at the last position go its query there, and keys and values up to there."""
    scores = np.zeros((LENGTH, *LAYOUT.edges.shape))
    rows = {name: n for n, name in enumerate(LAYOUT.sources)}
    columns = {name: n for n, name in enumerate(LAYOUT.destinations)}

    def put(name: str, score: float) -> None:
        edge, _, position = name.partition("@")
        source, _, destination = edge.partition("->")
        scores[int(position), rows[source], columns[destination]] = score

    put("a1.h0->logits@3", 5)
    put("m0->a1.h0<v>@1", -4)
    put("m0->a1.h0<q>@1", 9)  # a query at another position than the one that writes
    put("a0.h1->m0@1", 3)
    put("input->a0.h1<k>@0", 2)
    put("input->a0.h1<k>@2", 8)  # a key that the head does not see from position 1
    found = Circuit.greedy(LAYOUT, scores, 4)
    assert set(found.edges) == {"a1.h0->logits@3", "m0->a1.h0<v>@1", "a0.h1->m0@1", "input->a0.h1<k>@0"}
    assert found.nodes == ("input@0", "a0.h1@0", "a0.h1@1", "m0@1", "a1.h0@1", "a1.h0@3", "logits@3")
    assert "m0->a1.h0<v>@1" in found and "m0->a1.h0<v>@2" not in found
    assert found.pruned() == found
    assert "m0->a1.h0<q>@1" in Circuit.top(LAYOUT, scores, 1)


def test_what_is_written_down_is_read_back():
    circuit = drawn(30, 5)
    told = json.loads(json.dumps(circuit.to_json()))
    assert Circuit.from_json(told) == circuit and hash(Circuit.from_json(told)) == hash(circuit)
    assert Circuit.of(LAYOUT, circuit.edges, LENGTH) == circuit
    assert circuit.anywhere != circuit and circuit.digest != circuit.at(LENGTH).anywhere.digest
    assert len(~circuit) + len(circuit) == len(Circuit.whole(LAYOUT, LENGTH))
    for change, said in [
        ({"positions": 0}, "positions of a circuit to be at least 1"),
        ({"positions": "4"}, "the field positions of a circuit to be int"),
        ({"positions": 2}, "at a position from 0 to 1"),
        ({"edges": ["input->a0.h0<q>"]}, "such as 'input->a0.h0<q>@0'"),
        ({"edges": ["input->logits@0"]}, "at a position from 0 to 3"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Circuit.from_json(told | change)
    with pytest.raises(ConfigError, match="circuits with equally many positions, found 4 and none"):
        circuit | circuit.anywhere
    with pytest.raises(ShapeError, match="with a first axis of positions"):
        Circuit(LAYOUT, np.zeros((1, 1, 2, 3)))


def test_circuits_by_position_are_chosen_run_and_held_against_random_ones(model, tmp_path):
    chosen_on, pairs = draw_pairs(3, length=5), draw_pairs(2, length=5, seed=9)
    store, layout = mizarr.open_store(tmp_path / "store"), Layout.of(model.config)
    selected = SelectedCircuits(
        chosen_on=chosen_on, pairs=pairs, sizes=(50, 400), method="EAP", minimal=True, by_position=True
    ).on(model)
    run(selected, store)
    found = selected.open(store).load()
    assert found["chosen"].dims == ("size", "position", "source", "destination")
    scores = EdgeScores(pairs=chosen_on, method="EAP", by_position=True).dataset(model, {}, ())["score"]
    circuit = Circuit.top(layout, scores.values, 50)
    assert np.array_equal(found["chosen"].values[0] > 0, circuit.chosen)
    random = [Circuit.grown(layout, 50, seed=seed, positions=5) for seed in range(3)]
    values = CircuitValues(pairs=pairs, circuits=(circuit, *random, circuit.anywhere)).on(model)
    run(values, store)
    told = values.open(store).load()
    np.testing.assert_allclose(told["value"][0], found["value"][0], atol=1e-5)
    assert told["size"].values[:4].tolist() == [50] * 4
    np.testing.assert_allclose(told["empty"], found["empty"], atol=1e-5)
    left = [each for _, each in without_each(circuit)]
    expected = CircuitRuns(model, layout, pairs, "corrupted").values(np.stack([each.chosen for each in left]))
    np.testing.assert_allclose(
        found["without"].values[0][circuit.chosen], expected.mean(1), rtol=0, atol=1e-5
    )
    assert next(name for name, _ in without_each(circuit)).rpartition("@")[2].isdecimal()


def test_prompts_of_several_lengths_have_no_positions_in_common(model):
    mixed = (*draw_pairs(1, length=5), *draw_pairs(1, length=6))
    layout = Layout.of(model.config)
    with pytest.raises(PromptError, match=r"as edges are told apart by position, found lengths \[5, 6\]"):
        EdgeScores(pairs=mixed, by_position=True).check(model.config)
    with pytest.raises(PromptError, match=r"expected prompts of 4 tokens"):
        CircuitValues(pairs=mixed[:1], circuits=(Circuit.whole(layout, 4),)).check(model.config)
    assert isinstance(mixed[0], Pair)
