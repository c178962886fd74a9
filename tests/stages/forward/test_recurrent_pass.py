"""Layers gone through again: an independent implementation's numbers, and the literal loop on every kind of
network, which is what a `RecurrentPass` means and never what is computed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mizarr
from mizarr import Add, HookPoint, HookSpec, Model, RecurrentPass, Scale, Zero, generate
from mizarr.stages.forward.hooks.spec import BoundSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.networks.history import STREAM
from mizarr.stages.forward.passes.plain import WholePrompts
from mizarr.store.errors import ConfigError, InterventionError

from .random_hybrids import HYBRIDS, save_random_hybrid
from .random_models import FAMILIES, VOCAB, save_random_model
from .random_rwkv import GENERATIONS, save_random_rwkv

REFERENCE = (
    Path(__file__).resolve().parents[3].parent / "shared" / "reference" / "recurrent" / "recurrent_pass"
)
LENGTH = 9


# -- an independent implementation


@pytest.fixture(scope="module")
def reference() -> tuple[Model, dict[str, Any], Any]:
    if not REFERENCE.is_dir():
        pytest.skip("the reference arrays are not beside this checkout")
    model = Model.from_pretrained(REFERENCE, dtype="float64")
    held = np.load(REFERENCE / "reference.npz")
    return model, json.loads((REFERENCE / "manifest.json").read_text()), held


def recurrent(spec: dict[str, Any] | None, vector: Any, *, sustained: bool = False) -> RecurrentPass | None:
    if spec is None:
        return None
    fed = [(position, vector, strength) for position, strength in spec["feedback"]]
    return RecurrentPass(spec["start"], spec["end"], spec["depth"], fed, sustained)


def test_logits_are_those_of_the_reference(reference):
    model, manifest, held = reference
    assert len(manifest["specs"]) >= 8
    # Rotary tables are float32, as in transformers, and a sine's last bit (6e-8) differs between instruction
    # sets; every layer rotates again. All else is float64.
    atol = 1e-6 * float(np.abs(held["baseline"]).max())
    for name, spec in manifest["specs"].items():
        for vector in (held["feedback_vector"], torch.tensor(held["feedback_vector"])):
            found = model.forward(manifest["prompt"], recurrent=recurrent(spec, vector)).logits[0].numpy()
            assert np.abs(found - held[name]).max() <= atol, name


def test_generations_are_those_of_the_reference(reference):
    model, manifest, held = reference
    assert len(manifest["generations"]) >= 13
    for name, expected in manifest["generations"].items():
        spec = manifest["specs"][name.removesuffix("_sustained")]
        asked = recurrent(spec, held["feedback_vector"], sustained=name.endswith("_sustained"))
        new = len(expected) - len(manifest["prompt"])
        (found,) = generate(model, manifest["prompt"], max_tokens=new, eos=(), recurrent=asked)
        assert list(found.token_ids) == expected, name


# -- the literal loop

KINDS = [
    *((family, save_random_model) for family in FAMILIES),
    *((generation, save_random_rwkv) for generation in GENERATIONS),
    *((family, save_random_hybrid) for family in HYBRIDS),
]


def load(folder: Path, name: str, save: Any, seed: int) -> Model:
    save(folder, name, seed)
    return Model.from_pretrained(folder, dtype="float64")


def literal(model: Model, ids: Sequence[int], asked: RecurrentPass, sustained: bool = False) -> Tensor:
    """Logits [position, vocab] of the loop as it is told, pass by pass."""
    network, given = model.network, torch.tensor([ids])
    taps = RunTaps(BoundSpec(), lambda *_: None)
    history = WholePrompts(len(ids), taps, given.device)

    def through(carried: dict[str, Tensor], layers: range) -> dict[str, Tensor]:
        for layer in layers:
            carried = network.layer(layer, carried, history, taps)
        return carried

    block = range(asked.loop_start, asked.loop_end + 1)
    with torch.no_grad():
        entered = through(network.embed(given, history.positions), range(asked.loop_start))
        carried = through(entered, block)
        for _ in range(asked.depth - 1):
            if asked.feedback:
                stream = entered[STREAM].clone()
                for position, vector, strength in asked.feedback:
                    stream[:, position] += strength * torch.as_tensor(np.array(vector))
                    if sustained:
                        stream[:, -1] += strength * torch.as_tensor(np.array(vector))
                carried = {**entered, STREAM: stream}
            carried = through(carried, block)
        carried = through(carried, range(asked.loop_end + 1, model.config.num_layers))
        return network.unembed(network.finish(carried[STREAM], taps, None), mizarr.logits())[0]


def draw_ids(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drawn(seed: int, model: Model, *, fed: bool, depth: int | None = None) -> RecurrentPass:
    rng, layers = random.Random(seed), model.config.num_layers
    start, end = sorted(rng.choices(range(layers), k=2))
    normal = np.random.default_rng(seed).standard_normal
    feedback = [
        (rng.randrange(LENGTH), normal(model.config.axis_sizes["hidden"]), rng.choice([-2.0, 0.5, 3.0]))
        for _ in range(rng.randint(1, 3) if fed else 0)
    ]
    return RecurrentPass(start, end, depth or rng.randint(2, 3), feedback)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(("name", "save"), KINDS, ids=[name for name, _ in KINDS])
def test_every_network_gives_what_the_literal_loop_gives(name, save, tmp_path):
    seed = sum(map(ord, name))
    model, ids = load(tmp_path, name, save, seed % 7), draw_ids(seed)
    plain = model.forward(ids).logits[0]
    for fed in (True, False):
        asked = drawn(seed, model, fed=fed)
        found = model.forward(ids, recurrent=asked).logits[0]
        assert_near(found, literal(model, ids, asked))
        assert not torch.allclose(found, plain, atol=1e-6), "the second pass matters"


@pytest.fixture(scope="module", params=["mistral", "rwkv7", "qwen3_next"])
def model(request, tmp_path_factory) -> Model:
    name, save = next(each for each in KINDS if each[0] == request.param)
    return load(tmp_path_factory.mktemp(name), name, save, 2)


def test_fed_depth_and_the_end_of_the_block_decide_nothing(model):
    ids, asked = draw_ids(1), drawn(3, model, fed=True, depth=2)
    expected = model.forward(ids, recurrent=asked).logits
    start, fed, last = asked.loop_start, asked.feedback, model.config.num_layers - 1
    for depth, end in ((3, asked.loop_end), (7, start), (2, last), (5, last)):
        assert torch.equal(
            model.forward(ids, recurrent=RecurrentPass(start, end, depth, fed)).logits, expected
        )


def test_feedback_is_one_steered_pass(model):
    ids, asked = draw_ids(2), drawn(5, model, fed=True)
    point = HookPoint.resid_pre(asked.loop_start)
    steered = HookSpec()
    for position, vector, strength in asked.feedback:
        steered = steered.intervene(
            point, Add(torch.tensor(np.array(vector)) * strength, positions=(position,))
        )
    expected = model.forward(ids, steered).logits
    assert torch.equal(model.forward(ids, recurrent=asked).logits, expected)


def test_a_depth_of_one_is_a_plain_pass(model):
    ids, vector = draw_ids(3), np.ones(model.config.axis_sizes["hidden"])
    plain = model.forward(ids).logits
    for fed in ([], [(2, vector, 5.0)]):
        assert torch.equal(model.forward(ids, recurrent=RecurrentPass(0, 1, 1, fed)).logits, plain)


def test_captures_are_those_of_the_last_time_and_changes_are_made_each_time(model):
    ids, layers = draw_ids(4), model.config.num_layers
    everything = HookSpec().capture("blocks.*.hook_resid_*", "hook_*")
    halved = HookPoint.resid_post(1)
    hooks = HookSpec().capture("blocks.*.hook_resid_*", "hook_*").intervene(halved, Scale(0.5))
    found = model.forward(ids, hooks, recurrent=RecurrentPass(1, 1, 3))
    # By hand: what the block gave goes into it again, as an ordinary replacement of its input.
    once = model.forward(ids, hooks)
    for _ in range(2):
        entering = HookSpec().intervene(HookPoint.resid_pre(1), mizarr.Replace(once[halved][0]))
        once = model.forward(ids, entering.extend(hooks))
    for point in found:
        if point.layer is None or point.layer >= 1:
            assert_near(found[point], once[point])
    assert_near(found.logits, once.logits)
    before = model.forward(ids, everything)
    assert torch.equal(found[HookPoint.resid_post(0)], before[HookPoint.resid_post(0)])
    assert layers == len({point.layer for point in found if point.kind == "resid_post"})


def test_without_logits_captures_are_still_those_of_the_last_time(model):
    ids, asked = draw_ids(4), RecurrentPass(0, 1, 2)
    spec = HookSpec().capture("blocks.0.hook_resid_post")
    first, whole = model.forward(ids, spec), model.forward(ids, spec, recurrent=asked)
    found = model.forward(ids, spec, want=None, recurrent=asked)
    assert torch.equal(found["blocks.0.hook_resid_post"], whole["blocks.0.hook_resid_post"])
    assert not torch.equal(found["blocks.0.hook_resid_post"], first["blocks.0.hook_resid_post"])


def test_what_is_fed_meets_the_changes_of_the_spec_first(model):
    ids, asked = draw_ids(5), drawn(8, model, fed=True)
    hooks = HookSpec().intervene(HookPoint.resid_pre(asked.loop_start), Zero())
    assert torch.equal(model.forward(ids, hooks, recurrent=asked).logits, model.forward(ids, hooks).logits)


def test_positions_from_the_end_are_those_of_each_prompt(model):
    prompts, vector = [draw_ids(6, 5), draw_ids(7, 8)], np.ones(model.config.axis_sizes["hidden"])
    found = model.forward(prompts, recurrent=RecurrentPass(1, 1, feedback=[(-1, vector, 2.0)]))
    for row, ids in enumerate(prompts):
        alone = model.forward(ids, recurrent=RecurrentPass(1, 1, feedback=[(len(ids) - 1, vector, 2.0)]))
        assert torch.equal(found.logits[row, : len(ids)], alone.logits[0])


# -- generation


def by_hand(model: Model, ids: Sequence[int], asked: RecurrentPass, new: int) -> list[int]:
    """Greedy tokens of the literal loop, every position read anew at every step."""
    ids = list(ids)
    for _ in range(new):
        ids.append(int(literal(model, ids, asked, asked.sustained)[-1].argmax()))
    return ids


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["prefill", "sustained", "not fed"])
def test_generations_are_those_of_the_literal_loop(model, mode, seed):
    asked = drawn(seed, model, fed=mode != "not fed")
    asked = RecurrentPass(
        asked.loop_start, asked.loop_end, asked.depth, asked.feedback, sustained=mode == "sustained"
    )
    ids = draw_ids(seed)
    found = generate(model, [ids], max_tokens=6, eos=(), recurrent=asked)
    assert list(found[0].token_ids) == by_hand(model, ids, asked, 6)
    kept = found.reading == "keys and values kept"
    assert kept == (mode == "prefill"), found.reading


def test_the_planning_position_is_fed_twice_in_the_first_step_alone(model):
    ids, vector = draw_ids(9), np.random.default_rng(0).standard_normal(model.config.axis_sizes["hidden"])
    fed, point = [(LENGTH - 1, vector, 2.0)], "blocks.1.hook_resid_pre"
    spec = HookSpec().capture(point)
    asked = RecurrentPass(1, 1, feedback=fed, sustained=True)
    found = generate(
        model, [ids], spec, max_tokens=3, eos=(), recurrent=asked, capture_positions="every"
    ).activations(point)
    texts = [ids, *([*ids, *_new(model, ids, asked, count)] for count in (1, 2))]
    for step, text in enumerate(texts):
        clean = model.forward(text, spec)[point][0]
        added = (found[step, : len(text)] - clean) @ torch.tensor(vector) / float(vector @ vector)
        expected = torch.zeros(len(text), dtype=added.dtype)
        expected[LENGTH - 1] += 2
        expected[-1] += 2
        torch.testing.assert_close(added, expected, atol=1e-9, rtol=0)


def _new(model: Model, ids: list[int], asked: RecurrentPass, count: int) -> tuple[int, ...]:
    return generate(model, [ids], max_tokens=count, eos=(), recurrent=asked)[0].generated_ids


def test_a_prompt_gives_what_it_gives_alone(model):
    prompts, vector = (
        [draw_ids(1, 5), draw_ids(2, 5), draw_ids(3, 8)],
        np.ones(model.config.axis_sizes["hidden"]),
    )
    asked = RecurrentPass(0, 1, feedback=[(-2, vector, 1.5)], sustained=True)
    together = generate(model, prompts, max_tokens=4, eos=(), recurrent=asked)
    alone = [generate(model, [ids], max_tokens=4, eos=(), recurrent=asked)[0] for ids in prompts]
    assert [each.generated_ids for each in together] == [each.generated_ids for each in alone]


def test_with_keys_kept_a_position_is_fed_once_and_stays_fed(model):
    """The other meaning, asked for by name: what stands in the cache stays as it was fed when it was new."""
    ids, vector = draw_ids(2), 3 * np.random.default_rng(1).standard_normal(model.config.axis_sizes["hidden"])
    asked = RecurrentPass(1, 1, feedback=[(-1, vector, 2.0)], sustained=True)
    found = list(generate(model, [ids], max_tokens=4, eos=(), recurrent=asked, cache=True)[0].token_ids)
    text = list(ids)
    for step in range(4):
        places = [(LENGTH - 1, vector, 2.0), *((LENGTH - 1 + s, vector, 2.0) for s in range(step + 1))]
        logits = model.forward(text, recurrent=RecurrentPass(1, 1, feedback=places)).logits[0, -1]
        text.append(int(logits.argmax()))
    assert found == text


def test_layers_gone_through_again_keep_no_keys(model):
    with pytest.raises(ConfigError, match="cache=None or cache=False, found True: layers are repeated"):
        generate(model, [draw_ids(0)], max_tokens=2, recurrent=RecurrentPass(0, 1), cache=True)


# -- bad input, and identity

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"depth": 0}, ConfigError, "depth of at least 1, found 0"),
    ({"loop_start": 1, "loop_end": 0}, ConfigError, "loop_start <= loop_end, found layers 1 to 0"),
    ({"loop_start": -1}, ConfigError, "found layers -1 to 1"),
    ({"loop_end": 99}, ConfigError, r"layers within 0\.\.\d, found layers 0 to 99"),
    ({"feedback": [(LENGTH, np.ones(4), 1.0)]}, InterventionError, r"in 0\.\.8 .*, found 9"),
    ({"feedback": [(-LENGTH - 1, np.ones(4), 1.0)]}, InterventionError, "found -10"),
    ({"feedback": [(0, np.ones(3), 1.0)]}, InterventionError, r"vector of length \d+ .*, found shape \[3\]"),
    ({"feedback": [(0, np.ones((1, 4)), 1.0)]}, InterventionError, r"found shape \[1, 4\]"),
    ({"feedback": [(0, [], 1.0)]}, InterventionError, r"found shape \[0\]"),
    ({"feedback": [(0, [float("nan")], 1.0)]}, InterventionError, "finite numbers"),
    ({"feedback": [(0, np.ones(4, int), 1.0)]}, InterventionError, "floating-point"),
    ({"feedback": [(0, np.ones(4), float("inf"))]}, InterventionError, "finite number, found inf"),
    ({"sustained": True}, ConfigError, "feedback vectors for sustained=True, found none"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_bad_input_is_told_in_one_line(model, given, error, message):
    for run in (model.forward, lambda *args, **told: generate(model, *args, **told)):
        with pytest.raises(error, match=message) as caught:
            run([draw_ids(0)], recurrent=RecurrentPass(**{"loop_start": 0, "loop_end": 1} | given))
        assert "\n" not in str(caught.value)


def test_a_recurrent_pass_is_a_value():
    vector = np.arange(4.0)
    one, other = (RecurrentPass(1, 2, feedback=[(0, vector, 1.0)]) for _ in range(2))
    vector += 1  # whoever writes to it later changes nothing
    assert one == other and hash(one) == hash(other)
    changed = [
        RecurrentPass(1, 2, feedback=[(0, vector, 1.0)]),
        RecurrentPass(1, 2, feedback=[(1, vector - 1, 1.0)]),
        RecurrentPass(1, 2, feedback=[(0, vector - 1, 2.0)]),
        RecurrentPass(1, 2, feedback=[(0, vector - 1, 1.0)], sustained=True),
        RecurrentPass(1, 2, 3, [(0, vector - 1, 1.0)]),
        RecurrentPass(1, 2),
    ]
    assert one not in changed
    assert len(set(changed)) == len(changed)


def test_the_order_of_layers_is_in_the_digest_of_a_run(model):
    specs = [
        asked.applied(BoundSpec(), model.config, LENGTH)
        for asked in (
            RecurrentPass(0, 1),
            RecurrentPass(1, 1),
            RecurrentPass(0, 1, 3),
            RecurrentPass(0, 1, 1),
        )
    ]
    assert len({spec.run_digest for spec in specs}) == 4
    assert specs[3].run_digest == BoundSpec().run_digest, "a depth of 1 is a plain run"
    assert len({spec.digest for spec in specs}) == 4
