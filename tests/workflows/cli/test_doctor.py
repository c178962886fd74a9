"""`mizarr doctor`: what it says is so, and it leaves nothing behind."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import mizarr
from mizarr.stages.extras import EXTRAS
from mizarr.workflows.cli import run


def told(capsys, *arguments: str) -> dict[str, dict[str, str]]:
    assert run(["doctor", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_names_versions_devices_places_and_optional_parts(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    said = told(capsys, "--store", str(tmp_path / "store"))
    assert said["mizarr"]["version"] == mizarr.__version__
    assert said["packages"]["torch"] == version("torch")
    assert "matplotlib" not in said["packages"]
    assert list(said["optional parts"]) == list(EXTRAS)
    assert said["computing"]["devices"].startswith("cpu")
    assert said["places"]["store"] == f"{tmp_path / 'store'}, does not exist yet"
    assert said["places"]["cache"].startswith(str(tmp_path / "cache"))
    assert not list(tmp_path.iterdir()), "looking leaves nothing behind"


def test_what_is_missing_is_told_with_the_command_that_adds_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = told(capsys)["optional parts"]["plots"]
    assert said.startswith("missing matplotlib: pip install 'mizarr[plots]'")


def test_a_folder_that_is_no_store_is_told(capsys, tmp_path):
    mizarr.open_store(tmp_path / "store")
    assert told(capsys, "--store", str(tmp_path / "store"))["places"]["store"].endswith("can be written")
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("no store")
    assert "other: " in told(capsys, "--store", str(other))["places"]["store"]


def test_the_text_has_every_fact(capsys):
    facts = told(capsys)
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if not line.startswith(" ")] == list(facts)
    assert all(name in text for group in facts.values() for name in group)
