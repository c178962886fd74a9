"""Experiments on edges: what is in their keys, what is kept, what is refused, what an area is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from mizarr.pipeline import run
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Rank, Recovery
from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.circuits.evaluation import CircuitValues, areas, faithfulness, without_each
from mizarr.stages.circuits.pairs import Pair
from mizarr.stages.circuits.scores import EdgeEffects, EdgeScores
from mizarr.stages.circuits.selected import SelectedCircuits
from mizarr.stages.forward.edges.layout import Layout
from mizarr.store import open_store
from mizarr.store.errors import ConfigError, PromptError, StageError

from .random_pairs import draw_pairs

PAIRS = draw_pairs(4, length=6, seed=11)


def ran(experiment, folder, store):
    (found,) = run([experiment.on(str(folder))], store, quiet=True)
    return found


def test_scores_of_pairs_are_the_mean_of_theirs_however_they_are_batched(model):
    whole = EdgeScores(pairs=PAIRS, memory=1).dataset(model, {}, ())
    each = [EdgeScores(pairs=(pair,)).dataset(model, {}, ())["score"].values for pair in PAIRS]
    np.testing.assert_allclose(whole["score"], np.mean(each, 0), atol=1e-5)
    other = EdgeScores(pairs=(*PAIRS, *draw_pairs(2, length=8, seed=3))).dataset(model, {}, ())
    assert np.isfinite(other["score"].values[Layout.of(model.config).edges]).all()


def test_node_scores_of_eap_are_the_sum_of_the_edges_that_leave(model):
    found = EdgeScores(pairs=PAIRS, method="EAP").dataset(model, {}, ())
    np.testing.assert_allclose(found["node_score"], found["score"].sum("destination"), atol=2e-5)


def test_a_change_at_a_position_that_the_logits_do_not_read_does_nothing_to_them(model):
    effects = EdgeEffects(pairs=PAIRS, position=2)
    found = effects.dataset(model, effects.cells(model.config)[0], ())["effect"].values[0]
    np.testing.assert_allclose(found[:, -1], 0, atol=1e-6)
    assert np.nanmax(np.abs(found[:, :-1])) > 0


def test_results_are_stored_and_one_pair_more_computes_one(folder, tmp_path):
    store = open_store(tmp_path / "store")
    found = {}
    for count in (2, 3):
        node = EdgeEffects(pairs=PAIRS[:count]).on(str(folder))
        before = len(node.missing(store))
        run([node], store, quiet=True)
        found[count] = node.open(store).load()
        assert before == (2 if count == 2 else 1)
        assert node.status(store).is_cached
    xr.testing.assert_identical(found[3].isel(pair=slice(2)), found[2])
    assert found[3]["effect"].dims == ("pair", "source", "destination")
    assert found[3]["effect"].attrs["units"] == "logits"
    assert list(found[3]["source"].values[:2]) == ["input", "a0.h0"]


def test_another_process_finds_the_same_key(folder, tmp_path):
    code = (
        "from mizarr.stages.circuits.scores import EdgeScores\n"
        "from mizarr.store import open_store\n"
        "from tests.stages.circuits.random_pairs import draw_pairs\n"
        f"node = EdgeScores(pairs=draw_pairs(4, length=6, seed=11)).on({str(folder)!r})\n"
        f"print(node.key(open_store({str(tmp_path / 'store')!r})).digest)\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    node = EdgeScores(pairs=PAIRS).on(str(folder))
    assert told.stdout.strip() == node.key(open_store(tmp_path / "store")).digest


def test_whatever_decides_a_number_is_in_the_key_and_memory_is_not(folder, tmp_path):
    store = open_store(tmp_path / "store")
    base = EdgeScores(pairs=PAIRS)
    others = [
        replace(base, pairs=PAIRS[:3]),
        replace(base, steps=6),
        replace(base, method="EAP"),
        replace(base, alternative="zero"),
        replace(base, seed=1),
        replace(base, pairs=tuple(replace(pair, metric=LogitDifference(1, 2)) for pair in PAIRS)),
        replace(base, pairs=tuple(replace(pair, corrupted=pair.clean[::-1]) for pair in PAIRS)),
    ]
    keys = {each.on(str(folder)).key(store).digest for each in (base, *others)}
    assert len(keys) == 8
    assert replace(base, memory=1 << 20).on(str(folder)).key(store) == base.on(str(folder)).key(store)
    layout = Layout.of(base.on(str(folder)).source.config)
    values = [
        CircuitValues(pairs=PAIRS, circuits=(Circuit.at_random(layout, 9, seed=seed),)).on(str(folder))
        for seed in (0, 1)
    ]
    assert len({each.key(store).digest for each in values}) == 2


def test_selected_circuits_are_the_edges_of_largest_score_and_what_they_give(model):
    chosen, scored = PAIRS[:2], PAIRS[2:]
    asked = SelectedCircuits(chosen_on=chosen, pairs=scored, sizes=(40, 300), minimal=True)
    prepared = asked.prepare(model)
    found = asked.joined([asked.dataset(prepared, cell, ()) for cell in asked.cells(model.config)])
    layout = Layout.of(model.config)
    scores = EdgeScores(pairs=chosen).dataset(model, {}, ())["score"].values
    for row, size in enumerate((40, 300)):
        circuit = Circuit.top(layout, scores, size)
        assert (found["chosen"].values[row] == circuit.chosen).all()
        named = dict(without_each(circuit)) if size == 40 else {}
        values = CircuitValues(pairs=scored, circuits=(circuit, ~circuit, *named.values()))
        given = values.dataset(model, {}, ())
        np.testing.assert_allclose(found["value"][row], given["value"][0], atol=2e-5)
        np.testing.assert_allclose(found["complement"][row], given["value"][1], atol=2e-5)
        for name, value in zip(named, given["value"].mean("pair").values[2:], strict=True):
            place = tuple(np.argwhere(layout.chosen([name]))[0])
            assert found["without"].values[row][place] == pytest.approx(float(value), abs=2e-5)


def test_faithfulness_and_areas_on_paper():
    def dataset(values, clean, empty):
        return xr.Dataset(
            {"value": (("circuit", "pair"), values), "clean": ("pair", clean), "empty": ("pair", empty)}
        )

    found = faithfulness(dataset([[1.0, 1.0], [3.0, 5.0], [7.0, 7.0]], [4.0, 4.0], [0.0, 2.0]))
    np.testing.assert_allclose(found, [0.0, 1.0, 2.0])
    with pytest.raises(StageError, match="and the circuit without edges, found 1 and 1"):
        faithfulness(dataset([[1.0]], [1.0], [1.0]))
    assert areas([0.0, 0.5, 1.0], [0.0, 1.0, 1.0]) == (0.75, 0.25)
    under, between = areas([0.001, 0.5, 1.0], [0.0, 2.0, 1.0])
    assert under == pytest.approx(0.499 + 0.75) and between == pytest.approx(0.499 + 0.25)
    for shares in ([0.5], [0.5, 0.5], [0.5, 0.1]):
        with pytest.raises(StageError, match="in ascending order of their share"):
            areas(shares, [0.0] * len(shares))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"pairs": ()}, StageError, "at least one pair of prompts"),
        ({"pairs": (replace(PAIRS[0], corrupted=(3, 4)),)}, PromptError, "pair 0: .* found 6 and 2 tokens"),
        ({"pairs": (replace(PAIRS[0], corrupted=(999,) * 6),)}, PromptError, "999"),
        (
            {"pairs": (replace(PAIRS[0], metric=Recovery(KL())),)},
            StageError,
            "pair 0: expected a metric of a single run, found Recovery; give the metric inside",
        ),
        ({"pairs": (replace(PAIRS[0], metric=LogitDifference(1, 999)),)}, PromptError, "found 999"),
        ({"pairs": (PAIRS[0], replace(PAIRS[1], metric=KL()))}, StageError, "metrics of one unit"),
        (
            {"pairs": (replace(PAIRS[0], metric=Rank(3)),)},
            StageError,
            "a gradient for the method EAP-IG-inputs, found 'rank'; use LogitDifference or KL",
        ),
        ({"alternative": "other"}, StageError, "one of corrupted, zero, mean, resampled, found 'other'"),
        ({"pairs": PAIRS[:1], "alternative": "mean"}, StageError, "at least two pairs of each length"),
        ({"method": "EAP-IG"}, StageError, "method to be one of EAP, EAP-IG-inputs, .* found 'EAP-IG'"),
        ({"steps": 0}, StageError, "steps to be at least 1"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_runs(model, change, error, said):
    with pytest.raises(error, match=said) as caught:
        EdgeScores(**{"pairs": PAIRS, **change}).cells(model.config)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_run_is_refused(model):
    other = Circuit.whole(Layout(3, (False,)))
    with pytest.raises(
        ConfigError, match=r"5 layers of 4 heads, found one of 1 layers of 3 heads; use the model"
    ):
        CircuitValues(pairs=PAIRS, circuits=(other,)).cells(model.config)
    with pytest.raises(StageError, match="at least one circuit"):
        CircuitValues(pairs=PAIRS, circuits=()).cells(model.config)
    with pytest.raises(PromptError, match=r"a position from -6 to 5, which every prompt has, found 6"):
        EdgeEffects(pairs=PAIRS, position=6).cells(model.config)
    with pytest.raises(StageError, match="found one pair twice"):
        EdgeEffects(pairs=(PAIRS[0], PAIRS[0])).cells(model.config)
    for sizes in ((), (5, 5), (0, 4), (10_000,)):
        with pytest.raises(StageError, match="sizes"):
            SelectedCircuits(pairs=PAIRS, chosen_on=PAIRS, sizes=sizes).cells(model.config)
    assert Pair((1,), (2,), KL()).canonical()["clean"] == [1]
