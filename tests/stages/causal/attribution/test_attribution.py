"""Attribution: estimates are the first order of exact runs, whether stages or experiments make them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr import HookPoint, HookSpec, Model, Replace
from mizarr.pipeline import run
from mizarr.stages.causal.attribution.check import AttributionCheck, agreement
from mizarr.stages.causal.attribution.integrated import IntegratedGradients
from mizarr.stages.causal.attribution.patching import AttributionPatching
from mizarr.stages.causal.attribution.scores import gradient_attribution, patch_attribution
from mizarr.stages.causal.controls import rank_correlation
from mizarr.stages.causal.grids.patching import ActivationPatching, PatchTable
from mizarr.stages.causal.grids.patching_metrics import (
    KL,
    LogitDifference,
    LogProbability,
    Rank,
    Recovery,
)
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.hooks.spec import Capture
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.store.errors import PromptError, ShapeError, StageError
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, VOCAB, save_random_model
from tests.stages.forward.random_rwkv import save_random_rwkv

pytest.importorskip("transformers")
LENGTH = 7


def draw(seed: int, length: int = LENGTH) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, VOCAB, length).tolist())


CLEAN, CORRUPTED = draw(1), (*draw(1)[:2], *draw(2)[2:4], *draw(1)[4:])
METRIC = LogitDifference(3, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("llama")
    save_random_model(path, "llama", 2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    return path


@pytest.fixture(scope="module")
def model(folder: Any) -> Model:
    return Model.from_pretrained(folder, dtype="float64")


@pytest.fixture
def store(tmp_path: Any) -> Any:
    return mizarr.open_store(tmp_path / "store", durability="process")


def computed(experiment: Any, model: Any, store: Any) -> xr.Dataset:
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


def slope(
    model: Model,
    point: HookPoint,
    clean: torch.Tensor,
    where: tuple[Any, ...],
    metric: Any,
    position: int | None = None,
) -> float:
    """How fast a metric of the corrupted run moves towards the clean activation at a place, by two runs.
    position: of a state, from which later ones follow."""
    own = model.forward([list(CORRUPTED)], HookSpec().capture(point))[point][0]
    base = model.forward([list(CLEAN)]).logits[0, -1].numpy()
    moved, step = [], 2e-3
    for by in (step, -step):
        value = own.clone()
        value[where] += by * (clean - own)[where]
        change = Replace(value) if position is None else Replace(value[where], positions=(position,))
        spec = HookSpec().intervene(point, change)
        logits = model.forward([list(CORRUPTED)], spec).logits[0, -1].numpy()
        chosen = slice(None) if metric.tokens is None else list(metric.tokens)
        moved.append(metric.value(logits[chosen], base[chosen]))
    return (moved[0] - moved[1]) / (2 * step)


GRIDS = [
    ("resid_mid", "position", METRIC),
    ("mlp_out", "layer", KL()),
    ("z", "head_position", LogProbability(5)),
    ("k", "head_position", METRIC),
    ("q", "head", METRIC),
    ("pattern", "edge", METRIC),
]


def index_of(kind: str, over: str, place: tuple[int, ...]) -> tuple[Any, ...]:
    whole = slice(None)
    return {
        "layer": (whole,),
        "position": (*place,),
        "head": (*place,),
        "head_position": (*place,),
        "edge": (*place,),
    }[over]


@pytest.mark.parametrize(("kind", "over", "metric"), GRIDS, ids=lambda each: str(each)[:20])
def test_an_estimate_is_the_slope_of_exact_runs(model, store, kind, over, metric):
    grid = AttributionPatching(
        clean=CLEAN, corrupted=CORRUPTED, kinds=(kind,), over=over, metrics=(metric,), layers=(1,)
    )
    found = computed(grid, model, store)
    effects = found[metric.name].isel(layer=0) - found["unpatched"].sel(run="corrupted").item()
    scale = float(np.abs(effects).max())
    assert scale > 1e-4
    point = HookPoint(kind, 1)
    clean = model.forward([list(CLEAN)], HookSpec().capture(point))[point][0]
    for place in product(*map(range, effects.shape)):
        expected = slope(model, point, clean, index_of(kind, over, place), metric)
        assert float(effects.values[place]) == pytest.approx(expected, abs=3e-3 * scale), place


@pytest.mark.parametrize(("family", "seed"), [("llama", 2), ("gemma2", 3), ("gpt_oss", 1)])
@pytest.mark.parametrize("kind", ["q", "k"])
def test_weights_made_anew_are_those_of_each_patch_alone(family, seed, kind, tmp_path, store):
    """Grouped queries, soft caps, windows, sinks: weights by a run per cell, gradients by the primitive."""
    save = save_random_model if family in FAMILIES else save_random_hybrid
    save(tmp_path / "m", family, seed, tokenizer=False)
    model, layer = Model.from_pretrained(tmp_path / "m", dtype="float64"), 1
    given: dict[str, Any] = {
        "clean": CLEAN,
        "corrupted": CORRUPTED,
        "kinds": (kind,),
        "over": "head_position",
        "metrics": (METRIC,),
        "layers": (layer,),
    }
    found = computed(AttributionPatching(attention="anew", **given), model, store)
    effects = (found["logit_difference"] - found["unpatched"].sel(run="corrupted").item())[0].values
    point, weights = HookPoint(kind, layer), HookPoint.pattern(layer)
    clean = model.forward([list(CLEAN)], HookSpec().capture(point))[point][0]
    spec = HookSpec().capture(weights, f"grad:{weights}").gradient_of(METRIC)
    base = model.forward([list(CORRUPTED)], spec)
    gradient = base[f"grad:{weights}"][0]
    expected = np.zeros_like(effects)
    for head, position in product(*map(range, effects.shape)):
        part = clean[head : head + 1, position : position + 1]
        change = Replace(part, positions=(position,), heads=(head,))
        patched = model.forward([list(CORRUPTED)], HookSpec().intervene(point, change).capture(weights))
        expected[head, position] = ((patched[weights] - base[weights])[0] * gradient).sum()
    assert np.abs(expected).max() > 1e-4
    np.testing.assert_allclose(effects, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_weights_made_anew_are_nearer_to_exact_runs_of_keys(model, store):
    given: dict[str, Any] = {"clean": CLEAN, "corrupted": CORRUPTED, "over": "head_position"}
    given |= {"kinds": ("k",), "metrics": (METRIC,)}
    exact = computed(ActivationPatching(**given), model, store)["logit_difference"]
    misses = {}
    for how in ("slope", "anew"):
        found = computed(AttributionPatching(attention=how, **given), model, store)[METRIC.name]
        misses[how] = float(np.abs(found - exact).mean())
    assert misses["anew"] < misses["slope"]


def dropped_literally(folder: Any, layer: int | None, kind: str) -> tuple[Any, Any, Any]:
    """Of transformers' Llama, by its own hooks and autograd: clean and corrupted values of z or mlp_out of
    every layer, and the metric's gradient there where what one layer adds to the stream is a constant."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    held: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        held.append(x.detach().requires_grad_() if not x.requires_grad else x)
        held[-1].retain_grad()
        return held[-1]

    def drop(module: Any, given: Any, out: Any) -> Any:
        is_tuple = isinstance(out, tuple)
        stream, entered = (out[0] if is_tuple else out), given[0]
        passed = entered + (stream - entered).detach()
        return (passed, *out[1:]) if is_tuple else passed

    for number, block in enumerate(theirs.model.layers):
        if kind == "z":
            block.self_attn.o_proj.register_forward_pre_hook(lambda module, given: (keep(given[0]),))
        else:
            block.mlp.register_forward_hook(lambda module, given, out: keep(out))
        if number == layer:
            block.register_forward_hook(drop)
    theirs(torch.tensor([CLEAN]))
    clean = torch.stack([x.detach()[0] for x in held])
    held.clear()
    logits = theirs(torch.tensor([CORRUPTED])).logits[0, -1]
    (logits[METRIC.correct] - logits[METRIC.wrong]).backward()
    none = torch.zeros_like(clean[0])
    gradient = torch.stack([none if x.grad is None else x.grad[0] for x in held])
    return clean, torch.stack([x.detach()[0] for x in held]), gradient


@pytest.mark.parametrize(("kind", "over"), [("z", "head_position"), ("mlp_out", "position")])
@pytest.mark.parametrize("seed", [4, 9])
def test_gradient_dropout_is_that_of_transformers_with_each_layer_a_constant(
    tmp_path, store, kind, over, seed
):
    """AtP* literally: sizes summed over the layer that is dropped, over one less than layers there are."""
    save_random_model(tmp_path / "m", "llama", seed, num_hidden_layers=3, tie_word_embeddings=False)
    model = Model.from_pretrained(tmp_path / "m", dtype="float64")
    grid = {"clean": CLEAN, "corrupted": CORRUPTED, "kinds": (kind,), "over": over, "metrics": (METRIC,)}
    found = computed(AttributionPatching(dropout=True, **grid), model, store)
    ours = found["logit_difference"].values - found["unpatched"].sel(run="corrupted").item()

    def effects(layer: int | None) -> Any:
        clean, corrupted, gradient = dropped_literally(tmp_path / "m", layer, kind)
        each = ((clean - corrupted) * gradient).numpy()
        if kind == "mlp_out":
            return each.sum(-1)
        return each.reshape(3, LENGTH, model.config.num_attention_heads, -1).sum(-1).transpose(0, 2, 1)

    whole, layers = effects(None), [effects(layer) for layer in range(3)]
    assert all((layers[n][n] == 0).all() for n in range(3)), "a layer's own part does not reach the metric"
    expected = np.copysign(sum(np.abs(each) for each in layers) / 2, whole)
    assert np.abs(np.abs(expected) - np.abs(whole)).max() > 1e-3 * np.abs(whole).max(), "it is not the same"
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_past_a_dropped_layer_the_gradient_goes_by_the_stream_alone(tmp_path, family):
    """The same bits where layers are computed again on the way back; a layer's own points get nothing."""
    save_random_model(tmp_path / "m", family, 5)
    model = Model.from_pretrained(tmp_path / "m", dtype="float64")
    points = ("resid_pre", "resid_post", "attn_out", "mlp_out")
    spec = model.bind(HookSpec().capture("grad:hook_embed", *(f"grad:blocks.*.hook_{p}" for p in points)))
    want = Logits((-1,), (3,))
    asked: Any = ([CLEAN], spec, want, torch.ones_like)
    kept, again = (model.backward(*asked, memory=memory, dropped=1) for memory in (1 << 30, 0))
    whole = model.backward(*asked)
    assert torch.equal(kept[0], whole[0]), "a pass is what it is without"

    def at(found: Any, kind: str, layer: int | None) -> torch.Tensor:
        return found[1][Capture(HookPoint(kind, layer), is_gradient=True)]

    for capture, gradient in kept[1].items():
        assert torch.equal(gradient, again[1][capture]), capture
    assert torch.equal(at(kept, "resid_pre", 1), at(kept, "resid_post", 1))
    assert torch.equal(at(kept, "resid_post", 1), at(whole, "resid_post", 1))
    assert not at(kept, "attn_out", 1).any() and not at(kept, "mlp_out", 1).any()
    assert at(kept, "attn_out", 0).any() and not torch.equal(
        at(kept, "embed", None), at(whole, "embed", None)
    )


def test_dropout_goes_with_weights_made_anew(model, store):
    """Both parts of AtP*: the gradient at the weights, a layer at a time."""
    given: dict[str, Any] = {"clean": CLEAN, "corrupted": CORRUPTED, "kinds": ("q",), "over": "head_position"}
    given |= {"metrics": (METRIC,), "layers": (0,), "attention": "anew"}
    found = computed(AttributionPatching(**given, dropout=True), model, store)
    ours = found["logit_difference"][0].values - found["unpatched"].sel(run="corrupted").item()
    point, weights = HookPoint.q(0), HookPoint.pattern(0)
    asked = HookSpec().capture(point, weights)
    clean, own = (model.forward([list(ids)], asked) for ids in (CLEAN, CORRUPTED))
    made = HookSpec().intervene(point, Replace(clean[point][0])).capture(weights)
    moved = (model.forward([list(CORRUPTED)], made)[weights] - own[weights])[0]
    bound, want = model.bind(HookSpec().capture(f"grad:{weights}")), Logits((-1,), (3, 7))

    def gradient(dropped: int | None) -> torch.Tensor:
        sign = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
        back = model.backward([CORRUPTED], bound, want, lambda _: sign, dropped=dropped)
        return back[1][Capture(weights, is_gradient=True)][0]

    each = [(moved * gradient(layer)).sum(-1).abs() for layer in range(model.config.num_layers)]
    size = sum(each) / (model.config.num_layers - 1)
    expected = torch.copysign(size, (moved * gradient(None)).sum(-1)).numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_dropout_needs_layers_to_drop_and_is_in_the_key(tmp_path, model):
    grid: dict[str, Any] = {"clean": CLEAN, "corrupted": CORRUPTED, "kinds": ("z",), "metrics": (METRIC,)}
    assert AttributionPatching(**grid).params()["dropout"] is False
    assert AttributionPatching(**grid, dropout=True).params()["dropout"] is True
    save_random_model(tmp_path / "m", "llama", 1, num_hidden_layers=1)
    with pytest.raises(StageError, match="at least two layers for gradient dropout, found 1"):
        AttributionPatching(**grid, dropout=True).check(Model.from_pretrained(tmp_path / "m").config)


def test_states_of_a_recurrence_are_estimated_too(tmp_path, store):
    save_random_rwkv(tmp_path / "m", "rwkv7", 1)
    model = Model.from_pretrained(tmp_path / "m", dtype="float64")
    grid = AttributionPatching(
        clean=CLEAN, corrupted=CORRUPTED, kinds=("rwkv_state_seq",), metrics=(METRIC,), layers=(0,)
    )
    found = computed(grid, model, store)
    effects = found["logit_difference"].isel(layer=0) - found["unpatched"].sel(run="corrupted").item()
    point = HookPoint.rwkv_state_seq(0)
    clean = model.forward([list(CLEAN)], HookSpec().capture(point))[point][0]
    scale = float(np.abs(effects).max())
    for position in range(LENGTH):
        here = (slice(None), slice(position, position + 1))
        expected = slope(model, point, clean, here, METRIC, position)
        assert float(effects[position]) == pytest.approx(expected, abs=3e-3 * scale), position


def test_a_grid_of_estimates_has_the_axes_and_scale_of_the_exact_one(model, store):
    given: dict[str, Any] = {
        "clean": CLEAN,
        "corrupted": CORRUPTED,
        "kinds": ("z", "k", "v"),
        "over": "head",
        "metrics": (Recovery(METRIC), KL()),
    }
    exact = computed(ActivationPatching(**given), model, store)
    found = computed(AttributionPatching(**given), model, store)
    for name in ("recovery", "kl"):
        assert found[name].dims == exact[name].dims and found[name].shape == exact[name].shape
        assert np.array_equal(np.isnan(found[name]), np.isnan(exact[name]))
        assert found[name].attrs == exact[name].attrs
    np.testing.assert_allclose(found["unpatched"], exact["unpatched"], atol=1e-9)


def test_stages_over_what_is_stored_give_the_same_without_a_model(folder, store, monkeypatch):
    """Two pairs at once; a second metric reads the same activations."""
    pairs = [(CLEAN, CORRUPTED), (draw(8, 5), draw(9, 5))]
    clean, corrupted = ([list(pair[which]) for pair in pairs] for which in (0, 1))
    points = ("blocks.*.attn.hook_z", "blocks.*.hook_resid_post")
    metrics = (METRIC, LogitDifference(9, 4))

    def gradients(metric: Any) -> CaptureNode:
        spec = HookSpec().capture(*(f"grad:{point}" for point in points)).gradient_of(metric)
        return CaptureNode(str(folder), corrupted, spec)

    held = [CaptureNode(str(folder), rows, list(points)) for rows in (clean, corrupted)]
    nodes = {metric: gradients(metric) for metric in metrics}
    run([*held, *nodes.values()], store)
    loaded = Model.from_pretrained(folder)
    monkeypatch.setattr(Model, "from_pretrained", None)
    for metric, kind, over in product(metrics, ("z", "resid_post"), ("head_position", "position")):
        if (kind == "z") != (over == "head_position"):
            continue
        form = patch_attribution.form(f"patch_attribution{'_of_heads' if kind == 'z' else ''}")
        node = form.on(clean=held[0][kind], corrupted=held[1][kind], gradient=nodes[metric][f"{kind}__grad"])
        run(node, store)
        scores = node.open(store)["attribution"].load()
        assert scores.dims == ("layer", "token", *(("head",) if kind == "z" else ()))
        start = 0
        for one, other in pairs:
            own = scores.isel(token=slice(start, start + len(one)))
            start += len(one)
            grid = AttributionPatching(
                clean=one, corrupted=other, kinds=(kind,), over=over, metrics=(metric,)
            )
            found = computed(grid, loaded, store)
            effects = found[metric.name] - found["unpatched"].sel(run="corrupted").item()
            expected = effects.transpose("layer", "position", ...).values
            bound = 1e-4 * np.abs(expected).max()
            np.testing.assert_allclose(own.values, expected, rtol=0, atol=bound)


def test_scores_by_hand():
    def array(values: Any, *dims: str) -> xr.DataArray:
        return xr.DataArray(np.array(values, np.float32), dims=dims, coords={"layer": [4]})

    stream = ("layer", "token", "hidden")
    clean, corrupted = array([[[1, 2], [3, 4]]], *stream), array([[[0, 2], [1, 1]]], *stream)
    gradient = array([[[10, 1], [1, -1]]], *stream)
    found = patch_attribution(clean, corrupted, gradient)
    assert found.dims == ("layer", "token")
    assert found.values.tolist() == [[10.0, -1.0]]
    assert found["layer"].values.tolist() == [4]
    assert gradient_attribution(clean, gradient).values.tolist() == [[12.0, -1.0]]
    neurons = [each.rename(hidden="mlp") for each in (clean, gradient)]
    assert gradient_attribution(*neurons).values.tolist() == [[[10.0, 2.0], [3.0, -4.0]]]
    with pytest.raises(ShapeError, match="found 1 and 2 along 'token'"):
        patch_attribution(clean.isel(token=[0]), corrupted, gradient)
    with pytest.raises(ShapeError, match="at the same layers, found different"):
        gradient_attribution(clean.assign_coords(layer=[5]), gradient)
    shifted = [
        each.assign_coords(position=("token", row)) for each, row in ((clean, [0, 1]), (gradient, [0, 0]))
    ]
    with pytest.raises(ShapeError, match="at the same positions, found different"):
        gradient_attribution(*shifted)


# Exact runs of what is proposed


@pytest.mark.parametrize("metric", [METRIC, Recovery(METRIC)], ids=["plain", "recovery"])
def test_the_largest_and_random_cells_are_run_exactly(model, store, metric):
    given: dict[str, Any] = {"clean": CLEAN, "corrupted": CORRUPTED, "metrics": (metric,)}
    kinds = ("z", "v")
    check = computed(
        AttributionCheck(kinds=kinds, over="head_position", verify=6, seed=3, **given), model, store
    )
    assert check["sort"].values.tolist() == ["largest"] * 6 + ["random"] * 6
    columns = [check[name].values.tolist() for name in ("kind", "layer", "position", "head")]
    rows = list(zip(*columns, strict=True))
    assert len(set(rows)) == 12
    table = computed(PatchTable(index=tuple(rows), **given), model, store)
    none = 0.0 if isinstance(metric, Recovery) else table["unpatched"].sel(run="corrupted").item()
    np.testing.assert_allclose(check["exact"], table[metric.name] - none, rtol=0, atol=1e-9)
    grids = {
        kind: computed(AttributionPatching(kinds=(kind,), over="head_position", **given), model, store)
        for kind in kinds
    }
    every = {kind: np.abs(grids[kind][metric.name].values - none) for kind in kinds}
    largest = np.sort(np.concatenate([each.ravel() for each in every.values()]))[::-1][:6]
    np.testing.assert_allclose(np.abs(check["estimate"][:6]), largest, rtol=0, atol=1e-9)
    for sort, which in (("largest", slice(0, 6)), ("random", slice(6, 12)), ("all", slice(None))):
        estimate, exact = check["estimate"].values[which], check["exact"].values[which]
        told = check.sel(chosen=sort)
        assert float(told["correlation"]) == pytest.approx(np.corrcoef(estimate, exact)[0, 1])
        assert float(told["worst_miss"]) == pytest.approx(np.abs(estimate - exact).max())


def test_a_grid_smaller_than_what_is_verified_is_run_whole(model, store):
    check = computed(
        AttributionCheck(
            clean=CLEAN,
            corrupted=CORRUPTED,
            kinds=("z",),
            over="head",
            layers=(0,),
            metrics=(METRIC,),
            verify=9,
        ),
        model,
        store,
    )
    assert check.sizes["cell"] == 4 and set(check["sort"].values) == {"largest"}
    assert np.isnan(check["worst_miss"].sel(chosen="random"))


def test_agreement_by_hand():
    one, other = np.array([1.0, 2.0, 3.0, 10.0]), np.array([2.0, 4.0, 6.0, 7.0])
    assert rank_correlation(one, other) == pytest.approx(1.0)
    assert rank_correlation(one, -other) == pytest.approx(-1.0)
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(
        np.corrcoef([1.5, 1.5, 3.0], [1.0, 2.0, 3.0])[0, 1]
    )
    assert agreement(one, other)["worst_miss"] == 3.0
    assert np.isnan(agreement(one[:2], other[:2])["correlation"])
    assert np.isnan(agreement(one, np.ones(4))["correlation"])


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"window": 2}, StageError, "expected window=1"),
        ({"align": (0, 1, 2, 3, 4, 5, 6)}, StageError, "found align"),
        ({"metrics": (Rank(3),)}, StageError, "expected a differentiable metric"),
        ({"metrics": (Recovery(Rank(3)),)}, StageError, "expected a differentiable metric"),
        ({"kinds": ("resid_pst",)}, StageError, "did you mean 'resid_post'"),
        ({"verify": 0}, StageError, "verify to be at least 1"),
        ({"attention": "new"}, StageError, "expected attention to be 'slope' or 'anew', found 'new'"),
    ],
    ids=str,
)
def test_what_has_no_estimate_is_refused_before_anything_runs(folder, store, change, error, told):
    given: dict[str, Any] = {
        "clean": CLEAN,
        "corrupted": CORRUPTED,
        "kinds": ("resid_post",),
        "metrics": (METRIC,),
    }
    kind = AttributionCheck if "verify" in change else AttributionPatching
    with pytest.raises(error, match=told) as raised:
        run(kind(**given | change).on(str(folder)), store)
    assert "\n" not in str(raised.value)


# Integrated gradients


def test_integrated_gradients_are_a_fine_sum_of_gradients_by_autograd(model, store):
    found = computed(
        IntegratedGradients(prompt=CLEAN, baseline=CORRUPTED, metric=METRIC, steps=24), model, store
    )
    embedding = model.network.embedding
    end, start = (embedding[list(ids)] for ids in (CLEAN, CORRUPTED))
    total, steps = torch.zeros_like(end), 400
    for step in range(steps):
        given = torch.lerp(start, end, (step + 0.5) / steps).requires_grad_()
        logits = _from_embedding(model, given)
        (gradient,) = torch.autograd.grad(logits[3] - logits[7], given)
        total += gradient / steps
    expected = ((end - start) * total).sum(-1).detach().numpy()
    np.testing.assert_allclose(found["attribution"], expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    value = found["value"].values
    assert float(found["gap"]) == pytest.approx(value[0] - value[1] - found["attribution"].values.sum())
    assert abs(float(found["gap"])) <= 1e-3 * abs(value[0] - value[1])


def _from_embedding(model: Model, embedding: torch.Tensor) -> torch.Tensor:
    """Logits [vocab] at the last position of a pass that starts from an embedding [position, hidden]."""
    from mizarr.stages.forward.passes.plain import forward
    from tests.stages.forward.networks.test_layers import Nudged

    ids = torch.tensor([CLEAN])
    taps = Nudged(HookPoint.embed(), lambda x: embedding[None] - x)
    logits = forward(model.network, ids, taps, mizarr.logits())
    assert logits is not None
    return logits[0, -1]


def test_more_steps_leave_less_over_and_removal_is_exact(model, store):
    gaps = []
    for steps in (1, 4, 16):
        found = computed(
            IntegratedGradients(prompt=CLEAN, baseline=CORRUPTED, metric=LogProbability(5), steps=steps),
            model,
            store,
        )
        assert found.sizes["step"] == steps
        gaps.append(abs(float(found["gap"])))
    assert gaps[2] < 0.05 * max(gaps[0], 1e-3) and gaps[2] < gaps[1]
    row = model.network.embedding[CORRUPTED[2]].detach()
    spec = HookSpec().intervene("hook_embed", Replace(row, positions=(2,)))
    before, after = (
        model.forward([list(CLEAN)], hooks).logits[0, -1].log_softmax(-1)[5].item() for hooks in (None, spec)
    )
    assert float(found["removed"][2]) == pytest.approx(before - after, abs=1e-6)
    same = [i for i in range(LENGTH) if CLEAN[i] == CORRUPTED[i]]
    assert np.abs(found["attribution"].values[same]).max() == 0, "what is the same has no share"


def test_a_baseline_of_another_length_is_refused(folder, store):
    with pytest.raises(
        PromptError, match="expected a baseline of 7 tokens, the length of the prompt, found 3"
    ):
        run(IntegratedGradients(prompt=CLEAN, baseline=(1, 2, 3), metric=METRIC).on(str(folder)), store)
