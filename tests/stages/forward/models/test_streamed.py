"""Models of which not all weights are in memory: the same numbers and the same identity, or a refusal."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr import HookSpec, Model, Zero
from mizarr.stages.forward.models import limits
from mizarr.stages.forward.models.residency import EMBEDDING, HEAD, bytes_of
from mizarr.stages.forward.models.source import ModelSource
from mizarr.store.errors import ConfigError, SourceChanged, WeightsError
from tests.benchmarks.large_models import write_llama
from tests.layer_parts import part_of

from ..random_hybrids import save_random_hybrid
from ..random_models import save_random_model

pytest.importorskip("transformers")
IDS = [[5, 17, 3, 250, 9, 40], [1, 2, 3, 4, 5, 6]]


@pytest.fixture
def folder(tmp_path):
    save_random_model(
        tmp_path / "m", "llama", 2, num_hidden_layers=4, tie_word_embeddings=False, intermediate_size=400
    )
    return tmp_path / "m"


def sizes_of(folder):
    return bytes_of(Model.from_pretrained(folder).config, 4)


def few(folder, layers=1, **options):
    sizes = sizes_of(folder)
    room = sizes.always + layers * sizes.units[0]
    return Model.from_pretrained(folder, max_memory=room, progress=False, **options)


def test_a_pass_reads_what_is_not_there_and_gives_the_same_bits(folder):
    """Cyclic passes keep all but the one that was used last, which is the best anybody can do."""
    whole, model = Model.from_pretrained(folder), few(folder, layers=3)
    hooks = HookSpec().capture("blocks.*.hook_resid_post")
    for _ in range(3):
        expected, found = whole.forward(IDS, hooks, want=None), model.forward(IDS, hooks, want=None)
        for layer in range(4):
            point = f"blocks.{layer}.hook_resid_post"
            assert torch.equal(expected[point], found[point])
    assert sum(model.streamed.window.reads.values()) == 4 + 2, "one of four in each further pass"
    assert model.streamed.nbytes == whole.weight_bytes == model.weight_bytes


def test_the_whole_head_takes_its_turn(folder):
    whole, model = Model.from_pretrained(folder), few(folder, layers=1)
    assert torch.equal(whole.forward(IDS).logits, model.forward(IDS).logits)
    assert model.streamed.window.reads[HEAD] == 1 and EMBEDDING not in model.streamed.window.reads


def test_a_head_larger_than_the_room_is_told_when_it_is_needed(tmp_path):
    save_random_model(tmp_path / "m", "llama", 2, hidden_size=8, head_dim=8, num_attention_heads=1,
                      num_key_value_heads=1, tie_word_embeddings=False)  # fmt: skip
    model = few(tmp_path / "m")
    model.forward(IDS, HookSpec().capture("blocks.*.hook_resid_post"), want=None)
    with pytest.raises(ConfigError, match="memory for the LM head"):
        model.forward(IDS)


def test_planned_runs_read_each_weight_once_in_a_sweep(folder):
    """A grid of ablations goes through the layers together, whoever holds them."""
    whole, model = Model.from_pretrained(folder), few(folder)
    runs = [
        mizarr.Run(IDS[0], HookSpec().intervene(f"blocks.{layer}.hook_{part}_out", Zero()))
        for layer in range(4)
        for part in ("attn", "mlp")
    ]
    expected, found = mizarr.run(whole, runs), mizarr.run(model, runs)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(torch.as_tensor(one.logits), torch.as_tensor(other.logits))
    assert model.streamed.window.reads == {0: 1, 1: 1, 2: 1, 3: 1, HEAD: 1}


def test_it_is_the_model_of_its_files(folder):
    model = few(folder)
    assert model.identity == Model.from_pretrained(folder).identity
    model.forward(IDS)
    assert model.identity == Model.from_pretrained(folder).identity


@pytest.mark.parametrize("where", ["layer", "final norm"])
def test_edited_weights_have_no_identity_and_are_not_lost_silently(folder, where):
    model = few(folder)
    model.forward(IDS, HookSpec().capture("blocks.0.hook_resid_post"), want=None)
    weights = model.network.weights
    with torch.no_grad():
        (part_of(weights.layers[0], "q").weight if where == "layer" else weights.final_norm.weight).mul_(2)
    with pytest.raises(ConfigError, match="results cannot be stored under a key"):
        _ = model.identity
    if where == "layer":
        with pytest.raises(ConfigError, match="found layer 0 edited in memory"):
            model.forward(IDS)


def test_files_written_meanwhile_are_refused(folder):
    model = few(folder)
    model.forward(IDS)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(
        SourceChanged, match="unchanged since the model was loaded, because layers are still read"
    ):
        model.forward(IDS)


def test_a_damaged_layer_is_told_when_it_is_reached(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    room = bytes_of(ModelSource(folder).config, 4).least
    model = Model.from_pretrained(folder, max_memory=room)
    with pytest.raises(WeightsError, match=r"model\.layers\.2\.mlp\.up_proj"):
        model.forward(IDS)


def test_too_little_for_one_layer_is_refused_and_sizes_may_be_words(folder):
    with pytest.raises(
        ConfigError, match=r"expected at least .* largest layer and shared weights, found 1 KiB"
    ):
        Model.from_pretrained(folder, max_memory="1KiB")
    assert Model.from_pretrained(folder, max_memory="1GiB").streamed is None


def test_what_would_read_all_weights_for_every_step_is_refused(folder):
    from mizarr.stages.forward.generation.generate import generate

    model = few(folder)
    with pytest.raises(ConfigError, match=r"for text, token by token, found that layers are read from"):
        generate(model, [IDS[0]], max_tokens=2)


@pytest.mark.parametrize("saved", ["pickled", "sharded by layers"])
def test_other_files_are_read_layer_by_layer_too(folder, saved, tmp_path):
    """A pickle holds no matrix as it is: tokens are embedded by the whole of it."""
    tensors = load_file(folder / "model.safetensors")
    whole = Model.from_pretrained(folder)
    if saved == "pickled":
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        import json

        (folder / "model.safetensors").unlink()
        parts = {f"model-{n}.safetensors": sorted(tensors)[n::3] for n in range(3)}
        for name, held in parts.items():
            save_file({each: tensors[each] for each in held}, folder / name)
        places = {each: name for name, held in parts.items() for each in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = few(folder)
    store = mizarr.open_store(tmp_path / "store")
    found = mizarr.capture(model, IDS, "blocks.*.hook_resid_post", store=store, progress=False)
    expected = whole.forward(IDS, HookSpec().capture("blocks.3.hook_resid_post"), want=None)
    rows = found["resid_post"].sel(layer=3).values.reshape(2, 6, -1)
    np.testing.assert_array_equal(rows, expected["blocks.3.hook_resid_post"].numpy())
    once = dict.fromkeys(range(4), 1) | ({EMBEDDING: 1} if saved == "pickled" else {})
    assert model.streamed.window.reads == once


def test_what_layers_share_is_there_once_and_stays(tmp_path):
    save_random_hybrid(tmp_path / "m", "zamba", 1)
    whole = Model.from_pretrained(tmp_path / "m")
    sizes = bytes_of(whole.config, 4)
    model = Model.from_pretrained(
        tmp_path / "m", max_memory=max(sizes.least, sizes.always + sizes.units[EMBEDDING])
    )
    assert whole.config.tensors.shared and model.streamed is not None
    assert torch.equal(whole.forward(IDS).logits, model.forward(IDS).logits)


# How much there is


def test_a_setting_says_how_much_memory_there_is(folder, monkeypatch, capfd):
    monkeypatch.setenv("MIZARR_MEMORY", str(sizes_of(folder).total - 1))
    model = Model.from_pretrained(folder)
    assert model.streamed is not None and "each pass reads layers from files" in capfd.readouterr().err
    monkeypatch.setenv("MIZARR_MEMORY", "100MB")
    assert Model.from_pretrained(folder).streamed is None and not capfd.readouterr().err


def test_control_groups_and_own_limits_count(tmp_path, monkeypatch):
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    for folder, most, now, cached in (("jobs/one", "max", 50, 0), ("jobs", 1000, 700, 200)):
        (tmp_path / folder / "memory.max").write_text(f"{most}\n")
        (tmp_path / folder / "memory.current").write_text(f"{now}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 0\n")
    monkeypatch.setattr(limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/jobs/one\n")
    assert limits.memory_there_is() == 1000 - 700 + 200
    (tmp_path / "cgroup").write_text("0::/\n")
    script = (
        "import resource; from mizarr.stages.forward.models.limits import memory_there_is\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({8 << 30}, {8 << 30}))\n"
        "print(memory_there_is())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 8 << 30
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 8 << 30


LIMITED = """
import resource, sys
import numpy as np, torch
import mizarr, mizarr.stages.forward.capture.layer_major, mizarr.stages.forward.networks.table
import dask.array, xarray  # what opens the result is part of the package, too
xarray.DataArray(dask.array.zeros(2)).load()

def held(what):
    return int(open("/proc/self/status").read().partition(what)[2].split()[0]) << 10

folder, store, allowed, order = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)
before = held("VmRSS:")
if allowed:
    resource.setrlimit(resource.RLIMIT_DATA, (held("VmData:") + allowed,) * 2)
ids = np.random.default_rng(0).integers(0, 8000, (16, 64))
mizarr.capture(folder, ids, "blocks.*.hook_resid_post", store=mizarr.open_store(store), order=order,
               batch_tokens=512, memory=16 << 20, progress=False)
print(held("VmHWM:") - before)
"""


@pytest.mark.slow
def test_weights_of_four_times_the_memory_are_harvested_within_it(tmp_path):
    """1.27 GB of weights in 300 MB of data beside what torch and the package take; the limit is the
    system's, and the same capture with batches outside does not live in it."""
    held = write_llama(tmp_path / "m", layers=18, hidden=1024, inner=4096, heads=16, vocab=8000)
    allowed = 300 << 20
    assert held > 4 * allowed

    def run(store, *arguments):
        command = [sys.executable, "-c", LIMITED, str(tmp_path / "m"), str(tmp_path / store), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)

    done = run("few", str(allowed), "auto")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < allowed
    assert run("none", str(allowed), "batch").returncode != 0
    assert run("whole", "0", "batch").returncode == 0
    few, whole = (
        {record.key: record.content for record in mizarr.open_store(tmp_path / name).records()}
        for name in ("few", "whole")
    )
    assert few == whole and few
