"""`mizarr export` and `mizarr import`: from a store to a file and back, without torch, refusing clearly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import xarray as xr

from mizarr.store import open_store
from mizarr.workflows.cli import run
from tests.store.exchanged import PROMPTS, STATES, TEXTS, put_run, values
from tests.torch_free import TORCH_BLOCKED

SIZES = [len(prompt) for prompt in PROMPTS]
STATE = values("resid_post", 0)


@pytest.fixture
def entry(tmp_path):
    return put_run(open_store(tmp_path / "store", durability="process"), cells=STATES)


@pytest.fixture
def states(tmp_path) -> Path:
    """A file from elsewhere: two layers, packed, with row sizes."""
    path = tmp_path / "states.npz"
    np.savez(path, **{"layers.0": STATE, "layers.1": STATE + 1, "row_size": SIZES, "loss": np.zeros(2)})
    return path


def said(capsys, *arguments: object) -> str:
    code = run([*map(str, arguments)])
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return streams.out


def refused(capsys, *arguments: object) -> str:
    assert run([*map(str, arguments)]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.startswith("mizarr: error: ") and streams.err.count("\n") == 1
    return streams.err


MAP = ("--map", "layers.{layer}=blocks.{layer}.hook_resid_post", "--skip", "loss", "--model", "gpt2")


def test_export_prints_the_file_it_wrote(entry, tmp_path, capsys):
    path = tmp_path / "states.nc"
    arguments = ("--variables", "resid_post", "--layers", "0,2-3", "--store", tmp_path / "store")
    assert said(capsys, "export", entry.digest[:12], "--to", path, *arguments) == f"{path}\n"
    there = xr.open_dataset(path)
    assert set(there.data_vars) == {"resid_post"} and there.layer.values.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(there.resid_post.sel(layer=2).values, values("resid_post", 2))


def test_export_for_machines_tells_path_and_bytes(entry, tmp_path, capsys):
    for name in ("run.zarr", "run.safetensors"):
        written = tmp_path / name
        arguments = (entry.digest, "--to", written, "--store", tmp_path / "store", "--json")
        told = json.loads(said(capsys, "export", *arguments))
        files = [written] if written.is_file() else [path for path in written.rglob("*") if path.is_file()]
        assert told == {"path": str(written), "bytes": sum(path.stat().st_size for path in files)}


def test_a_table_may_be_wide_and_named_otherwise(entry, tmp_path, capsys):
    arguments = ("--layout", "wide", "--format", "parquet", "--store", tmp_path / "store")
    said(capsys, "export", entry.digest, "--to", tmp_path / "table", *arguments)
    found = np.stack(pq.read_table(tmp_path / "table")["resid_post.3"].to_pylist())
    np.testing.assert_array_equal(found, values("resid_post", 3))


def test_import_prints_the_run_and_says_what_it_holds(states, tmp_path, capsys):
    assert run(["import", str(states), *MAP, "--store", str(tmp_path / "new")]) == 0
    streams = capsys.readouterr()
    assert streams.err == "resid_post [layer 2, token 15, hidden 3]\n"
    held = open_store(tmp_path / "new", mode="r")[streams.out.strip()]
    np.testing.assert_array_equal(held.resid_post.values, np.stack([STATE, STATE + 1]))
    again = said(capsys, "import", states, *MAP, "--store", tmp_path / "new", "--json")
    told = json.loads(again)
    assert told["run"] == streams.out.strip()
    assert told["variables"] == {"resid_post": {"layer": 2, "token": 15, "hidden": 3}}


def test_what_was_imported_is_listed_shown_verified_and_exported(states, tmp_path, capsys):
    place = ("--store", tmp_path / "new")
    digest = said(capsys, "import", states, *MAP, *place).strip()
    rows = json.loads(said(capsys, "ls", *place, "--json"))
    assert sorted(row["label"] for row in rows) == ["resid_post/0", "resid_post/1"]
    shown = json.loads(said(capsys, "show", rows[0]["key"], *place, "--json"))
    assert shown["provenance"][0]["declared"] is True
    said(capsys, "verify", *place)
    said(capsys, "export", digest, "--to", tmp_path / "back.safetensors", *place)
    back = safetensors.numpy.load_file(tmp_path / "back.safetensors")
    np.testing.assert_array_equal(back["blocks.1.hook_resid_post"], STATE + 1)


@pytest.mark.parametrize("kind", ["ids", "texts"])
def test_prompts_come_from_a_file(tmp_path, capsys, kind):
    np.savez(tmp_path / "a.npz", **{"blocks.0.hook_resid_post": STATE, "row_size": SIZES})
    lines = [json.dumps({"ids": ids}) for ids in PROMPTS] if kind == "ids" else map(json.dumps, TEXTS)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ("--model", "gpt2", "--prompts", tmp_path / "prompts.jsonl", "--store", tmp_path / "new")
    held = open_store(tmp_path / "new")[said(capsys, "import", tmp_path / "a.npz", *arguments).strip()]
    if kind == "ids":
        assert held.mi.prompt(1).token_id.values.tolist() == PROMPTS[1]
    else:
        assert held.text.values.tolist() == TEXTS and "token_id" not in held.coords


# Misuse


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "a.csv"], "names no export format"),
        (["--to", "a.nc", "--format", "netcdff"], "did you mean 'netcdf'?"),
        (
            ["--to", "a.nc", "--layers", "3-0"],
            "expected --layers as numbers and ranges such as 0-5,11, found '3-0'",
        ),
        (["--to", "a.nc", "--layers", "x"], "found 'x'"),
        (["--to", "a.nc", "--layers", "0-3"], "'ln1_scale' at layers 0, not at layers 1-3"),
        (["--to", "a.nc", "--variables", "resid_pst"], "resid_post"),
        (["--to", "none/a.nc"], "create it first"),
        (
            ["--to", "store"],
            "the suffix of 'store' names no export format; end the name in .nc, .zarr, .parquet",
        ),
    ],
)
def test_export_refuses_in_one_line_and_leaves_nothing(entry, tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert says in refused(capsys, "export", entry.digest, *arguments, "--store", "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_key_that_is_not_there_is_told(entry, tmp_path, capsys):
    told = refused(capsys, "export", "ffff", "--to", tmp_path / "a.nc", "--store", tmp_path / "store")
    assert "no key" in told and "mizarr ls" in told


def test_a_store_that_is_not_there_is_not_made(tmp_path, capsys):
    assert "expected a store" in refused(
        capsys, "export", "ff", "--to", tmp_path / "a.nc", "--store", tmp_path / "none"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model"),
        (["--model", "gpt2"], "there is no hook point 'layers.0'"),
        (["--model", "gpt2", "--map", "layers.0"], "expected --map ARRAY=HOOK, found --map 'layers.0'"),
        ([*MAP, "--map", "layers.{layer}=x"], "--map names two hook points for the array 'layers.{layer}'"),
        ([*MAP[:2], "--model", "gpt2"], "array 'loss'"),
        ([*MAP, "--skip", "lss"], "did you mean 'loss'?"),
        ([*MAP, "--n-layers", "1"], "layer 1, and n_layers=1"),
        ([*MAP, "--prompts", "none.txt"], "expected a file of prompts"),
        ([*MAP, "--dtype", "float8"], "expected dtype='bfloat16'"),
    ],
)
def test_import_refuses_in_one_line_and_leaves_no_store(states, tmp_path, capsys, arguments, says):
    assert says in refused(capsys, "import", states, *arguments, "--store", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_neither_command_needs_torch(states, tmp_path):
    program = (
        TORCH_BLOCKED
        + """
import contextlib, io
from mizarr.workflows.cli import run
said = io.StringIO()
with contextlib.redirect_stdout(said):
    code = run(["import", *sys.argv[1:]])
place = sys.argv[-2:]
codes = [run(["export", said.getvalue().strip(), "--to", f"{place[1]}{suffix}", *place])
         for suffix in (".nc", ".zarr", ".parquet", ".safetensors", ".npz")]
sys.exit(code or max(codes))
"""
    )
    arguments = [str(states), *MAP, "--store", str(tmp_path / "new")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 5
