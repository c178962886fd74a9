"""Subspaces, conditions and the interventions they restrict: on paper, and beside hooks on transformers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import (
    Add,
    Clamp,
    HookPoint,
    HookSpec,
    LinearCondition,
    Model,
    Replace,
    Run,
    Scale,
    Subspace,
    Zero,
)
from mizarr.store.errors import InterventionError

from ..compared import assert_near
from ..random_models import VOCAB, save_random_model
from ..random_rwkv import save_random_rwkv

RESID = HookPoint.resid_post(0)
SIZES = {
    "batch": 2,
    "position": 4,
    "hidden": 3,
    "head": 2,
    "d_head": 5,
    "query_position": 4,
    "key_position": 4,
}
PLANE = Subspace([[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
"""The plane of (1, 1, 0) and (0, 0, 1)."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- values


@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (6, 6)])
def test_a_basis_is_orthonormal_and_spans_the_vectors(shape):
    vectors = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[0] + 1)[:, None] ** 4
    subspace = Subspace(vectors)
    np.testing.assert_allclose(subspace.basis @ subspace.basis.T, np.eye(shape[0]), atol=1e-6)
    np.testing.assert_allclose(subspace.component(vectors), vectors, rtol=1e-5, atol=1e-5)
    assert (subspace.dimension, subspace.width) == shape


def test_a_coefficient_has_the_sign_of_its_vector():
    assert Subspace([0.0, -2.0]).coefficients(np.array([0.0, -3.0])).tolist() == [3.0]
    both = Subspace([[0.0, -2.0, 0.0], [0.0, 1.0, -1.0]])
    np.testing.assert_allclose(both.coefficients(np.array([0.0, 0.0, -4.0])), [0.0, 4.0], atol=1e-6)


def test_a_basis_makes_the_same_subspace_again():
    for seed in range(20):
        subspace = Subspace(drawn(4, 96, seed=seed))
        assert Subspace(subspace.basis) == subspace == pickle.loads(pickle.dumps(subspace))
        assert Subspace(torch.tensor(subspace.basis)).digest == subspace.digest
    assert Subspace([1.0, 0.0]) != Subspace([0.0, 1.0])


def test_what_is_written_to_the_vectors_later_changes_nothing():
    vectors = np.eye(2, 3, dtype=np.float32)
    subspace, condition = Subspace(vectors), LinearCondition(vectors[0])
    vectors[:] = 7
    assert subspace == Subspace(np.eye(2, 3)) and condition == LinearCondition([1.0, 0.0, 0.0])
    for held in (subspace.basis, condition.weight):
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subspace([[1.0, 2.0], [0.0, 0.0]]), "found vector 1 of norm 0; leave it out"),
        (lambda: Subspace([[1.0, 2.0], [-2.0, -4.0]]), "found 2 vectors of width 2 that span 1 dimensions"),
        (lambda: Subspace(drawn(4, 3)), "found 4 vectors of width 3 that span 3 dimensions"),
        (lambda: Subspace([1.0, np.nan]), "Subspace: expected finite numbers"),
        (lambda: Subspace([1, 2]), "Subspace: expected a floating-point tensor, found dtype int64"),
        (lambda: Subspace(np.ones((1, 2, 3))), r"\[k, width\], found shape \[1, 2, 3\]"),
        (lambda: Subspace(np.ones((0, 3))), r"\[k, width\], found shape \[0, 3\]"),
        (lambda: LinearCondition(np.ones((2, 3))), "expected one weight vector .* found 2"),
        (
            lambda: LinearCondition([1.0], threshold=np.inf),
            "LinearCondition: threshold: expected a finite number",
        ),
        (lambda: Clamp(within=PLANE), "expected a limit low or high, found neither"),
        (lambda: Clamp(2.0, 1.0), "found low=2 and high=1; exchange them"),
        (lambda: Add([1.0], relative_to="mean"), "relative_to to be 'norm' or None, found 'mean'"),
        (
            lambda: Zero(within=np.ones(3)),
            r"expected within to be a Subspace, found .*write within=mizarr\.Subspace",
        ),
        (lambda: Zero(where=PLANE), "expected where to be a LinearCondition"),
    ],
)
def test_values_that_make_no_sense_are_refused_in_one_line(make: Callable[[], Any], message: str):
    with pytest.raises(InterventionError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "point", "message"),
    [
        (
            Zero(within=Subspace(drawn(2, 4))),
            RESID,
            "within= of width 3, .*'hidden' .*found width 4; make it from",
        ),
        (Zero(where=LinearCondition(drawn(4))), RESID, "where= of width 3.*found width 4"),
        (Zero(within=PLANE), HookPoint.z(0), "of width 5, the size of the axis 'd_head'"),
        (Zero(within=Subspace(drawn(4))), HookPoint.pattern(0), "a vector at each position for within="),
        (Scale(2.0, where=LinearCondition(drawn(4))), HookPoint.scores(0), "leave where out"),
        (Add(0.5, relative_to="norm"), HookPoint.pattern(0), "for relative_to="),
    ],
)
def test_another_width_and_points_without_vectors_are_refused_before_a_pass(change, point, message):
    with pytest.raises(InterventionError, match=message):
        change.check(point, SIZES)


# -- on paper


def test_interventions_within_a_subspace_leave_the_rest_as_it_is():
    x = torch.tensor([[[1.0, 3.0, 5.0], [2.0, 0.0, -1.0]]])

    def plane(change) -> list[list[float]]:
        return change.apply(x, RESID)[0].tolist()

    assert plane(Zero(within=PLANE)) == [pytest.approx([-1, 1, 0]), pytest.approx([1, -1, 0])]
    assert plane(Replace([4.0, 0.0, 7.0], within=PLANE)) == [
        pytest.approx([1, 3, 7]),
        pytest.approx([3, 1, 7]),
    ]
    assert plane(Add([1.0, 0.0, 1.0], within=PLANE))[0] == pytest.approx([1.5, 3.5, 6])
    assert plane(Scale(2.0, within=PLANE))[0] == pytest.approx([3, 5, 10])
    assert plane(Zero(within=PLANE, positions=(1,))) == [pytest.approx([1, 3, 5]), pytest.approx([1, -1, 0])]


def test_a_coefficient_is_set_and_limited():
    axis, x = Subspace([0.0, 2.0, 0.0]), torch.tensor([[[1.0, 3.0, 5.0], [2.0, -4.0, -1.0]]])
    assert Clamp(7.0, 7.0, within=axis).apply(x, RESID)[0].tolist() == [[1, 7, 5], [2, 7, -1]]
    assert Clamp(high=0.0, within=axis).apply(x, RESID)[0].tolist() == [[1, 0, 5], [2, -4, -1]]
    assert Clamp(-2.0, 2.0).apply(x, RESID)[0].tolist() == [[1, 2, 2], [2, -2, -1]]


def test_a_strength_is_a_multiple_of_the_states_own_norm():
    x = torch.tensor([[[3.0, 4.0, 0.0], [0.0, 0.0, 10.0]]])
    changed = Add([0.5, 0.0, 0.0], relative_to="norm").apply(x, RESID)
    assert changed[0].tolist() == [[5.5, 4, 0], [5, 0, 10]]


def test_a_condition_spares_the_positions_where_its_probe_is_silent():
    x = torch.tensor([[[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]])
    where = LinearCondition([1.0, 0.0, 0.0], bias=-1.0, threshold=0.5)
    assert Add([0.0, 9.0, 0.0], where=where).apply(x, RESID)[0, :, 1].tolist() == [0, 9, 9]
    assert Zero(where=where, positions=(0, 2)).apply(x, RESID)[0, :, 0].tolist() == [1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_projects_in_float32(dtype):
    subspace, x = Subspace(drawn(3, 64)), (100 * drawn(1, 4, 64, seed=1)).to(dtype)
    changed = Zero(within=subspace).apply(x, RESID)
    exact = x.double() - subspace.component(x.double())
    assert changed.dtype == dtype
    # The last rounding is all that is left: half of the distance to the next number.
    assert ((changed.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps).all()


# -- beside hooks on transformers


FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "starcoder2")


def changes(width: int) -> dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]]:
    """Intervention on resid_post, and the same written by hand."""
    vectors = drawn(2, width, seed=3)
    q = torch.linalg.qr(vectors.T)[0]
    target, weight, unit = drawn(width, seed=4), drawn(width, seed=5), vectors[0] / vectors[0].norm()
    within = Subspace(vectors)

    def only_where(x: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        fires = (x * weight).sum(-1) + 0.3 > 0.1
        return torch.where(fires[..., None], changed, x)

    return {
        "project out": (Zero(within=within), lambda x: x - x @ q @ q.T),
        "replace within": (Replace(target, within=within), lambda x: x + (target - x) @ q @ q.T),
        "add within": (Add(target, within=within), lambda x: x + target @ q @ q.T),
        "set": (Clamp(2.0, 2.0, within=Subspace(vectors[0])), lambda x: x + (2 - x @ unit)[..., None] * unit),
        "relative": (
            Add(0.5 * unit, relative_to="norm"),
            lambda x: x + 0.5 * x.norm(dim=-1, keepdim=True) * unit,
        ),
        "where": (Add(target, where=LinearCondition(weight, 0.3, 0.1)), lambda x: only_where(x, x + target)),
    }


def hooked(
    reference: Any, layers: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[Any]:
    """Handles of hooks that change what layers of a transformers model return."""

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return [reference.model.layers[layer].register_forward_hook(hook) for layer in layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_change_agrees_with_hooks_on_transformers(family: str, tmp_path: Path):
    reference = save_random_model(tmp_path, family, 1)
    model = Model.from_pretrained(tmp_path)
    ids = torch.randint(2, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    for name, (change, by_hand) in changes(model.config.hidden_size).items():
        for layers in ((0,), tuple(range(model.config.num_layers))):
            handles = hooked(reference, layers, by_hand)
            with torch.no_grad():
                expected = reference(ids).logits
            spec = HookSpec()
            for layer in layers:
                spec = spec.intervene(HookPoint.resid_post(layer), change)
            assert_near(model.forward(ids, spec).logits, expected)
            assert not torch.allclose(model.forward(ids).logits, expected, atol=1e-3), name
            if layers == (0,):
                # Hooks on transformers see the newest token alone while its cache is in use, as ours do.
                steps = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
                grown = reference.generate(ids[:1], use_cache=True, **steps)[0].tolist()
                made = mizarr.generate(model, ids[:1].tolist(), spec, max_tokens=6, eos=())
                assert list(made[0].token_ids) == grown, name
                assert "kept" in made.reading, "keys and values are cached"
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("make", ["transformer", "recurrent"])
def test_planned_runs_equal_forward_passes(make: str, tmp_path: Path):
    if make == "transformer":
        save_random_model(tmp_path, "llama", 2)
    else:
        save_random_rwkv(tmp_path, "rwkv6", 0)
    model = Model.from_pretrained(tmp_path)
    ids = list(range(3, 15))
    runs = [
        Run(ids, HookSpec().intervene(f"blocks.{layer}.hook_{kind}", change), mizarr.logits())
        for layer in range(model.config.num_layers)
        for kind in ("resid_pre", "resid_post")
        for change, _ in changes(model.config.hidden_size).values()
    ]
    for run, result in zip(runs, mizarr.run(model, runs), strict=True):
        assert_near(result.logits, model.forward(ids, run.hooks).logits)


def test_coordinates_are_exchanged_between_the_runs_of_a_pair(tmp_path: Path):
    """An interchange intervention: in a subspace and in its complement in turn, it is a whole patch."""
    save_random_model(tmp_path, "llama", 3)
    model = Model.from_pretrained(tmp_path)
    base, source, point = [5, 9, 11, 4], [5, 9, 30, 4], "blocks.0.hook_resid_post"
    state = model.forward(source, HookSpec().capture(point), want=None)[point][0, 2]
    q = torch.linalg.qr(drawn(model.config.hidden_size, model.config.hidden_size))[0].T
    part, rest = Subspace(q[:3]), Subspace(q[3:])

    def patched(*within: Subspace | None) -> torch.Tensor:
        spec = HookSpec()
        for subspace in within:
            spec = spec.intervene(point, Replace(state[None], positions=(2,), within=subspace))
        return model.forward(base, spec).logits

    assert_near(patched(part, rest), patched(None))
    assert float((patched(part) - patched(None)).abs().max()) > 1e-2
    assert float((patched(part) - model.forward(base).logits).abs().max()) > 1e-2


def test_a_subspace_keys_a_run(tmp_path: Path):
    one, other = (HookSpec().intervene(RESID, Zero(within=Subspace(drawn(3, seed=seed)))) for seed in (0, 1))
    again = HookSpec().intervene(RESID, Zero(within=Subspace(drawn(3, seed=0))))
    assert one.bind([RESID]).run_digest == again.bind([RESID]).run_digest != other.bind([RESID]).run_digest
    assert "within" not in Zero().canonical(), "interventions without a subspace keep their keys"
