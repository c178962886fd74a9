"""What a store keeps of a selection of tokens: the rows of the whole capture, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr

from mizarr import HookSpec, Model, capture, open_store
from mizarr.pipeline import plan
from mizarr.stages.forward.capture import capture as planning
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.store.errors import CorruptEntry, HookPointNotFound, PromptError
from mizarr.store.runs.entries import Entry
from mizarr.store.runs.selections import as_selection
from mizarr.workflows.cli.group import run

from ..random_models import VOCAB

RESID, Z = "blocks.*.hook_resid_post", "blocks.*.attn.hook_z"


@pytest.fixture(scope="module")
def mask(tokens):
    return np.random.default_rng(6).random(tokens.n_tokens) < 0.3


@pytest.fixture(scope="module")
def whole(model, tokens, tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("whole"), durability="process")
    options = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}
    return capture(model, tokens, [RESID, Z, "hook_embed"], store=store, **options)


def harvested(model, tokens, spec, folder, **options):
    store = open_store(folder, durability="process")
    chosen = {"segment_tokens": 16, "batch_tokens": 32, **options}
    return store, capture(model, tokens, spec, store=store, progress=False, **chosen)


def by_hand(tokens, positions):
    """Packed indices of what is kept, one prompt after the other, in plain Python."""
    found = []
    for start, size in zip(tokens.row_start.tolist(), tokens.row_size.tolist(), strict=True):
        if positions == "last":
            kept = {size - 1}
        elif isinstance(positions, str):
            kept = set(range(size)[slice(*(int(x) if x else None for x in positions.split(":")))])
        else:
            kept = {p % size for p in positions if -size <= p < size}
        found += [start + each for each in sorted(kept)]
    return found


@pytest.mark.parametrize("positions", ["last", "::4", "1:", "-3:-1", "2:20:5", [0, 3], [7, -1, 0, -2, 11, 3]])
@pytest.mark.parametrize("segment_tokens", [8, 16, None])
def test_a_selection_is_the_rows_of_the_whole_capture(
    model, tokens, whole, tmp_path, positions, segment_tokens
):
    spec = HookSpec().capture(RESID, Z, "hook_embed", positions=positions)
    store, found = harvested(model, tokens, spec, tmp_path, segment_tokens=segment_tokens)
    rows = by_hand(tokens, positions)
    assert found.sizes["token"] == len(rows)
    for name in found.data_vars:
        expected = whole[str(name).partition("__")[0]]
        np.testing.assert_allclose(found[name].values, expected.isel(token=rows).values, atol=2e-5, rtol=1e-5)
    for label in ("token_id", "position", "prompt"):
        np.testing.assert_array_equal(found[label].values, whole[label].values[rows])
    np.testing.assert_array_equal(found["row_size"], np.bincount(whole["prompt"].values[rows], minlength=7))
    assert store.verify() == []


def test_a_mask_keeps_its_tokens_and_is_read_again_by_who_never_had_it(model, tokens, whole, mask, tmp_path):
    store, found = harvested(model, tokens, HookSpec().capture(RESID, positions=mask), tmp_path)
    (name,) = found.data_vars
    np.testing.assert_array_equal(found[name].values, whole["resid_post"].values[:, mask])
    (entry,) = open_store(tmp_path, "r").entries()
    xr.testing.assert_identical(entry.open().load(), found.load())
    path = store.path / entry.path
    program = (
        "import xarray as xr; "
        f"ds = xr.open_dataset({str(path)!r}, engine='mizarr'); print(float(ds[{str(name)!r}].sum()))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float(told) == pytest.approx(float(found[name].sum()), rel=1e-5)


def test_plain_zarr_shows_rows_and_the_tokens_they_are_of(model, tokens, whole, mask, tmp_path):
    spec = HookSpec().capture(RESID, Z, positions="::4").capture(RESID, positions=mask)
    store, _ = harvested(model, tokens, spec, tmp_path)
    (entry,) = store.entries()
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    for name in ("resid_post__every_4", "z__every_4", next(n for n in plain if "mask" in str(n))):
        axis = plain[name].dims[1]
        held = plain[name].isel({axis: plain[axis].values >= 0})
        expected = whole[str(name).partition("__")[0]].values[:, held[axis].values]
        np.testing.assert_array_equal(held.values, expected)


def test_several_selections_and_the_whole_lie_side_by_side(model, tokens, whole, tmp_path):
    spec = HookSpec().capture(RESID).capture(RESID, positions="last").capture(Z, positions="::4")
    _, found = harvested(model, tokens, spec, tmp_path)
    assert found["resid_post"].dims == ("layer", "token", "hidden")
    np.testing.assert_array_equal(found["resid_post"], whole["resid_post"])
    last = by_hand(tokens, "last")
    np.testing.assert_array_equal(found["resid_post__last"], whole["resid_post"].isel(token=last))
    np.testing.assert_array_equal(found["token_id_last"], whole["token_id"].values[last])
    some = found.mi.prompts([5, 3])
    np.testing.assert_array_equal(
        some["resid_post__last"], whole["resid_post"].isel(token=[last[5], last[3]])
    )
    np.testing.assert_array_equal(some["prompt_last"], [0, 1])
    one = found.mi.prompt(3)
    assert (one.sizes["position"], one.sizes["token_last"], one.sizes["token_every_4"]) == (30, 1, 8)
    assert found.mi.hook("blocks.0.hook_resid_post").dims == ("token", "hidden")
    assert found.mi.hook("blocks.0.hook_resid_post@last").dims == ("token_last", "hidden")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_whatever_comes_first_a_run_is_cut_alike_and_has_one_content(model, tmp_path, dtype):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 100).tolist() for _ in range(1500)]
    last = HookSpec().capture(RESID, positions="last")
    norms = HookSpec().capture("hook_embed", reduce="norm")
    logits = HookSpec().capture("hook_logits", reduce="logsumexp")
    lengths = {
        CaptureNode(model, prompts, spec, storage_dtype=dtype)._segment_tokens()
        for spec in (HookSpec().capture(RESID), last, norms, logits)
    }
    assert len(lengths) == 1
    assert lengths.pop() < 150_000 / 4


def test_what_is_stored_whole_is_served_without_computing(model, tokens, mask, tmp_path, monkeypatch):
    store, _ = harvested(model, tokens, HookSpec().capture(RESID), tmp_path / "a")
    _, own = harvested(model, tokens, HookSpec().capture(RESID, positions=mask), tmp_path / "b")
    spec = HookSpec().capture(RESID, positions=mask)
    monkeypatch.setattr(Model, "stream_batch", lambda *_, **__: pytest.fail("computed again"))
    before = store.usage()
    view = capture(model, tokens, spec, store=store, progress=False)
    xr.testing.assert_identical(view.load(), own.load())
    assert store.usage()[0].bytes == before[0].bytes
    (name,) = view.data_vars
    lazy = capture(model, tokens, spec, store=store, progress=False)[name]
    assert lazy[2, 4, 1].item() == own[name].values[2, 4, 1]
    np.testing.assert_array_equal(lazy[1:, 3:9:2, 0], own[name].values[1:, 3:9:2, 0])


def test_beside_what_is_served_only_the_rest_is_computed(model, tokens, tmp_path):
    store, whole = harvested(model, tokens, HookSpec().capture(RESID), tmp_path)
    spec = HookSpec().capture(RESID, Z, positions="last")
    found = capture(model, tokens, spec, store=store, progress=False)
    (entry,) = store.entries()
    assert set(entry.specs) == {"resid_post", "z__last"}
    np.testing.assert_array_equal(
        found["resid_post__last"], whole["resid_post"].isel(token=by_hand(tokens, "last"))
    )


def test_keys_tell_selections_apart_and_leave_whole_captures_as_they_were(model, tokens, mask):
    def keys(spec):
        node = CaptureNode(model, tokens, spec)
        return {(str(node.run_key.digest), cell) for cell in node.cells}

    other = mask.copy()
    other[3] ^= True
    several = [None, "last", "::4", "::5", "1:", [0, 3], [0, -3], mask, other]
    found = [keys(HookSpec().capture(RESID, positions=each)) for each in several]
    assert len(frozenset().union(*found)) == sum(map(len, found))
    assert found[0] == keys(HookSpec().capture(RESID))
    bound = CaptureNode(model, tokens, HookSpec().capture(RESID)).spec
    assert bound.canonical()["captures"][0] == ["blocks.0.hook_resid_post", "after"]
    # However it is written, one selection is one.
    for one, same in (("last", [-1]), ("last", "-1:"), ("::4", "0::4"), ([3, 0, 3], [0, 3])):
        assert as_selection(one) == as_selection(same)


def test_a_smaller_request_is_picked_from_a_larger_run(model, tokens, tmp_path, monkeypatch):
    store, larger = harvested(model, tokens, HookSpec().capture(RESID, positions="::4"), tmp_path)
    monkeypatch.setattr(Model, "stream_batch", lambda *_, **__: pytest.fail("computed again"))
    found = capture(
        model, tokens.select([3, 1]), HookSpec().capture(RESID, positions="::4"), store=store, progress=False
    )
    xr.testing.assert_identical(found.load(), larger.mi.prompts([3, 1]).load())


def test_a_dry_run_knows_what_little_is_kept(model, tokens, mask, tmp_path):
    store = open_store(tmp_path)
    hidden, layers = model.config.hidden_size, model.config.num_layers
    for positions, rows in (("last", 7), (mask, int(mask.sum())), (None, tokens.n_tokens)):
        node = CaptureNode(model, tokens, HookSpec().capture(RESID, positions=positions))
        assert node.estimate(store).bytes_written == pytest.approx(rows * layers * hidden * 4, abs=1)
        assert plan(node, store) is not None


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        (np.ones(3, bool), "expected positions as a mask of one bool per token"),
        (np.zeros(73, bool), "selects no token"),
        ([400], "selects no token"),
        (np.ones(73, np.float32), "expected positions as 'last'"),
        (np.ones((73, 1), bool), "expected positions as 'last'"),
        ("first", "expected positions as 'last'"),
        ("::-1", "a step of at least 1"),
        ("::0", "a step of at least 1"),
        (":", "select all tokens"),
        ([], "expected positions as 'last'"),
    ],
)
def test_positions_that_mean_nothing_are_refused_in_one_line(model, tokens, positions, error):
    with pytest.raises(PromptError, match=error) as found:
        CaptureNode(model, tokens, HookSpec().capture(RESID, positions=positions))
    assert "\n" not in str(found.value)


def test_less_than_all_is_asked_of_a_store_alone_and_of_points_with_tokens(model, tokens):
    with pytest.raises(HookPointNotFound, match="expected captures without positions= and reduce="):
        model.forward([[1, 2]], HookSpec().capture(RESID, positions="last"))
    with pytest.raises(HookPointNotFound, match="a pair of tokens"):
        CaptureNode(model, tokens, HookSpec().capture("blocks.*.attn.hook_pattern", positions="last"))


def test_a_corpus_that_has_grown_takes_over_what_was_selected_of_it(model, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "WORTH_A_LOOK", 1)
    spec = HookSpec().capture(RESID, positions="::4")
    rows: list[int] = []
    take_over = Entry.take_over
    monkeypatch.setattr(Entry, "take_over", lambda *told: rows.append(take_over(*told)) or rows[-1])
    store, _ = harvested(model, tokens.select(range(5)), spec, tmp_path / "a")
    found = capture(model, tokens, spec, store=store, batch_tokens=32, segment_tokens=16, progress=False)
    _, expected = harvested(model, tokens, spec, tmp_path / "b")
    assert rows == [32]  # of the first 47 tokens, in segments of 16
    xr.testing.assert_identical(found.load(), expected.load())


def test_tokens_of_a_mask_that_were_changed_are_noticed_and_made_again(model, tokens, mask, tmp_path):
    spec = HookSpec().capture(RESID, positions=mask)
    store, found = harvested(model, tokens, spec, tmp_path)
    found.load()
    (entry,) = store.entries()
    (axis,) = (each.packed for each in entry.specs.values())
    (file,) = (path for path in (store.path / entry.path / axis / "c").rglob("*") if path.is_file())
    told = bytearray(file.read_bytes())
    told[9] ^= 1
    file.chmod(0o644)
    file.write_bytes(told)
    with pytest.raises(CorruptEntry, match=axis):
        next(open_store(tmp_path).entries()).open()
    (damage,) = store.verify()
    store.quarantine(damage)
    again = harvested(model, tokens, spec, tmp_path)[1]
    xr.testing.assert_identical(again.load(), found)


def test_the_command_names_what_a_selection_is_seen_in(tmp_path, capsys):
    command = ["capture", "specimen", "ab", "--text", "--hooks", "hook_embed", "--store", str(tmp_path)]
    assert run([*command, "--json"]) == 0
    (whole,) = json.loads(capsys.readouterr().out)["arrays"]
    assert run([*command, "--positions", "last", "--json"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)["arrays"]
    assert seen == {**whole, "variable": "embed__last"}


KILLED = """
import os, signal, sys
import numpy as np
from mizarr import HookSpec, capture, open_store
from mizarr.store.runs.entries import Entry
from mizarr.store.runs.packed import PackedTokens
model, folder, after = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = np.random.default_rng(5)
tokens = PackedTokens.from_lists([rng.integers(0, {vocab}, size).tolist() for size in {sizes}])
mask = np.random.default_rng(6).random(tokens.n_tokens) < 0.3
write = Entry.write_segment
def dying(self, n, *rest, **named):
    if n >= after:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, n, *rest, **named)
Entry.write_segment = dying
spec = HookSpec().capture("{point}", positions=mask).capture("{point}", positions="last")
capture(model, tokens, spec, store=open_store(folder), segment_tokens=16, batch_tokens=32, progress=False)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_killed_harvest_goes_on_to_the_same_store(model, tokens, mask, tmp_path):
    spec = HookSpec().capture(RESID, positions=mask).capture(RESID, positions="last")
    folder = model.name
    program = KILLED.format(vocab=VOCAB, sizes=tokens.row_size.tolist(), point=RESID)
    for after in (0, 2):
        told = [sys.executable, "-c", program, str(folder), str(tmp_path / "a"), str(after)]
        died = subprocess.run(told, check=False)
        assert died.returncode == -signal.SIGKILL
    store, found = harvested(folder, tokens, spec, tmp_path / "a")
    undisturbed, expected = harvested(folder, tokens, spec, tmp_path / "b")
    xr.testing.assert_identical(found.load(), expected.load())
    (one,), (other,) = store.entries(), undisturbed.entries()
    for cell in one.published():
        assert one.content(*cell) == other.content(*cell)
    assert store.verify() == []


@pytest.mark.slow
def test_workers_of_a_cluster_store_the_same(model, tokens, mask, tmp_path):
    distributed = pytest.importorskip("distributed")
    spec = HookSpec().capture(RESID, positions=mask).capture(RESID, positions="::4")
    _, here = harvested(model.name, tokens, spec, tmp_path / "a")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        _, there = harvested(model.name, tokens, spec, tmp_path / "b", cluster=cluster.scheduler_address)
    xr.testing.assert_identical(here.load(), there.load())
