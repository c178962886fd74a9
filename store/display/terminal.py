"""Safe output of text to a terminal.

Names, labels and texts come from files that others wrote. A terminal obeys escape sequences in what it is
sent: they can clear the screen, rewrite earlier lines or set the clipboard. So everything the package prints
goes through this module (or `console.py` for rich), which shows control characters as escapes such as
`\\x1b`. A test refuses other ways to print.

Wrapping stdout instead was considered and dropped: rich writes its own escape sequences to the same stream.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
import warnings
from types import TracebackType
from typing import Any

__all__ = ["echo", "escape_reports_of_python", "escaped"]

_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators, and what changes the direction of text
    "\ud800-\udfff]"  # bytes of a file name that are no UTF-8; no stream can encode them
)


def escaped(text: str, *, one_line: bool = False) -> str:
    r"""Replace control characters by visible escapes.

    Arguments:
        text: Any text.
        one_line: Whether newlines and tabs are escaped as well.

    >>> escaped("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    # Bidirectional marks are included: they can display a file name in an order that hides its suffix.
    text = _CONTROL_CHARACTERS.sub(_escape, text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if one_line else text


def _escape(character: re.Match[str]) -> str:
    code = ord(character[0])
    # JSON holds no raw C0, but may hold DEL: as \u007f a document stays JSON.
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text with its control characters escaped.

    Arguments:
        text: Converted with `str`.
        err: Whether to print to stderr instead of stdout.
        nl: Whether to end the line.
    """
    import click  # finds an encoding where the locale names none

    click.echo(escaped(str(text)), err=err, nl=nl)


def escape_reports_of_python() -> None:
    """Escape control characters in what Python itself prints: warnings, uncaught errors, unhandled logs."""
    # Error messages quote names and texts from files, too.
    sys.excepthook = _report_error
    threading.excepthook = lambda args: _report_error(args.exc_type, args.exc_value, args.exc_traceback)
    warnings.showwarning = _report_warning
    if logging.lastResort is not None:
        # The handler Python uses where the application has configured no logging.
        logging.lastResort.setFormatter(_EscapingFormatter())


def _report_error(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    echo("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), err=True)


def _report_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    echo(warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n"), err=True)


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))
