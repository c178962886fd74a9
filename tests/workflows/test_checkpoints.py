"""Several revisions in one question: each answered as alone, side by side along an axis, told as curves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr
from mizarr.store.errors import ConfigError, ModelNotFound
from mizarr.workflows import build, compute
from mizarr.workflows.checkpoints import several_revisions
from mizarr.workflows.cli import run
from mizarr.workflows.views import Lines
from mizarr.workflows.workflow import Workflow

REVISIONS = ("step1", "step2", "main")
ASK: dict[str, Any] = {"sequences": 2, "length": 8}


@pytest.fixture(scope="module")
def hub(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A hub id of three revisions, whose attention is ever sharper."""
    from safetensors.torch import load_file, save_file

    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for reference, scale in zip(REVISIONS, (0.2, 0.6, 1.0), strict=True):
        snapshot = repository / "snapshots" / f"commit-{reference}"
        snapshot.mkdir(parents=True)
        (repository / "refs" / reference).write_text(snapshot.name)
        for file in tiny_model.iterdir():
            (snapshot / file.name).write_bytes(file.read_bytes())
        tensors = load_file(snapshot / "model.safetensors")
        for name in tensors:
            if "q_proj" in name:
                tensors[name] *= scale
        save_file(tensors, snapshot / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(cache))
        yield "org/tiny"


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of what was asked of one revision at a time."""
    return tmp_path_factory.mktemp("beside") / "store"


@pytest.fixture(scope="module")
def alone(hub: str, beside: Path) -> dict[str, Workflow]:
    """What is answered of each revision alone."""
    return {
        revision: compute("head_detection", store=beside, model=hub, revision=revision, **ASK)
        for revision in REVISIONS
    }


def test_each_revision_is_answered_as_alone_and_stands_along_one_axis(hub, alone, tmp_path):
    done = compute("head_detection", store=tmp_path / "store", model=hub, revision=list(REVISIONS), **ASK)
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert list(document["revisions"]) == list(REVISIONS)
    name = next(iter(done.by_revision["main"].nodes))
    whole = done.result(name)
    assert whole["revision"].values.tolist() == list(REVISIONS)
    effects = []
    for row, revision in enumerate(REVISIONS):
        single = alone[revision]
        own = document["revisions"][revision]
        assert own["provenance"]["keys"] == single.to_json()["provenance"]["keys"]
        for variable, values in single.result(name).load().data_vars.items():
            found = whole[variable].isel(revision=row).values
            if values.dtype.kind == "f":
                np.testing.assert_array_equal(found, values.values)
        effects.append([each["effect"] for each in single.to_json()["findings"]])
    curves = [view for view in done.shown if isinstance(view, Lines)]
    for number in range(len(effects[0])):
        drawn = {line.name: line.values for line in curves[number].lines}
        np.testing.assert_array_equal(drawn["effect"], [each[number] for each in effects])
        nulls = [document["revisions"][each]["findings"][number]["null"] for each in REVISIONS]
        np.testing.assert_allclose(drawn["null, highest of 95 %"], [null["high_95"] for null in nulls])
    assert len({tuple(each) for each in effects}) == 3, "revisions differ"


def test_what_was_computed_alone_is_not_computed_again(hub, alone, beside, tmp_path, monkeypatch):
    monkeypatch.setattr(mizarr.Model, "from_pretrained", None)
    done = compute("head_detection", store=beside, model=hub, revision=",".join(REVISIONS), **ASK)
    assert done.draw(tmp_path / "figures")
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


def test_on_the_command_line(hub, tmp_path, capsys):
    ask = ["--set", f"model={hub}", "--set", "revision=step1,main", "--store", str(tmp_path / "store")]
    ask += [part for name, value in ASK.items() for part in ("--set", f"{name}={value}")]
    assert run(["explain", "head_detection", *ask, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["revision"] == "step1,main"
    assert run(["compute", "head_detection", *ask, "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "2 revisions of org/tiny" in said and "step1" in said
    assert run(["compute", "head_detection", *ask, "--quiet", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["revision"] == "step1,main"
    assert [each["commit"] for each in document["checkpoints"]] == ["commit-step1", "commit-main"]


def test_a_question_that_only_describes_has_numbers_by_revision(hub, tmp_path):
    done = compute("inspect_weights", store=tmp_path / "store", model=hub, revision=["step1", "main"])
    told = done.to_json()
    for name, values in told.get("by_revision", {}).items():
        assert values == [told["revisions"][revision][name] for revision in ("step1", "main")]
    assert done.tables()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ("main", ()),
        ("a,b", ("a", "b")),
        ("a, b", ("a", "b")),
        (["a", "b"], ("a", "b")),
        (["a"], ("a",)),
        (("x", 2), ("x", "2")),
    ],
)
def test_revisions_are_read_from_lists_and_commas(given, expected):
    assert several_revisions(given) == expected


@pytest.mark.parametrize("given", ["a,a", "a,", ["a", ""], ["a", "a"]])
def test_revisions_that_do_not_differ_are_refused(given, hub):
    with pytest.raises(ConfigError, match="revisions that differ") as caught:
        build("head_detection", model=hub, revision=given, **ASK)
    assert "\n" not in str(caught.value)


def test_a_revision_that_is_not_there_is_one_line(hub):
    with pytest.raises(ModelNotFound, match="at revision 'step9'") as caught:
        build("head_detection", model=hub, revision="step1,step9", **ASK)
    assert "\n" not in str(caught.value)
