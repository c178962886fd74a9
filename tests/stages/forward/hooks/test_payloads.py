"""What an intervention carries is its own: nobody changes a run or its key by writing to a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import mizarr
from mizarr import Add, AddAtPositions, HookSpec, Knockout, Replace, Run
from mizarr.stages.forward.hooks.interventions import Intervention
from mizarr.stages.forward.hooks.recurrent import RecurrentPass
from mizarr.store.errors import InterventionError
from tests.stages.forward.random_models import save_random_model
from tests.stages.forward.random_rwkv import save_random_rwkv

STREAM = "blocks.0.hook_resid_post"
IDS = [3, 9, 27, 81, 5, 15]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> mizarr.Model:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, "llama", 0)
    return mizarr.Model.from_pretrained(folder)


@dataclass(frozen=True, eq=False)
class Pushed(Intervention):
    """An intervention of a user, with a tensor and a list of arrays."""

    version: ClassVar[int] = 1
    vector: Any
    more: Any = ()

    def apply(self, x, point, allowed=None, subset=None):
        """See `Intervention`."""
        parts = [part.tolist() for part in (self.vector, *self.more)]
        return sum((torch.tensor(part).to(x) for part in parts), x)


def numpy_rows(width: int) -> Any:
    """A view whose base somebody else may write to."""
    return np.arange(2.0 * width, dtype=np.float32).reshape(2, width)[1]


SOURCES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda width: torch.arange(float(width)),
    "view": lambda width: torch.arange(2.0 * width)[::2],
    "expanded": lambda width: torch.ones(1).expand(width),
    "bfloat16": lambda width: torch.ones(width, dtype=torch.bfloat16),
    "parameter": lambda width: torch.nn.Parameter(torch.ones(width)),
    "array": lambda width: np.ones(width, np.float32),
    "float64": np.ones,
    "array view": numpy_rows,
    "shared": lambda width: torch.from_numpy(np.ones(width, np.float32)),
}
MAKERS: dict[str, Callable[[Any], Intervention]] = {
    "Replace": Replace,
    "Add": Add,
    "AddAtPositions": lambda vector: AddAtPositions([(1, vector)]),
    "of a user": Pushed,
    "of a user, in a list": lambda vector: Pushed(np.zeros(1, np.float32), [vector]),
}


def tensors_in(value: Any) -> list[Any]:
    """Every tensor and array that can be reached from a value."""
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if hasattr(value, "shape") else []


def fields_of(change: Intervention) -> list[Any]:
    """Every tensor and array that a user reads from an intervention."""
    return tensors_in([getattr(change, name) for name in vars(change)])


def overwrite(value: Any) -> None:
    """Write to a tensor or array as a user may, by force if need be."""
    with contextlib.suppress(ValueError, RuntimeError), torch.no_grad():
        if isinstance(value, np.ndarray):
            with contextlib.suppress(ValueError):
                value.setflags(write=True)
            value[...] = 7
        else:
            value.fill_(7)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("maker", MAKERS)
def test_whoever_writes_to_a_payload_changes_no_spec(model, source, maker):
    original = SOURCES[source](model.config.hidden_size)
    change = MAKERS[maker](original)
    spec = HookSpec().intervene(STREAM, change).capture("blocks.1.hook_resid_post")
    digest, before = spec.canonical(), model.forward(IDS, spec).logits
    for shown in [
        original,
        *fields_of(change),
        *(x for at in spec.interventions_at(STREAM) for x in fields_of(at)),
    ]:
        overwrite(shown)
    assert spec.canonical() == digest
    assert torch.equal(model.forward(IDS, spec).logits, before)
    if not maker.startswith("of a user"):
        assert HookSpec().intervene(STREAM, change).canonical()["interventions"] == digest["interventions"]


def test_a_mask_and_what_is_fed_are_copied_as_well(model):
    mask = torch.zeros(len(IDS), len(IDS), dtype=torch.bool)
    mask[3, 1] = True
    cut = Knockout(mask=mask)
    told = cut.canonical()
    vector = torch.ones(model.config.hidden_size)
    fed = RecurrentPass(1, 1, feedback=[(1, vector, 0.5)])
    named = fed.canonical()
    for shown in (mask, cut.mask, vector, fed.feedback[0][1]):
        overwrite(shown)
    assert (cut.canonical(), fed.canonical()) == (told, named)


def test_what_is_planned_is_what_is_stored(model, tmp_path):
    change = Replace(torch.ones(model.config.hidden_size))
    spec, clean = (
        HookSpec().intervene(STREAM, change),
        HookSpec().intervene(STREAM, Replace(np.ones(model.config.hidden_size))),
    )
    store = mizarr.open_store(tmp_path)
    runs = [Run(IDS, spec)]
    planned = mizarr.run(model, runs)
    change.value.mul_(5)
    (dirty,) = mizarr.run(model, runs, store=store)
    (again,) = mizarr.run(model, [Run(IDS, clean)], store=store)
    assert torch.equal(dirty.logits, planned[0].logits)
    assert torch.equal(again.logits, planned[0].logits)


def loaded(folder, family: str) -> mizarr.Model:
    """A random model of a family."""
    save = save_random_rwkv if family.startswith("rwkv") else save_random_model
    save(folder, family, 0)
    return mizarr.Model.from_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "gemma2", "starcoder2", "rwkv7"])
@pytest.mark.parametrize("door", ["forward", "run", "two equal runs", "batch"])
def test_whoever_writes_to_a_result_changes_nothing_else(family, door, tmp_path):
    """Neither another capture, nor another result, nor the spec, nor the model."""
    model = loaded(tmp_path, family)
    hidden = model.config.hidden_size
    spec = (
        HookSpec()
        .intervene("blocks.0.hook_resid_post", Replace(torch.ones(1, len(IDS), hidden)))
        .intervene("blocks.1.hook_attn_out", Pushed(torch.ones(hidden)))
        .intervene("blocks.1.hook_mlp_out", mizarr.Zero())
        .capture("*")
        .capture("*", when="before")
    )

    def results() -> list[Any]:
        if door == "forward":
            return [model.forward(IDS, spec)]
        if door == "batch":
            return [model.forward([IDS, IDS, IDS[::-1]], spec)]
        runs = [Run(IDS, spec)] * (2 if door.startswith("two") else 1)
        return mizarr.run(model, runs)

    found, expected = results(), results()
    captures = [(cache, capture) for cache in found for capture in cache._captured]
    for place, (cache, capture) in enumerate(captures):
        cache._captured[capture].fill_(-1)
        for number, (other, one) in enumerate(captures):
            if number > place:
                value = other._captured[one]
                wanted = expected[next(n for n, c in enumerate(found) if c is other)]._captured[one]
                assert torch.equal(value, wanted), (str(capture), str(one))
    for one, other in zip(results(), expected, strict=True):
        assert torch.equal(one.logits, other.logits)


# A row per prompt


@pytest.mark.parametrize("maker", [Replace, Add])
def test_a_payload_with_a_row_per_prompt_is_refused_where_batches_are_the_passs_own(model, maker, tmp_path):
    prompts = [IDS, IDS[::-1], IDS, [*IDS[1:], 2]]
    rows = torch.randn(4, len(IDS), model.config.hidden_size)
    spec = HookSpec().intervene(STREAM, maker(rows)).capture("blocks.1.hook_resid_post")
    for refused in (
        lambda: mizarr.capture(model, prompts, spec, store=mizarr.open_store(tmp_path)),
        lambda: mizarr.run(model, [Run(prompt, spec) for prompt in prompts]),
        lambda: mizarr.generate(model, prompts, spec, max_tokens=2),
    ):
        with pytest.raises(InterventionError, match=r"found 4 rows; give each prompt|batch=1") as error:
            refused()
        assert "\n" not in str(error.value)
    own = [HookSpec().intervene(STREAM, maker(row)).capture("blocks.1.hook_resid_post") for row in rows]
    together = model.forward(prompts, spec)["blocks.1.hook_resid_post"]
    planned = mizarr.run(
        model, [Run(*pair) for pair in zip(prompts, own, strict=True)], store=mizarr.open_store(tmp_path)
    )
    for row, cache in zip(together, planned, strict=True):
        torch.testing.assert_close(row, cache["blocks.1.hook_resid_post"][0], atol=1e-5, rtol=1e-5)


def test_a_run_keeps_the_prompt_it_was_made_with(model):
    ids = list(IDS)
    run = Run(ids)
    ids[0] = 200
    assert list(run.prompt) == IDS
    assert torch.equal(mizarr.run(model, [run])[0].logits[0, 0], model.forward(IDS).logits[0, -1])
