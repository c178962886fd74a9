"""`mizarr ls`, `show`, `verify`, `gc` over a store that holds one small result."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import xarray as xr

from mizarr.store import ResultKey, open_store
from mizarr.workflows.cli import run


@pytest.fixture
def stored(tmp_path):
    """A store with one result: (its path, the record)."""
    path = tmp_path / "store"
    recovery = xr.DataArray(np.arange(6.0).reshape(2, 3), dims=("layer", "position"), attrs={"unit": "1"})
    key = ResultKey("recovery", 1, {"clean": 1.0}, {})
    return path, open_store(path).put_result(key, recovery.to_dataset(name="recovery"))


def said(capsys, *arguments):
    assert run([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_ls_shows_one_line_per_key(stored, capsys):
    path, record = stored
    header, line = said(capsys, "ls", "--store", path).splitlines()
    assert header.split()[0] == "KEY"
    assert line.split()[0] == record.key[:12]
    assert "recovery/1" in line


def test_ls_tells_of_runs_their_model_prompts_and_hook_points(tmp_path, capsys):
    import mizarr

    prompts, points = ["a prompt", "another"], ["blocks.[0124].hook_resid_post", "hook_embed"]
    store = mizarr.open_store(tmp_path / "store")
    held = mizarr.capture("specimen", prompts, points, store=store, progress=False)
    lines = said(capsys, "ls", "--store", tmp_path / "store").splitlines()
    assert lines[0].split()[:2] == ["RUN", "MODEL"]
    (listed,) = store.runs()
    assert (listed.model, listed.prompts, listed.tokens) == ("specimen", 2, held.sizes["token"])
    assert listed.hooks == ("embed", "resid_post 0-2, 4")
    assert listed.bytes == sum(
        file.stat().st_size for file in store.files.path(_data(store)).rglob("*") if file.is_file()
    )
    for word in (listed.run[:12], "specimen", "resid_post 0-2, 4", "float32"):
        assert word in lines[1]
    assert len(said(capsys, "ls", "--keys", "--store", tmp_path / "store").splitlines()) == 1 + 5
    assert "resid_post" in said(capsys, "show", listed.run[:12], "--store", tmp_path / "store")


def _data(store):
    (entry,) = store.entries()
    return entry.path


def test_ls_for_machines_holds_the_whole_record(stored, capsys):
    path, record = stored
    (row,) = json.loads(said(capsys, "ls", "--store", path, "--json"))
    assert (row["key"], row["content"], row["label"]) == (record.key, record.content, record.label)


def test_the_store_may_come_from_the_environment(stored, capsys, monkeypatch):
    path, record = stored
    monkeypatch.setenv("MIZARR_STORE", str(path))
    assert record.key[:12] in said(capsys, "ls")


def test_show_takes_the_short_key_that_ls_prints(stored, capsys):
    path, record = stored
    text = said(capsys, "show", record.key[:12], "--store", path)
    assert "recovery" in text
    assert re.search(r"layer: 2, position: 3", text)


def test_show_for_machines_gives_dims_and_recipe(stored, capsys):
    path, record = stored
    found = json.loads(said(capsys, "show", record.key, "--store", path, "--json"))
    assert found["dataset"]["sizes"] == {"layer": 2, "position": 3}
    assert found["dataset"]["variables"]["recovery"]["attrs"]["unit"] == "1"
    assert found["provenance"][0]["request"]["stage"] == "recovery"


def test_verify_finds_nothing_in_a_sound_store(stored, capsys):
    path, _ = stored
    assert json.loads(said(capsys, "verify", "--store", path, "--json")) == []


def test_verify_exits_with_1_and_names_the_damaged_file(stored, capsys):
    path, _ = stored
    damaged = next(file for file in path.rglob("recovery/c/**/*") if file.is_file())
    bits = bytearray(damaged.read_bytes())
    bits[0] ^= 1
    damaged.write_bytes(bits)
    assert run(["verify", "--store", str(path)]) == 1
    assert str(damaged.relative_to(path)) in capsys.readouterr().out
    assert run(["verify", "--store", str(path), "--quarantine"]) == 1
    capsys.readouterr()
    assert said(capsys, "ls", "--store", path).splitlines()[1:] == [], "what was damaged is withdrawn"


def test_gc_removes_nothing_in_a_dry_run(stored, capsys):
    path, record = stored
    assert said(capsys, "gc", "--store", path, "--dry-run", "--grace", "0s", "--quota", "1B")
    assert record.key[:12] in said(capsys, "ls", "--store", path)


def test_gc_with_a_quota_removes_what_is_not_pinned(stored, capsys):
    path, record = stored
    arguments = ["gc", "--store", path, "--grace", "0s", "--quota", "1B", "--json"]
    said(capsys, "pin", "figure", record.key[:12], "--store", path)
    said(capsys, *arguments)
    (line,) = said(capsys, "ls", "--store", path).splitlines()[1:]
    assert line.startswith(record.key[:12]) and line.endswith("figure")
    said(capsys, "pin", "figure", "--remove", "--store", path)
    said(capsys, *arguments)
    assert record.key[:12] not in said(capsys, "ls", "--store", path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["figure"], "NAME and KEY"),
        (["figure", "ab", "--remove"], "NAME and KEY"),
        (["absent", "--remove"], "no pin 'absent'"),
        (["a/b", "{key}"], "'a/b'"),
    ],
)
def test_a_pin_that_makes_no_sense_is_refused(arguments, said, stored, capsys):
    path, record = stored
    filled = [argument.format(key=record.key) for argument in arguments]
    assert run(["pin", *filled, "--store", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_looking_into_a_store_that_is_not_there_is_one_line_and_makes_none(command, tmp_path, capsys):
    assert run([command, "--store", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.startswith("mizarr: error: ")
    assert not list(tmp_path.iterdir())


def test_an_unknown_key_is_one_line(stored, capsys):
    path, _ = stored
    assert run(["show", "ffffffffffff", "--store", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
