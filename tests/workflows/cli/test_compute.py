"""`mizarr compute` and `mizarr explain` on a model of two layers that reads a few words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mizarr.pipeline.reasons import scaled_seconds
from mizarr.stages.forward.runs.duration import IMPORT_SECONDS
from mizarr.store import open_store
from mizarr.store.provenance import get_provenance
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


def test_explain_refuses_the_workers_that_compute_refuses(arguments, capsys):
    both = ["--workers", "2", "--cluster", "tcp://127.0.0.1:1"]
    told = [
        (run([command, *arguments, *both]), capsys.readouterr().err) for command in ("explain", "compute")
    ]
    assert told[0] == told[1]
    assert told[0][0] == 2
    assert told[0][1].startswith("mizarr: error: both a cluster")


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


def test_explain_estimates_how_long_what_ran_before_will_take(checkpoint, capsys, tmp_path):
    model, store = checkpoint(), str(tmp_path / "store")

    def steps(workflow, *chosen):
        arguments = [workflow, "--model", model, "--store", store, "--json"]
        assert run(["explain", *arguments, *(word for pair in chosen for word in ("--set", pair))]) == 0
        return {step["name"]: step["seconds"] for step in json.loads(capsys.readouterr().out)["steps"]}

    def took(name):
        (note,) = (
            note
            for record in open_store(store, mode="r").records()
            if record.label.rpartition("/")[0] == name
            for note in open_store(store, mode="r").provenance(record)[:1]
        )
        return note

    edge = ["target=w5", "key=0", "layer=0"]
    knockout = ["attention_knockout", "prompt=w1 w2 w3 w4", *edge]
    counted = steps(*knockout)  # before anything ran
    assert counted.keys() == {"edge_knockout", "head_knockout"}
    assert all(seconds >= IMPORT_SECONDS for seconds in counted.values())
    chosen = [word for pair in knockout[1:] for word in ("--set", pair)]
    assert run(["compute", knockout[0], "--model", model, "--store", store, *chosen, "--quiet"]) == 0
    capsys.readouterr()
    found = steps("attention_knockout", "prompt=w1 w2 w3 w4 w6 w7", *edge)
    note = took("edge_knockout")
    more = 2 * 2  # layers, further positions that may be read
    expected = scaled_seconds(note, (note["runs"] + more) / note["runs"])
    assert found["edge_knockout"] == pytest.approx(expected, abs=2e-3)
    assert found["head_knockout"] == pytest.approx(took("head_knockout")["seconds"], abs=2e-3)


def test_explain_scales_captures_by_their_tokens(arguments, capsys, tmp_path):
    assert run(["compute", *arguments, "--quiet"]) == 0
    capsys.readouterr()
    longer = ['prompts=["w1 w2 w3 w4 w5 w6 w7 w8 w9 w1"]' if word == PROMPTS else word for word in arguments]
    assert run(["explain", *longer, "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["steps"][0]
    (entry,) = open_store(tmp_path / "store", mode="r").entries()
    (note,) = (note for note in get_provenance(entry.folder, entry.path) if "tokens" in note)
    assert note["tokens"] == 5
    assert step["seconds"] == pytest.approx(scaled_seconds(note, 2), abs=2e-3)
    assert run(["explain", *longer]) == 0
    assert "about " in capsys.readouterr().out.splitlines()[1]


def test_the_answer_for_machines_is_one_json_document(arguments, capsys, tmp_path):
    assert run(["compute", *arguments, "--quiet", "--json", "--figures", str(tmp_path / "figures")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["prompt"] for result in found["results"]] == ["w1 w2 w3", "w4 w5"]
    assert found["figures"] == [str(path) for path in sorted((tmp_path / "figures").iterdir())]


def test_what_is_cached_never_imports_torch(arguments):
    assert run(["compute", *arguments, "--quiet"]) == 0
    code = "import sys; from mizarr.workflows.cli import run\n" + "".join(
        f"assert run({[command, *arguments]!r}) == 0; assert 'torch' not in sys.modules\n"
        for command in ("explain", "compute")
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
