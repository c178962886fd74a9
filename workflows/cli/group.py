"""The `mizarr` command: parse, call, print.

Data goes to stdout (`--json` for machines), talk and progress to stderr. This file holds the group and the
border to the shell: what is raised below becomes one line and an exit code here. The commands live beside it
and import what they need when they run, so that `--help` is quick and never meets torch.

Exit codes: 0 done; 1 `verify` found damage; 2 misuse, or an error mizarr raises on purpose; 130 interrupted.
Anything else is a defect of mizarr and keeps its traceback.
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
INTERRUPTED = 130


@click.group(
    cls=SuggestingGroup,
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
for command in (*RUNNING, *STORED, models, features, *ABOUT):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its code."""
    escape_reports_of_python()
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code. Errors raised on purpose and warnings become a line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(args)


def _run(args: Sequence[str] | None) -> int:
    try:
        result = cli.main(args, prog_name="mizarr", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "mizarr"
        return _say(f"{error.format_message()} (see {where} --help)")
    except click.ClickException as error:
        return _say(error.format_message())
    except MizarrError as error:
        return _say(str(error))
    except (click.Abort, KeyboardInterrupt):
        echo("mizarr: interrupted; what was finished is kept, the same command resumes", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left; python would complain once more when it flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        return _say(f"{error.strerror}: {os.fspath(error.filename)!r}")
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


def _say(message: str) -> int:
    echo(f"mizarr: error: {' '.join(message.split())}", err=True)
    return MISUSE
