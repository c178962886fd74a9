"""Planned runs give what plain forward passes give, and cost what they change."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from mizarr.stages.forward.model import Model
from mizarr.stages.forward.runs import Run, stream
from tests.stages.forward.random_models import FAMILIES, save_random_model
from tests.stages.forward.random_runs import draw_runs


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(family: str, seed: int) -> Model:
        if (family, seed) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{seed}")
            save_random_model(folder, family, seed)
            made[family, seed] = Model.from_pretrained(folder)
        return made[family, seed]

    return model


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to 1e-5 of the scale of what is expected; infinities (masked scores) in the same places."""
    assert found.shape == expected.shape, what
    finite = expected.isfinite()
    assert torch.equal(finite, found.isfinite()), what
    if finite.any():
        scale = max(float(expected[finite].abs().max()), 1.0)
        assert float((found - expected)[finite].abs().max()) <= 1e-5 * scale, what


def check(model: Model, runs: list[Run], **options) -> None:
    seen = []
    for index, planned in stream(model, runs, **options):
        seen.append(index)
        run = runs[index]
        plain = model.forward(run.prompt, run.hooks, want=run.want)
        what = f"run {index}: {run.hooks!r}, want {run.want}"
        assert planned.tokens == plain.tokens
        assert planned.has_logits == plain.has_logits
        if plain.has_logits:
            assert_same(planned.logits, plain.logits, what)
        assert list(planned) == list(plain)
        for point in plain:
            for when in ("after", "before"):
                if plain.get(point, when=when) is not None:
                    assert_same(
                        planned.get(point, when=when), plain.get(point, when=when), f"{what} at {point}"
                    )
    assert sorted(seen) == list(range(len(runs)))


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 10**6), config=st.integers(0, 3))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_planned_runs_equal_plain_forward_passes(models, family, seed, config):
    rng = random.Random(seed)
    model = models(family, config)
    check(model, draw_runs(rng, model, 14), memory=rng.choice([None, 600_000]))
