"""`mizarr models families`, and `inspect` and `fetch` on a checkpoint of two layers made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.stages.forward.architectures.known import KNOWN, from_hf_config
from mizarr.stages.forward.models.files import ModelFiles
from mizarr.stages.forward.networks.weights import expected_tensors
from mizarr.workflows.cli import run

PAGE = Path(mizarr.__file__).parent / "docs" / "families.md"


def inspected(capsys, *arguments):
    code = run(["models", "inspect", *arguments, "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_lists_every_tensor_with_its_shape_and_norm(checkpoint, capsys):
    folder = checkpoint()
    code, found = inspected(capsys, folder)
    assert code == 0 and found["compatible"] and found["known_family"]
    config = json.loads((Path(folder) / "config.json").read_text())
    shapes = expected_tensors(from_hf_config(config))
    assert {t["name"]: tuple(t["shape"]) for t in found["tensors"]} == shapes
    assert found["parameters"] == sum(int(np.prod(shape)) for shape in shapes.values())
    assert all(tensor["norm"] > 0 for tensor in found["tensors"])


def test_shapes_only_reads_no_values(checkpoint, capsys):
    _, found = inspected(capsys, checkpoint(), "--shapes-only")
    assert {tensor["norm"] for tensor in found["tensors"]} == {None}


def test_inspect_for_people_is_a_table_with_one_line_per_tensor(checkpoint, capsys):
    assert run(["models", "inspect", checkpoint()]) == 0
    said = capsys.readouterr().out
    assert "llama (known family)" in said
    assert "model.embed_tokens.weight" in said
    assert "32x16" in said


def test_a_checkpoint_that_lacks_a_tensor_is_explained_and_exits_with_1(checkpoint, capsys):
    code, found = inspected(capsys, checkpoint(leave_out="model.layers.1.mlp.up_proj.weight"))
    assert code == 1 and not found["compatible"]
    assert "model.layers.1.mlp.up_proj.weight" in found["issues"][0]


def test_a_family_no_table_knows_is_configured_from_its_tensors(checkpoint, capsys):
    code, found = inspected(capsys, checkpoint(model_type="lama", surprise=3), "--shapes-only")
    assert code == 0 and not found["known_family"]
    assert found["layout"] == "not checked against transformers yet"
    assert found["config"]["num_kv_heads"] == 2
    assert any("surprise" in warning for warning in found["warnings"])


@pytest.mark.parametrize("name", ["no/such-model", "./nowhere"])
def test_a_model_that_is_not_there_is_one_line(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert run(["models", "inspect", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mizarr: error: ") and said.count("\n") == 1 and name in said


def test_fetch_prints_where_the_model_lies(monkeypatch, capsys, tmp_path):
    """The hub is not asked here; tests of the download are those of the forward room."""
    asked = []

    def fetch(name, revision, *, progress):
        asked.append((name, revision, progress))
        return ModelFiles(name, tmp_path)

    monkeypatch.setattr("mizarr.stages.forward.models.download.fetch", fetch)
    assert run(["models", "fetch", "org/name", "--revision", "v2", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert asked == [("org/name", "v2", False)]


def test_families_lists_every_row_of_the_table_as_the_documentation_does(capsys):
    assert run(["models", "families", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["model_type"] for row in rows] == list(KNOWN)
    written = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    lines = {line.split("`")[1]: line for line in written}
    assert len(lines) == len(written) == len(rows)
    for model_type, *told in (row.values() for row in rows):
        line = lines[model_type]
        start = f"| {' | '.join([f'`{model_type}`', *told])} |"
        assert line.startswith(start), "make families writes it anew"
        heads, points, apart = (
            cell.strip() for cell in line.removeprefix(start).removesuffix("|").split("|")
        )
        assert set(filter(None, heads.split(", "))) <= {"base", "encoder", "sequence", "token"}
        # As good as float32 gets, or what it is held against in words.
        assert not apart[0].isdigit() or (points and float(apart) <= 1e-5), model_type
    assert run(["models", "families"]) == 0
    said = capsys.readouterr().out
    assert all(model_type in said for model_type in KNOWN)


@pytest.mark.parametrize(
    ("model_type", "column", "told"),
    [
        ("gemma2", "norm", "RMS, weight + 1, four per block"),
        ("gemma2", "attention", "biases, sliding window, soft cap"),
        ("phi3", "mlp", "gated SiLU, fused"),
        ("starcoder2", "mlp", "plain tanh-GELU"),
        ("llama", "head", "untied"),
        ("mamba", "head", "tied"),
        ("jamba", "attention", "Mamba-1, some attention without rope"),
        ("rwkv7", "examples", "RWKV-7 Goose"),
    ],
)
def test_a_family_is_described_by_what_sets_it_apart(model_type, column, told, capsys):
    assert run(["models", "families", "--json"]) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["model_type"] == model_type)
    assert row[column] == told
