"""`mizarr compute` and `mizarr explain` on a model of two layers that reads a few words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mizarr.workflows.cli import run

PROMPTS = 'prompts=["w1 w2 w3", "w4 w5"]'


@pytest.fixture
def arguments(checkpoint, tmp_path):
    """What every call below shares."""
    return ["logit_lens", "--model", checkpoint(), "--set", PROMPTS, "--store", str(tmp_path / "store")]


def test_explain_says_what_will_run_and_leaves_no_trace(arguments, capsys, tmp_path):
    assert run(["explain", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workflow"] == "logit_lens"
    assert found["steps"][0]["state"].startswith("will run because")
    assert not (tmp_path / "store").exists()


def test_explain_for_people_lists_the_settings_on_stderr(arguments, capsys):
    assert run(["explain", *arguments]) == 0
    streams = capsys.readouterr()
    assert streams.out.startswith("STAGE")
    assert '--set prompts=["w1 w2 w3", "w4 w5"]' in streams.err


def test_computing_makes_every_stage_cached(arguments, capsys):
    assert run(["compute", *arguments, "--quiet"]) == 0
    assert "w1 w2 w3" in capsys.readouterr().out
    assert run(["explain", *arguments, "--json"]) == 0
    assert {step["state"] for step in json.loads(capsys.readouterr().out)["steps"]} == {"cached"}


def test_the_answer_for_machines_is_one_json_document(arguments, capsys, tmp_path):
    assert run(["compute", *arguments, "--quiet", "--json", "--figures", str(tmp_path / "figures")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["prompt"] for result in found["results"]] == ["w1 w2 w3", "w4 w5"]
    assert found["figures"] == [str(path) for path in sorted((tmp_path / "figures").iterdir())]


@pytest.mark.parametrize("command", ["explain", "compute"])
def test_what_is_cached_never_imports_torch(command, arguments, capsys):
    assert run(["compute", *arguments, "--quiet"]) == 0
    code = (
        f"import sys; from mizarr.workflows.cli import run; assert run({[command, *arguments]!r}) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["logit_lense"], "did you mean 'logit_lens'?"),
        (["logit_lens", "--set", "topk=3"], "did you mean 'top_k'?"),
        (["logit_lens", "--set", "top_k=0"], "at least 1"),
        (["logit_lens", "--set", "top_k=many"], "expected top_k"),
        (["logit_lens", "--set", "model=a", "--model", "b"], "given twice"),
        (["logit_lens", "--model", "./nowhere", "--set", PROMPTS], "./nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_workflow_or_setting_there_is_not_is_one_line(change, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["compute", *change]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert said in streams.err and streams.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
