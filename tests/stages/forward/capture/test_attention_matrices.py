"""Scores and patterns of a store are those of a pass, masked ones too, in every dtype and way of reading."""

from __future__ import annotations

import numpy as np
import pytest
import xarray

import mizarr
from mizarr import Add, HookSpec, Knockout, Model, Replace, Scale, Zero
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.forward.hooks.spec import Capture
from tests.stages.forward.random_encoders import save_random_encoder
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import save_random_model
from tests.stages.forward.random_rwkv import save_random_rwkv

PROMPTS = [list(range(2, 11)), [5, 6, 7], [9, 4, 8, 3, 12, 11, 2]]
SAVED_BY = {
    "llama": save_random_model,
    "gemma2": save_random_model,
    "mistral": save_random_model,
    "llama4_text": save_random_hybrid,
    "gpt_oss": save_random_hybrid,
    "bloom": save_random_hybrid,
    "bamba": save_random_hybrid,
    "rwkv7": save_random_rwkv,
    "bert": save_random_encoder,
    "modernbert": save_random_encoder,
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3, "int8": 1e-2}
ONE = np.ones(1, np.float32)
CHANGES = {
    "nothing": None,
    "cut edges": ("blocks.0.attn.hook_scores", Knockout(edges=[(2, 1)])),
    "raw scores": ("blocks.0.attn.hook_scores", Add(ONE)),
    "masked scores": ("blocks.0.attn.hook_attn_scores", Zero(positions=(1,))),
    "scaled scores": ("blocks.0.attn.hook_attn_scores", Scale(0.5)),
    "added to the pattern": ("blocks.0.attn.hook_pattern", Add(0.1 * ONE)),
    "pattern replaced": ("blocks.0.attn.hook_pattern", Replace(0.25 * ONE)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(family: str) -> Model:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            SAVED_BY[family](folder, family, 0)
            made[family] = Model.from_pretrained(folder)
        return made[family]

    return model


def assert_stored(model: Model, spec: HookSpec, store, dtype: str = "float32", **how) -> None:
    """Every attention matrix of a capture, as `.mi.attn` gives it, is that of a pass over its prompt."""
    states = mizarr.capture(model, PROMPTS, spec, store=store, storage_dtype=dtype, **how)
    for number, prompt in enumerate(PROMPTS):
        cache = model.forward(prompt, spec)
        for capture, value in cache._captured.items():
            told = f"{capture.name} {capture.when} of prompt {number}"
            matrix = states.mi.attn(number, capture.variable).sel(layer=capture.point.layer)
            matrix = matrix.transpose(..., "query_position", "key_position")
            expected = value[0].double().numpy()
            finite = np.abs(expected[np.isfinite(expected)]).max()
            tolerance = TOLERANCE[dtype] * max(float(finite), 1e-6)
            np.testing.assert_allclose(
                matrix.values.astype(np.float64),
                expected,
                rtol=TOLERANCE[dtype],
                atol=tolerance,
                err_msg=told,
            )


def matrices(model: Model) -> HookSpec:
    """A spec that captures every attention matrix, before and after interventions."""
    points = [point for point in model.hook_points if "key_position" in point.dims]
    return HookSpec().capture(*points).capture(*points, when="before")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", SAVED_BY)
def test_matrices_are_those_of_a_pass(family, dtype, models, tmp_path):
    model = models(family)
    assert_stored(model, matrices(model), mizarr.open_store(tmp_path), dtype, segment_tokens=4)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_matrices_that_are_changed_are_those_of_a_pass(family, change, models, tmp_path):
    model = models(family)
    spec = matrices(model) if CHANGES[change] is None else matrices(model).intervene(*CHANGES[change])
    assert_stored(model, spec, mizarr.open_store(tmp_path))


def test_gradients_above_the_diagonal_are_those_of_a_pass(models, tmp_path):
    model = models("llama")
    spec = HookSpec().capture("grad:blocks.*.attn.hook_pattern", "grad:blocks.*.attn.hook_attn_scores")
    spec = spec.gradient_of(LogitDifference(3, 4))
    assert any(
        np.triu(value[0, 0].numpy(), 1).any()
        for capture, value in model.forward(PROMPTS[0], spec)._captured.items()
        if isinstance(capture, Capture) and capture.point.kind == "pattern"
    )
    assert_stored(model, spec, mizarr.open_store(tmp_path))


def test_every_way_to_read_gives_the_same(models, tmp_path):
    """Of all prompts, of one, of some in another order, of a run that holds more, and through the engine."""
    model = models("llama")
    store, spec = mizarr.open_store(tmp_path / "store"), matrices(model)
    whole = mizarr.capture(model, PROMPTS, spec, store=store)
    part = mizarr.capture(model, PROMPTS[1:], spec, store=store)
    some = whole.mi.prompts([2, 0])
    folder = tmp_path / "store" / next(e.path for e in store.entries() if e.tokens.n_prompts == len(PROMPTS))
    opened = xarray.open_dataset(folder, engine="mizarr")
    for variable in ("scores", "attn_scores", "pattern"):
        for number in range(3):
            expected = whole.mi.attn(number, variable).values
            assert np.array_equal(opened.mi.attn(number, variable).values, expected)
            if number:
                assert np.array_equal(part.mi.attn(number - 1, variable).values, expected)
        assert np.array_equal(some.mi.attn(1, variable).values, whole.mi.attn(0, variable).values)
    scores, pattern = (whole.mi.attn(0, name).values for name in ("attn_scores", "pattern"))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(weights / weights.sum(-1, keepdims=True), pattern, atol=1e-6)
