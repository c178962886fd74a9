"""An intervention that a user writes sees all positions of one prompt, at every door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import mizarr
from mizarr import HookPoint, HookSpec, Model, Run, Scale, Zero, generate
from mizarr.stages.forward.architectures.points import BY_NAME
from mizarr.stages.forward.hooks.interventions import Intervention
from mizarr.store.errors import InterventionError
from tests.stages.forward.random_encoders import save_random_encoder
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import save_random_model
from tests.stages.forward.random_rwkv import save_random_rwkv

PROMPTS = [[3, 9, 27, 81, 5, 15], [7, 6, 5, 4, 3, 2], [11, 12, 13, 14]]
SAVED_BY = {
    "llama": save_random_model,
    "gemma2": save_random_model,
    "rwkv7": save_random_rwkv,
    "bamba": save_random_hybrid,
    "bert": save_random_encoder,
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


class Own(Intervention):
    """What users write: `work` on an activation whose last but one axis is positions."""

    version: ClassVar[int] = 1

    def work(self, x):
        """The changed activation."""
        raise NotImplementedError

    def apply(self, x, point, allowed=None, subset=None):
        """See `Intervention`."""
        return self.work(x)


@dataclass(frozen=True, eq=False)
class Centred(Own):
    """Takes the mean over positions away."""

    version: ClassVar[int] = 1

    def work(self, x):
        """See `Own`."""
        return x - x.mean(-2, keepdim=True)


@dataclass(frozen=True, eq=False)
class Counted(Own):
    """Scales each position by its number, and by how many there are; writes to what it gets."""

    version: ClassVar[int] = 1

    def work(self, x):
        """See `Own`."""
        x *= (torch.arange(1.0, x.shape[-2] + 1) / x.shape[-2]).to(x)[:, None]
        return x


@dataclass(frozen=True, eq=False)
class OfBatch(Own):
    """Takes the mean over everything away, other prompts included where there are any."""

    version: ClassVar[int] = 1

    def work(self, x):
        """See `Own`."""
        return x - x.mean()


@dataclass(frozen=True, eq=False)
class Half(Scale):
    """A subclass of an intervention of mizarr, which says nothing of positions."""

    version: ClassVar[int] = 1
    factor: float = 0.5

    def change(self, part, positions=None):
        """See `Scale`."""
        return part - self.factor * part.mean(-2, keepdim=True)


OWN = [Centred(), Counted(), OfBatch(), Half()]


def specs(model: Model) -> list[HookSpec]:
    """Every intervention at points of early and last layers, alone and among others that touch few positions,
    in both orders."""
    last = model.config.num_layers - 1
    kinds = ("resid_pre", "attn_out", "mlp_out", "resid_post", "normalized", "pattern", "v")
    points = [p for p in model.hook_points if p.kind in kinds and p.layer in (0, 1, last)]
    points += [p for p in model.hook_points if p.kind in ("embed", "final_norm")]
    points = [p for p in points if not BY_NAME[p.kind].is_derived]
    near, far = Scale(1.5, positions=(2,)), Zero(positions=(-1,))
    found = []
    for number, point in enumerate(points):
        change = OWN[number % len(OWN)]
        found.append(HookSpec().intervene(point, change))
        found.append(HookSpec().intervene(point, near).intervene(point, change))
        found.append(HookSpec().intervene(point, change).intervene(point, near))
        at = HookPoint.resid_post(0)
        found.append(HookSpec().intervene(at, near).intervene(point, change))
        found.append(
            HookSpec().intervene(at, near).intervene(point, change).intervene(HookPoint.resid_post(last), far)
        )
    return found


def plain(model: Model, prompt: list[int], spec: HookSpec) -> Any:
    """The last logits, and the stream that leaves the last layer, of a pass over one prompt alone."""
    cache = model.forward(prompt, spec.capture(f"blocks.{model.config.num_layers - 1}.hook_resid_post"))
    (point,) = cache
    return cache.logits[0, -1], cache[point][0]


@pytest.mark.parametrize("family", SAVED_BY)
def test_planned_runs_are_plain_passes(family, models):
    model = models(family)
    chosen = specs(model)
    silent = [Run(prompt, spec) for prompt in PROMPTS for spec in chosen]
    for run, result in zip(silent, mizarr.run(model, silent), strict=True):
        expected, _ = plain(model, list(run.prompt), run.hooks)
        torch.testing.assert_close(result.logits[0, 0], expected, atol=1e-4, rtol=1e-4, msg=repr(run.hooks))


@pytest.mark.parametrize("family", ["llama", "rwkv7", "bert"])
def test_batches_and_captures_are_passes_over_one_prompt(family, models, tmp_path):
    model = models(family)
    point = f"blocks.{model.config.num_layers - 1}.hook_resid_post"
    store = mizarr.open_store(tmp_path)
    for number, spec in enumerate(specs(model)[::5]):
        together = model.forward(PROMPTS, spec.capture(point))
        for row, prompt in enumerate(PROMPTS):
            _, expected = plain(model, prompt, spec)
            found = together[point][row, : len(prompt)]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=repr(spec))
        if number % 5 == 0:
            states = mizarr.capture(model, PROMPTS, spec.capture(point), store=store, segment_tokens=8)
            kept = torch.from_numpy(states["resid_post"].values.copy()).reshape(-1, together[point].shape[-1])
            rows = torch.cat([plain(model, prompt, spec)[1] for prompt in PROMPTS])
            torch.testing.assert_close(kept, rows, atol=1e-4, rtol=1e-4, msg=repr(spec))


@pytest.mark.parametrize("change", OWN, ids=lambda change: type(change).__name__)
def test_a_generated_token_is_that_of_a_pass_over_what_was_read(change, models):
    model = models("llama")
    spec = HookSpec().intervene("blocks.0.hook_resid_post", change)
    found = generate(model, PROMPTS, spec, max_tokens=4, eos=())
    assert found.reading != "keys and values kept"
    for prompt, result in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        for token in result.generated_ids:
            assert token == int(plain(model, ids, spec)[0].argmax())
            ids.append(token)


def test_one_that_says_it_is_positionwise_gets_some_positions(models):
    @dataclass(frozen=True, eq=False)
    class Doubled(Own):
        """Looks at one position at a time."""

        version: ClassVar[int] = 1
        is_positionwise: ClassVar[bool] = True
        sizes: ClassVar[list[int]] = []

        def work(self, x):
            """See `Own`."""
            self.sizes.append(x.shape[-2])
            return 2 * x

    model = models("llama")
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Doubled())
    spec = HookSpec().intervene("blocks.0.hook_resid_post", Scale(2.0, positions=(4,))).extend(spec)
    run = Run(PROMPTS[0], spec)
    plan = [run, Run(PROMPTS[0], HookSpec().intervene("blocks.0.hook_resid_pre", Zero(positions=(1,))))]
    found = mizarr.run(model, plan)[0]
    torch.testing.assert_close(found.logits[0, 0], plain(model, PROMPTS[0], spec)[0], atol=1e-4, rtol=1e-4)
    assert Doubled().needs_all_positions is False

    class Inherited(Doubled):
        """Says nothing of itself."""

    assert Inherited().needs_all_positions is True


def test_states_refuse_one_that_looks_at_all_positions(models):
    model = models("rwkv7")
    point = next(p for p in model.hook_points if p.kind.endswith("_state_seq"))
    with pytest.raises(InterventionError, match="is_positionwise = True"):
        model.forward(PROMPTS[0], HookSpec().intervene(point, Centred()))


def test_another_shape_is_refused(models):
    @dataclass(frozen=True, eq=False)
    class Shrunk(Own):
        """Gives the mean alone."""

        version: ClassVar[int] = 1

        def work(self, x):
            """See `Own`."""
            return x.mean(-2, keepdim=True)

    with pytest.raises(InterventionError, match="expand it to that shape"):
        models("llama").forward(PROMPTS[0], HookSpec().intervene("blocks.0.hook_resid_post", Shrunk()))
