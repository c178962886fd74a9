"""What is not finite is neither shown nor stored: a line says where it began, and its remedy works."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr import HookSpec, Model
from mizarr.stages.forward.hooks.wants import ALL_LOGITS
from mizarr.stages.forward.models.finite import first_not_finite
from mizarr.store import open_store
from mizarr.store.errors import NotFinite
from mizarr.workflows.cli import run as mizarr_command
from tests.layer_parts import part_of

from .random_models import save_random_model

IDS = [5, 17, 3, 250, 9]
EARLY, LATE = "blocks.0.hook_resid_post", "blocks.*.hook_resid_post"
BEGIN = "'blocks.1.mlp.hook_post'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose second layer of three adds more to the stream than float16 holds."""
    folder = tmp_path_factory.mktemp("large")
    model = save_random_model(folder, "llama", 0, num_hidden_layers=3)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3e5)
        model.model.layers[1].mlp.up_proj.weight.mul_(1e3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def load(folder):
    return partial(Model.from_pretrained, folder, device="cpu")


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


DOORS = {
    "forward": lambda model, store: model.forward(IDS),
    "forward of several lengths": lambda model, store: model.forward([IDS, IDS[:3]]),
    "forward that captures": lambda model, store: model.forward(IDS, HookSpec().capture(LATE), want=None),
    "run": lambda model, store: mizarr.run(model, [mizarr.Run(IDS)]),
    "run that captures": lambda model, store: mizarr.run(
        model, [mizarr.Run(IDS, HookSpec().capture(LATE), want=None)]
    ),
    "run that stores": lambda model, store: mizarr.run(
        model, [mizarr.Run(IDS, HookSpec().capture(LATE))], store=store
    ),
    "run that changes": lambda model, store: mizarr.run(
        model, [mizarr.Run(IDS, HookSpec().intervene("blocks.0.hook_mlp_out", mizarr.Zero()))] * 2
    ),
    "generate": lambda model, store: mizarr.generate(model, IDS, max_tokens=2),
    "generate that reads anew": lambda model, store: mizarr.generate(model, IDS, max_tokens=2, cache=False),
    "gradients": lambda model, store: model.forward(
        IDS, HookSpec().capture(f"grad:{EARLY}").gradient_of(mizarr_metric())
    ),
    **{
        f"capture of {name}": partial(
            lambda hooks, model, store: mizarr.capture(
                model, [IDS, IDS[:2]], hooks, store=store, progress=False
            ),
            hooks,
        )
        for name, hooks in {
            "states": HookSpec().capture(LATE),
            "neurons": HookSpec().capture("blocks.2.mlp.hook_post"),
            "logits": HookSpec().capture("hook_logits", reduce="topk:2"),
            "sums of logits": HookSpec().capture("hook_logits", reduce="logsumexp"),
            "norms": HookSpec().capture(LATE, reduce="norm"),
            "means": HookSpec().capture(LATE, reduce="mean"),
            "a mean of all": HookSpec().capture(LATE, reduce="run_mean"),
            "some positions": HookSpec().capture(LATE, positions="last"),
            "patterns": HookSpec().capture("blocks.2.attn.hook_pattern"),
            "scores": HookSpec().capture("blocks.2.attn.hook_attn_scores"),
        }.items()
    },
    "capture in float32": lambda model, store: mizarr.capture(
        model, [IDS], LATE, store=store, storage_dtype="float32", progress=False
    ),
    "capture in int8": lambda model, store: mizarr.capture(
        model, [IDS], LATE, store=store, storage_dtype="int8", progress=False
    ),
}


def mizarr_metric():
    from mizarr.stages.causal.grids.patching_metrics import LogitDifference

    return LogitDifference(1, 2)


@pytest.mark.parametrize("door", DOORS)
def test_an_overflow_is_refused_by_every_door_with_where_it_began(door, load, store):
    with pytest.raises(NotFinite, match=f"first at {BEGIN}") as error:
        DOORS[door](load(dtype="float16"), store)
    text = str(error.value)
    assert (
        "dtype='bfloat16'" in text and "the largest number of float16 is 65504" in text and "\n" not in text
    )
    assert not list(store.records())
    # The remedy works, by the same door.
    DOORS[door](load(dtype="bfloat16"), store)


def test_what_is_finite_before_the_overflow_is_given(load, store):
    model = load(dtype="float16")
    cache = model.forward(IDS, HookSpec().capture(EARLY), want=None)
    assert cache[EARLY].isfinite().all()
    stored = mizarr.capture(model, [IDS], EARLY, store=store, progress=False)
    assert np.isfinite(stored["resid_post"].values).all()
    mizarr.run(model, [mizarr.Run(IDS, HookSpec().capture(EARLY), want=None)])


def test_a_store_too_narrow_for_what_is_computed_names_its_own_dtype(load, store):
    model = load()
    capture = partial(mizarr.capture, model, [IDS], LATE, store=store, progress=False)
    with pytest.raises(
        NotFinite, match=r"'blocks.1.hook_resid_post'.*exceeds the largest float16 number"
    ) as error:
        capture(storage_dtype="float16")
    for dtype in re.findall(r"storage_dtype='(\w+)'", str(error.value)):
        found = capture(storage_dtype=dtype)
        assert np.isfinite(found["resid_post"].values).all()
    assert " dtype=" not in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_intervention_that_is_too_large_is_named(dtype, load, store):
    hooks = HookSpec().capture(LATE).intervene("blocks.0.hook_mlp_out", mizarr.Scale(3e38))
    hooks = hooks.intervene("blocks.0.hook_mlp_out", mizarr.Scale(3e38))
    model = load(dtype=dtype)
    for door in (
        lambda: model.forward(IDS, hooks),
        lambda: mizarr.run(model, [mizarr.Run(IDS, hooks)]),
        lambda: mizarr.generate(model, IDS, hooks, max_tokens=1),
        lambda: mizarr.capture(model, [IDS], hooks, store=store, progress=False),
    ):
        with pytest.raises(
            NotFinite, match=r"first at 'blocks\.0\.hook_mlp_out'.*an intervention causes this"
        ):
            door()
    assert not list(store.records())


def test_masked_scores_are_no_overflow(load, store):
    kinds = ("blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_scores")
    model = load()
    scores = HookSpec().capture(*kinds)
    cut = HookSpec().capture(*kinds).intervene(kinds[0], mizarr.Knockout([(4, 1)]))
    assert model.forward(IDS, scores)[kinds[0]].isinf().any()
    model.forward(IDS, cut)
    mizarr.run(model, [mizarr.Run(IDS, cut)])
    mizarr.capture(model, [IDS], scores, store=store, progress=False)
    mizarr.generate(model, IDS, scores, max_tokens=2)


def test_the_place_is_the_first_one(load):
    model = load(dtype="float16")
    spec = model.bind(None)
    assert str(first_not_finite(model, [IDS], spec)) == BEGIN.strip("'")
    assert first_not_finite(load(), [IDS], spec) is None
    with torch.no_grad():
        part_of(model.network.weights.layers[0], "down").weight.fill_(torch.nan)
    assert first_not_finite(model, [IDS], spec).layer == 0
    with pytest.raises(NotFinite):
        model.run_batch([IDS], spec, ALL_LOGITS)


def test_commands_say_it_in_a_line(tmp_path, capsys):
    folder = shutil.copytree(Path(mizarr.__file__).parent / "stages/forward/specimen", tmp_path / "large")
    (weights,) = folder.glob("*.safetensors")
    held = load_file(weights)
    for name in held:
        if ".1.mlp.down_proj" in name or ".1.mlp.up_proj" in name:
            held[name] = (held[name].float() * 1e4).to(held[name].dtype)
    save_file(held, weights)
    command = ["capture", str(folder), "The cat", "--text", "--hooks", LATE]
    command += ["--store", str(tmp_path / "store")]
    assert mizarr_command([*command, "--dtype", "float16"]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert "first at 'blocks.1." in told[-1] and "--dtype" in told[-1]
    assert "Traceback" not in "".join(told)
    assert mizarr_command([*command, "--storage-dtype", "float16"]) == 2
    assert "--storage-dtype" in capsys.readouterr().err
    assert mizarr_command([*command, "--dtype", "bfloat16"]) == 0
