"""The one loop over layers runs under autograd for whoever asks, and records nothing for whoever does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mizarr
from mizarr.stages.forward.architectures.points import BY_NAME, HookPoint
from mizarr.stages.forward.hooks.edge_interventions import Knockout, Steer
from mizarr.stages.forward.hooks.interventions import Scale, Zero
from mizarr.stages.forward.hooks.spec import BoundSpec, HookSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.hooks.wants import ALL_LOGITS, LAST_LOGITS
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.passes.branches import Wanted
from mizarr.stages.forward.passes.kept import Cache, read_on
from mizarr.stages.forward.passes.plain import forward
from mizarr.stages.forward.passes.planner import plan_runs
from mizarr.stages.forward.passes.sweep import sweep
from mizarr.stages.forward.runs.run import Run, resolve, stream

from ..random_models import FAMILIES, VOCAB, save_random_model

pytest.importorskip("transformers")
TWO = ("llama", "gemma2")
"""Gated SiLU without soft caps on the fused kernel; four norms, soft caps and attention by hand."""


def draw(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def metric(logits: Tensor) -> Tensor:
    """A logit difference at the last position."""
    return logits[0, -1, 3] - logits[0, -1, 7]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random models in float64, made once; their embedding needs a gradient."""
    made: dict[str, Model] = {}

    def model(family: str) -> Model:
        if family not in made:
            folder: Path = tmp_path_factory.mktemp(family)
            save_random_model(folder, family, 3)
            made[family] = Model.from_pretrained(folder, dtype="float64")
        made[family].network.embedding.requires_grad_(True)
        return made[family]

    return model


# Gradients are right


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_at_every_layer_are_those_of_transformers(family, tmp_path):
    reference = save_random_model(tmp_path, family, 1)
    model, ids = Model.from_pretrained(tmp_path), draw(37)
    output = reference(ids, output_hidden_states=True, use_cache=False)
    layers = model.config.num_layers
    expected = torch.autograd.grad(metric(output.logits), output.hidden_states[:layers])
    streams: list[Tensor] = []
    spec = HookSpec().capture("blocks.*.hook_resid_pre").bind(model.hook_points)
    taps = RunTaps(spec, lambda _, x: streams.append(x.requires_grad_(True)))
    logits = forward(model.network, ids, taps, ALL_LOGITS)
    assert logits is not None
    found = torch.autograd.grad(metric(logits), streams)
    for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        scale = theirs.abs().max()
        assert scale > 1e-3
        assert (ours - theirs).abs().max() <= 1e-4 * scale, layer


class Nudged:
    """Taps that add something at one hook point."""

    def __init__(self, point: HookPoint, delta: Any) -> None:
        self.place, self.delta = (point.kind, point.layer), delta

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        return x + self.delta(x) if (kind, layer) == self.place else x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        return False

    def changes(self, layer: int | None, *kinds: str) -> bool:
        return any((kind, layer) == self.place for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        return self.changes(layer, *kinds)

    def changes_attention(self, layer: int) -> bool:
        return self.changes(layer, "scores", "attn_scores", "pattern")

    def cut(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("family", TWO)
@pytest.mark.parametrize("kind", BY_NAME)
def test_gradients_at_every_hook_point_are_finite_differences(models, family, kind):
    model, ids = models(family), draw(9)
    point = HookPoint(kind, 0 if BY_NAME[kind].per_layer else None)
    if point not in model.hook_points:
        pytest.skip(f"{family} has no {point}")
    added: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        added.append(torch.zeros_like(x, requires_grad=True))
        return added[-1]

    logits = forward(model.network, ids, Nudged(point, leaf), ALL_LOGITS)
    assert logits is not None
    (gradient,) = torch.autograd.grad(metric(logits), added)
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def moved(step: float) -> float:
        taps = Nudged(point, lambda _: step * direction)
        given = model.tapped(ids, taps, ALL_LOGITS)
        assert given is not None
        return float(metric(given))

    # Norms and softmax compute in float32 whatever the dtype, so a smaller step would measure their rounding.
    step = 1e-3
    slope = (moved(step) - moved(-step)) / (2 * step)
    assert gradient.norm() > 1e-3
    assert slope == pytest.approx(float((gradient * direction).sum()), abs=2e-3 * float(gradient.norm()))


SPECS = {
    "nothing": HookSpec(),
    "streams and heads": HookSpec()
    .intervene("blocks.0.hook_resid_mid", Scale(1.5, positions=(3,)))
    .intervene("blocks.1.attn.hook_v", Zero(positions=(5,))),
    "edges": HookSpec()
    .intervene("blocks.0.attn.hook_scores", Knockout(edges=[(6, 2)]))
    .intervene("blocks.1.attn.hook_pattern", Steer([(7, 1)], 3.0)),
    "the input": HookSpec()
    .intervene("hook_embed", Scale(0.5, positions=(1,)))
    .intervene("blocks.0.hook_resid_post", Scale(1.0, positions=(2,))),
}


@pytest.mark.parametrize("family", TWO)
def test_gradients_through_a_sweep_of_branches_are_those_of_plain_passes(models, family):
    model, prompt = models(family), draw(9)[0].tolist()
    runs = [Run(prompt, spec) for spec in SPECS.values()]
    wanted = [resolve(model, run) for run in runs]
    planned = plan_runs(wanted, model.config, 8)
    assert len(planned.blocks) == 1
    results = {index: logits for index, logits, _ in sweep(model.network, planned.blocks[0], wanted, 1 << 24)}
    for index, each in enumerate(wanted):
        found = _embedding_gradient(model, metric(results[index]))
        assert_close(found, _embedding_gradient(model, metric(_plain(model, each))), list(SPECS)[index])


def _plain(model: Model, run: Wanted) -> Tensor:
    logits = forward(
        model.network, torch.tensor([run.tokens]), RunTaps(run.spec, lambda *_: None), LAST_LOGITS
    )
    assert logits is not None
    return logits


def _embedding_gradient(model: Model, value: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, [model.network.embedding], retain_graph=True)
    return found


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    scale = float(expected.abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale, msg=lambda told: f"{what}: {told}")


@pytest.mark.parametrize("family", TWO)
def test_gradients_through_kept_keys_are_those_of_one_pass(models, family):
    model, prompt = models(family), draw(9)[0].tolist()
    cache, taps = Cache(), RunTaps(BoundSpec(), lambda *_: None)
    for stop in (4, 5, 6, 9):
        logits = read_on(model.network, [prompt[:stop]], cache, taps)
    whole = _plain(model, resolve(model, Run(prompt)))
    torch.testing.assert_close(logits, whole[:, 0], rtol=0, atol=1e-5)
    expected = _embedding_gradient(model, metric(whole))
    assert_close(_embedding_gradient(model, metric(logits[None])), expected, "read in four parts")


# Nobody pays who does not ask


def test_doors_record_nothing_and_leave_the_mode_as_it_was(models):
    model, prompt = models("llama"), draw(9)[0].tolist()
    hooks = HookSpec().capture("blocks.*.hook_resid_post")
    cache = model.forward(prompt, hooks)
    assert not cache.logits.requires_grad
    assert not any(cache[point].requires_grad for point in cache)
    for _, result in stream(model, [Run(prompt, hooks), Run(prompt, SPECS["edges"])]):
        assert torch.is_grad_enabled()
        assert not result.logits.requires_grad
    for keep in (False, True):
        given = mizarr.generate(model, [prompt], hooks, max_tokens=3, cache=keep)
        assert not given.activations("blocks.0.hook_resid_post").requires_grad
    assert torch.is_grad_enabled()
    assert not model.embed(draw(3)).requires_grad


def test_a_pass_that_records_gives_the_same_logits(models):
    model, ids = models("gemma2"), draw(9)
    recorded = forward(model.network, ids, RunTaps(BoundSpec(), lambda *_: None), ALL_LOGITS)
    assert recorded is not None
    assert recorded.requires_grad
    torch.testing.assert_close(recorded.detach(), model.forward(ids).logits, rtol=0, atol=1e-5)
