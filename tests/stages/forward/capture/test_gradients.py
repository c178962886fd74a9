"""Gradients as captures: what is stored is what autograd gives for each prompt, and the key says of what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookSpec, Zero
from mizarr.pipeline import plan
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, LogProbability, Probability
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.hooks.wants import ALL_LOGITS
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.passes.plain import forward
from mizarr.store.errors import ConfigError, HookPointNotFound, PromptError, StageError

from ..random_models import VOCAB, save_random_model
from ..random_rwkv import save_random_rwkv

pytest.importorskip("transformers")
STREAM = "grad:blocks.*.hook_resid_post"
METRIC = LogitDifference(3, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(path, "llama", 1)
    return path


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, size).tolist() for size in (5, 9, 9, 9, 30, 1, 2, 40, 9, 31, 30)]


@pytest.fixture
def store(tmp_path):
    return mizarr.open_store(tmp_path / "store", durability="process")


def spec(metric=METRIC, points=STREAM, **given):
    return HookSpec().capture(points).gradient_of(metric, **given)


def by_autograd(model, ids, number):
    """Gradients [layer, position, hidden] at resid_post of what `number` makes of the logits."""
    streams = []
    taps = RunTaps(
        model.bind(HookSpec().capture("blocks.*.hook_resid_post")),
        lambda _, x: streams.append(x if x.requires_grad else x.requires_grad_(True)),
    )
    logits = forward(model.network, torch.tensor([ids]), taps, ALL_LOGITS)
    return torch.stack([x[0] for x in torch.autograd.grad(number(logits[0]), streams)]).numpy()


def difference(logits):
    return logits[-1, 3] - logits[-1, 7]


def assert_close(found, expected, bound=1e-5):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= bound * max(np.abs(expected).max(), 1e-6)


def rows_of(dataset, prompts, variable="resid_post__grad"):
    """The array of each prompt, [layer, position, ...]."""
    ends = np.cumsum([len(ids) for ids in prompts])
    return np.split(dataset[variable].values, ends[:-1], axis=1)


def test_what_is_stored_is_what_autograd_gives_for_each_prompt_alone(folder, prompts, store):
    """Prompts that straddle segments, batches by length, a metric for all."""
    model = Model.from_pretrained(folder)
    stored = mizarr.capture(
        model, prompts, spec(), store=store, segment_tokens=32, batch_tokens=64, progress=False
    )
    array = stored["resid_post__grad"]
    assert array.dims == ("layer", "token", "hidden")
    assert array.attrs["hook"] == "grad:blocks.{}.hook_resid_post"
    for ids, found in zip(prompts, rows_of(stored, prompts), strict=True):
        assert_close(found, by_autograd(model, ids, difference))
    assert store.verify() == []


def test_a_prompt_alone_gives_what_it_gives_in_company(folder, prompts, tmp_path, store):
    model = Model.from_pretrained(folder)
    together = rows_of(mizarr.capture(model, prompts, spec(), store=store, progress=False), prompts)
    other = mizarr.open_store(tmp_path / "other", durability="process")
    for number in (0, 3, 7):
        alone = mizarr.capture(model, [prompts[number]], spec(), store=other, progress=False)
        assert_close(alone["resid_post__grad"].values, together[number])


@pytest.mark.parametrize(
    ("metric", "number"),
    [
        (Probability(5), lambda logits: logits[-1].softmax(-1)[5]),
        (LogProbability(5), lambda logits: logits[-1].log_softmax(-1)[5]),
        (METRIC, difference),
    ],
    ids=["probability", "log-probability", "logit difference"],
)
def test_metrics_go_back_as_torch_would(folder, prompts, metric, number):
    model = Model.from_pretrained(folder)
    cache = model.forward(prompts[4], spec(metric))
    found = np.stack([cache[f"grad:blocks.{n}.hook_resid_post"][0] for n in range(model.config.num_layers)])
    assert_close(found, by_autograd(model, prompts[4], number))


def test_prompts_may_have_metrics_and_baselines_of_their_own(folder, store):
    model, rng = Model.from_pretrained(folder), np.random.default_rng(3)
    rows = [rng.integers(0, VOCAB, size).tolist() for size in (6, 8, 6, 8)]
    against = [rng.integers(0, VOCAB, size).tolist() for size in (5, 7, 9, 8)]
    metrics = [LogitDifference(1, 2), LogProbability(3), LogitDifference(4, 5), KL()]
    chosen = spec(metrics, baseline=against)
    stored = rows_of(mizarr.capture(model, rows, chosen, store=store, progress=False), rows)
    clean = model.forward(against[3]).logits[0, -1].log_softmax(-1)
    numbers = [
        lambda logits: logits[-1, 1] - logits[-1, 2],
        lambda logits: logits[-1].log_softmax(-1)[3],
        lambda logits: logits[-1, 4] - logits[-1, 5],
        lambda logits: (clean.exp() * (clean - logits[-1].log_softmax(-1))).sum(),
    ]
    cache = model.forward(rows, chosen)
    for row, (ids, number) in enumerate(zip(rows, numbers, strict=True)):
        expected = by_autograd(model, ids, number)
        assert_close(stored[row], expected)
        assert_close(cache["grad:blocks.1.hook_resid_post"][row, : len(ids)].numpy(), expected[1])
    assert cache["grad:blocks.0.hook_resid_post"][0, 6:].isnan().all(), "past the end of a prompt"


def test_the_key_holds_what_gradients_are_of_and_plain_keys_stay(folder, prompts):
    def key(hooks, rows=prompts):
        return CaptureNode(str(folder), rows, hooks).run_key

    plain = key(HookSpec().capture("blocks.*.hook_resid_post"))
    assert plain.hooks == mizarr.store.digest.digest("interventions", [])
    two = prompts[1:3]
    each = [LogitDifference(1, 2), LogitDifference(2, 1)]
    keys = [
        plain,
        key(spec()),
        key(spec(LogitDifference(7, 3))),
        key(spec(LogProbability(3))),
        key(spec(at=0)),
        key(spec(KL(), baseline=prompts[0])),
        key(spec(KL(), baseline=prompts[1])),
        key(spec().intervene("blocks.0.hook_mlp_out", Zero())),
        key(spec(each), two),
        key(spec(each[::-1]), two),
    ]
    assert len({each.digest for each in keys}) == len(keys)
    assert key(spec(points="grad:hook_embed")).digest == keys[1].digest, "captures choose from a run"
    assert key(spec(each), two).hooks != key(spec(each), two[::-1]).hooks, "whose metrics change places"


def test_prompts_in_another_order_never_get_each_others_metrics(folder, prompts, store):
    """A run is found in a larger one by its prompts, whatever their order."""
    rows, each = prompts[1:4], [LogitDifference(1, 2), LogitDifference(3, 4), LogitDifference(5, 6)]
    model = Model.from_pretrained(folder)
    mizarr.capture(model, rows, spec(each), store=store, progress=False)
    swapped = mizarr.capture(model, rows[::-1], spec(each), store=store, progress=False)
    found = rows_of(swapped, rows[::-1])
    assert_close(found[0], by_autograd(model, rows[2], lambda z: z[-1, 1] - z[-1, 2]))


def test_more_layers_of_a_run_are_added_and_nothing_is_computed_twice(folder, prompts, store, monkeypatch):
    model = Model.from_pretrained(folder)
    mizarr.capture(model, prompts, spec(points="grad:blocks.0.hook_resid_post"), store=store, progress=False)
    wider = CaptureNode(str(folder), prompts, spec())
    step = plan([wider], store).steps[0]
    assert (step.status.cells, step.status.cells_cached) == (len(wider.cells), 1)
    assert "resid_post__grad missing" in step.status.reason
    asked = []
    whole = Model.differentiate
    monkeypatch.setattr(
        Model,
        "differentiate",
        lambda self, rows, spec, *a, **k: asked.append(spec) or whole(self, rows, spec, *a, **k),
    )
    mizarr.capture(str(folder), prompts, spec(), store=store, progress=False)
    assert {c.point.layer for given in asked for c in given.captures} == {1}
    asked.clear()
    mizarr.capture(str(folder), prompts, spec(), store=store, progress=False)
    assert not asked


def test_a_resumed_capture_is_bitwise_the_undisturbed_one(folder, prompts, tmp_path, monkeypatch):
    model = Model.from_pretrained(folder)
    given = {"segment_tokens": 32, "progress": False}
    stores = [mizarr.open_store(tmp_path / name, durability="process") for name in ("whole", "killed")]
    expected = mizarr.capture(model, prompts, spec(), store=stores[0], **given)
    whole, left = Model.differentiate, [3]

    def killed(self, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Model, "differentiate", killed)
        with pytest.raises(KeyboardInterrupt):
            mizarr.capture(model, prompts, spec(), store=stores[1], **given)
    found = mizarr.capture(model, prompts, spec(), store=stores[1], **given)
    assert np.array_equal(found["resid_post__grad"].values, expected["resid_post__grad"].values)


def test_another_process_finds_them_without_torch(folder, prompts, store):
    mizarr.capture(str(folder), prompts, spec(), store=store, progress=False)
    code = f"""
import sys, json, mizarr
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.pipeline import plan
hooks = mizarr.HookSpec().capture({STREAM!r}).gradient_of(LogitDifference(3, 7))
node = CaptureNode({str(folder)!r}, {json.dumps(prompts)}, hooks)
store = mizarr.open_store({str(store.path)!r})
assert plan([node], store).is_cached
assert "torch" not in sys.modules
print(float(abs(node.open(store)["resid_post__grad"]).sum()) > 0)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert told.stdout.strip() == "True"


def test_every_hook_point_of_a_recurrent_model_can_be_stored(tmp_path, store):
    save_random_rwkv(tmp_path / "m", "rwkv7", 0)
    model, ids = Model.from_pretrained(tmp_path / "m"), [[5, 9, 30, 4], [7, 8, 9]]
    stored = mizarr.capture(model, ids, spec(points="grad:*"), store=store, progress=False)
    cache = model.forward(ids[0], spec(points="grad:*"))
    state = stored["rwkv_state_seq__grad"]
    assert state.dims == ("layer", "token", "head", "key", "value")
    expected = cache["grad:blocks.1.rwkv.hook_state_seq"][0].transpose(0, 1).numpy()
    assert_close(state.values[1, :4], expected)
    assert {str(name) for name in cache.to_xarray().data_vars} <= {str(name) for name in stored.data_vars}


@pytest.mark.parametrize(
    ("hooks", "error", "told"),
    [
        (HookSpec().capture(STREAM), HookPointNotFound, r"found none; add \.gradient_of"),
        (
            HookSpec().capture("hook_embed").gradient_of(METRIC),
            HookPointNotFound,
            r"found none; add \.capture\('grad:",
        ),
        (spec().capture("hook_embed"), StageError, "expected only gradients.*found 'hook_embed'"),
        (spec(KL()), StageError, "expected a baseline prompt for 'kl'"),
        (spec(LogitDifference(1, VOCAB)), PromptError, "expected token ids in"),
        (spec(at=5), PromptError, "expected a position at= in -1..0"),
        (spec([METRIC, METRIC]), StageError, "one for each of 11 prompts, found 2"),
    ],
    ids=["no metric", "no gradient", "both", "no baseline", "token", "position", "too few"],
)
def test_what_cannot_be_is_said_in_one_line_and_nothing_is_written(
    folder, prompts, store, hooks, error, told
):
    with pytest.raises(error, match=told) as raised:
        mizarr.capture(str(folder), prompts, hooks, store=store, progress=False)
    assert "\n" not in str(raised.value)
    assert not list(Path(store.path).glob("data/*"))
    if "only" not in told:
        with pytest.raises(error, match=told):
            Model.from_pretrained(folder).forward(prompts, hooks)


def test_passes_that_go_no_way_back_say_so(folder, prompts):
    model = Model.from_pretrained(folder)
    with pytest.raises(HookPointNotFound, match="the planner of runs has no backward pass"):
        mizarr.run(model, [mizarr.Run(prompts[0], spec())])
    with pytest.raises(HookPointNotFound, match="generation has no backward pass"):
        mizarr.generate(model, [prompts[0]], spec(), max_tokens=1)


def test_a_bridged_model_has_none(tmp_path, store):
    save_random_model(tmp_path / "m", "llama", 1)
    with pytest.raises(ConfigError, match="found llama, which transformers computes"):
        mizarr.capture(
            str(tmp_path / "m"), [[1, 2]], spec(), backend="transformers", store=store, progress=False
        )
