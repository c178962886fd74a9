"""A circuit is a set of edges: its algebra, its selections, what is pruned, how it is written down."""

from __future__ import annotations

import heapq
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.forward.edges.layout import Layout
from mizarr.store.errors import ConfigError, ShapeError

TWO = Layout(2, (False, False))
PARALLEL = Layout(2, (True, True))


def test_edges_go_from_what_is_computed_before():
    assert TWO.sources == ("input", "a0.h0", "a0.h1", "m0", "a1.h0", "a1.h1", "m1")
    assert TWO.destinations[:7] == (
        *("a0.h0<q>", "a0.h1<q>", "a0.h0<k>", "a0.h1<k>", "a0.h0<v>", "a0.h1<v>", "m0"),
    )
    assert TWO.destinations[-1] == "logits"
    assert int(TWO.edges.sum()) == 6 * 1 + 3 + 6 * 4 + 6 + 7
    assert "a0.h1->m0" in Circuit.whole(TWO).edges
    assert "a0.h1->m0" not in Circuit.whole(PARALLEL).edges
    with pytest.raises(ConfigError, match=r"such as 'input->a0.h0<q>', found 'a0.h1->m0'"):
        Circuit.of(PARALLEL, ["a0.h1->m0"])


@given(st.lists(st.integers(0, 2**31), min_size=2, max_size=2), st.integers(0, 46), st.integers(0, 46))
def test_the_algebra_is_that_of_sets(seeds, one, other):
    a, b = (Circuit.at_random(TWO, size, seed=seed) for size, seed in zip((one, other), seeds, strict=True))
    assert set((a | b).edges) == set(a.edges) | set(b.edges)
    assert set((a & b).edges) == set(a.edges) & set(b.edges)
    assert set((a - b).edges) == set(a.edges) - set(b.edges)
    assert set((~a).edges) == set(Circuit.whole(TWO).edges) - set(a.edges)
    assert len(a) == one and Circuit.of(TWO, a.edges) == a and hash(Circuit.of(TWO, a.edges)) == hash(a)
    assert Circuit.from_json(json.loads(json.dumps(a.to_json()))) == a
    assert (a.digest == b.digest) == (a == b)


@given(st.integers(0, 2**31), st.integers(0, 46))
def test_what_is_left_by_pruning_lies_on_a_way_from_the_input_to_the_logits(seed, size):
    circuit = Circuit.at_random(TWO, size, seed=seed)
    edges = [(name.split("->")[0], name.split("->")[1].split("<")[0]) for name in circuit.edges]

    def reached(start, ahead):
        found, new = {start}, {start}
        while new:
            new = {b if ahead else a for a, b in edges if (a if ahead else b) in new} - found
            found |= new
        return found

    on_the_way = reached("input", True) & reached("logits", False)
    wanted = {
        name for name, (a, b) in zip(circuit.edges, edges, strict=True) if a in on_the_way and b in on_the_way
    }
    assert set(circuit.pruned().edges) == wanted
    assert circuit.pruned().pruned() == circuit.pruned()


def taken_one_by_one(layout, magnitude, size):
    """Edges in the order of a priority queue: each time the largest |score| into a node of the circuit."""
    queue, queued, joined, order = [], set(), set(), []

    def join(position, node):
        joined.add((position, node))
        for place in np.argwhere(magnitude > -np.inf):
            at, source, destination = map(int, place)
            is_read = at == position or (at < position and layout.is_seen_later[destination])
            if layout.owner[destination] == node and is_read and (at, source, destination) not in queued:
                queued.add((at, source, destination))
                heapq.heappush(queue, (-magnitude[at, source, destination], at, source, destination))

    join(len(magnitude) - 1, -1)
    while queue and len(order) < size:
        _, at, source, destination = heapq.heappop(queue)
        order.append((at, source, destination))
        if (at, source) not in joined:
            join(at, source)
    return order


@settings(max_examples=25)
@given(
    st.integers(0, 2**31),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([1, 3, 100]),
    st.sampled_from([TWO, PARALLEL, Layout(3, (False,))]),
)
def test_greedy_takes_edges_as_a_priority_queue_does(seed, positions, n_scores, layout):
    """Also where many scores are equal, or zero."""
    rng = np.random.default_rng(seed)
    whole = Circuit.whole(layout, positions)
    scores = rng.integers(-n_scores, n_scores, whole.chosen.shape).astype(float)
    magnitude = np.where(whole.chosen, np.abs(scores), -np.inf).reshape(-1, *layout.edges.shape)
    order = taken_one_by_one(layout, magnitude, len(whole))
    for size in (0, 1, 5, len(order) // 2, len(order)):
        chosen = np.zeros_like(magnitude, np.bool_)
        for place in order[:size]:
            chosen[place] = True
        expected = Circuit(layout, chosen.reshape(whole.chosen.shape))
        assert Circuit.greedy(layout, scores, size) == expected


def test_selections_on_paper():
    scores = np.zeros(TWO.edges.shape)
    for name, score in {"input->m0": -5, "m0->logits": 2, "a1.h0->logits": 1, "input->a1.h0<k>": 3}.items():
        scores += score * TWO.chosen([name])
    assert set(Circuit.top(TWO, scores, 2).edges) == {"input->m0", "input->a1.h0<k>"}
    assert Circuit.top(TWO, scores, 2).pruned().edges == ()
    assert set(Circuit.greedy(TWO, scores, 2).edges) == {"m0->logits", "input->m0"}
    assert Circuit.greedy(TWO, scores, 4) == Circuit.top(TWO, scores, 4)
    assert Circuit.greedy(TWO, scores, 4).nodes == ("input", "m0", "a1.h0", "logits")
    grown = Circuit.grown(TWO, 20, seed=0)
    assert len(grown) == 20 and grown != Circuit.grown(TWO, 20, seed=1)
    assert Circuit.greedy(TWO, scores, 46) == Circuit.whole(TWO)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "in format 1, found format 2"),
        ({"format": True}, "the field format of a circuit to be int, found True"),
        ({"heads": 0}, "the field heads of a circuit to be at least 1"),
        ({"parallel": [0, 1]}, "true or false"),
        ({"edges": ["input->m0", "input->m0"]}, "each once"),
        ({"edges": ["m1->m0"]}, "found 'm1->m0'"),
        ({"edges": [3]}, "to list names of edges"),
        ({"more": 1}, "of a circuit with the fields format, heads, parallel, edges, found"),
    ],
)
def test_another_document_is_no_circuit(change, said):
    told = Circuit.of(TWO, ["input->m0"]).to_json() | change
    with pytest.raises(ConfigError, match=said) as caught:
        Circuit.from_json(told)
    assert "\n" not in str(caught.value)


def test_what_is_no_score_or_no_size_is_refused():
    with pytest.raises(ShapeError, match=r"expected edge scores .* of shape \[7, 15\], .* found shape \[3\]"):
        Circuit.top(TWO, np.zeros(3), 1)
    with pytest.raises(ConfigError, match=r"expected a circuit of 0 to 46 edges, .* found size 47"):
        Circuit.at_random(TWO, 47, seed=0)
    with pytest.raises(ConfigError, match="a finite score for every edge"):
        Circuit.top(TWO, np.full(TWO.edges.shape, np.nan), 1)
    with pytest.raises(
        ConfigError, match="one model's graph, found 2 layers of 2 heads and 2 layers of 2 heads"
    ):
        Circuit.whole(TWO) | Circuit.whole(PARALLEL)
    scores = np.where(TWO.edges, 1.0, np.nan)
    assert len(Circuit.top(TWO, scores, 46)) == 46, "no number where there is no edge"


def test_networkx_reads_the_graph():
    networkx = pytest.importorskip("networkx")
    circuit = Circuit.of(TWO, ["input->a0.h0<q>", "input->a0.h0<k>", "a0.h0->logits"])
    graph = networkx.node_link_graph(circuit.node_link(np.ones(TWO.edges.shape)), edges="edges")
    assert set(graph.edges(keys=True)) == {
        *(("input", "a0.h0", kind) for kind in "qk"),
        ("a0.h0", "logits", "all"),
    }
    assert networkx.is_directed_acyclic_graph(graph) and graph["input"]["a0.h0"]["q"]["weight"] == 1.0
