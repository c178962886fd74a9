"""`mizarr stages`: every stage and experiment, what it gives, and a door to each."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import mizarr
from mizarr.pipeline.plan import in_order
from mizarr.stages import find, registry
from mizarr.workflows import WORKFLOWS, build
from mizarr.workflows.cli import run
from mizarr.workflows.usage import Use, uses
from tests.torch_free import without_torch

PAGE = (Path(mizarr.__file__).parent / "docs" / "reference" / "python.md").read_text()


@pytest.fixture(scope="module")
def used() -> dict[str, Use]:
    return uses()


@pytest.fixture(autouse=True)
def asked_once(monkeypatch, used):
    """Planning every workflow takes seconds; the answer does not change."""
    monkeypatch.setattr("mizarr.workflows.usage.uses", lambda: used)


def said(capsys, *arguments: str) -> str:
    assert run(["stages", *arguments]) == 0
    return capsys.readouterr().out


def test_every_stage_and_experiment_has_a_door(used):
    """A workflow uses it, or another form of it, or docs/reference/python.md says where to import it from."""
    assert list(used) == list(registry())
    without = [
        name
        for name, use in used.items()
        if not use.workflows and not use.form_of and f"`{use.declaration.home}`" not in PAGE
    ]
    assert not without, "name it in docs/reference/python.md"


def test_a_form_without_a_workflow_leads_to_one_that_has_some(used):
    forms = {name: use.form_of for name, use in used.items() if use.form_of}
    assert forms["head_attribution_post_norm"] == "head_attribution"
    for name, other in forms.items():
        assert used[other].workflows and name in find(other).forms


def test_what_the_reference_says_can_be_imported_is_there():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `mizarr.")]
    names = [part for line in rows for part in line.split("`") if part.startswith("mizarr.")]
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


def test_users_are_the_workflows_whose_own_graph_has_it(used):
    nodes = {node.name for node in in_order(build("logit_attribution").nodes.values())}
    for name in ("contrasted_tokens", "head_attribution", "logit_lens", "edge_knockout"):
        assert ("logit_attribution" in used[name].workflows) == (name in nodes)
    assert used["causal_tracing"].workflows == ("causal_tracing",)
    assert {workflow for use in used.values() for workflow in use.workflows} <= set(WORKFLOWS)


def test_the_table_has_all_names_outputs_and_users(capsys, used):
    head, *lines = said(capsys).splitlines()
    assert head.split() == ["NAME", "KIND", "VERSION", "INPUT", "OUTPUT", "USED", "BY"]
    heads = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    assert list(heads) == list(registry())
    for name, line in heads.items():
        kind, version = line.split()[1:3]
        declared = used[name].declaration
        assert (kind, version) == (declared.kind, str(declared.version))
        label, output = next(iter(declared.outputs.items()))
        assert f"{label}{'?' * output.is_optional} [{', '.join(output.dims)}] {output.unit}" in line
        assert line.endswith(used[name].doors[0])


def test_one_is_described_with_its_users(capsys):
    lines = said(capsys, "edge_knockout").splitlines()
    assert lines[:-1] == find("edge_knockout").describe().splitlines()
    assert lines[-1] == "  use attention_knockout"
    assert (
        said(capsys, "layer_cka").splitlines()[-1]
        == "  use library: mizarr.stages.geometry.similarity.layer_cka"
    )


def test_documents_for_machines_say_the_same(capsys, used):
    every = json.loads(said(capsys, "--json"))
    assert [one["name"] for one in every] == list(registry())
    one = json.loads(said(capsys, "edge_knockout", "--json"))
    assert one == next(each for each in every if each["name"] == "edge_knockout")
    assert one["kind"] == "experiment" and one["workflows"] == ["attention_knockout"]
    assert one["outputs"]["kl"] == {
        "dims": ["layer", "edge"],
        "unit": "nats",
        "long_name": "KL(baseline || changed) at the prompt's last position",
        "is_optional": False,
    }
    assert one["resources"] == ["model"] and one["parameters"]["tokens"] is None
    assert one["parameters"]["top_k"] == "10"


def test_an_unknown_name_is_one_line_with_the_nearest_and_exit_code_2(capsys):
    assert run(["stages", "logit_lenz"]) == 2
    assert "did you mean 'logit_lens'?" in capsys.readouterr().err


@pytest.mark.wide
def test_the_whole_table_never_imports_torch(used):
    program = """
from mizarr.workflows.usage import uses
print(json.dumps({name: use.to_json() for name, use in uses().items()}))
"""
    assert without_torch(program) == {name: use.to_json() for name, use in used.items()}
