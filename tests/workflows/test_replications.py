"""Published results are asked for again as they were published, or their protocol runs on a shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mizarr.stages.forward.models.files import ModelFiles, resolve
from mizarr.workflows import WORKFLOWS, build, kind_of
from mizarr.workflows.cli import run
from mizarr.workflows.replications import REPLICATIONS, PrintedNumber, value_at
from mizarr.workflows.settings import read_settings


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and nothing in its cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("name", REPLICATIONS)
def test_its_settings_are_those_of_its_workflow(name: str):
    asked = REPLICATIONS[name]
    assert asked.workflow in WORKFLOWS and asked.title and asked.source
    kind = kind_of(asked.workflow)
    for model in asked.models:
        read_settings(kind.settings_type, asked.workflow, asked.asked(model))
    assert {claim.model for claim in asked.claims} <= set(asked.models)
    planned = build(asked.workflow, **asked.here)
    assert planned.nodes


def test_they_are_listed(capsys: pytest.CaptureFixture[str]):
    assert run(["replicate"]) == 0
    said = capsys.readouterr().out
    assert all(name in said and each.workflow in said for name, each in REPLICATIONS.items())
    assert run(["replicate", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == list(REPLICATIONS)


def test_offline_it_says_what_it_would_fetch_and_runs_the_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = ["replicate", "attention-patterns", "--store", str(tmp_path / "store"), "--quiet", "--json"]
    assert run(asked) == 0
    said = capsys.readouterr()
    assert (
        "not in the local cache: meta-llama/Llama-3.2-1B at main (unknown size, because the hub" in said.err
    )
    assert "not that the result replicates" in said.err
    document = json.loads(said.out)
    assert document["is_published_model"] is False and document["claims"] == []
    expected = build("attention_patterns", prompt="The capital of France is", key="first")
    assert document["model_id"] == "specimen"
    assert document["settings"] == json.loads(json.dumps(expected.header()["settings"]))


def test_printed_numbers_stand_beside_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A shipped model under the name of a published one: its numbers are others, and that is told."""
    from mizarr.stages.forward.models import files

    def found(name: str, *given: object, **told: object) -> ModelFiles:
        return resolve("specimen") if name == "meta-llama/Llama-3.2-1B" else resolve(name)

    monkeypatch.setattr(files, "resolve", found)
    monkeypatch.setattr("mizarr.workflows.subject.resolve", found, raising=False)
    monkeypatch.setattr("mizarr.stages.forward.models.source.resolve", found, raising=False)
    asked = ["replicate", "attention-patterns", "--store", str(tmp_path / "store"), "--quiet"]
    assert run([*asked, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["is_published_model"] is True
    places = [claim["place"] for claim in document["claims"]]
    assert places == ["peak_layer", "peak_weight"]
    assert document["claims"][0]["found"] == document["peak_layer"]
    assert not all(claim["agrees"] for claim in document["claims"])
    assert run(asked) == 1
    assert "AGREES" in capsys.readouterr().out


def test_what_is_asked_wrongly_is_told(capsys: pytest.CaptureFixture[str]):
    assert run(["replicate", "logit-len"]) == 2
    assert "no replication 'logit-len'; did you mean 'logit-lens'?" in capsys.readouterr().err
    assert run(["replicate", "logit-lens", "--model", "gpt2"]) == 2
    assert "mizarr compute logit_lens --model gpt2" in capsys.readouterr().err


def test_agreement_is_within_what_was_printed():
    claim = PrintedNumber("m", ("a", 0), 0.5, 0.01)
    assert [claim.agrees(found) for found in (0.509, 0.511, None, "0.5")] == [True, False, False, False]
    assert PrintedNumber("m", ("a",), " Par").agrees(" Par") and claim.place == "a.0"
    assert value_at({"a": [3]}, ("a", 0)) == 3 and value_at({"a": [3]}, ("a", 1)) is None
