"""`mizarr features`: what a dictionary is, in words and as JSON, and why it cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mizarr.workflows.cli import cli

from ...random_dictionaries import draw, save_random_clt, write_config, write_npz, write_plt


def call(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(cli, ["features", *arguments], standalone_mode=False)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.return_value or 0, found.output


def test_a_dictionary_is_described_as_json(tmp_path: Path):
    save_random_clt(tmp_path, layers=3, hidden=12, size=20)
    code, output = call("inspect", str(tmp_path), "--json")
    found = json.loads(output)
    assert code == 0
    assert (found["kind"], found["layers"], found["features"]) == ("clt", [0, 1, 2], 60)
    assert found["read"] == [f"blocks.{layer}.hook_resid_mid" for layer in range(3)]
    assert (found["activation"], found["dtype"], found["model"]) == ("JumpReLU", "float32", "tiny")
    assert found["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_a_dictionary_is_described_in_words(tmp_path: Path):
    for layer in range(2):
        write_plt(tmp_path, layer, draw(layer), skip=True)
    write_config(tmp_path, activation="topk", k=3)
    code, output = call("inspect", str(tmp_path), "--values", "--quiet")
    assert code == 0
    assert "80 features, 40 in each of 2 layers" in output
    assert "reads: blocks.0.hook_resid_mid … blocks.1.hook_resid_mid" in output
    assert "TopK (k 3), linear skip" in output
    norm = np.linalg.norm(draw(1)["W_dec"], axis=1).mean()
    assert f"{norm:.4g}" in output


def test_a_dictionary_of_another_model_exits_with_1(tmp_path: Path):
    save_random_clt(tmp_path, layers=3, hidden=12)
    code, output = call("inspect", str(tmp_path), "--model", "specimen")
    assert code == 1
    assert "cannot be used:" in output and "specimen has width 192 there" in output


def test_numbers_that_are_not_finite_exit_with_1(tmp_path: Path):
    weights = draw()
    weights["W_dec"][3, 0] = np.inf
    write_plt(tmp_path, 0, weights)
    write_config(tmp_path)
    assert call("inspect", str(tmp_path), "--quiet")[0] == 0
    code, output = call("inspect", str(tmp_path), "--values", "--json", "--quiet")
    assert code == 1
    assert json.loads(output)["issues"] == ["layer 0 holds numbers that are not finite"]


def test_hook_points_may_be_told(tmp_path: Path):
    write_npz(tmp_path / "layer_3" / "params.npz", draw())
    code, output = call(
        "inspect", str(tmp_path), "--read", "hook_resid_mid", "--write", "hook_mlp_out", "--json"
    )
    assert code == 0
    assert json.loads(output)["write"] == ["blocks.3.hook_mlp_out"]


def test_what_is_no_dictionary_is_told(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"found notes.txt; expected the files of one of"):
        call("inspect", str(tmp_path))


def test_a_dictionary_is_written_for_another_program(tmp_path: Path):
    save_random_clt(tmp_path / "in", layers=2, hidden=12)
    code, output = call("export", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "circuit_tracer")
    assert (code, output.strip()) == (0, str(tmp_path / "out"))
    theirs = json.loads(call("inspect", str(tmp_path / "out"), "--json")[1])
    ours = json.loads(call("inspect", str(tmp_path / "in"), "--json")[1])
    for name in ("name", "directory"):
        assert theirs.pop(name) != ours.pop(name)
    assert theirs == ours
    with pytest.raises(ValueError, match="no cross-layer transcoders"):
        call("export", str(tmp_path / "in"), str(tmp_path / "sae"), "--format", "saelens")
    assert not (tmp_path / "sae").exists()
