"""What a user sees first: commands alone, and the list of workflows."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest

from mizarr.workflows import WORKFLOWS, kind_of
from mizarr.workflows.cli import run
from mizarr.workflows.cli.group import cli
from mizarr.workflows.cli.stages import SUBJECTS

WIDTH = 100
"""Columns of a help text at most."""


def groups(command=cli, words=()):
    """The words of every command that only holds commands."""
    if isinstance(command, click.Group):
        yield words
        for name, inner in command.commands.items():
            yield from groups(inner, (*words, name))


@pytest.mark.parametrize("words", list(groups()), ids=" ".join)
def test_a_group_alone_prints_its_help(words, capsys):
    assert run(list(words)) == 0
    alone = capsys.readouterr()
    assert run([*words, "--help"]) == 0
    asked = capsys.readouterr()
    assert alone.out == asked.out
    assert alone.err == ""
    assert alone.out.startswith("Usage: ") and len(alone.out.splitlines()) > 8


def test_a_group_with_an_option_and_no_command_is_an_error(capsys):
    assert run(["models", "--no-such-option"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_workflows_lists_every_question_once(capsys):
    assert run(["workflows"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    words = out.split()
    assert all(words.count(name) == 1 for name in WORKFLOWS)
    flat = " ".join(words)
    assert all(" ".join(kind_of(name).question.split()) in flat for name in WORKFLOWS)
    assert run(["workflows", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert sorted(entry["name"] for entry in listed) == sorted(WORKFLOWS)
    assert {entry["subject"] for entry in listed} == set(SUBJECTS.values())


@pytest.mark.parametrize("name", ["logit_lens", "activation_patching", "attribution_graph"])
def test_workflows_name_lists_its_settings(name, capsys):
    assert run(["workflows", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(kind_of(name).question)
    assert run(["workflows", name, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert "model" in settings
    assert all(f"  {setting}" in out for setting in settings)
    assert run(["workflows", name[:-1]]) == 2
    assert f"did you mean '{name}'?" in capsys.readouterr().err


def test_the_list_of_workflows_loads_no_torch():
    code = (
        "import sys; from mizarr.workflows.cli import run; run(['workflows']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", ["compute", "report", "explain"])
def test_commands_on_workflows_say_where_these_are_listed(command, capsys):
    assert run([command, "--help"]) == 0
    assert "`mizarr workflows` lists the workflows" in capsys.readouterr().out
