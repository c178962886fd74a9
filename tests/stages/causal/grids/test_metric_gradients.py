"""Gradients of metrics in closed form are what small changes of the logits do."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.stages.causal.grids.patching_metrics import (
    KL,
    Custom,
    LogitDifference,
    LogProbability,
    Metric,
    Probability,
    Rank,
    Recovery,
)
from mizarr.stages.forward.hooks.objective import Objective, objective_of
from mizarr.store.errors import PromptError, StageError

METRICS = [
    LogitDifference(3, 5),
    KL(),
    Probability(4),
    LogProbability(4),
    Custom(lambda z: float(np.sin(z).sum()), version=1, derivative=np.cos),
]


def of(metric: Metric, vector: np.ndarray) -> np.ndarray:
    return vector if metric.tokens is None else vector[list(metric.tokens)]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_the_gradient_is_the_slope_of_the_value(metric, seed, spread):
    rng = np.random.default_rng(seed)
    logits, clean = (of(metric, spread * rng.normal(size=11)) for _ in range(2))
    found, step = metric.gradient(logits, clean), 1e-5
    assert found.dtype == np.float64 and found.shape == logits.shape
    for each, slope in enumerate(found):
        nudge = step * np.eye(len(logits))[each]
        moved = metric.value(logits + nudge, clean) - metric.value(logits - nudge, clean)
        assert moved / (2 * step) == pytest.approx(slope, abs=2e-9)


def test_the_gradient_of_a_likely_token_keeps_its_digits():
    logits = np.array([40.0, 0.0, 0.0])
    expected = 2 * np.exp(-40.0)
    assert LogProbability(0).gradient(logits, logits)[0] == pytest.approx(expected, rel=1e-12)
    assert Probability(0).gradient(logits, logits)[0] == pytest.approx(expected, rel=1e-12)


def test_kl_is_flat_at_the_clean_run():
    logits = np.random.default_rng(0).normal(size=9)
    assert np.abs(KL().gradient(logits, logits)).max() == 0


@pytest.mark.parametrize("metric", [Rank(1), Recovery(KL()), Custom(lambda z: float(z[0]), version=1)])
def test_metrics_without_a_gradient_are_refused_by_name(metric):
    assert not metric.has_gradient
    with pytest.raises(
        StageError,
        match=rf"a differentiable metric, found {type(metric).__name__}.*; use LogitDifference, .* KL",
    ):
        objective_of(metric)
    with pytest.raises(StageError, match="use LogitDifference"):
        metric.gradient(np.zeros(4), np.zeros(4))


def test_a_derivative_of_the_wrong_shape_is_refused():
    metric = Custom(lambda z: float(z[0]), version=1, derivative=lambda z: z[:2])
    with pytest.raises(StageError, match="to return 4 finite numbers"):
        metric.gradient(np.zeros(4), np.zeros(4))


def test_what_goes_with_no_prompts_is_refused():
    two = objective_of([LogitDifference(1, 2), LogitDifference(2, 1)])
    for objective, lengths, error, told in (
        (two, [3, 3, 3], StageError, "one metric for all prompts, or one for each of 3 prompts, found 2"),
        (objective_of(KL()), [3], StageError, "expected a baseline prompt for 'kl'"),
        (objective_of(KL(), baseline=[[1], [2]]), [3, 3, 3], StageError, "one baseline for all prompts"),
        (objective_of(LogitDifference(1, 2), at=4), [5, 4], PromptError, r"found 4"),
        (
            objective_of(Probability(320)),
            [5],
            PromptError,
            r"token ids in 0\.\.319 for metric and baseline, found 320",
        ),
        (
            objective_of(KL(), baseline=[3, -1]),
            [5],
            PromptError,
            r"token ids in 0\.\.319 for metric and baseline, found -1",
        ),
    ):
        with pytest.raises(error, match=told):
            objective.check(lengths, 320)
    with pytest.raises(StageError, match="at least one metric"):
        objective_of([])


def test_all_of_an_objective_is_in_its_identity():
    plain = objective_of(LogitDifference(1, 2))
    others = [
        objective_of(LogitDifference(2, 1)),
        objective_of(LogitDifference(1, 2), at=0),
        objective_of(LogitDifference(1, 2), baseline=[3]),
        objective_of([LogitDifference(1, 2), LogitDifference(2, 1)]),
        objective_of([LogitDifference(2, 1), LogitDifference(1, 2)]),
    ]
    told = [str(each.canonical("p")) for each in [plain, *others]]
    assert len(set(told)) == len(told)
    by_prompt = others[-1]
    assert by_prompt.canonical("p") != by_prompt.canonical("q"), "whose order is that of these prompts"
    assert plain.canonical("p") == plain.canonical("q"), "the same of whatever prompt"
    assert Objective((LogitDifference(1, 2),)) == plain


def test_a_spec_reads_as_it_was_written():
    from mizarr import HookSpec

    for given in (
        {"metric": LogitDifference(1, 2)},
        {"metric": [KL(), LogProbability(3)], "at": 2, "baseline": [[1, 2], [3, 4]]},
    ):
        spec = HookSpec().capture("grad:blocks.*.attn.hook_z").gradient_of(**given)
        assert eval(repr(spec)) == spec
        assert spec != HookSpec().capture("grad:blocks.*.attn.hook_z")
        assert HookSpec().extend(spec) == spec
    assert spec.is_captured("grad:blocks.3.attn.hook_z")
    assert not spec.is_captured("blocks.3.attn.hook_z") and not spec.is_captured("grad:hook_embed")
