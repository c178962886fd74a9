"""Edges left out one by one, and circuits, are what a literal implementation of the graph gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mizarr import Model
from mizarr.stages.circuits.batches import batches, network_of
from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.circuits.pairs import checked_layout
from mizarr.stages.circuits.runs import CircuitRuns
from mizarr.stages.forward.edges.effects import changed_edges
from mizarr.stages.forward.hooks.wants import Logits
from tests.stages.forward.random_hybrids import save_random_hybrid

from .literal import LiteralNeoX
from .random_pairs import draw_pairs

pytest.importorskip("transformers")
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def others(literal, pair, alternative, pairs):
    """What stands for each source: by the literal model."""
    clean = literal.run(list(pair.clean))[1]
    if alternative == "corrupted":
        return clean, literal.run(list(pair.corrupted))[1]
    if alternative == "zero":
        return clean, {name: torch.zeros_like(x) for name, x in clean.items()}
    each = [literal.run(list(other.clean))[1] for other in pairs]
    return clean, {name: torch.stack([one[name] for one in each]).mean(0) for name in clean}


def test_the_literal_model_is_the_model(model, literal):
    (pair,) = draw_pairs(1)
    ours = model.forward(list(pair.clean)).logits[0, -1]
    torch.testing.assert_close(literal.run(list(pair.clean))[0], ours, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("alternative", "count"), [("corrupted", 200), ("zero", 70), ("mean", 70)])
@pytest.mark.parametrize("position", [None, 3, -1])
def test_a_thousand_random_edges_equal_two_literal_passes(model, literal, alternative, count, position):
    """200 + 70 + 70 edges at all positions, at one, at the last."""
    pairs = draw_pairs(3, seed=count)
    layout, rng = checked_layout(pairs, alternative, model.config), np.random.default_rng(count)
    for place, pair in enumerate(pairs):
        (batch,) = batches(model, layout, pairs, alternative, only=place)
        found = {}
        with torch.no_grad():
            for sources, destinations, logits in changed_edges(
                network_of(model),
                layout,
                batch.clean,
                batch.change[0],
                Logits(),
                position=position,
                memory=1 << 22,
            ):
                found |= dict(
                    zip(zip(sources.tolist(), destinations.tolist(), strict=True), logits, strict=True)
                )
        assert len(found) == layout.edges.sum()
        clean, other = others(literal, pair, alternative, pairs)
        scale = literal.run(list(pair.clean))[0].abs().max()
        drawn = rng.choice(np.argwhere(layout.edges), count // 3 + 1, replace=False).tolist()
        for source, destination in drawn:
            name, value = layout.sources[source], other[layout.sources[source]]
            if position is not None:
                value = clean[name].clone()
                value[position] = other[name][position]
            wanted, _ = literal.run(list(pair.clean), {(name, layout.destinations[destination]): value})
            difference = (found[source, destination] - wanted).abs().max() / scale
            assert difference < 1e-5, layout.name(source, destination)


@pytest.mark.parametrize("parallel", [True, False])
def test_edges_and_circuits_of_a_gpt_neox_equal_literal_passes(parallel, tmp_path):
    """60 random edges and three circuits, one of them all but an edge: layer norms, biases that no edge
    carries, an MLP that reads what the heads read, rope on a part of each head."""
    shape = {"num_attention_heads": 3, "hidden_size": 24, "rope_parameters": PARTIAL}
    named = {"hidden_act": "silu", "attention_bias": True, "use_parallel_residual": parallel}
    save_random_hybrid(tmp_path, "gpt_neox", 4, tokenizer=False, **shape, **named)
    model, literal = Model.from_pretrained(tmp_path), LiteralNeoX(tmp_path)
    (pair,) = pairs = draw_pairs(1, seed=3)
    layout = checked_layout(pairs, "corrupted", model.config)
    (batch,) = batches(model, layout, pairs, "corrupted")
    logits, other = literal.run(list(pair.clean))[0], literal.run(list(pair.corrupted))[1]
    torch.testing.assert_close(logits, model.forward(list(pair.clean)).logits[0, -1], atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        found = {
            (int(source), int(destination)): row
            for sources, destinations, rows in changed_edges(
                network_of(model), layout, batch.clean, batch.change[0], Logits(), memory=1 << 22
            )
            for source, destination, row in zip(sources, destinations, rows, strict=True)
        }
    drawn = np.random.default_rng(4).choice(np.argwhere(layout.edges), 60, replace=False)
    for source, destination in drawn.tolist():
        name = layout.sources[source]
        edge = {(name, layout.destinations[destination]): other[name]}
        wanted, _ = literal.run(list(pair.clean), edge)
        difference = (found[source, destination] - wanted).abs().max() / logits.abs().max()
        assert difference < 1e-5, layout.name(source, destination)
    whole = Circuit.whole(layout)
    circuits = [Circuit.at_random(layout, size, seed=size) for size in (20, len(whole) // 2, len(whole) - 1)]
    values = CircuitRuns(model, layout, pairs, "corrupted").values(
        np.stack([each.chosen for each in circuits])
    )
    for row, circuit in enumerate(circuits):
        edges = dict.fromkeys(tuple(name.split("->")) for name in circuit.edges)
        logits, _ = literal.run(list(pair.clean), edges, other)
        wanted = float(logits[pair.metric.correct] - logits[pair.metric.wrong])
        assert values[row, 0] == pytest.approx(wanted, abs=1e-4)


def test_where_prompts_begin_alike_nothing_is_computed_twice_and_edges_are_the_same(model, literal):
    """60 random edges of prompts whose last 4 of 9 tokens differ, in less than 0.65 of the multiplications
    that prompts take which differ from the first token on."""
    counted = {}
    for alike in (0, 5):
        (drawn,) = draw_pairs(1, seed=8)
        pair = replace(drawn, corrupted=(*drawn.clean[:alike], *drawn.corrupted[alike:]))
        layout = checked_layout((pair,), "corrupted", model.config)
        (batch,) = batches(model, layout, (pair,), "corrupted")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            found = {
                (int(source), int(destination)): row
                for sources, destinations, logits in changed_edges(
                    network_of(model), layout, batch.clean, batch.change[0], Logits(), memory=1 << 22
                )
                for source, destination, row in zip(sources, destinations, logits, strict=True)
            }
        counted[alike] = counter.get_total_flops()
        other = literal.run(list(pair.corrupted))[1]
        scale, rng = literal.run(list(pair.clean))[0].abs().max(), np.random.default_rng(alike)
        for source, destination in rng.choice(np.argwhere(layout.edges), 60, replace=False).tolist():
            name = layout.sources[source]
            edge = {(name, layout.destinations[destination]): other[name]}
            wanted, _ = literal.run(list(pair.clean), edge)
            assert (found[source, destination] - wanted).abs().max() / scale < 1e-5
    assert counted[5] < 0.65 * counted[0]


@pytest.mark.parametrize("alternative", ["corrupted", "zero", "mean"])
def test_circuits_are_what_a_literal_pass_over_their_edges_gives(model, literal, alternative):
    pairs = draw_pairs(3, seed=5)
    layout = checked_layout(pairs, alternative, model.config)
    circuits = [Circuit.at_random(layout, size, seed=size) for size in (3, 100, 400, 700)]
    values = CircuitRuns(model, layout, pairs, alternative, memory=1 << 22).values(
        np.stack([each.chosen for each in circuits])
    )
    for column, pair in enumerate(pairs):
        _, other = others(literal, pair, alternative, pairs)
        for row, circuit in enumerate(circuits):
            edges = dict.fromkeys(tuple(name.split("->")) for name in circuit.edges)
            logits, _ = literal.run(list(pair.clean), edges, other)
            wanted = logits[pair.metric.correct] - logits[pair.metric.wrong]
            assert values[row, column] == pytest.approx(
                float(wanted), abs=5e-4 if alternative == "zero" else 1e-4
            )


def test_everything_is_the_model_and_nothing_the_corrupted_run(model):
    pairs = draw_pairs(4, seed=7)
    layout = checked_layout(pairs, "corrupted", model.config)
    whole = Circuit.whole(layout)
    runs = CircuitRuns(model, layout, pairs, "corrupted")
    values = runs.values(np.stack([whole.chosen, (~whole).chosen]))
    for column, pair in enumerate(pairs):
        for row, ids in enumerate((pair.clean, pair.corrupted)):
            logits = model.forward(list(ids)).logits[0, -1]
            wanted = float(logits[pair.metric.correct] - logits[pair.metric.wrong])
            assert values[row, column] == pytest.approx(wanted, abs=2e-5)
    np.testing.assert_allclose(runs.clean, values[0], atol=2e-5)


def test_a_circuit_that_leaves_edges_out_above_a_layer_may_begin_there(model):
    pairs = draw_pairs(2, seed=8)
    layout = checked_layout(pairs, "corrupted", model.config)
    chosen = layout.edges.copy()
    chosen[::2, layout.inputs(3).start :] = False
    runs = CircuitRuns(model, layout, pairs, "corrupted")
    np.testing.assert_allclose(runs.values(chosen[None], 3), runs.values(chosen[None]), atol=2e-5)


def test_memory_changes_no_result_beyond_rounding(model):
    pairs = draw_pairs(5, seed=9)
    layout = checked_layout(pairs, "resampled", model.config)
    masks = np.stack([Circuit.at_random(layout, 300, seed=seed).chosen for seed in range(4)])
    wide, narrow = (
        CircuitRuns(model, layout, pairs, "resampled", memory=memory).values(masks) for memory in (1 << 30, 1)
    )
    np.testing.assert_allclose(wide, narrow, atol=2e-5)
