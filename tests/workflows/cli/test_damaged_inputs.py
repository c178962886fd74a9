"""Whatever is in a file or a text that a command is given: one line, exit code 2, no traceback."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from mizarr.stages.features.crosscoder import Crosscoder
from mizarr.stages.graph.files import torch_file, viewer
from mizarr.store import open_store
from mizarr.store.errors import MizarrError
from mizarr.workflows.cli import run as mizarr_command
from mizarr.workflows.material import probe_targets
from mizarr.workflows.material.convergence_batch import read_batch
from mizarr.workflows.material.facts.fact_data import read_records
from mizarr.workflows.material.samples.marker_samples import read_samples

DIGITS = "9" * 5_000
DEEP = b"[" * 100_000
FILES = {
    "nested": DEEP,
    "nested objects": b'{"a":' * 50_000,
    "no JSON": b"{",
    "no text": b"\xff\xfe\xff",
    "NaN": b"[NaN]",
    "huge integer": f"[{DIGITS}]".encode(),
    "nothing": b"",
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
}
HOOK = ("--hooks", "blocks.0.hook_resid_post", "--store", "store")
CAPTURE = ("capture", "specimen", "--text", "a", "--store", "store")
DOORS = {
    "facts": ("compute", "counterfact_patching", "--set", "data=input.json"),
    "model": ("models", "inspect", "model"),
    "weights": ("models", "inspect", "weights"),
    "adapter": ("capture", "specimen", "--text", "a", "--adapter", "adapter", *HOOK),
    "features": ("features", "inspect", "features"),
    "import": ("import", "input.npz", "--model", "x", "--store", "store"),
    "import safetensors": ("import", "input.safetensors", "--model", "x", "--store", "store"),
    "corpus": ("capture", "specimen", "input.jsonl", *HOOK),
    "corpus in contexts": ("capture", "specimen", "input.jsonl", "--context", "16", *HOOK),
    "gguf": ("models", "inspect", "input.gguf"),
    "store": ("ls", "--store", "damaged"),
}


def refused(command, capsys):
    assert mizarr_command(list(command)) == 2
    told = capsys.readouterr().err.strip()
    assert (
        "Traceback" not in told
        and "No such option" not in told
        and told.count("\n") <= 1
        and len(told) < 1_500
    )
    return told


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
@pytest.mark.parametrize("command", DOORS.values(), ids=DOORS)
def test_a_damaged_file_is_told_in_one_line(command, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("input.json", "input.jsonl", "input.npz", "input.safetensors", "input.gguf"):
        (tmp_path / name).write_bytes(data)
    length = struct.pack("<Q", len(data))
    (tmp_path / "input.safetensors").write_bytes(length + data if data else b"")
    places = {
        "model/config.json": data,
        "weights/config.json": json.dumps({"model_type": "llama"}).encode(),
        "weights/model.safetensors": length + data,
        "adapter/adapter_config.json": data,
        "features/config.yaml": data,
        "features/cfg.json": data,
        "damaged/store.json": data,
    }
    for name, content in places.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    refused(command, capsys)
    # A corpus in contexts is read while it is stored.
    assert not (tmp_path / "store").exists() or "--context" in command


@pytest.mark.parametrize(
    "command",
    [
        ("show", DIGITS, "--store", "store"),
        ("export", "a", "--to", "a.npz", "--layers", DIGITS, "--store", "store"),
        ("export", "a", "--to", "a.npz", "--layers", f"0-{DIGITS}", "--store", "store"),
        ("export", "a", "--to", "a.npz", "--layers", "0-99999999999", "--store", "store"),
        ("models", "inspect", DIGITS),
        ("models", "inspect", f"org/{DIGITS}"),
        ("features", "inspect", DIGITS),
        (*CAPTURE, "--hooks", f"blocks.{DIGITS}.hook_resid_post"),
        (*CAPTURE, "--hooks", "blocks.0.hook_resid_post", "--positions", DIGITS),
        (*CAPTURE, "--hooks", "blocks.0.hook_resid_post", "--positions", f":{DIGITS}"),
        (*CAPTURE, "--hooks", "hook_logits", "--reduce", f"topk:{DIGITS}"),
        ("compute", "logit_lens", "--store", "store", "--set", f"prompts={DEEP.decode()}"),
        ("compute", "logit_lens", "--store", "store", "--set", f"top={DIGITS}"),
    ],
    ids=lambda command: " ".join(word[:20] for word in command),
)
def test_numbers_of_5000_digits_and_deep_values_are_told_in_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    open_store("store", durability="process")
    assert mizarr_command(list(command)) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told and "No such option" not in told and "Exceeds the limit" not in told


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
@pytest.mark.parametrize(
    "reader",
    [
        read_records,
        lambda path: read_batch(Path(path)),
        lambda path: read_samples(path, ["a"], unit="bytes"),
        probe_targets.labelled_entries,
        lambda path: viewer.read(Path(path)),
        lambda path: torch_file.read(Path(path)),
        lambda path: Crosscoder.load(Path(path).parent),
    ],
    ids=["facts", "batch", "samples", "labels", "graph", "graph of torch", "crosscoder"],
)
def test_material_that_users_name_is_told_in_one_line(reader, data, tmp_path):
    for name in ("input.json", "config.json"):
        (tmp_path / name).write_bytes(data)
    with pytest.raises(MizarrError) as caught:
        reader(str(tmp_path / "input.json"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1_000
