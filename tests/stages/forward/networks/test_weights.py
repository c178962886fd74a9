"""Weights: what is loaded is what the files hold, and a damaged checkpoint names its tensor or file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks import composed, weights
from mizarr.stages.logits.readout import readout_from_files
from mizarr.store.errors import WeightsError

RAW = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
}
CONFIG = from_hf_config(RAW)
CPU = torch.device("cpu")


def tensors(config=CONFIG, dtype=torch.float32):
    made = torch.Generator().manual_seed(0)
    shapes = weights.expected_tensors(config)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def load(path, config=CONFIG, dtype=torch.float32):
    return weights.load([path], config, composed.block, dtype=dtype, device=CPU, progress=False)


@pytest.fixture
def file(tmp_path):
    """Write tensors, return the file."""

    def write(held):
        save_file(held, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    return write


def test_every_tensor_arrives_under_its_field(file):
    held = tensors()
    loaded = load(file(held))
    layer = loaded.layers[1]
    assert torch.equal(layer.mixers[0].weights.k.weight, held["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(layer.channel_mixer.weights.down.weight, held["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(layer.norms["ln2"].weight, held["model.layers.1.post_attention_layernorm.weight"])
    assert torch.equal(loaded.lm_head, held["lm_head.weight"]) and layer.mixers[0].weights.q.bias is None


def test_a_tied_head_that_the_file_holds_too_is_the_embedding(file):
    tied = from_hf_config(RAW | {"tie_word_embeddings": True})
    held = tensors()
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    assert load(file(held), tied).lm_head is None


def test_a_tied_head_that_differs_in_the_file_is_refused(file):
    """The reference implementation computes with it, whatever config.json says."""
    tied = from_hf_config(RAW | {"tie_word_embeddings": True})
    held = tensors()
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    held["lm_head.weight"][-1, -1] += 1
    with pytest.raises(
        WeightsError, match=r"tensors .lm_head\.weight. and .model\.embed_tokens\.weight. to be equal"
    ):
        load(file(held), tied)
    with pytest.raises(WeightsError, match=r"set tie_word_embeddings to false"):
        readout_from_files([file(held)], tied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_happens_to_the_file_later_does_not_touch_loaded_weights(file, dtype):
    """A training loop saves into the file it loaded from; a mapping of it would become the new weights."""
    held = tensors(dtype=dtype)
    path = file(held)
    loaded = load(path, dtype=dtype)
    with path.open("r+b") as opened:
        opened.write(bytes(path.stat().st_size))
    assert loaded.embed.dtype == dtype
    assert torch.equal(loaded.embed, held["model.embed_tokens.weight"])
    assert torch.equal(
        loaded.layers[1].mixers[0].weights.o.weight, held["model.layers.1.self_attn.o_proj.weight"]
    )


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """Which of them counts would depend on the names of the files, which are no part of an identity."""
    held = tensors()
    save_file(held, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": held["lm_head.weight"]}, tmp_path / "b.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(WeightsError, match=r"'lm_head.weight' in one file, found it in .*a.safetensors and"):
        weights.load(files, CONFIG, composed.block, dtype=torch.float32, device=CPU, progress=False)


def test_shards_are_read_through_their_index(tmp_path):
    held = tensors()
    names = sorted(held)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, chosen in parts.items():
        save_file({name: held[name] for name in chosen}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, chosen in parts.items() for name in chosen}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    files = resolve(tmp_path)
    loaded = weights.load(
        files.weight_files, CONFIG, composed.block, dtype=torch.float32, device=CPU, progress=False
    )
    assert torch.equal(
        loaded.layers[0].channel_mixer.weights.gate.weight, held["model.layers.0.mlp.gate_proj.weight"]
    )
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        WeightsError, match=r"the 2 weight files listed in .*, found no model-00002-of-00002.safetensors"
    ):
        _ = resolve(tmp_path).weight_files


def test_a_missing_tensor_is_named_with_the_nearest_there_is(file):
    held = tensors()
    held["model.layers.1.self_attn.qproj.weight"] = held.pop("model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(
        WeightsError, match=r"'model.layers.1.self_attn.q_proj.weight', found none .* nearest is '.*qproj"
    ):
        load(file(held))


def test_a_misshapen_tensor_is_named_with_both_shapes(file):
    held = tensors() | {"model.norm.weight": torch.ones(17)}
    with pytest.raises(
        WeightsError,
        match=r"'model.norm.weight' to have the shape \[16\] that follows from config.json, found \[17\]",
    ):
        load(file(held))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_named(file, bad):
    held = tensors()
    held["model.layers.0.mlp.up_proj.weight"][3, 4] = bad
    with pytest.raises(
        WeightsError,
        match=r"found 1 NaN or infinite values in the tensor .model.layers.0.mlp.up_proj.weight'",
    ):
        load(file(held))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_only_nan_and_infinity_are_not_finite(dtype, monkeypatch):
    """Wherever they stand, whatever their sign; the largest and the smallest numbers are."""
    monkeypatch.setattr(weights, "_CHECKED", 8)
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    numbers = torch.tensor([most, -most, least, -least / 2, 0.0, -0.0, 1.0, -3.5] * 2 + [most], dtype=dtype)
    assert weights.is_finite(numbers) and weights.is_finite(numbers[:0])
    assert weights.is_finite(numbers[:16].reshape(4, 4).T)
    for at in range(len(numbers)):
        for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
            changed = numbers.clone()
            changed[at] = bad
            assert not weights.is_finite(changed), (at, bad)
    assert weights.is_finite(torch.tensor([1, 2])) and not weights.is_finite(torch.tensor(float("inf")))


def test_finite_weights_whose_sum_overflows_load(file):
    held = tensors(dtype=torch.float64)
    held["lm_head.weight"].fill_(3e38)
    assert load(file(held), dtype=torch.float64).lm_head[0, 0] == 3e38


def test_opposite_infinities_do_not_cancel(file):
    held = tensors()
    held["lm_head.weight"][0, :2] = torch.tensor([float("inf"), float("-inf")])
    with pytest.raises(WeightsError, match=r"found 2 NaN or infinite"):
        load(file(held))


def test_quantised_tensors_are_refused(file):
    held = tensors() | {"model.layers.0.mlp.up_proj.weight": torch.zeros(24, 16, dtype=torch.int8)}
    with pytest.raises(WeightsError, match=r"found I8; mizarr does not support this quantisation"):
        load(file(held))


def test_a_file_cut_short_is_named_with_both_sizes(file):
    path = file(tensors())
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(
        WeightsError,
        match=rf"model.safetensors is truncated: expected {len(whole)} bytes, found {len(whole) - 100}",
    ):
        load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(WeightsError, match=r"is damaged"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (20).to_bytes(8, "little") + b"x" * 20])
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        WeightsError, match=r"model.safetensors (is empty|is not a (complete|valid) safetensors file)"
    ):
        weights.read_shapes([tmp_path / "model.safetensors"])


def test_tensors_nobody_reads_are_listed_without_known_buffers():
    found = weights.expected_tensors(CONFIG) | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
        "v_head.weight": (1, 16),
    }
    assert weights.unused_tensors(found, CONFIG) == ["v_head.weight"]


def peak() -> int:
    """Bytes: the most memory this process ever held."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(path: str, raw: str) -> None:
    """Print the bytes by which loading raises the peak; run in a process of its own."""
    config = from_hf_config(json.loads(raw))
    before = peak()
    weights.load([Path(path)], config, composed.block, dtype=torch.float32, device=CPU, progress=False)
    print(peak() - before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_memory_than_the_checkpoint(tmp_path):
    """One mapping and no second copy: the peak grows by the file's size, 15 % allowed."""
    raw = RAW | {
        "hidden_size": 1024,
        "intermediate_size": 2800,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
    }
    path = tmp_path / "model.safetensors"
    save_file(
        {
            name: torch.full(shape, 0.01)
            for name, shape in weights.expected_tensors(from_hf_config(raw)).items()
        },
        path,
    )
    ran = subprocess.run(
        [sys.executable, __file__, str(path), json.dumps(raw)], capture_output=True, text=True, check=True
    )
    size = path.stat().st_size
    assert size > 150e6
    assert 0.5 * size < int(ran.stdout) <= 1.15 * size


if __name__ == "__main__":
    measure(*sys.argv[1:])
