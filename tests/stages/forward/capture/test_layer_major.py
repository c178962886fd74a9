"""A harvest that goes layer by layer gives what one that goes batch by batch gives, to the bit, whatever
interrupts it, in the memory of one layer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookSpec, Scale
from mizarr.stages.causal.grids.patching_metrics import Probability
from mizarr.stages.forward.capture import layer_major, order
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.capture.spool import Spool
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.models.residency import EMBEDDING, HEAD, bytes_of
from mizarr.store.errors import ConfigError, CorruptEntry, PlanError, StoreFull
from mizarr.store.files import LocalFolder

from ..random_encoders import save_random_encoder
from ..random_hybrids import save_random_hybrid
from ..random_models import VOCAB, save_random_model
from ..random_rwkv import save_random_rwkv

pytest.importorskip("transformers")
STREAMS = HookSpec().capture("hook_embed", "blocks.*.hook_resid_*")
EVERYTHING = HookSpec().capture("*")
FAMILIES = {
    **dict.fromkeys(("llama", "gemma2", "qwen3", "phi3", "starcoder2"), save_random_model),
    **dict.fromkeys(
        (
            "gemma3n_text",
            "gemma4_text",
            "gemma3_text",
            "gpt2",
            "mixtral",
            "deepseek_v3",
            "zamba",
            "zamba2",
            "jamba",
            "qwen3_next",
            "xlstm",
        ),
        save_random_hybrid,
    ),
    **dict.fromkeys(("minimax", "mamba2", "lfm2", "gated_deltanet"), save_random_hybrid),
    **dict.fromkeys(("rwkv", "rwkv7"), save_random_rwkv),
    **dict.fromkeys(("bert", "albert"), save_random_encoder),
}


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(5, VOCAB, size).tolist() for size in (5, 9, 9, 9, 30, 1, 2, 40, 9, 31, 30)]


@pytest.fixture
def stores(tmp_path):
    return [mizarr.open_store(tmp_path / name, durability="process") for name in ("batch", "layer")]


@contextmanager
def interrupted_at_layer(layer):
    """As by Ctrl-C when this layer, or the head behind the last, is about to be gone through."""
    run_layers = layer_major._LayerSweep.run_layers

    def interrupted(sweep, passes, group):
        if group[0] == layer:
            raise KeyboardInterrupt
        run_layers(sweep, passes, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_major._LayerSweep, "run_layers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


def one_layer_at_a_time(folder, **options):
    """The model with room for its largest layer alone."""
    whole = Model.from_pretrained(folder, progress=False, **options)
    return Model.from_pretrained(
        folder, max_memory=bytes_of(whole.config, whole.dtype.itemsize).least, progress=False, **options
    )


def contents(store):
    """What every published array of a store holds, by its key."""
    return {record.key: record.content for record in store.records()}


def capture(model, prompts, hooks, store, **options):
    options = {"segment_tokens": 128, "batch_tokens": 64} | options
    return mizarr.capture(model, prompts, hooks, store=store, progress=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_bits_layer_by_layer(family, tmp_path, prompts, stores):
    """Ragged prompts that straddle segments; of two families every hook point; each layer read once."""
    FAMILIES[family](tmp_path / "m", family, 5)
    whole, few = Model.from_pretrained(tmp_path / "m"), one_layer_at_a_time(tmp_path / "m")
    hooks = EVERYTHING if family in ("gemma2", "jamba") else STREAMS
    capture(whole, prompts, hooks, stores[0])
    capture(few, prompts, hooks, stores[1])
    assert contents(stores[0]) == contents(stores[1]) and contents(stores[0])
    if any(few.streamed.window._sizes[layer] for layer in range(few.config.num_layers)):
        assert few.streamed.window.reads == dict.fromkeys(range(few.config.num_layers), 1)
    assert not list(stores[1].path.rglob("*.spool*"))


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_and_interventions_give_the_same_bits(seed, tmp_path, prompts, stores):
    """What is changed on its way from one layer to the next is changed once."""
    save_random_model(tmp_path / "m", "gemma2", seed)
    hooks = (
        HookSpec()
        .extend(STREAMS)
        .intervene("blocks.*.hook_resid_post", Scale(0.5))
        .intervene("hook_embed", Scale(2.0))
    )
    whole = Model.from_pretrained(tmp_path / "m", dtype="bfloat16")
    capture(whole, prompts, hooks, stores[0])
    capture(one_layer_at_a_time(tmp_path / "m", dtype="bfloat16"), prompts, hooks, stores[1])
    assert contents(stores[0]) == contents(stores[1])


@pytest.mark.parametrize("wanted", ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"])
def test_layers_behind_the_last_thing_wanted_are_not_read(wanted, tmp_path, prompts, stores):
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=4)
    few = one_layer_at_a_time(tmp_path / "m")
    capture(few, prompts, wanted, stores[1])
    capture(tmp_path / "m", prompts, wanted, stores[0], order="batch")
    assert contents(stores[0]) == contents(stores[1])
    deepest = {"hook_embed": 0, "blocks.0.hook_resid_post": 1, "blocks.1.hook_mlp_out": 2}[wanted]
    assert few.streamed.window.reads == dict.fromkeys(range(deepest), 1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_is_read_once_for_logits_and_refused_before_anything_else(
    is_tied, tmp_path, prompts, stores
):
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=4, tie_word_embeddings=is_tied)
    sizes = bytes_of(Model.from_pretrained(tmp_path / "m").config, 4)
    unit = EMBEDDING if is_tied else HEAD
    spec = (
        HookSpec()
        .extend(STREAMS)
        .capture("hook_logits", reduce="topk:3")
        .intervene("blocks.*.hook_resid_post", Scale(0.5))
    )
    least = max(sizes.least, sizes.always + sizes.units[unit])
    few = Model.from_pretrained(tmp_path / "m", max_memory=least)
    capture(tmp_path / "m", prompts, spec, stores[0], order="batch")
    capture(few, prompts, spec, stores[1], batch_tokens=16)
    assert contents(stores[0]) == contents(stores[1])
    assert few.streamed.window.reads == dict.fromkeys([*range(4), unit], 1)
    assert sizes.always + sizes.units[unit] > sizes.least
    fewer = Model.from_pretrained(tmp_path / "m", max_memory=sizes.least)
    with pytest.raises(ConfigError, match=f"memory for the {unit}"):
        capture(fewer, [[7, 8, 9]], spec, stores[1])
    assert not fewer.streamed.window.reads


def test_logits_that_are_added_begin_where_the_layers_ended(tmp_path, prompts, stores):
    """What was killed before the head: the spool behind the last layer stands."""
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=3, tie_word_embeddings=False)
    sizes = bytes_of(Model.from_pretrained(tmp_path / "m").config, 4)
    spec = HookSpec().extend(STREAMS).capture("hook_logits", reduce="logsumexp")
    capture(tmp_path / "m", prompts, spec, stores[0], order="batch")
    room = sizes.always + max(sizes.units.values())
    few = Model.from_pretrained(tmp_path / "m", max_memory=room)
    with interrupted_at_layer(3):
        capture(few, prompts, spec, stores[1])
    again = Model.from_pretrained(tmp_path / "m", max_memory=room)
    capture(again, prompts, spec, stores[1])
    assert contents(stores[0]) == contents(stores[1])
    assert again.streamed.window.reads == {HEAD: 1}


def test_more_layers_of_a_stored_run_are_added(tmp_path, prompts, stores):
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=4)
    few = one_layer_at_a_time(tmp_path / "m")
    capture(few, prompts, "blocks.1.hook_resid_post", stores[1])
    capture(few, prompts, "blocks.*.hook_resid_post", stores[1])
    capture(tmp_path / "m", prompts, "blocks.*.hook_resid_post", stores[0], order="batch")
    assert contents(stores[0]) == contents(stores[1])


def test_as_many_layers_as_fit_are_in_memory_together(tmp_path, prompts, stores, monkeypatch):
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=5)
    sizes = bytes_of(Model.from_pretrained(tmp_path / "m").config, 4)
    model = Model.from_pretrained(tmp_path / "m", max_memory=sizes.always + 2 * sizes.units[0])
    groups, run_layers = [], layer_major._LayerSweep.run_layers
    monkeypatch.setattr(
        layer_major._LayerSweep,
        "run_layers",
        lambda sweep, passes, group: groups.append(list(group)) or run_layers(sweep, passes, group),
    )
    monkeypatch.setattr(layer_major._LayerSweep, "buffers", lambda sweep, passes: {})
    capture(model, prompts, "blocks.*.hook_resid_post", stores[0])
    assert groups == [[0, 1], [2, 3], [4]]


def test_a_limit_decides_the_order_and_provenance_tells_it(tmp_path, prompts, stores, capfd):
    """With room for two of six layers beside a batch and buffers, and with room for all."""
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=6, intermediate_size=2000)
    options = {"segment_tokens": 128, "batch_tokens": 64}
    node = CaptureNode(tmp_path / "m", prompts, "blocks.*.hook_resid_post", **options)
    sizes, working = bytes_of(node.source.config, 4), node._working_memory()
    limit = sizes.always + 2 * sizes.units[0] + working.batch + working.buffers
    for store, allowed, expected in zip(stores, ("100MB", limit), ("batch", "layer"), strict=True):
        mizarr.capture(
            tmp_path / "m", prompts, "blocks.*.hook_resid_post", store=store, memory_limit=allowed, **options
        )
        notes = [note for record in store.records() for note in store.provenance(record)]
        assert {note["order"] for note in notes if "batch_tokens" in note} == {expected}
    assert contents(stores[0]) == contents(stores[1])
    assert (
        capfd.readouterr().err.count(
            "reads layers from files; all batches run through one layer after another"
        )
        == 1
    )


def test_what_the_machine_has_left_decides_where_nobody_says(tmp_path, prompts, stores, monkeypatch):
    save_random_model(tmp_path / "m", "llama", 3, num_hidden_layers=6, intermediate_size=2000, hidden_size=24)
    monkeypatch.setenv("MIZARR_MEMORY", "2.2MB")
    chosen = []
    goes = order.goes_by_layers
    monkeypatch.setattr(
        "mizarr.stages.forward.capture.capture.goes_by_layers",
        lambda *asked: chosen.append(goes(*asked)) or chosen[-1],
    )
    capture(tmp_path / "m", prompts, "blocks.*.hook_resid_post", stores[0])
    assert chosen and all(chosen)


def test_one_order_after_the_other_is_the_same_run(tmp_path, prompts, stores):
    save_random_model(tmp_path / "m", "llama", 2)
    keys = {CaptureNode(tmp_path / "m", prompts, STREAMS, order=each).run_key for each in order.ORDERS}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"order": "sideways"}, PlanError, "one of auto, batch, layer, found 'sideways'"),
        ({"memory_limit": "10kB"}, PlanError, "memory_limit: expected more than"),
        ({"order": "layer", "cluster": "tcp://127.0.0.1:1"}, PlanError, "found a cluster"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    options, error, message, tmp_path, prompts, stores
):
    save_random_model(tmp_path / "m", "llama", 1)
    with pytest.raises(error, match=message):
        capture(tmp_path / "m", prompts, STREAMS, stores[0], **options)
    assert not (stores[0].path / "data").exists()


def test_gradients_go_back_through_all_layers_and_are_refused(tmp_path, prompts, stores):
    save_random_model(tmp_path / "m", "llama", 1)
    hooks = HookSpec().capture("grad:blocks.*.hook_resid_post").gradient_of(Probability(3))
    with pytest.raises(ConfigError, match="need a backward pass through all layers"):
        capture(tmp_path / "m", prompts, hooks, stores[0], order="layer")
    with pytest.raises(ConfigError, match=r"all weights of .* in memory"):
        capture(one_layer_at_a_time(tmp_path / "m"), prompts, hooks, stores[0])


def test_a_disk_without_room_for_what_is_carried_is_told_before_anything_is_computed(
    tmp_path, prompts, stores, monkeypatch
):
    save_random_model(tmp_path / "m", "llama", 2)
    few = one_layer_at_a_time(tmp_path / "m")
    written = CaptureNode(few, prompts, "hook_embed").estimate(stores[0]).bytes_written
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * written))
    hooks = "blocks.1.ln1.hook_scale"
    with pytest.raises(StoreFull, match="activations between layers"):
        capture(few, prompts * 40, hooks, stores[0])
    assert few.streamed.window.reads == {}


# Memory that runs out


@contextmanager
def room_for(most):
    """Memory for passes over so many positions through a second layer; larger ones fail at their end, when
    they have shown everything and written over what they were given. Gives what was tried there."""
    tried, stream = [], Model.stream_layers

    def limited(self, entering, layers, spec, sink, *, ends):
        rows = entering["stream"] if isinstance(entering, dict) else entering
        size = len(rows) * len(rows[0])
        carried = stream(self, entering, layers, spec, sink, ends=ends)
        if list(layers) == [1]:
            tried.append(size)
            if size > most:
                entering["stream"].fill_(torch.nan)
                raise torch.OutOfMemoryError("CUDA out of memory")
        return carried

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "stream_layers", limited)
        yield tried


def noted(store):
    """To how many positions a batch was lowered, of each capture of a store."""
    notes = (store.provenance(key) for key in {record.key for record in store.records()})
    return {each["batch_tokens_lowered_to"] for found in notes for each in found if "hooks" in each}


IN_HALVES = ["llama", "gemma2", "gpt2", "mixtral", "zamba", "gemma4_text", "bert", "rwkv7"]


@pytest.mark.parametrize("family", IN_HALVES)
def test_a_batch_that_does_not_fit_goes_through_in_halves_and_gives_the_same(
    family, tmp_path, prompts, stores, capfd
):
    """Prompts of one token, padded ones, powers of two, and means of a run, which must not be added twice."""
    FAMILIES[family](tmp_path / "m", family, 4)
    hooks = HookSpec().extend(STREAMS)
    if family != "bert":
        hooks = hooks.capture("blocks.*.hook_resid_post", reduce="run_mean")
    prompts = [*prompts, *prompts, [7] * 16, [8] * 16, *prompts]
    options = {"segment_tokens": 384, "batch_tokens": 160}
    whole = capture(tmp_path / "m", prompts, hooks, stores[0], **options)
    few = one_layer_at_a_time(tmp_path / "m")
    with room_for(64) as tried:
        found = mizarr.capture(few, prompts, hooks, store=stores[1], **options)
    assert max(tried) > 64 and tried.count(max(tried)) == 1, "what follows is smaller from the beginning"
    assert capfd.readouterr().err.count("out of memory with") == 1
    (lowered,) = noted(stores[1])
    assert lowered <= 64
    assert few.streamed.window.reads == dict.fromkeys(range(few.config.num_layers), 1)
    if family == "rwkv7":  # whose last bits depend on company
        for name in whole.data_vars:
            np.testing.assert_allclose(found[name], whole[name], rtol=1e-4, atol=1e-5)
    else:
        assert contents(stores[0]) == contents(stores[1])


def test_what_went_through_in_halves_is_spooled_as_one_and_gone_on_from(tmp_path, prompts, stores):
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=4)
    options = {"segment_tokens": 384, "batch_tokens": 160}
    capture(tmp_path / "m", prompts * 3, STREAMS, stores[0], **options)
    few = one_layer_at_a_time(tmp_path / "m")
    with room_for(64) as tried, interrupted_at_layer(3):
        capture(few, prompts * 3, STREAMS, stores[1], **options)
    assert max(tried) > 64
    again = one_layer_at_a_time(tmp_path / "m")
    capture(again, prompts * 3, STREAMS, stores[1], **options)
    assert again.streamed.window.reads == {3: 1}
    assert contents(stores[0]) == contents(stores[1])


def test_a_prompt_that_does_not_fit_alone_ends_a_harvest_by_layers_in_one_line(tmp_path, prompts, stores):
    save_random_model(tmp_path / "m", "llama", 2)
    few = one_layer_at_a_time(tmp_path / "m")
    long = [*prompts, [3] * 80]
    with room_for(79), pytest.raises(PlanError, match="one prompt of 80 tokens"):
        capture(few, long, STREAMS, stores[1])
    capture(few, long, STREAMS, stores[1])
    capture(tmp_path / "m", long, STREAMS, stores[0])
    assert contents(stores[0]) == contents(stores[1])


# The spool


def carried(rng):
    return {
        "stream": torch.randn(2, 3, 4, generator=rng),
        "other": torch.randn(2, 3, 1, generator=rng).bfloat16(),
    }


def test_what_is_spooled_comes_back_bit_by_bit(tmp_path):
    rng = torch.Generator().manual_seed(1)
    put = [carried(rng) for _ in range(3)]
    spool = Spool(LocalFolder(tmp_path), "seg")
    with spool.file(4, 2, "these").written() as spooled:
        for each in put:
            spooled.put(each)
        assert spool.layers(4, "these") == [], "not before it is whole"
    assert spool.layers(4, "these") == [2] and spool.layers(4, "others") == [] == spool.layers(3, "these")
    for back, each in zip(spool.file(4, 2, "these").batches(), put, strict=True):
        assert back.keys() == each.keys() and all(torch.equal(back[name], each[name]) for name in each)
    spool.clear(4)
    assert not list((tmp_path / "seg").iterdir())


@pytest.mark.parametrize("at", [0, 40, 150, -1])
@pytest.mark.parametrize("torn", ["flipped", "cut"])
def test_a_torn_spool_is_none(at, torn, tmp_path):
    spool = Spool(LocalFolder(tmp_path), "seg")
    with spool.file(0, 1, "these").written() as spooled:
        spooled.put(carried(torch.Generator().manual_seed(2)))
    path = tmp_path / "seg" / ".0.1.spool"
    data = bytearray(path.read_bytes())
    if torn == "flipped":
        data[at] ^= 1
    else:
        del data[at:]
    path.write_bytes(bytes(data))
    assert spool.layers(0, "these") == []
    if at != -1:
        with pytest.raises((CorruptEntry, ValueError)):
            list(spool.file(0, 1, "these").batches())


def test_an_interrupted_harvest_goes_on_from_what_is_spooled_and_a_torn_one_from_the_tokens(
    tmp_path, prompts, stores, monkeypatch
):
    save_random_model(tmp_path / "m", "llama", 2, num_hidden_layers=4)
    capture(tmp_path / "m", prompts, "blocks.*.hook_resid_*", stores[0], order="batch")
    few = one_layer_at_a_time(tmp_path / "m")
    with interrupted_at_layer(3):
        capture(few, prompts, "blocks.*.hook_resid_*", stores[1])
    spooled = sorted(stores[1].path.rglob("*.spool"))
    assert {path.name.split(".")[2] for path in spooled} == {"3"} and len(spooled) == 2
    data = bytearray(spooled[0].read_bytes())
    data[len(data) // 2] ^= 1
    spooled[0].write_bytes(bytes(data))
    computed, stream = Counter(), Model.stream_layers

    def counted(model, entering, layers, *rest, **options):
        computed.update(layers)
        return stream(model, entering, layers, *rest, **options)

    monkeypatch.setattr(Model, "stream_layers", counted)
    capture(few, prompts, "blocks.*.hook_resid_*", stores[1])
    assert contents(stores[0]) == contents(stores[1])
    assert 0 < computed[0] < computed[3], "one segment from its tokens, the others from layer 3"
    assert not list(stores[1].path.rglob("*.spool"))


LIVES = """
import os, signal, sys, time
import mizarr, numpy as np, torch  # once for all that are killed
from pathlib import Path
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.models.residency import EMBEDDING, HEAD, bytes_of

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
folder, root = sys.argv[1:]

def captured(store, few):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, {vocab}, 24).tolist() for _ in range(60)]
    model = Model.from_pretrained(folder)
    if few:
        model = Model.from_pretrained(folder, max_memory=bytes_of(model.config, 4).least, progress=False)
    mizarr.capture(model, prompts, "blocks.*.hook_resid_post", segment_tokens=96, progress=False,
                   store=mizarr.open_store(store, durability="process"))

def shards(store):
    return sum("c" in path.parts for path in Path(store).rglob("*") if path.is_file())

def lived(store, few, more=None):
    process = os.fork()
    if not process:
        captured(store, few)
        os._exit(0)
    wanted = None if more is None else shards(store) + more
    while wanted and shards(store) < wanted and not os.waitid(os.P_PID, process, ENDED):
        time.sleep(0.005)
    if wanted:
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def contents(store):
    return sorted((record.key, record.content) for record in mizarr.open_store(store).records())

calm, rough = root + "/calm", root + "/rough"
print([lived(calm, False), *(lived(rough, True, more) for more in (1, 16, 20)), lived(rough, True)])
print(contents(calm) == contents(rough), len(contents(calm)), list(Path(rough).rglob("*.spool*")))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_in_what_batches_give(tmp_path):
    """Killed where so many more shards stand: in the first layers, between layers, in the middle of one."""
    save_random_model(tmp_path / "m", "llama", 1, num_hidden_layers=4)
    program = LIVES.format(vocab=VOCAB)
    command = [sys.executable, "-c", program, str(tmp_path / "m"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    lines = done.stdout.split("\n")
    assert lines[0] == str([0, *[-signal.SIGKILL] * 3, 0]), done.stderr
    assert lines[1] == "True 4 []"


def test_two_processes_take_turns(tmp_path, prompts, stores):
    """The second finds the claim of the first, which is gone, or waits; what it gives is the same."""
    save_random_model(tmp_path / "m", "llama", 2)
    few = one_layer_at_a_time(tmp_path / "m")
    node = CaptureNode(few, prompts, "blocks.*.hook_resid_post", segment_tokens=128)
    entry = node._create_entry(stores[1])
    folder = stores[1].path / entry.path / "seg"
    (folder / "layers.claim").write_text(f"{os.uname().nodename} 999999 left")
    capture(few, prompts, "blocks.*.hook_resid_post", stores[1])
    capture(tmp_path / "m", prompts, "blocks.*.hook_resid_post", stores[0], order="batch")
    assert contents(stores[0]) == contents(stores[1]) and not (folder / "layers.claim").exists()
