"""The command line: what it says, where it says it, and the exit code it leaves."""

from __future__ import annotations

import errno
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import mizarr
from mizarr.store.errors import HookPointNotFound
from mizarr.workflows.cli import cli, run

PAGE = (Path(mizarr.__file__).parent / "docs" / "reference" / "commands.md").read_text()


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Every command that does something, by the words that call it."""
    found: dict[tuple[str, ...], click.Command] = {}
    for name, command in group.commands.items():
        words = (*path, name)
        found |= commands(command, words) if isinstance(command, click.Group) else {words: command}
    return found


COMMANDS = commands()


@pytest.fixture
def failing(monkeypatch):
    """Make `mizarr broken` raise what it is given."""

    def install(error: BaseException) -> None:
        @click.command()
        def broken() -> None:
            raise error

        monkeypatch.setitem(cli.commands, "broken", broken)

    return install


# Documented


def test_the_promised_commands_are_there():
    words = {" ".join(path) for path in COMMANDS}
    assert words >= {"demo", "capture", "compute", "explain", "ls", "show", "verify", "gc"}
    assert words >= {"models fetch", "models inspect"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_in_the_reference(words):
    assert re.search(rf"`mizarr {' '.join(words)}\b", PAGE), f"add `mizarr {' '.join(words)}` to commands.md"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_says_what_it_does_and_ends_with_an_example_that_parses(words, capsys):
    assert run([*words, "--help"]) == 0
    said = capsys.readouterr().out
    example = said[said.index("Example: ") :].removeprefix("Example: ")
    program, *rest = shlex.split(" ".join(example.split()))
    assert program == "mizarr" and tuple(rest[: len(words)]) == words
    COMMANDS[words].make_context(words[-1], rest[len(words) :])  # parses, or raises UsageError


@pytest.mark.parametrize("group", [[], ["models"]], ids=["mizarr", "models"])
def test_the_list_of_commands_cuts_no_line_short(group, capsys):
    assert run([*group, "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_says_what_it_is_for(words):
    silent = [p.name for p in COMMANDS[words].params if isinstance(p, click.Option) and not p.help]
    assert not silent


def test_version_is_that_of_the_package(capsys):
    assert run(["--version"]) == 0
    assert mizarr.__version__ in capsys.readouterr().out


# Misuse


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["captur"], "did you mean 'capture'?"),
        (["models", "inspekt", "x"], "did you mean 'inspect'?"),
        (["xyzzy"], "there are demo, capture"),
        (["ls", "--jsn"], "--json"),
        (["capture", "specimen"], "(see mizarr capture --help)"),
        (["capture", "specimen", "a", "--text", "--hooks", "x", "--dtype", "int4"], "bfloat16"),
        (["gc", "--grace", "soon"], "expected a duration"),
        (["compute", "x", "--set", "k"], "expected name=value"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_misuse_is_one_line_on_stderr_and_exit_code_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("mizarr: error: ") and streams.err.count("\n") == 1
    assert said in streams.err
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


def test_an_error_raised_on_purpose_is_one_line_and_exit_code_2(failing, capsys):
    failing(HookPointNotFound("there is no hook point 'x';\n  did you mean 'y'?"))
    assert run(["broken"]) == 2
    assert capsys.readouterr().err == "mizarr: error: there is no hook point 'x'; did you mean 'y'?\n"


def test_an_error_of_the_operating_system_names_the_file(failing, capsys):
    failing(PermissionError(errno.EACCES, "Permission denied", "sealed.txt"))
    assert run(["broken"]) == 2
    assert capsys.readouterr().err == "mizarr: error: Permission denied: 'sealed.txt'\n"


def test_a_defect_keeps_its_traceback(failing):
    failing(ZeroDivisionError("our fault"))
    with pytest.raises(ZeroDivisionError):
        run(["broken"])


def test_an_interrupt_says_that_the_run_resumes(failing, capsys):
    failing(KeyboardInterrupt())
    assert run(["broken"]) == 130
    streams = capsys.readouterr()
    assert "resumes" in streams.err and "Traceback" not in streams.err


# As processes


def test_a_reader_that_leaves_is_no_error():
    """As in `mizarr capture --help | head -0`: quiet on stderr."""
    command = [sys.executable, "-c", "from mizarr.workflows.cli import main; main(['--help'])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) in (0, 1)


WAITING = """
import time, click
from mizarr.workflows.cli import cli, main
@cli.command()
def wait():
    click.echo("ready", err=True)
    time.sleep(60)
main(["wait"])
"""


def test_ctrl_c_ends_a_process_with_130_and_one_line():
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == "mizarr: interrupted; what was finished is kept, the same command resumes"
