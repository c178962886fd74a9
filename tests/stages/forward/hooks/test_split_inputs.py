"""Inputs of queries, keys and values by head: a change reaches them and nothing else, in every decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mizarr
from mizarr import Add, HookPoint, HookSpec, Model, Replace, Run, generate
from mizarr.stages.forward.architectures.points import SPLIT_INPUTS, expand
from mizarr.store.errors import HookPointNotFound

from ..random_models import FAMILIES, VOCAB, save_random_model
from ..random_rwkv import save_random_rwkv

pytest.importorskip("transformers")
LENGTH, LAYER = 9, 1


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    save_random_model(folder, request.param, 4)
    return Model.from_pretrained(folder)


def draw(model: Model) -> tuple[list[int], torch.Tensor]:
    """Token ids, and a stream [position, hidden] that another prompt has there."""
    generator = torch.Generator().manual_seed(1)
    ids, other = torch.randint(2, VOCAB, (2, LENGTH), generator=generator).tolist()
    point = HookPoint.resid_pre(LAYER)
    return ids, model.forward(other, HookSpec().capture(point))[point][0]


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", SPLIT_INPUTS)
def test_a_changed_input_is_the_projection_of_another_stream(model, kind):
    """By way of the projection itself, taken from a pass whose stream is that one."""
    ids, stream = draw(model)
    at, made = HookPoint(kind, LAYER), HookPoint(kind.removesuffix("_input"), LAYER)
    foreign = HookSpec().intervene(HookPoint.resid_pre(LAYER), Replace(stream)).capture(made)
    projected = model.forward(ids, foreign)[made][0]
    plain = model.forward(ids).logits
    heads = projected.shape[0]
    for chosen in (tuple(range(heads)), (heads - 1,)):
        found = model.forward(ids, HookSpec().intervene(at, Replace(stream, heads=chosen)).capture(made))
        expected = HookSpec().intervene(made, Replace(projected[list(chosen)], heads=chosen)).capture(made)
        by_hand = model.forward(ids, expected)
        near(found[made], by_hand[made])
        near(found.logits, by_hand.logits)
        assert not torch.allclose(found.logits, plain, atol=1e-4), "it matters"


def test_a_change_reaches_nothing_beside_it(model):
    ids, stream = draw(model)
    kinds = ("q", "k", "v")
    beside = [HookPoint(kind, LAYER) for kind in (*kinds, "resid_pre", "ln1_normalized")]
    clean = model.forward(ids, HookSpec().capture(*beside))
    for kind in kinds:
        spec = HookSpec().capture(*beside).intervene(HookPoint(f"{kind}_input", LAYER), Replace(stream))
        found = model.forward(ids, spec)
        for point in beside:
            assert torch.equal(found[point], clean[point]) == (point.kind != kind), point


def test_reading_changes_no_bit_and_gives_the_stream_for_each_head(model):
    ids, _ = draw(model)
    points = [HookPoint(kind, LAYER) for kind in SPLIT_INPUTS]
    found = model.forward(ids, HookSpec().capture(*points, HookPoint.resid_pre(LAYER)))
    assert torch.equal(found.logits, model.forward(ids).logits)
    stream, sizes = found[HookPoint.resid_pre(LAYER)], model.config.axis_sizes
    for point in points:
        heads = sizes["head" if point.kind == "q_input" else "kv_head"]
        assert found[point].shape == (1, heads, LENGTH, sizes["hidden"])
        assert all(torch.equal(found[point][:, head], stream) for head in range(heads))


def test_what_is_left_alone_keeps_what_was_done_to_its_norm(model):
    """Bit for bit where the input is put back as it was, and beside runs that do change theirs."""
    ids, stream = draw(model)
    halved = HookPoint("ln1_scale", LAYER), mizarr.Scale(2.0, positions=(3,))
    norm = HookSpec().intervene(*halved)
    point = HookPoint.q_input(LAYER)
    expected = model.forward(ids, norm)
    own = model.forward(ids, HookSpec().capture(point))[point][0]
    assert torch.equal(
        model.forward(ids, HookSpec().intervene(*halved).intervene(point, Replace(own))).logits,
        expected.logits,
    )
    other = HookSpec().intervene(point, Replace(stream))
    one, _ = mizarr.run(model, [Run(ids, norm, want=mizarr.logits()), Run(ids, other, want=mizarr.logits())])
    near(one.logits, expected.logits)


def test_planned_runs_and_kept_keys_give_the_same(model):
    ids, stream = draw(model)
    specs = [
        HookSpec().intervene(HookPoint(kind, layer), Replace(stream[p], positions=(p,), heads=(0,)))
        for kind in SPLIT_INPUTS
        for layer in range(model.config.num_layers)
        for p in (0, 4, LENGTH - 1)
    ]
    planned = mizarr.run(model, [Run(ids, spec, want=mizarr.logits()) for spec in specs])
    for spec, found in zip(specs, planned, strict=True):
        near(found.logits, model.forward(ids, spec).logits)
    added = HookSpec()
    for kind in SPLIT_INPUTS:
        added = added.intervene(HookPoint(kind, LAYER), Add(0.3 * stream[0], positions=(2,)))
    kept, anew = (generate(model, [ids], added, max_tokens=5, eos=(), cache=cache) for cache in (True, False))
    assert kept.ids == anew.ids


def test_only_patterns_that_say_so_meet_them(model):
    points = model.hook_points
    for pattern in ("blocks.*", "*", "blocks.1.hook_*"):
        assert not {point.kind for point in expand(pattern, points)} & set(SPLIT_INPUTS)
    found = expand("blocks.*.hook_?_input", points)
    assert {point.kind for point in found} == set(SPLIT_INPUTS)
    assert HookPoint.from_transformer_lens("blocks.2.hook_q_input") == HookPoint.q_input(2)


def test_a_model_that_does_not_attend_has_none(tmp_path: Path):
    save_random_rwkv(tmp_path, "rwkv7", 0)
    with pytest.raises(HookPointNotFound, match=r"no hook point 'blocks\.0\.hook_q_input'"):
        Model.from_pretrained(tmp_path).forward([3, 4], HookSpec().capture("blocks.0.hook_q_input"))
