"""Activation patching: every cell against a full forward of the reference implementation with one edit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import plan as plan_nodes, run
from mizarr.pipeline.context import Group
from mizarr.stages.causal.grids import patching_metrics
from mizarr.stages.causal.grids.patching import (
    ActivationPatching,
    PatchTable,
    align_ends,
    block_every,
    head_all_pos_every,
    head_by_pos_every,
)
from mizarr.stages.causal.grids.patching_metrics import (
    KL,
    Custom,
    LogitDifference,
    Metric,
    Probability,
    Rank,
    Recovery,
)
from mizarr.stages.forward.runs.experiment import compute_cells
from mizarr.stages.forward.runs.run import plan
from mizarr.store.errors import InterventionError, PromptError, StageError

from ...forward.random_hybrids import save_random_hybrid
from ...forward.random_models import save_random_model
from ...reference_runs import Reference, put

CLEAN, CORRUPTED = (0, 7, 42, 99, 5, 13), (0, 7, 250, 31, 5, 13)
CORRECT, WRONG = 17, 200
DIFFERENCE = LogitDifference(CORRECT, WRONG)
LAYERS, HEADS, KV_HEADS, LENGTH = 3, 4, 2, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 3 layers, 4 heads, 2 key/value heads."""
    path = tmp_path_factory.mktemp("llama")
    axes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    reference = save_random_model(path, "llama", 3, hidden_size=32, head_dim=8, **axes)
    reference.eval()
    FOUND[path] = Reference(reference)
    return path


FOUND: dict[Path, Reference] = {}


@pytest.fixture
def reference(folder: Path) -> Reference:
    return FOUND[folder]


@pytest.fixture
def model(folder: Path) -> mizarr.Model:
    return mizarr.Model.from_pretrained(folder)


def compute(experiment, folder: Path, where: Path | str):
    """The whole result of an experiment, in memory."""
    store = mizarr.open_store(where)
    node = experiment.on(str(folder))
    run(node, store)
    return node.open(store).load()


def grid(**given) -> ActivationPatching:
    return ActivationPatching(**({"clean": CLEAN, "corrupted": CORRUPTED, "metrics": (DIFFERENCE,)} | given))


def difference(logits: torch.Tensor) -> float:
    return float(logits[CORRECT] - logits[WRONG])


PLACES = {
    "layer": [(None, None, None)],
    "position": [(None, p, None) for p in range(LENGTH)],
    "head": [(h, None, None) for h in range(HEADS)],
    "head_position": [(h, p, None) for h in range(HEADS) for p in range(LENGTH)],
    "edge": [(h, q, k) for h in range(HEADS) for q in range(LENGTH) for k in range(LENGTH)],
}
GRIDS = [
    *[(kind, "position") for kind in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z")],
    *[(kind, over) for kind in ("z", "q", "k", "v", "pattern") for over in ("head", "head_position")],
    ("pattern", "edge"),
    ("mlp_out", "layer"),
]


@pytest.mark.parametrize(("kind", "over"), GRIDS)
def test_every_cell_is_the_full_forward_with_that_one_place_overwritten(
    kind, over, folder, reference, tmp_path
):
    layers = (0, 2) if len(PLACES[over]) > LENGTH else None
    found = compute(grid(kinds=(kind,), over=over, layers=layers), folder, tmp_path)["logit_difference"]
    _, clean = reference.run(CLEAN)
    for layer, cell in zip(found["layer"].values, found, strict=True):
        places = [
            place
            for place in PLACES[over]
            if not (kind in ("k", "v") and place[0] is not None and place[0] >= KV_HEADS)
        ]
        expected = [
            difference(
                reference.run(CORRUPTED, {(kind, int(layer)): put(clean[kind, int(layer)], *place)})[0]
            )
            for place in places
        ]
        np.testing.assert_allclose(np.ravel(cell.values), expected, atol=2e-5)


def test_edges_to_later_keys_are_patched_where_positions_see_them(tmp_path):
    """Each cell is a pass with that one weight written over, of a decoder without its mask."""
    save_random_hybrid(tmp_path / "model", "gpt2", 1, tokenizer=False, is_causal=False)
    model = mizarr.Model.from_pretrained(tmp_path / "model")
    asked = grid(kinds=("pattern",), over="edge", layers=(0,), heads=(0,))
    found = compute(asked, tmp_path / "model", tmp_path / "store")["logit_difference"][0, 0]
    point = mizarr.HookPoint.pattern(0)
    clean, own = (model.forward(ids, mizarr.HookSpec().capture(point))[point] for ids in (CLEAN, CORRUPTED))
    for query, key in ((0, 5), (2, 3), (5, 5), (4, 1)):
        weights = own.clone()
        weights[0, 0, query, key] = clean[0, 0, query, key]
        spec = mizarr.HookSpec().intervene(point, mizarr.Replace(weights))
        expected = difference(model.forward(CORRUPTED, spec).logits[0, -1])
        assert float(found[query, key]) == pytest.approx(expected, abs=1e-6)
    unchanged = difference(model.forward(CORRUPTED).logits[0, -1])
    assert (np.abs(found.values[np.triu_indices(LENGTH, 1)] - unchanged) > 2e-5).sum() > 5


def test_axes_are_named_after_what_they_are(folder, tmp_path):
    for kind, over, dims in (
        ("resid_pre", "position", ("layer", "position")),
        ("z", "head_position", ("layer", "head", "position")),
        ("k", "head", ("layer", "kv_head")),
        ("pattern", "head_position", ("layer", "head", "query_position")),
        ("pattern", "edge", ("layer", "head", "query_position", "key_position")),
    ):
        found = compute(grid(kinds=(kind,), over=over, layers=(1,)), folder, tmp_path)
        assert found["logit_difference"].dims == dims
        assert found["logit_difference"].attrs["units"] == "logits"
        assert found["logit_difference"].attrs["long_name"]
    texts = [decoded(folder, token) for token in CORRUPTED]
    assert compute(grid(kinds=("resid_pre",)), folder, tmp_path)["token"].values.tolist() == texts


def decoded(folder: Path, token: int) -> str:
    return mizarr.Model.from_pretrained(folder).tokenizer.decode_token(token)


def test_a_window_overwrites_neighbouring_layers_together(folder, reference, tmp_path):
    found = compute(grid(kinds=("mlp_out",), window=2), folder, tmp_path)["logit_difference"]
    _, clean = reference.run(CLEAN)
    for layer, layers in ((0, (0,)), (1, (0, 1)), (2, (1, 2))):
        for position in range(LENGTH):
            edits = {("mlp_out", at): put(clean["mlp_out", at], None, position) for at in layers}
            expected = difference(reference.run(CORRUPTED, edits)[0])
            assert float(found.sel(layer=layer, position=position)) == pytest.approx(expected, abs=2e-5)


def test_bundles_are_the_single_grids_stacked_with_nan_for_heads_there_are_not(folder, tmp_path):
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "metrics": (DIFFERENCE,)}
    blocks = compute(block_every(**given), folder, tmp_path)["logit_difference"]
    assert blocks.dims == ("kind", "layer", "position")
    assert blocks["kind"].values.tolist() == ["resid_pre", "attn_out", "mlp_out"]
    for make, over, dims in (
        (head_all_pos_every, "head", ("kind", "layer", "head")),
        (head_by_pos_every, "head_position", ("kind", "layer", "head", "position")),
    ):
        bundle = compute(make(**given), folder, tmp_path)
        values = bundle["logit_difference"]
        assert values.dims == dims
        assert values.shape[:3] == (5, LAYERS, HEADS)
        for kind in ("z", "q", "k", "v", "pattern"):
            alone = compute(grid(kinds=(kind,), over=over), folder, tmp_path)["logit_difference"].values
            np.testing.assert_array_equal(values.sel(kind=kind).values[:, : alone.shape[1]], alone)
            assert np.isnan(values.sel(kind=kind).values[:, alone.shape[1] :]).all()
        assert values.isnull().sum() == 2 * values[0, :, :2].size
        assert "key/value heads" in bundle.attrs["note"]


def test_an_index_table_gives_its_rows_in_their_order(folder, tmp_path):
    index = (("z", 2, None, 1), ("resid_pre", 0, 3, None), ("z", 2, -1, 0), ("k", 1, 2, 1), ("z", 2, None, 1))
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "metrics": (DIFFERENCE, KL())}
    table = compute(PatchTable(index=index, **given), folder, tmp_path)
    assert table["logit_difference"].dims == ("index",)
    assert table["kind"].values.tolist() == ["z", "resid_pre", "z", "k", "z"]
    assert table["position"].values.tolist() == [-1, 3, -1, 2, -1]
    for row, (kind, over, at) in enumerate(
        [
            ("z", "head", {"layer": 2, "head": 1}),
            ("resid_pre", "position", {"layer": 0, "position": 3}),
            ("z", "head_position", {"layer": 2, "position": LENGTH - 1, "head": 0}),
            ("k", "head_position", {"layer": 1, "position": 2, "kv_head": 1}),
            ("z", "head", {"layer": 2, "head": 1}),
        ]
    ):
        whole = compute(grid(kinds=(kind,), over=over, metrics=(DIFFERENCE, KL())), folder, tmp_path)
        for name in ("logit_difference", "kl"):
            assert float(table[name][row]) == pytest.approx(float(whole[name].sel(at)), abs=1e-6)


def test_recovery_is_zero_where_nothing_changes_and_one_where_everything_is_clean(folder, tmp_path):
    chosen = (Recovery(DIFFERENCE), Recovery(KL(), name="kl_recovery"))
    found = compute(grid(kinds=("resid_post",), over="layer", metrics=chosen), folder, tmp_path)
    for metric in chosen:
        np.testing.assert_allclose(found[metric.name], 1, atol=1e-4)
    by_position = compute(grid(kinds=("resid_pre",), layers=(0,), metrics=chosen), folder, tmp_path)
    same = [i for i in range(LENGTH) if CLEAN[i] == CORRUPTED[i]]
    for metric in chosen:
        np.testing.assert_allclose(by_position[metric.name].sel(position=same), 0, atol=1e-4)


def test_kl_recovery_is_one_minus_the_ratio_of_divergences(folder, tmp_path):
    found = compute(grid(kinds=("resid_mid",), metrics=(KL(), Recovery(KL()))), folder, tmp_path)
    corrupted = float(found["unpatched"].sel(run="corrupted", metric="kl"))
    assert corrupted > 0.01
    np.testing.assert_allclose(found["recovery"], 1 - found["kl"] / corrupted, atol=1e-12)


def test_patching_a_run_with_itself_changes_nothing(folder, reference, tmp_path):
    own = difference(reference.run(CLEAN)[0])
    given = {"clean": CLEAN, "corrupted": CLEAN}
    for kinds, over in ((("resid_pre", "mlp_out"), "position"), (("q", "v", "pattern"), "head")):
        found = compute(grid(kinds=kinds, over=over, **given), folder, tmp_path)["logit_difference"]
        held = found.values[~np.isnan(found.values)]
        np.testing.assert_allclose(held, own, atol=2e-5)


def test_runs_name_the_one_place_they_act_at(model):
    for kind, over in (("resid_pre", "position"), ("z", "head_position"), ("pattern", "edge")):
        experiment = grid(kinds=(kind,), over=over)
        cell = experiment.cells(model.config)[1]
        prepared = experiment.prepare(model)
        for each in experiment.runs(prepared, cell):
            (change,) = each.hooks.interventions_at(mizarr.HookPoint(kind, 1))
            assert len(change.positions) == 1
            assert change.heads is None or len(change.heads) == 1
            assert change.value.numel() <= max(model.config.hidden_size, LENGTH)


@pytest.mark.parametrize(
    ("kind", "over"), [("resid_pre", "position"), ("k", "head_position"), ("z", "head"), ("pattern", "edge")]
)
def test_a_sketch_without_the_model_is_planned_as_the_runs_are(kind, over, folder, model, tmp_path):
    experiment = grid(kinds=(kind,), over=over)
    node = experiment.on(str(folder))
    sketched = node.plan(mizarr.open_store(tmp_path))
    prepared = experiment.prepare(model)
    runs = [each for cell in node.cells() for each in experiment.runs(prepared, cell)]
    planned = plan(model, runs)
    assert (sketched.runs, sketched.naive) == (planned.runs, planned.naive)
    # Runs that happen to put in what is there already are one run only where the numbers are known.
    assert planned.positions <= sketched.positions <= 1.1 * planned.positions


def test_a_table_is_planned_without_the_model_too(folder, model, tmp_path):
    index = (("z", 2, None, 1), ("resid_pre", 0, 3, None), ("k", 1, 2, 1))
    table = PatchTable(clean=CLEAN, corrupted=CORRUPTED, metrics=(DIFFERENCE,), index=index)
    sketched = table.on(str(folder)).plan(mizarr.open_store(tmp_path))
    prepared = table.prepare(model)
    runs = [each for cell in table.cells(model.config) for each in table.runs(prepared, cell)]
    assert sketched.positions == plan(model, runs).positions


def test_metrics_are_those_of_the_logits(folder, reference, tmp_path):
    chosen = (DIFFERENCE, KL(), Probability(CORRECT), Rank(CORRECT), Custom(largest))
    found = compute(grid(kinds=("resid_post",), layers=(1,), metrics=chosen), folder, tmp_path)
    clean, seen = reference.run(CLEAN)
    for position in range(LENGTH):
        edits = {("resid_post", 1): put(seen["resid_post", 1], None, position)}
        logits = reference.run(CORRUPTED, edits)[0].double()
        p, q = clean.double().log_softmax(-1), logits.log_softmax(-1)
        expected = {
            "logit_difference": difference(logits),
            "kl": float((p.exp() * (p - q)).sum()),
            "probability": float(q[CORRECT].exp()),
            "rank": float(logits.argsort(descending=True).tolist().index(CORRECT)),
            "largest": float(logits.max()),
        }
        for name, value in expected.items():
            assert float(found[name].sel(layer=1, position=position)) == pytest.approx(value, abs=2e-5)


def largest(logits):
    return logits.max()


def same_but_twice(logits):
    return 2 * logits.max()


def key_of(metric, folder: Path) -> str:
    store = mizarr.open_store(folder / "keys")
    return grid(kinds=("resid_pre",), metrics=(metric,)).on(str(folder)).key(store).digest


def test_the_key_of_a_custom_metric_is_its_code_or_its_version(folder):
    def key(metric) -> str:
        return key_of(metric, folder)

    assert key(Custom(largest)) == key(Custom(largest))
    assert key(Custom(largest)) != key(Custom(same_but_twice, name="largest"))
    assert key(Custom(largest, version=1)) == key(Custom(same_but_twice, version=1, name="largest"))
    assert key(Custom(largest, version=1)) != key(Custom(largest, version=2))
    assert Custom(lambda logits: logits.max(), version="3.0").name == "metric"
    draws = np.random.default_rng(0)
    with pytest.raises(StageError, match=r"metric 'metric' has no version.*Generator.*closure 'draws'"):
        key(Custom(lambda logits: draws.random()))
    assert key(Custom(lambda logits: draws.random(), version=1))


FACTOR = 3.0


def scaled(logits, power=1.0):
    return by_factor(logits.max() ** power)


def by_factor(number):
    return FACTOR * number


@dataclass(frozen=True)
class Largest(Metric):
    """A metric of one's own."""

    name: str = "largest"
    units: str = "logits"
    long_name: str = "largest logit"

    def value(self, logits, clean):
        return float(by_factor(logits.max()))


def closing_over(weights):
    return lambda logits: float(logits[: len(weights)] @ weights)


WEIGHTS = np.array([1.0, 2.0])


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        (Custom(scaled), lambda patch: patch.setitem(globals(), "FACTOR", 5.0)),
        (Custom(scaled), lambda patch: patch.setitem(globals(), "by_factor", abs)),
        (Custom(scaled), lambda patch: patch.setattr(scaled, "__defaults__", (2.0,))),
        (Custom(closing_over(WEIGHTS), name="weighed"), lambda patch: np.put(WEIGHTS, 0, 7.0)),
        (Largest(), lambda patch: patch.setitem(globals(), "FACTOR", 5.0)),
        (
            Recovery(Largest()),
            lambda patch: patch.setattr(Largest, "value", lambda self, x, clean: float(x[0])),
        ),
    ],
    ids=["global", "helper", "default", "closure", "class", "recovery"],
)
def test_after_a_change_a_metric_gives_what_an_empty_store_would_give(
    metric, change, folder, tmp_path, monkeypatch
):
    asked = grid(kinds=("resid_post",), layers=(1,), metrics=(metric,))
    before = compute(asked, folder, tmp_path / "kept")[metric.name]
    key = key_of(metric, folder)
    change(monkeypatch)
    again = compute(asked, folder, tmp_path / "kept")[metric.name]
    assert key_of(metric, folder) != key
    assert again.identical(compute(asked, folder, tmp_path / "empty")[metric.name])
    assert not again.equals(before)


def test_a_metric_that_changes_what_it_reads_publishes_nothing(folder, tmp_path):
    seen: list[float] = []

    def remembering(logits):
        seen.append(float(logits.max()))
        return seen[0]

    with pytest.raises(StageError, match="expected metrics with the same code as when the run was planned"):
        compute(grid(kinds=("resid_post",), layers=(1,), metrics=(Custom(remembering),)), folder, tmp_path)
    assert not list(mizarr.open_store(tmp_path).records())


def test_a_worker_with_other_metrics_refuses_its_cells(folder, tmp_path, monkeypatch):
    store = mizarr.open_store(tmp_path)
    node = grid(kinds=("resid_post",), layers=(1,), metrics=(Custom(scaled),)).on(str(folder))
    expected = node.key(store).digest
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    with pytest.raises(StageError, match="or differs on this worker"):
        compute_cells(node, store, Group((node.cells()[0],)), expected=expected)
    assert not list(store.records())


def test_metrics_that_ship_keep_their_place_in_keys():
    kl = {"metric": "KL", "name": "kl"}
    shipped = (DIFFERENCE, KL(), Probability(3), Rank(3), Recovery(KL()), Custom(abs, 2))
    assert [metric.canonical() for metric in shipped] == [
        {"metric": "LogitDifference", "correct": CORRECT, "wrong": WRONG, "name": "logit_difference"},
        kl,
        {"metric": "Probability", "token": 3, "name": "probability"},
        {"metric": "Rank", "token": 3, "name": "rank"},
        {"metric": "Recovery", "of": kl, "name": "recovery"},
        {"metric": "Custom", "version": 2, "name": "abs", "units": "1", "long_name": "abs"},
    ]


def test_keys_move_with_every_parameter(folder):
    store = mizarr.open_store(folder / "keys")
    base = {"kinds": ("z",), "over": "head_position"}
    variants = [
        {},
        {"clean": CORRUPTED},
        {"corrupted": CLEAN},
        {"kinds": ("q",)},
        {"over": "head"},
        {"layers": (0,)},
        {"positions": (1,)},
        {"heads": (0,)},
        {"window": 2},
        {"at": 3},
        {"metrics": (KL(),)},
        {"metrics": (Recovery(KL()),)},
        {"metrics": (Recovery(DIFFERENCE),)},
        {"metrics": (LogitDifference(CORRECT, 3),)},
        {"metrics": (Probability(CORRECT),)},
        {"metrics": (Probability(WRONG),)},
        {"align": tuple(range(LENGTH))},
    ]
    keys = {grid(**(base | each)).on(str(folder)).key(store).digest for each in variants}
    assert len(keys) == len(variants)


def count_runs(monkeypatch) -> list[int]:
    """How many runs each call of the planner is asked for, from now on."""
    from mizarr.stages.forward.runs import experiment

    asked, stream = [], experiment.stream

    def counted(model, runs, **given):
        asked.append(len(runs))
        return stream(model, runs, **given)

    monkeypatch.setattr(experiment, "stream", counted)
    return asked


def test_one_more_layer_computes_one_layer_and_a_second_call_none(folder, tmp_path, monkeypatch):
    asked = count_runs(monkeypatch)
    compute(grid(kinds=("resid_pre",), layers=(0, 1)), folder, tmp_path)
    compute(grid(kinds=("resid_pre",), layers=(0, 1, 2)), folder, tmp_path)
    compute(grid(kinds=("resid_pre",)), folder, tmp_path)
    assert asked == [2 * LENGTH, LENGTH]
    block_every(clean=CLEAN, corrupted=CORRUPTED, metrics=(DIFFERENCE,))
    compute(grid(kinds=("resid_pre", "mlp_out")), folder, tmp_path)
    assert asked[2:] == [3 * LENGTH], "the cells of resid_pre are stored already"


def test_explain_tells_runs_asked_and_stored_and_what_a_loop_would_cost(folder, tmp_path):
    store = mizarr.open_store(tmp_path / "store")
    whole = grid(kinds=("resid_pre",)).on(folder)
    (step,) = plan_nodes(whole, store).steps
    assert f": {3 * LENGTH} runs, {3 * LENGTH} of them distinct, in 1 sweeps" in step.state
    assert f"layer-positions instead of {3 * LENGTH * 3 * LENGTH:,}" in step.state
    run(grid(kinds=("resid_pre",), layers=(0, 1)).on(folder), store)
    (step,) = plan_nodes(whole, store).steps
    assert f"{3 * LENGTH} runs requested, {2 * LENGTH} of them stored; {LENGTH} runs, " in step.state
    # The unpatched run, and from the last layer on the positions from the patched one to the end.
    positions = 3 * LENGTH + sum(LENGTH - p for p in range(LENGTH))
    assert f": {positions} layer-positions instead of {3 * LENGTH * LENGTH}" in step.state


def test_a_killed_grid_goes_on_where_it_was(folder, tmp_path, monkeypatch):
    measured = []
    measure = ActivationPatching.measure

    def dies(self, prepared, cell, result):
        measured.append(cell)
        if len(measured) == LENGTH + 2:
            raise KeyboardInterrupt
        return measure(self, prepared, cell, result)

    experiment = grid(kinds=("attn_out",))
    with monkeypatch.context() as killed:
        killed.setattr(ActivationPatching, "measure", dies)
        with pytest.raises(KeyboardInterrupt):
            compute(experiment, folder, tmp_path / "store")
    store = mizarr.open_store(tmp_path / "store")
    missing = len(experiment.on(str(folder)).missing(store))
    assert missing < LAYERS
    asked = count_runs(monkeypatch)
    again = compute(experiment, folder, tmp_path / "store")
    assert asked == [missing * LENGTH]
    whole = compute(experiment, folder, tmp_path / "other")
    np.testing.assert_allclose(again["logit_difference"], whole["logit_difference"], atol=1e-6)


def test_prompts_of_different_length_are_refused_in_one_line_that_offers_an_alignment():
    with pytest.raises(PromptError, match=r"found 6 and 5 tokens.*align_ends") as caught:
        grid(kinds=("resid_pre",), corrupted=CORRUPTED[:5])
    assert "\n" not in str(caught.value)


def test_aligned_prompts_of_different_length_are_patched_from_the_place_that_corresponds(
    folder, reference, tmp_path
):
    short = (0, 7, 250, 5, 13)
    aligned = align_ends(CLEAN, short)
    assert aligned == (0, 1, 2, 4, 5)
    given = {"corrupted": short, "align": aligned}
    found = compute(grid(kinds=("resid_mid",), **given), folder, tmp_path)["logit_difference"]
    _, clean = reference.run(CLEAN)
    for layer, position in itertools.product(range(LAYERS), range(len(short))):
        source = clean["resid_mid", layer][list(aligned)]
        logits, _ = reference.run(short, {("resid_mid", layer): put(source, None, position)})
        assert float(found.sel(layer=layer, position=position)) == pytest.approx(difference(logits), abs=2e-5)


def test_alignment_counts_from_both_ends():
    assert align_ends((1, 2, 3, 9), (1, 5, 9)) == (0, 1, 3)
    assert align_ends((1, 5, 9), (1, 2, 3, 9)) == (0, 1, 1, 2)
    assert align_ends((1, 2), (1, 2)) == (0, 1)
    assert align_ends((4, 5, 6), (4, 5, 6, 6)) == (0, 1, 2, 2)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"kinds": ()}, StageError, "at least one entry in kinds"),
        ({"layers": ()}, StageError, "at least one entry in layers"),
        ({"positions": ()}, StageError, "at least one entry in positions"),
        ({"metrics": ()}, StageError, "at least one metric"),
        ({"metrics": (Probability(1), Probability(2))}, StageError, "'probability' twice"),
        ({"metrics": (Probability(32000),)}, PromptError, "token id from 0 to 319, found 32000"),
        ({"metrics": (Recovery(LogitDifference(-1, 2)),)}, PromptError, "found -1"),
        ({"kinds": ("resid_pst",)}, StageError, "did you mean 'resid_post'"),
        ({"over": "heads"}, StageError, "found 'heads'"),
        ({"over": "head"}, StageError, "found 'resid_pre'"),
        ({"kinds": ("z",), "over": "edge"}, StageError, "pattern with over='edge', found 'z'"),
        ({"layers": (3,)}, InterventionError, "layer from 0 to 2 .*found 3"),
        ({"positions": (6,)}, InterventionError, "position from 0 to 5 .*found 6"),
        ({"kinds": ("k",), "over": "head", "heads": (2,)}, InterventionError, "head from 0 to 1 .*found 2"),
        ({"at": 6}, InterventionError, "found 6"),
        ({"window": 0}, StageError, "window of at least 1"),
        ({"kinds": ("pattern",), "over": "edge", "window": 2}, StageError, "expected window=1"),
        ({"kinds": ("pattern",), "over": "head", "align": (0, 1, 2, 3, 4, 5)}, StageError, "equal length"),
    ],
)
def test_what_cannot_be_patched_is_said_before_anything_runs(given, error, match, model):
    with pytest.raises(error, match=match) as caught:
        grid(**({"kinds": ("resid_pre",)} | given)).cells(model.config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (("z", 3, None, 0), "layer from 0 to 2"),
        (("z", 0, None, 4), "head from 0 to 3"),
        (("v", 0, None, 2), "head from 0 to 1"),
        (("z", 0, -7, 0), "position from 0 to 5"),
        (("mlp_out", 0, 1, 0), "has no heads"),
    ],
)
def test_rows_of_a_table_must_exist(row, match, model):
    table = PatchTable(clean=CLEAN, corrupted=CORRUPTED, metrics=(KL(),), index=(row,))
    with pytest.raises((InterventionError, StageError), match=match):
        table.cells(model.config)


def test_an_empty_table_is_refused():
    with pytest.raises(StageError, match="at least one"):
        PatchTable(clean=CLEAN, corrupted=CORRUPTED, metrics=(KL(),), index=())


def test_recovery_of_equal_runs_is_refused_instead_of_nan(folder, tmp_path):
    for metric in (KL(), DIFFERENCE):
        same = grid(kinds=("resid_pre",), corrupted=CLEAN, metrics=(Recovery(metric),))
        with pytest.raises(StageError, match="different values in the clean and the corrupted run"):
            compute(same, folder, tmp_path)
    with pytest.raises(StageError, match="Recovery of a Recovery"):
        Recovery(Recovery(KL()))


def test_a_metric_that_gives_nan_is_named(folder, tmp_path):
    def nothing(logits):
        return float("nan")

    with pytest.raises(StageError, match=r"'nothing'.*finite"):
        compute(grid(kinds=("resid_pre",), metrics=(Custom(nothing),)), folder, tmp_path)


def test_only_the_tokens_a_metric_reads_are_asked_for():
    assert patching_metrics.required_tokens((DIFFERENCE, Recovery(DIFFERENCE))) == (CORRECT, WRONG)
    assert patching_metrics.required_tokens((DIFFERENCE, KL())) is None
    logits = np.arange(320.0)
    both = patching_metrics.read_metrics((LogitDifference(9, 4), Probability(3)), logits, logits)
    assert both[0] == 5
