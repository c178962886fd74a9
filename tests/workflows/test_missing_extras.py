"""Without an optional part: what needs it says so before it computes, and the rest is shown."""

from __future__ import annotations

import sys
from io import StringIO

import pytest
from rich.console import Console

import mizarr
from mizarr.store.errors import MissingExtra
from mizarr.workflows import WORKFLOWS, build, demo
from mizarr.workflows.cli import run
from mizarr.workflows.workflow import Workflow

PROMPT = "The mother tongue of Danielle Darrieux is"


@pytest.fixture
def without(monkeypatch):
    """Make modules impossible to import."""

    def hide(*names: str) -> None:
        for name in names:
            for module in [each for each in sys.modules if each.split(".")[0] == name]:
                monkeypatch.delitem(sys.modules, module)
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.fixture
def computing(monkeypatch) -> list[object]:
    """What the pipeline was asked to compute; it computes nothing."""
    asked: list[object] = []
    monkeypatch.setattr("mizarr.pipeline.run", lambda nodes, *_, **__: asked.append(nodes))
    return asked


@pytest.mark.parametrize("name", ["probe", "layer_scan"])
def test_a_workflow_that_needs_an_extra_says_so_before_it_computes(name, without, computing, tmp_path):
    without("sklearn", "scipy")
    with pytest.raises(MissingExtra, match=rf"^{name} needs .*mizarr\[probing\]"):
        mizarr.compute(name, store=tmp_path / "store")
    assert not computing


def test_figures_are_refused_before_anything_is_computed(without, computing, capsys, tmp_path):
    without("matplotlib")
    arguments = [
        "compute",
        "logit_lens",
        "--store",
        str(tmp_path / "store"),
        "--figures",
        str(tmp_path / "f"),
    ]
    for more in ([], ["--every-model"]):
        assert run([*arguments, *more]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert "mizarr[plots]" in said.err
    assert not computing
    assert not (tmp_path / "f").exists()


def test_what_is_cached_is_shown_without_the_extra(without, tmp_path):
    """Tables of a probe that was computed elsewhere need no scikit-learn."""
    store = mizarr.open_store(tmp_path / "store")
    small = {"targets": ["line_break"], "layers": [3], "examples": 200, "widths": [40]}
    first = mizarr.compute("probe", store=store, **small).to_json()
    without("sklearn", "scipy")
    assert build("probe", **small).run(store).to_json()["provenance"] == first["provenance"]


def test_the_demo_asks_both_questions_without_matplotlib(without, monkeypatch, tmp_path):
    without("matplotlib")
    lens = {"prompts": [PROMPT], "answers": ["French"]}
    monkeypatch.setattr(demo, "DEMO", {"logit_lens": lens, "token_positions": {}})
    out, talk = (Console(width=100, file=StringIO()) for _ in range(2))
    done = demo.run(mizarr.open_store(tmp_path / "store"), tmp_path / "figures", console=out, talk=talk)
    assert [workflow.name for workflow in done.workflows] == ["logit_lens", "token_positions"]
    assert done.figures == []
    assert "French" in out.file.getvalue()
    assert "mizarr[plots]" in talk.file.getvalue()


def test_every_workflow_that_names_an_extra_names_one_there_is():
    from mizarr.stages.extras import EXTRAS
    from mizarr.workflows import kind_of

    kinds: list[type[Workflow]] = [kind_of(name) for name in WORKFLOWS]
    assert {kind.extra for kind in kinds} == {"", "probing"} <= {"", *EXTRAS}
