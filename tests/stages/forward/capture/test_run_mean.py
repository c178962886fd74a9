"""Means over all tokens of a run: exact sums of segments, put together when they are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
import xarray as xr

from mizarr import HookSpec, Model, capture, open_store
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.capture.run_reductions import sums_in_parts
from mizarr.store.errors import HookPointNotFound, ShapeError
from mizarr.store.runs.entries import Entry
from mizarr.store.runs.run_sums import BELOW, QUANTA, mean_of_parts
from mizarr.workflows.cli.group import run

RESID, Z = "blocks.*.hook_resid_post", "blocks.*.attn.hook_z"
OPTIONS = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}


@pytest.fixture(scope="module")
def whole(model, tokens, tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("whole"), durability="process")
    return capture(model, tokens, [RESID, Z, "hook_embed"], store=store, **OPTIONS).load()


def means(**how):
    return HookSpec().capture(RESID, Z, "hook_embed", reduce="run_mean", **how)


def reduced(model, tokens, folder, spec=None, **options):
    store = open_store(folder, durability="process")
    return store, capture(model, tokens, spec or means(), store=store, **{**OPTIONS, **options})


def mean_by_hand(column):
    return float(sum(map(Fraction, column.tolist())) / len(column))


def parts_of(values, cuts):
    pieces = np.split(values, cuts)
    return np.stack([sums_in_parts(torch.from_numpy(piece), "x").numpy() for piece in pieces])


@pytest.mark.parametrize("seed", range(8))
def test_a_mean_is_the_true_one_rounded_once_however_it_is_cut(seed):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((60, 3)) * 10.0 ** rng.integers(-10, 11, (60, 3))).astype(np.float32)
    expected = [mean_by_hand(column) for column in values.T]
    for cuts in ([], [1], [13, 40], list(range(1, 60))):
        assert mean_of_parts(parts_of(values, cuts), 60).tolist() == expected
    turned = parts_of(values[rng.permutation(60)], [30])
    assert mean_of_parts(turned, 60).tolist() == expected


def test_large_numbers_that_cancel_leave_the_small_ones():
    values = np.array([[1e12], [2.0**-30], [-1e12]], np.float32)
    assert float(values.astype(np.float64).mean()) != 2.0**-30 / 3
    assert mean_of_parts(parts_of(values, [1]), 3)[0] == 2.0**-30 / 3


def test_parts_add_up_without_mizarr():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((500, 4)).astype(np.float32)
    parts = parts_of(values, [100, 350])
    np.testing.assert_allclose(parts.sum((0, -1)) / 500, values.astype("f8").mean(0), rtol=1e-13)


def test_more_tokens_than_a_segment_may_have_are_added_over_segments():
    """2^26 rows of the largest magnitude fill what float64 counts; a thousand such segments still add."""
    one = 2.0**27 * QUANTA[0] - QUANTA[0]
    of_segment = np.zeros((1000, 1, len(QUANTA)))
    of_segment[..., 0] = one * 2.0**26
    assert mean_of_parts(of_segment, 1000 << 26)[0] == one


def test_nan_stays_in_its_column_and_too_large_numbers_are_refused():
    values = np.array([[1.0, np.nan], [3.0, 2.0]], np.float32)
    found = mean_of_parts(parts_of(values, [1]), 2)
    assert found[0] == 2.0
    assert np.isnan(found[1])
    for large in (BELOW, -BELOW, np.inf):
        with pytest.raises(ShapeError, match=r"segment 3.*below 1\.1e\+12"):
            sums_in_parts(torch.tensor([[large], [np.nan]]), "segment 3")


def means_by_hand(rows):
    """Of rows [..., token, number] over tokens, each rounded once."""
    return np.apply_along_axis(mean_by_hand, -2, rows)


def test_it_is_the_mean_of_the_whole_capture_rounded_once(model, tokens, whole, tmp_path):
    store, found = reduced(model, tokens, tmp_path)
    mean = found["resid_post__run_mean"]
    assert (mean.dims, mean.dtype) == (("layer", "hidden"), np.float64)
    np.testing.assert_array_equal(mean, means_by_hand(whole["resid_post"].values))
    np.testing.assert_array_equal(found["embed__run_mean"], means_by_hand(whole["embed"].values))
    heads = found["z__run_mean"]
    assert heads.dims == ("layer", "head", "d_head")
    np.testing.assert_array_equal(heads[1, 1], means_by_hand(whole["z"].values[1, :, 1]))
    np.testing.assert_array_equal(mean.sel(layer=1)[3:5], mean.values[1, 3:5])
    np.testing.assert_array_equal(mean.isel(layer=[1, 0], hidden=[4, 2]), mean.values[[1, 0]][:, [4, 2]])
    assert store.verify() == []


def test_of_one_number_a_token_it_is_one_number(model, tokens, tmp_path):
    """A norm's scale has no axis beside that of tokens."""
    scale = "blocks.*.ln1.hook_scale"
    spec = HookSpec().capture(scale).capture(scale, reduce="run_mean")
    _, found = reduced(model, tokens, tmp_path, spec)
    expected = [mean_by_hand(row) for row in found["ln1_scale"].values]
    assert found["ln1_scale__run_mean"].values.tolist() == expected


def test_of_a_selection_it_is_over_the_tokens_that_are_kept(model, tokens, whole, tmp_path):
    """All but the first of each prompt, whose activations are out of all proportion in many models."""
    spec = means(positions="1:").capture(RESID, positions="last", reduce="run_mean")
    _, found = reduced(model, tokens, tmp_path, spec)
    later = np.flatnonzero(tokens.position_of(slice(None)) > 0)
    expected = means_by_hand(whole["resid_post"].values[:, later])
    np.testing.assert_array_equal(found["resid_post__from_1__run_mean"], expected)
    expected = means_by_hand(whole["resid_post"].values[:, np.cumsum(tokens.row_size) - 1])
    np.testing.assert_array_equal(found["resid_post__last__run_mean"], expected)


def test_bits_do_not_depend_on_batches_and_segments(model, tokens, tmp_path, another_way):
    _, expected = reduced(model, tokens, tmp_path / "a")
    _, found = reduced(model, tokens, tmp_path / "b", **another_way)
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_bits_do_not_depend_on_what_the_run_is_stored_in(model, tokens, tmp_path):
    _, expected = reduced(model, tokens, tmp_path / "a")
    _, found = reduced(model, tokens, tmp_path / "b", storage_dtype="bfloat16")
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_bits_do_not_depend_on_threads_nor_on_what_else_is_captured(model, tokens, tmp_path, set_threads):
    found = []
    for threads, spec in ((1, means()), (2, means().capture(RESID))):
        set_threads(threads)
        found.append(reduced(model, tokens, tmp_path / str(threads), spec)[1].load())
    for name in means().bind(model.hook_points, stored=True).kept:
        np.testing.assert_array_equal(found[0][name.variable], found[1][name.variable])


def test_a_batch_that_is_run_again_counts_once(model, tokens, tmp_path, monkeypatch):
    _, expected = reduced(model, tokens, tmp_path / "a", segment_tokens=128)
    stream, failed = Model.stream_batch, []

    def limited(self, rows, spec, want, sink):
        found = stream(self, rows, spec, want, sink)
        if len(set(map(tuple, rows))) > 1 and not failed:  # what was captured has been handed over
            failed.append(rows)
            raise MemoryError
        return found

    monkeypatch.setattr(Model, "stream_batch", limited)
    _, found = reduced(model, tokens, tmp_path / "b", segment_tokens=128, batch_tokens=64)
    assert failed
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_the_estimate_is_what_is_written(model, tokens, tmp_path):
    spec = HookSpec().capture(RESID, reduce="run_mean")
    node = CaptureNode(model, tokens, spec, segment_tokens=16)
    store = open_store(tmp_path, durability="process")
    rows = 5 * model.config.num_layers  # 73 tokens in segments of 16
    assert node.estimate(store).bytes_written == rows * 8 * len(QUANTA) * model.config.hidden_size
    reduced(model, tokens, tmp_path, spec)
    (entry,) = store.entries()
    assert len(entry.segments) == 5
    assert not (store.path / entry.path / "resid_post").exists()
    assert CaptureNode(model, tokens, spec, segment_tokens=16).status(store).is_cached


def test_other_prompts_have_another_mean_and_take_nothing_from_this_one(model, tokens, tmp_path):
    store, _ = reduced(model, tokens, tmp_path)
    some = tokens.select([1, 3])
    assert not CaptureNode(model, some, means(), segment_tokens=16).status(store).is_cached
    _, found = reduced(model, some, tmp_path)
    rows = np.concatenate(
        [model.forward(ids.tolist(), HookSpec().capture("hook_embed"))["hook_embed"][0] for ids in some]
    )
    np.testing.assert_array_equal(found["embed__run_mean"], means_by_hand(rows))


def test_a_corpus_that_grew_takes_over_sums_of_the_segments_that_are_the_same(
    model, tokens, tmp_path, monkeypatch
):
    """47 tokens at first: two whole segments of 16."""
    monkeypatch.setattr("mizarr.stages.forward.capture.capture.WORTH_A_LOOK", 1)
    taken, take_over = [], Entry.take_over
    monkeypatch.setattr(Entry, "take_over", lambda *asked: taken.append(take_over(*asked)))
    reduced(model, tokens.select(range(5)), tmp_path / "a")
    _, found = reduced(model, tokens, tmp_path / "a")
    assert taken == [32]
    _, expected = reduced(model, tokens, tmp_path / "b")
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_plain_readers_another_process_and_a_copy_see_the_same(model, tokens, tmp_path):
    store, found = reduced(model, tokens, tmp_path / "a")
    (entry,) = store.entries()
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    stored = plain["resid_post__run_mean"]
    assert stored.dims == ("layer", "segment", "hidden", "part")
    assert "73 tokens" in stored.attrs["values"]
    by_hand = stored.sum(["segment", "part"]) / tokens.n_tokens
    np.testing.assert_allclose(by_hand, found["resid_post__run_mean"], rtol=1e-12, atol=1e-15)
    other = open_store(tmp_path / "b", durability="process")
    reduced(model, tokens, tmp_path / "b", HookSpec().capture(RESID))
    store.copy_to(other)
    program = (
        "import pickle, sys, xarray as xr\n"
        f"ds = xr.open_dataset({str(other.path / entry.path)!r}, engine='mizarr')\n"
        "mean = pickle.loads(pickle.dumps(ds['resid_post__run_mean']))\n"
        "print(float(mean.sum()), 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.split() == [str(float(found["resid_post__run_mean"].sum())), "False"]
    assert other.verify() == []


def test_the_mean_of_gradients_is_kept_as_well(model, tokens, tmp_path):
    metric = LogitDifference(3, 7)
    whole = HookSpec().capture(f"grad:{RESID}").gradient_of(metric)
    spec = HookSpec().capture(f"grad:{RESID}", reduce="run_mean").gradient_of(metric)
    _, expected = reduced(model, tokens, tmp_path / "a", whole)
    _, found = reduced(model, tokens, tmp_path / "b", spec)
    by_hand = means_by_hand(expected["resid_post__grad"].values)
    np.testing.assert_array_equal(found["resid_post__grad__run_mean"], by_hand)


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
spec = HookSpec().capture(*points, reduce="run_mean")
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
    (entry,) = open_store(folder).entries()
    assert 0 < len(entry.missing([("resid_post__run_mean", 1)])) < len(entry.segments)
    _, found = reduced(model, tokens, folder)
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_what_has_no_mean_is_refused_in_one_line(model, tokens, tmp_path):
    store = open_store(tmp_path / "s")
    for spec, said in [
        (HookSpec().capture("blocks.*.attn.hook_pattern", reduce="run_mean"), "row of numbers per token"),
        (HookSpec().capture("hook_logits", reduce="run_mean"), "expected reduce='topk:10'"),
    ]:
        with pytest.raises(HookPointNotFound, match=said):
            capture(model, tokens, spec, store=store, **OPTIONS)


def test_the_command_line_keeps_it_and_shows_it(tmp_path, capsys):
    store = tmp_path / "store"
    asked = ["capture", "specimen", "the cat sat", "--text", "--hooks", RESID, "--store", str(store)]
    assert run([*asked, "--reduce", "run_mean"]) == 0
    capsys.readouterr()
    for command in ("ls", "verify"):
        assert run([command, "--store", str(store)]) == 0
    assert "resid_post__run_mean" in capsys.readouterr().out
