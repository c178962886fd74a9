"""The `mizarr` command group: parses arguments, calls the subcommand, prints errors as one line.

Results go to stdout (`--json` for machines), progress and messages to stderr. Errors that a subcommand raises
become one line on stderr and an exit code here. The subcommands are in the neighbouring files and import
their dependencies when they run, so that `--help` is fast and does not import torch.

Exit codes: 0 success; 1 a check failed (`verify` found damage, a model cannot run, a replication differs);
2 wrong usage, or an error that mizarr raises on purpose (`MizarrError`); 130 interrupted. Any other exception
is a defect of mizarr and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

import click

from ...store.display.terminal import echo, escape_reports_of_python
from ...store.errors import MizarrError
from ...store.version import __version__
from .completion import completion
from .doctor import doctor
from .features import features
from .generate import generate
from .models import models
from .options import SuggestingGroup
from .replicate import replicate
from .report import report
from .runs import capture, compute, demo, explain
from .stages import stages, workflows
from .stored.browse import browse, site
from .stored.exchange import export, import_
from .stored.moving import copy, merge
from .stored.store import gc, ls, pin, show, verify
from .train import train
from .zoo import train_zoo

__all__ = ["cli", "main", "run"]

MISUSE = 2
"""Exit code of wrong usage and of errors that mizarr raises on purpose; the same code as click's."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""


@click.group(
    cls=SuggestingGroup,
    # click wraps help at 80 columns by default, in a wider terminal too.
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: mizarr demo",
)
@click.version_option(__version__, prog_name="mizarr")
def cli() -> None:
    """Mechanistic interpretability as cached dataflow.

    Capture activations once, compute on them many times, see what is stored and why anything runs again.
    """


RUNNING = (demo, capture, generate, workflows, compute, report, replicate, train, train_zoo, explain, stages)
STORED = (ls, show, browse, site, export, import_, copy, merge, verify, pin, gc)
ABOUT = (doctor, completion)
# The order of the list in --help, see `SuggestingGroup.list_commands`.
for command in (*RUNNING, *STORED, models, features, *ABOUT):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code. args: default `sys.argv[1:]`."""
    escape_reports_of_python()
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, without ending the process.

    A `MizarrError`, an `OSError` with a file name and each Python warning are printed as one line on stderr.

    Arguments:
        args: Command-line arguments; None for `sys.argv[1:]`.
    """
    with warnings.catch_warnings():
        # `catch_warnings` restores it at the end of the block.
        warnings.showwarning = _show_warning
        return _run(args)


def _run(args: Sequence[str] | None) -> int:
    try:
        # standalone_mode=False: click raises its errors instead of printing them and ending the process.
        result = cli.main(args, prog_name="mizarr", standalone_mode=False)
        # Flushed within `try`, so that a closed pipe is noticed here and not at exit.
        sys.stdout.flush()
    # Before ClickException, its base class: a wrong usage also names the --help of its command.
    except click.UsageError as error:
        command_path = error.ctx.command_path if error.ctx else "mizarr"
        return _print_error(f"{error.format_message()} (see {command_path} --help)")
    except click.ClickException as error:
        return _print_error(error.format_message())
    except MizarrError as error:
        return _print_error(str(error))
    # click turns a KeyboardInterrupt within a command into Abort.
    except (click.Abort, KeyboardInterrupt):
        echo("mizarr: interrupted; what was finished is kept, the same command resumes", err=True)
        return INTERRUPTED
    # Before OSError, its base class.
    except BrokenPipeError:
        # The reader of the pipe (head, less) has exited. Python flushes stdout again at exit, which would
        # print a second BrokenPipeError: stdout is redirected to /dev/null.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # Without a file name the message would not say what failed: the traceback does.
        if error.filename is None:
            raise
        return _print_error(f"{error.strerror}: {os.fspath(error.filename)!r}")
    # Without standalone mode click returns what the command returns, or the code of `ctx.exit`.
    return result if isinstance(result, int) else 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a Python warning as one line on stderr, without file and line number."""
    echo(f"mizarr: warning: {' '.join(str(message).split())}", err=True)


def _print_error(message: str) -> int:
    """Print an error as one line on stderr; returns the exit code MISUSE."""
    echo(f"mizarr: error: {' '.join(message.split())}", err=True)
    return MISUSE
