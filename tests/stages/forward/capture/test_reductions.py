"""What is made of activations while they go by: what the whole capture gives, however it is cut."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import xarray as xr

from mizarr import HookSpec, capture, open_store
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.capture.reduced import folded
from mizarr.store.errors import HookPointNotFound, PromptError
from mizarr.workflows.cli.group import run

RESID, Z = "blocks.*.hook_resid_post", "blocks.*.attn.hook_z"
OPTIONS = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}


@pytest.fixture(scope="module")
def whole(model, tokens, tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("whole"), durability="process")
    return capture(model, tokens, [RESID, Z, "hook_embed"], store=store, **OPTIONS).load()


def both():
    points = (RESID, Z, "hook_embed")
    return HookSpec().capture(*points, reduce="norm").capture(*points, reduce="mean")


def reduced(model, tokens, folder, spec=None, **options):
    store = open_store(folder, durability="process")
    return store, capture(model, tokens, spec or both(), store=store, **{**OPTIONS, **options})


def norm_by_hand(rows):
    return np.float32(math.sqrt(math.fsum(float(each) ** 2 for each in rows)))


def test_folded_sums_are_sums_of_any_width():
    rng = np.random.default_rng(0)
    for width in [*range(1, 20), 64, 100, 1023]:
        rows = rng.standard_normal((4, width)) * 10.0 ** rng.integers(-8, 8, (4, width))
        expected = [math.fsum(row) for row in rows]
        tolerance = 1e-15 * np.abs(rows).sum(axis=-1)
        assert (np.abs(folded(torch.from_numpy(rows)).numpy() - expected) <= tolerance).all()


@pytest.mark.parametrize("start", [0, 1, 2])
def test_pooled_prompts_are_those_of_the_tokens_that_positions_select(model, tokens, whole, tmp_path, start):
    chosen, spec = {"positions": f"{start}:"} if start else {}, HookSpec()
    for reduce in ("mean", "max", "weighted_mean"):
        spec = spec.capture(RESID, Z, "hook_embed", reduce=reduce, **chosen)
    kept = [ids for ids in tokens if len(ids) > start]
    _, found = reduced(model, kept, tmp_path, spec)
    stored, suffix = whole["prompt"].values, f"__from_{start}" if start else ""
    numbers = [number for number, ids in enumerate(tokens) if len(ids) > start]
    for name in ("resid_post", "z", "embed"):
        axis = whole[name].dims.index("token")
        for row, number in enumerate(numbers):
            states = np.moveaxis(whole[name].values, axis, 0)[stored == number][start:].astype(np.float64)
            weights = np.arange(len(states)) + 1.0 + start
            expected = {
                "mean": states.mean(0),
                "max": states.max(0),
                "weighted_mean": np.average(states, axis=0, weights=weights),
            }
            for reduce, value in expected.items():
                pooled = np.moveaxis(found[f"{name}{suffix}__{reduce}"].values, axis, 0)[row]
                np.testing.assert_allclose(pooled, value, rtol=1e-6, atol=1e-7)


def test_a_prompt_without_a_token_to_pool_is_refused_before_anything_runs(model):
    spec = HookSpec().capture(RESID, positions="3:", reduce="max")
    with pytest.raises(PromptError, match=r"found none of prompt 1 \(3 tokens\) at positions '3::'"):
        CaptureNode(model, [[1, 2, 3, 4], [1, 2, 3]], spec)


def test_norms_and_means_are_those_of_the_whole_capture(model, tokens, whole, tmp_path):
    """To the last bit: float64 sums, correctly rounded or not, round to one float32."""
    store, found = reduced(model, tokens, tmp_path)
    for name in ("resid_post", "z"):
        values, norms, means = whole[name].values, found[f"{name}__norm"], found[f"{name}__mean"]
        assert norms.dims == whole[name].dims[:-1]
        assert means.dims == ("layer", "prompt_id", *whole[name].dims[2:])
        by_hand = np.apply_along_axis(norm_by_hand, -1, values)
        np.testing.assert_array_equal(norms.values, by_hand)
        for prompt, (start, size) in enumerate(zip(tokens.row_start, tokens.row_size, strict=True)):
            rows = values[:, start : start + size].astype(np.float64)
            sums = np.apply_along_axis(math.fsum, 1, rows)
            np.testing.assert_array_equal(means.values[:, prompt], (sums / size).astype(np.float32))
    assert found["embed__norm"].dims == ("token",)
    np.testing.assert_array_equal(found["row_size"], tokens.row_size)
    assert store.verify() == []


def test_bits_do_not_depend_on_batches_and_segments(model, tokens, tmp_path, another_way):
    _, expected = reduced(model, tokens, tmp_path / "a")
    _, found = reduced(model, tokens, tmp_path / "b", **another_way)
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_bits_do_not_depend_on_threads(model, tokens, tmp_path, set_threads):
    found = []
    for threads in (1, 2):
        set_threads(threads)
        found.append(reduced(model, tokens, tmp_path / str(threads))[1].load())
    xr.testing.assert_identical(*(each.drop_attrs() for each in found))


def test_the_mean_of_a_run_is_that_of_its_prompts_by_their_tokens(model, tokens, whole, tmp_path):
    """To 2^-24 of the largest mean of a prompt, as each of these is rounded once."""
    _, found = reduced(model, tokens, tmp_path)
    means = found["resid_post__mean"].astype("f8")
    of_run = means.weighted(found["row_size"]).mean("prompt_id")
    expected = whole["resid_post"].astype("f8").mean("token")
    assert float(abs(of_run - expected).max()) <= 2.0**-24 * float(abs(means).max())


def test_norms_of_a_selection_are_those_of_its_tokens(model, tokens, whole, tmp_path):
    spec = HookSpec().capture(RESID, positions="last", reduce="norm")
    store, found = reduced(model, tokens, tmp_path, spec)
    assert list(found.data_vars) == ["resid_post__last__norm"]
    last = np.cumsum(tokens.row_size) - 1
    by_hand = np.apply_along_axis(norm_by_hand, -1, whole["resid_post"].values[:, last])
    np.testing.assert_array_equal(found["resid_post__last__norm"].values, by_hand)
    capture(model, tokens, RESID, store=store, **OPTIONS)  # no view of what is no reduction
    assert CaptureNode(model, tokens, spec, segment_tokens=16).status(store).is_cached


def test_the_whole_is_never_stored_and_the_estimate_says_so(model, tokens, tmp_path):
    spec = HookSpec().capture(RESID, reduce="mean")
    node = CaptureNode(model, tokens, spec, segment_tokens=16)
    width, layers = model.config.hidden_size, model.config.num_layers
    store = open_store(tmp_path, durability="process")
    assert node.estimate(store).bytes_written == pytest.approx(4 * tokens.n_prompts * layers * width, abs=1)
    reduced(model, tokens, tmp_path, spec)
    (entry,) = store.entries()
    assert {name for name, _ in entry.published()} == {"resid_post__mean"}
    assert not (store.path / entry.path / "resid_post").exists()


def test_keys_tell_reductions_apart_and_share_the_run(model, tokens, tmp_path):
    store, _ = reduced(model, tokens, tmp_path, HookSpec().capture(RESID, reduce="norm"))
    reduced(model, tokens, tmp_path, HookSpec().capture(RESID, reduce="mean"))
    capture(model, tokens, RESID, store=store, **OPTIONS)
    (entry,) = store.entries()
    keys = {entry.key(f"resid_post{end}", 1).digest for end in ("", "__norm", "__mean")}
    assert len(keys) == 3
    digests = {
        HookSpec().capture(RESID, reduce=how).bind(model.config.hook_points, stored=True).digest
        for how in (None, "norm", "mean")
    }
    assert len(digests) == 3


def test_plain_readers_another_process_and_a_copy_see_the_same(model, tokens, tmp_path):
    store, found = reduced(model, tokens, tmp_path / "a", segment_tokens=None)
    (entry,) = store.entries()
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    for name in found.data_vars:
        np.testing.assert_array_equal(plain[name].values, found[name].values)
    other = open_store(tmp_path / "b", durability="process")
    store.copy_to(other)
    program = (
        "import sys, xarray as xr\n"
        f"ds = xr.open_dataset({str(other.path / entry.path)!r}, engine='mizarr')\n"
        "print(float(ds['resid_post__mean'].astype('f8').sum()), 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.split()[1] == "False"
    expected = float(found["resid_post__mean"].astype("f8").sum())
    assert float(told.split()[0]) == pytest.approx(expected, rel=1e-12)
    assert other.verify() == []


KILLED = """
import os, signal, sys
import numpy as np
from mizarr import HookSpec, Model, capture, open_store
from mizarr.store.runs.entries import Entry
from mizarr.store.runs.packed import PackedTokens

model, folder, sizes, ids = sys.argv[1], sys.argv[2], eval(sys.argv[3]), eval(sys.argv[4])
write, count = Entry.write_segment, [0]

def dying(self, *arguments, **options):
    count[0] += 1
    if count[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, *arguments, **options)

Entry.write_segment = dying
points = ("blocks.*.hook_resid_post", "blocks.*.attn.hook_z", "hook_embed")
spec = HookSpec().capture(*points, reduce="norm").capture(*points, reduce="mean")
tokens = PackedTokens(np.array(ids, np.int32), np.array(sizes))
store = open_store(folder, durability="process")
capture(model, tokens, spec, store=store, segment_tokens=16, batch_tokens=32, progress=False)
"""


def test_a_killed_harvest_goes_on_to_the_same_bits(model, tokens, tmp_path):
    _, expected = reduced(model, tokens, tmp_path / "undisturbed")
    folder, arguments = tmp_path / "killed", [str(tokens.row_size.tolist()), str(tokens.ids.tolist())]
    command = [sys.executable, "-c", KILLED, model.name, str(folder), *arguments]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    died = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    store = open_store(folder)
    (entry,) = store.entries()
    assert 0 < len(entry.missing([("resid_post__mean", 1)])) < len(entry.segments)
    _, found = reduced(model, tokens, folder)
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_what_cannot_be_reduced_is_refused_in_one_line(model, tokens, tmp_path, capsys):
    store = open_store(tmp_path / "s")
    for spec, said in [
        (HookSpec().capture("blocks.*.attn.hook_pattern", reduce="mean"), "row of numbers per token"),
        (HookSpec().capture("blocks.*.ln1.hook_scale", reduce="norm"), "row of numbers per token"),
    ]:
        with pytest.raises(HookPointNotFound, match=said):
            capture(model, tokens, spec, store=store, **OPTIONS)
    with pytest.raises(HookPointNotFound, match="nearest is 'mean'"):
        HookSpec().capture(RESID, reduce="meen")
    with pytest.raises(HookPointNotFound, match="reduce='norm'"):
        model.forward([1, 2], HookSpec().capture(RESID, reduce="norm"))
    assert run(["capture", "specimen", "a b", "--text", "--hooks", RESID, "--reduce", "median"]) == 2


def test_the_command_line_keeps_means(tmp_path, capsys):
    store = tmp_path / "store"
    asked = ["capture", "specimen", "the cat sat", "--text", "--hooks", RESID, "--store", str(store)]
    assert run([*asked, "--reduce", "mean"]) == 0
    capsys.readouterr()
    assert run(["ls", "--store", str(store)]) == 0
    assert "resid_post__mean" in capsys.readouterr().out
