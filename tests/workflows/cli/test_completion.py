"""Shell completion: scripts of three shells, and what they ask mizarr for."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mizarr.workflows import WORKFLOWS
from mizarr.workflows.cli import run
from mizarr.workflows.cli.completion import VARIABLE

START = [sys.executable, "-c", "from mizarr.workflows.cli import main; main()"]


def script(shell: str, capsys) -> str:
    assert run(["completion", shell]) == 0
    return capsys.readouterr().out


def offered(*words: str) -> list[str]:
    """What a shell is told when the last word is to be completed."""
    typed = ["mizarr", *words]
    environment = {
        VARIABLE: "bash_complete",
        "COMP_WORDS": " ".join(typed),
        "COMP_CWORD": str(len(typed) - 1),
    }
    done = subprocess.run(START, capture_output=True, text=True, check=False, env=environment)
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_that_asks_mizarr(shell, capsys):
    said = script(shell, capsys)
    assert VARIABLE in said and "mizarr" in said
    if program := shutil.which(shell):
        read = subprocess.run([program, "-n"], input=said, capture_output=True, text=True, check=False)
        assert read.returncode == 0, read.stderr


def test_commands_workflows_and_settings_are_completed():
    assert offered("comp") == ["compute", "completion"]
    assert offered("compute", "logit") == [name for name in WORKFLOWS if name.startswith("logit")]
    assert "top_k=" in offered("compute", "logit_lens", "--set", "")
    assert offered("compute", "nothing", "--set", "") == []


def test_another_shell_is_misuse(capsys):
    assert run(["completion", "powershell"]) == 2
    assert "bash" in capsys.readouterr().err
