"""`mizarr models ls`, what it says of a cache, and one question asked of every model that is here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mizarr import Model
from mizarr.stages.forward.models.files import SHIPPED
from mizarr.stages.forward.models.listing import listed_models
from mizarr.workflows import compute
from mizarr.workflows.cli import run

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache: a model with a branch, a tag and a commit of its own; one without weights; one whose config is
    broken; one of a family nobody knows; a dictionary; a data set."""
    cache = tmp_path / "hub"

    def snapshot(name: str, commit: str, *references: str, **changed: bytes | None) -> None:
        folder = cache / name / "snapshots" / commit
        folder.mkdir(parents=True)
        for file in FILES:
            content = changed.get(file.partition(".")[0], (tiny_model / file).read_bytes())
            if content is not None:
                (folder / file).write_bytes(content)
        (cache / name / "refs").mkdir(exist_ok=True)
        for reference in references:
            path = cache / name / "refs" / reference
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)

    unknown = json.loads((tiny_model / "config.json").read_text()) | {"model_type": "nobodys"}
    snapshot("models--org--tiny", "c1", "main", "pr/1")
    snapshot("models--org--tiny", "c0", "step1000")
    snapshot("models--org--tiny", "c9")
    snapshot("models--org--half", "c2", "main", model=None)
    snapshot("models--org--torn", "c3", "main", config=b"{")
    snapshot("models--org--new", "c4", "main", config=json.dumps(unknown).encode())
    snapshot("models--org--dictionary", "c5", "main", config=None)
    snapshot("datasets--org--texts", "c6", "main")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


def test_everything_that_is_a_model_is_listed_with_what_stands_in_its_way(hub, tiny_model, capsys):
    assert run(["models", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    places = [(row["name"], row["revision"], row["commit"]) for row in rows]
    assert places == [
        *((name, None, None) for name in SHIPPED),
        ("org/half", "main", "c2"),
        ("org/new", "main", "c4"),
        ("org/tiny", "main", "c1"),
        ("org/tiny", "pr/1", "c1"),
        ("org/tiny", "step1000", "c0"),
        ("org/tiny", "c9", "c9"),
        ("org/torn", "main", "c3"),
    ]
    by_name = {row["name"]: row for row in rows}
    size = (tiny_model / "model.safetensors").stat().st_size
    tiny = by_name["org/tiny"]
    assert (tiny["layers"], tiny["hidden_size"], tiny["weight_bytes"]) == (3, 32, size)
    assert tiny["can_run"] and tiny["known_family"] and tiny["directory"].endswith("c9")
    assert not by_name["org/half"]["can_run"] and "model.safetensors" in by_name["org/half"]["obstacle"]
    assert "expected JSON" in by_name["org/torn"]["obstacle"]
    assert by_name["org/new"]["can_run"] and not by_name["org/new"]["known_family"]
    assert all("\n" not in row["obstacle"] for row in rows)
    assert run(["models", "ls"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + len(rows)
    assert any("step1000" in line and "yes" in line for line in said)


def test_an_empty_cache_lists_what_ships(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nowhere"))
    assert [each.name for each in listed_models()] == list(SHIPPED)


def test_a_question_goes_to_every_model_once(hub, tmp_path, capsys):
    ask = ["compute", "logit_lens", "--set", 'prompts=["it was the age of"]', "--every-model", "--quiet"]
    store = str(tmp_path / "store")
    code = run([*ask, "--store", store, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    documents = json.loads(out)
    told = {each["model"]: each for each in documents}
    assert list(told) == [*SHIPPED, "org/new", "org/tiny"]
    alone = compute(
        "logit_lens", store=tmp_path / "other", model="org/tiny", prompts=["it was the age of"]
    ).to_json()
    assert told["org/tiny"]["provenance"]["keys"] == alone["provenance"]["keys"]
    assert told["org/tiny"]["revision"] == "main"
    assert "skipped" in told["org/new"] and "skipped org/new" in err


@pytest.mark.parametrize("also", [["--model", "specimen"], ["--set", "revision=main"]])
def test_every_model_and_one_model_are_not_asked_at_once(also, tmp_path, capsys):
    code = run(["compute", "logit_lens", "--every-model", *also, "--store", str(tmp_path / "store")])
    said = capsys.readouterr().err
    assert code == 2 and said.strip().count("\n") <= 1
    assert "leave out --model" in said or "expected no revision" in said
    assert not (tmp_path / "store").exists()


def test_inspect_times_a_pass_and_tells_its_memory(tiny_model, capsys):
    assert run(["models", "inspect", str(tiny_model), "--time", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    timed = found["timed"]
    model = Model.from_pretrained(tiny_model)
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert found["bytes_in_float32"] == 4 * found["parameters"]
    assert timed["weight_bytes"] == model.weight_bytes == 4 * found["parameters"]
    assert len(tensors) > 10
    assert (timed["dtype"], timed["device"], timed["tokens"]) == ("float32", str(model.device), 16)
    assert 0 < timed["pass_seconds"] < 60 and timed["load_seconds"] > 0
    assert timed["memory"]["resident"]["peak"] >= timed["memory"]["resident"]["before"] > 0
    assert run(["models", "inspect", str(tiny_model), "--time", "--shapes-only", "--quiet"]) == 0
    assert "loaded in" in capsys.readouterr().out
    assert run(["models", "inspect", str(tiny_model), "--shapes-only", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["timed"] is None
