"""Capture: what lands in the store is what the model computes, once, whatever interrupts it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr import HookPoint, HookSpec, Zero
from mizarr.stages.forward.capture import harvest
from mizarr.stages.forward.capture.batches import MAX_WASTE, pieces_of, plan_batches
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models.model import Model
from mizarr.store.errors import (
    HookPointNotFound,
    NotFinite,
    PromptError,
    ShapeError,
    StageError,
    StoreFull,
    WeightsError,
)
from mizarr.store.files import local as files
from mizarr.store.runs.packed import PackedTokens
from tests.memory import PEAK, printed

from ..random_encoders import save_random_encoder
from ..random_models import VOCAB, save_random_model

pytest.importorskip("transformers")
EVERYTHING = HookSpec().capture("*")
RESID = HookSpec().capture("blocks.*.hook_resid_post")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(path, "llama", 1)
    return path


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, size).tolist() for size in (5, 9, 9, 9, 30, 1, 2, 70, 9, 31, 30)]


@pytest.fixture
def store(tmp_path):
    return mizarr.open_store(tmp_path / "store", durability="process")


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "starcoder2"])
def test_every_hook_point_is_stored_as_the_model_gives_it(family, tmp_path, prompts, store):
    """Prompts that straddle segments, ragged batches, packed lower triangles: value by value against single
    forwards."""
    save_random_model(tmp_path / "m", family, 8)
    model = Model.from_pretrained(tmp_path / "m")
    stored = mizarr.capture(
        model, prompts, EVERYTHING, store=store, segment_tokens=32, batch_tokens=64, progress=False
    )
    token = pair = square = 0
    for ids in prompts:
        cache = model.forward(ids, EVERYTHING)
        length = len(ids)
        rows = {"token": slice(token, token + length), "pair": slice(pair, pair + length * (length + 1) // 2)}
        rows["square"] = slice(square, square + length**2)
        for capture in model.bind(EVERYTHING).captures:
            value = cache[capture.point][0]
            dims = capture.point.dims[1:]
            if capture.point.kind.endswith("scores"):
                expected, axis = value.flatten(1).T, "square"
            elif "query_position" in dims:
                queries, keys = np.tril_indices(length)
                expected, axis = value[:, queries, keys].T, "pair"
            else:
                expected = (
                    value[..., 0]
                    if dims[-1] == "one"
                    else value.transpose(0, 1)
                    if "head" in dims[0]
                    else value
                )
                axis = "token"
            found = stored[capture.variable]
            if capture.point.layer is not None:
                found = found.sel(layer=capture.point.layer)
            np.testing.assert_allclose(
                found.isel({axis: rows[axis]}).values,
                expected.numpy(),
                atol=2e-5,
                rtol=1e-5,
                err_msg=str(capture.point),
            )
        token, pair, square = (rows[axis].stop for axis in ("token", "pair", "square"))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_attention_that_looks_both_ways_is_stored_whole_and_without_padding(family, tmp_path, prompts, store):
    """Ragged prompts cut by segments; each by itself in the reference, where nothing can be padded."""
    reference = save_random_encoder(tmp_path / "m", family, 4, tokenizer=False)
    hooks = HookSpec().capture("blocks.*.attn.hook_pattern", "blocks.0.attn.hook_attn_scores")
    model, sizes = Model.from_pretrained(tmp_path / "m"), [len(ids) for ids in prompts]
    stored = mizarr.capture(
        model, prompts, hooks, store=store, segment_tokens=32, batch_tokens=64, progress=False
    )
    assert stored["pattern"].dims == ("layer", "square", "head")
    assert stored.sizes["square"] == sum(size**2 for size in sizes)  # a row for each pair there is, none else
    np.testing.assert_allclose(stored["pattern"].sum("square"), sum(sizes), rtol=1e-5)
    for i, ids in enumerate(prompts):
        with torch.no_grad():
            expected = torch.stack(reference(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
        np.testing.assert_allclose(stored.mi.attn(i).values, expected.numpy(), atol=2e-6)
        scores = model.forward(ids, hooks)["blocks.0.attn.hook_attn_scores"][0]
        np.testing.assert_allclose(stored.mi.attn(i, "attn_scores").values[0], scores.numpy(), atol=2e-5)
    assert float(np.triu(stored.mi.attn(4).values, 1).max()) > 0.01
    some = stored.mi.prompts([7, 0])
    xr.testing.assert_identical(some.mi.attn(0).drop_attrs(), stored.mi.attn(7).drop_attrs())
    assert stored.mi.prompt(3).sizes["square"] == 81
    (entry,) = store.entries()
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    bounds, rows = plain["pattern"].attrs["square_bounds"], plain.sizes["square"] // len(entry.segments)
    second = plain["pattern"].isel(square=slice(rows, rows + bounds[2] - bounds[1]))
    np.testing.assert_array_equal(second, stored["pattern"].isel(square=slice(*bounds[1:3])))
    with pytest.raises(ShapeError, match="attention matrices of 11 prompts, found"):
        plain.mi.attn(0)


def test_plain_xarray_reads_the_same_numbers_with_labels(folder, prompts, store):
    ours = mizarr.capture(folder, prompts, RESID, store=store, segment_tokens=64, progress=False)
    entry = next(iter(store.entries()))
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    np.testing.assert_array_equal(plain["resid_post"].values, ours["resid_post"].values)
    np.testing.assert_array_equal(
        plain["token_id"].values, np.concatenate([np.array(ids) for ids in prompts])
    )


def test_a_second_capture_computes_nothing(folder, prompts, store, monkeypatch):
    first = mizarr.capture(folder, prompts, RESID, store=store, progress=False).load()
    monkeypatch.setattr(Model, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded"))
    second = mizarr.capture(folder, prompts, RESID, store=store, progress=False).load()
    xr.testing.assert_identical(first, second)


def test_more_layers_compute_only_those(folder, prompts, store, monkeypatch):
    mizarr.capture(folder, prompts, HookSpec().capture(HookPoint.resid_post(0)), store=store, progress=False)
    wanted = []
    stream = Model.stream_batch
    monkeypatch.setattr(
        Model,
        "stream_batch",
        lambda self, rows, spec, *rest: wanted.extend(spec.captures) or stream(self, rows, spec, *rest),
    )
    mizarr.capture(folder, prompts, RESID, store=store, progress=False)
    assert {capture.point.layer for capture in wanted} == set(
        range(1, Model.from_pretrained(folder).config.num_layers)
    )


def test_interventions_make_another_run(folder, prompts, store):
    plain = CaptureNode(folder, prompts, RESID)
    changed = CaptureNode(
        folder,
        prompts,
        HookSpec().capture("blocks.*.hook_resid_post").intervene("blocks.0.hook_mlp_out", Zero()),
    )
    assert plain.run_key.digest != changed.run_key.digest
    stored = mizarr.capture(
        folder,
        prompts,
        HookSpec().capture("blocks.*.hook_resid_post").intervene("blocks.0.hook_mlp_out", Zero()),
        store=store,
        progress=False,
    )
    model = Model.from_pretrained(folder)
    cache = model.forward(
        prompts[4], HookSpec().capture("blocks.*.hook_resid_post").intervene("blocks.0.hook_mlp_out", Zero())
    )
    start = sum(map(len, prompts[:4]))
    np.testing.assert_allclose(
        stored["resid_post"].sel(layer=1)[start : start + 30],
        cache[HookPoint.resid_post(1)][0].numpy(),
        atol=1e-5,
    )


def test_another_weight_under_the_same_name_is_another_run(tmp_path, prompts):
    save_random_model(tmp_path / "m", "llama", 1)
    before = CaptureNode(tmp_path / "m", prompts, RESID).run_key
    save_random_model(tmp_path / "m", "llama", 1, rms_norm_eps=3e-4)
    config_changed = CaptureNode(tmp_path / "m", prompts, RESID).run_key
    weights = tmp_path / "m" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert (
        len(
            {before.digest, config_changed.digest, CaptureNode(tmp_path / "m", prompts, RESID).run_key.digest}
        )
        == 3
    )


def test_segments_and_batches_do_not_change_the_numbers(folder, prompts, tmp_path):
    options = [
        {"segment_tokens": 16, "batch_tokens": 32},
        {"segment_tokens": 256, "batch_tokens": 4096},
        {"segment_tokens": 64, "batch_tokens": 1},
    ]
    stored = [
        mizarr.capture(
            folder, prompts, RESID, store=mizarr.open_store(tmp_path / str(n)), progress=False, **o
        )["resid_post"].values
        for n, o in enumerate(options)
    ]
    for other in stored[1:]:
        np.testing.assert_array_equal(other, stored[0])


def test_bfloat16_runs_are_stored_in_half_the_bytes_and_read_as_float32(folder, prompts, store):
    stored = mizarr.capture(folder, prompts, RESID, store=store, dtype="bfloat16", progress=False)[
        "resid_post"
    ]
    cache = Model.from_pretrained(folder, dtype="bfloat16").forward(prompts[7], RESID)
    start = sum(map(len, prompts[:7]))
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(
        stored.sel(layer=0)[start : start + 70], cache[HookPoint.resid_post(0)][0].float().numpy()
    )
    entry = next(iter(store.entries()))
    assert entry.shard("resid_post", 0, 0).dtype.itemsize == 2


def test_numbers_too_large_for_float16_are_refused_not_stored_as_infinity(tmp_path, store):
    model = save_random_model(tmp_path / "m", "llama", 1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e6)
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(NotFinite, match="exceeds the largest float16 number"):
        mizarr.capture(
            tmp_path / "m", [[1, 2, 3]], RESID, store=store, storage_dtype="float16", progress=False
        )
    assert not list(store.records())


def test_a_full_disk_stops_at_a_segment_and_the_run_goes_on_later(folder, prompts, store, monkeypatch):
    writes, link = [], os.link

    def filling(*args, **kwargs):
        writes.append(args)
        if len(writes) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return link(*args, **kwargs)

    monkeypatch.setattr(os, "link", filling)
    with pytest.raises(StoreFull, match="no space left"):
        mizarr.capture(folder, prompts, RESID, store=store, segment_tokens=16, progress=False)
    assert not list(store.records()), "nothing is visible before it is complete"
    monkeypatch.undo()
    entry = next(iter(store.entries()))
    before = len(entry.missing([("resid_post", 0)]))
    assert 0 < before < len(entry.segments), "some segments stand, some do not"
    resumed = mizarr.capture(folder, prompts, RESID, store=store, segment_tokens=16, progress=False)
    calm = mizarr.open_store(store.path.parent / "other")
    undisturbed = mizarr.capture(folder, prompts, RESID, store=calm, segment_tokens=16, progress=False)
    np.testing.assert_array_equal(resumed["resid_post"].values, undisturbed["resid_post"].values)


@pytest.mark.parametrize("in_turn", [True, False])
def test_taking_turns_waits_for_all_bytes_and_never_for_the_disk(folder, tmp_path, monkeypatch, in_turn):
    """Of the first segment, a disk that does not answer before the second is begun; where nobody takes turns,
    a system that takes no bytes before.
    """
    model, ids = Model.from_pretrained(folder), np.arange(64).reshape(4, 16) % VOCAB
    fill, written, sync = harvest.fill, files._write_new, os.fsync
    log, second_is_begun, waited = [], threading.Event(), []

    def filling(model, entry, n, *rest):
        log.append(f"segment {n} begun")
        if n == 1:
            second_is_begun.set()
        fill(model, entry, n, *rest)

    def writing(path, parts):
        if path.match("resid_post/c/*/0/*"):
            if not in_turn:
                waited.append(second_is_begun.wait(timeout=30))
            log.append("shard written")
        return written(path, parts)

    def syncing(handle):
        if in_turn and Path(f"/proc/self/fd/{handle}").readlink().match("resid_post/c/*/0/*"):
            waited.append(second_is_begun.wait(timeout=30))
        sync(handle)

    monkeypatch.setattr(harvest, "needs_every_core", lambda model: in_turn)
    monkeypatch.setattr(harvest, "fill", filling)
    monkeypatch.setattr(files, "_write_new", writing)
    monkeypatch.setattr(os, "fsync", syncing)
    stored = mizarr.capture(
        model, ids, RESID, store=mizarr.open_store(tmp_path / "store"), segment_tokens=32, progress=False
    )
    layers = model.config.num_layers
    assert waited == [True] * layers
    assert log[: log.index("segment 1 begun")].count("shard written") == (layers if in_turn else 0)
    for layer, rows in enumerate(stored["resid_post"].values.reshape(-1, 4, 16, model.config.hidden_size)):
        expected = model.forward(ids, RESID)[f"blocks.{layer}.hook_resid_post"]
        np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_a_subset_of_stored_prompts_is_a_hit(folder, prompts, store, monkeypatch):
    whole = mizarr.capture(folder, prompts, RESID, store=store, segment_tokens=64, progress=False)
    monkeypatch.setattr(Model, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded"))
    some = mizarr.capture(folder, [prompts[7], prompts[0]], RESID, store=store, progress=False)
    start = sum(map(len, prompts[:7]))
    expected = np.concatenate(
        [whole["resid_post"][:, start : start + 70], whole["resid_post"][:, :5]], axis=1
    )
    np.testing.assert_array_equal(some["resid_post"].values, expected)
    assert some["token_id"].values.tolist() == prompts[7] + prompts[0]


def test_kinds_captured_at_different_layers_keep_their_own_layer_labels(folder, prompts, store):
    hooks = HookSpec().capture("blocks.*.hook_resid_post", "blocks.1.attn.hook_pattern", "hook_embed")
    stored = mizarr.capture(folder, prompts, hooks, store=store, progress=False)
    assert stored["pattern"].coords["layer_pattern"].values.tolist() == [1]
    assert len(stored["resid_post"]["layer"]) == Model.from_pretrained(folder).config.num_layers


def test_names_and_globs_may_stand_for_a_spec(folder, prompts):
    by_name = CaptureNode(folder, prompts, ["blocks.*.hook_resid_post", "hook_embed"])
    assert (
        by_name.spec
        == CaptureNode(folder, prompts, HookSpec().capture("hook_embed", "blocks.*.hook_resid_post")).spec
    )


@pytest.mark.parametrize(
    ("prompts", "hooks", "error"),
    [
        ([[1, VOCAB + 5]], RESID, PromptError),
        ([[]], RESID, PromptError),
        ([[1] * 1000], RESID, PromptError),
        ([[1, 2]], HookSpec(), StageError),
        ([[1, 2]], HookSpec().capture("blocks.77.hook_resid_post"), HookPointNotFound),
    ],
)
def test_what_cannot_be_captured_leaves_the_store_untouched(folder, prompts, hooks, error, store):
    before = sorted(store.path.rglob("*"))
    with pytest.raises(error):
        mizarr.capture(folder, prompts, hooks, store=store, progress=False)
    assert sorted(store.path.rglob("*")) == before


def test_batches_follow_from_lengths_alone_and_waste_little():
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 60, 200)
    tokens = PackedTokens.from_lists([[1] * size for size in sizes])
    segment = range(1000, 3000)
    pieces = pieces_of(segment, tokens.row_start, tokens.row_size, whole=False)
    kept = sum(piece.stop - piece.start for piece in pieces)
    assert kept == len(segment), "every token of the segment exactly once"
    batches = plan_batches(pieces, batch_tokens=256, one_length=False)
    assert sorted(piece.prompt for batch in batches for piece in batch.pieces) == sorted(
        piece.prompt for piece in pieces
    )
    for batch in batches:
        computed = batch.length * len(batch.pieces)
        assert computed <= 256
        assert computed - sum(piece.run for piece in batch.pieces) <= MAX_WASTE * computed


LIVES = """
import os, signal, sys, time
import mizarr, numpy as np, torch  # once for all that are killed
from pathlib import Path
from mizarr.stages.forward.models.model import Model

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT

def captured(store):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, {vocab}, 24).tolist() for _ in range(120)]
    mizarr.capture({folder!r}, prompts, mizarr.HookSpec().capture("blocks.*.hook_resid_post"),
                   store=mizarr.open_store(store, durability="process"), segment_tokens=64, progress=False,
                   storage_dtype={dtype!r})

def shards(store):
    return sum("c" in path.parts for path in Path(store).rglob("*") if path.is_file())

def lived(store, more=None):
    process = os.fork()
    if not process:
        captured(store)
        os._exit(0)
    wanted = None if more is None else shards(store) + more
    while wanted and shards(store) < wanted and not os.waitid(os.P_PID, process, ENDED):
        time.sleep(0.001)
    if wanted:
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

calm, rough = sys.argv[1:]
print([lived(calm), *(lived(rough, more) for more in (1, 9, 20)), lived(rough)])
"""


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_killed_and_resumed_captures_end_in_the_undisturbed_store(folder, tmp_path, dtype):
    """Killed at whatever it does when so many more shards stand; every life is a process of its own."""
    program = LIVES.format(vocab=VOCAB, folder=str(folder), dtype=dtype)
    command = [sys.executable, "-c", program, str(tmp_path / "calm"), str(tmp_path / "rough")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split("\n")[0] == str([0, *[-signal.SIGKILL] * 3, 0]), done.stderr
    calm, rough = (_shards(tmp_path / name) for name in ("calm", "rough"))
    assert calm.keys() == rough.keys()
    assert all(rough[name] == data for name, data in calm.items())


def test_what_another_harvest_commits_meanwhile_is_not_computed_again(folder, prompts, store, monkeypatch):
    """One that is quicker is ahead of where this one was when it looked what is missing."""
    settings = {"store": store, "segment_tokens": 32, "progress": False}
    mizarr.capture(folder, prompts, HookSpec().capture("hook_embed"), **settings)
    numbers, real = [], harvest.fill

    def fill(model, entry, n, spec, buffer, size):
        numbers.append(n)
        if len(numbers) == 1:
            others = set(range(len(entry.segments))) - {n}
            harvest.harvest(model, entry, spec, batch=size, segments=others)
        real(model, entry, n, spec, buffer, size)

    monkeypatch.setattr(harvest, "fill", fill)
    mizarr.capture(folder, prompts, RESID, **settings)
    assert len(numbers) > 3
    assert sorted(numbers) == list(range(len(numbers)))


def _shards(root: Path) -> dict[str, bytes]:
    """Everything that carries data: shards, records, manifests; neither times nor who was there."""
    kept = ("c", "seg", "manifest")
    files = (
        path
        for path in root.rglob("*")
        if path.is_file()
        and set(path.parts) & set(kept)
        and path.suffix != ".claim"
        and not path.name.startswith(".")
    )
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_weights_that_cannot_be_loaded_leave_the_store_untouched(folder, tmp_path, store):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        mizarr.capture(tmp_path / "m", [[1, 2, 3]], RESID, store=store, progress=False)
    assert not (store.path / "data").exists()


MEASURED = """
import mizarr, numpy as np
from mizarr.store.runs.packed import PackedTokens
tokens = PackedTokens(
    np.random.default_rng(0).integers(0, {vocab}, {prompts} * 64).astype(np.int32), np.full({prompts}, 64))
mizarr.capture({folder!r}, tokens, ["*resid*", "*mlp*"], memory=16 << 20, progress=False,
               store=mizarr.open_store({store!r}, durability="process"))
print({peak})
"""


@pytest.mark.wide
def test_peak_memory_does_not_grow_with_the_corpus(folder, tmp_path):
    """Eight times the corpus, stored in more than 150 MB, in the same memory."""

    def peak(prompts: int) -> int:
        store = str(tmp_path / str(prompts))
        return printed(
            MEASURED.format(vocab=VOCAB, folder=str(folder), prompts=prompts, store=store, peak=PEAK)
        )

    small, large = peak(250), peak(2000)
    stored = sum(path.stat().st_size for path in (tmp_path / "2000").rglob("*") if path.is_file())
    assert stored > 150 << 20
    assert large - small < 40 << 20, f"{small >> 20} MiB for 250 prompts, {large >> 20} MiB for 2000"


@pytest.mark.slow
def test_workers_of_a_cluster_store_and_read_the_same_bytes(folder, prompts, tmp_path):
    from distributed import LocalCluster

    from mizarr.pipeline import run
    from mizarr.stages.geometry import pca

    here, there = (mizarr.open_store(tmp_path / name) for name in ("here", "there"))
    node = CaptureNode(folder, prompts, RESID, segment_tokens=32)
    moments = pca.moments.on(states=node["resid_post"])
    run(moments, here)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        run(moments, there, cluster=cluster.scheduler_address)
    contents = [{record.key: record.content for record in store.records()} for store in (here, there)]
    assert contents[0] == contents[1]


def test_a_run_that_somebody_else_has_just_made_keeps_the_length_of_their_segments(
    folder, prompts, store, monkeypatch
):
    """The entry is laid out in memory while it is made; if another came first, theirs stands."""
    theirs = CaptureNode(folder, prompts, RESID, segment_tokens=64)
    planned, made, outrun = CaptureNode._planned_entry, CaptureNode._create_entry, threading.Event()

    def plan_first(node, where):
        entry = planned(node, where)
        made(theirs, where)
        outrun.set()
        return entry

    def make_second(node, where, begun=None):
        assert outrun.wait(60)
        return made(node, where, begun)

    monkeypatch.setattr(CaptureNode, "_planned_entry", plan_first)
    monkeypatch.setattr(CaptureNode, "_create_entry", make_second)
    mine = mizarr.capture(folder, prompts, RESID, store=store, segment_tokens=16, progress=False)
    entry = store.entry(theirs.run_key)
    assert entry.segment_tokens == 64
    assert not entry.missing(theirs.cells)
    plain = mizarr.capture(folder, prompts, RESID, store=store, progress=False)
    np.testing.assert_array_equal(mine["resid_post"].values, plain["resid_post"].values)
