"""Progress on stderr: amount done, total, rate, remaining time and memory of the process.

A bar on a terminal; a line every few seconds if stderr is a file; nothing when quiet. A log file gets one
flushed line of JSON for every step, independently of stderr:

    {"time": "2026-01-31T12:00:00Z", "task": "capture", "done": 8192, "total": 65536, "unit": "tokens",
     "bytes": 6291456, "seconds": 4.1, "rate": 1998.0, "seconds_left": 28.7}

Border: counts and units; does not know what the units are. rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from ..store.display.terminal import echo
from ..store.errors import ConfigError
from .memory import megabytes, resident

_LINE_EVERY = 5.0  # seconds between plain lines
_PREFIXES = ("", "k", "M", "G", "T")
"""Metric prefixes, each a thousand times the one before it."""


class Bar:
    """Counter of one task's progress, such as captured tokens; `advance` may be called from any thread."""

    def __init__(self, owner: Progress, label: str, total: int | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self.written = 0
        self._owner = owner
        self._started = self._printed = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Any = None

    def advance(self, count: int = 1, written: int = 0) -> None:
        """Count finished work, and show it.

        Arguments:
            count: Number of units that have finished since the last call.
            written: Bytes stored since the last call.
        """
        with self._lock:
            self.done += count
            self.written += written
            self._owner._show(self)
            self._owner._log(self)

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        # A first count may come within one tick of the clock.
        return self.done / max(time.monotonic() - self._started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the average rate; None if the total is unknown or nothing is done."""
        return (self.total - self.done) / self.rate if self.total and self.done else None

    def to_json(self) -> dict[str, Any]:
        """State of the task as one line of the progress log, in plain values."""
        seconds_left = self.seconds_left
        return {
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "task": self.label,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "bytes": self.written,
            "seconds": round(time.monotonic() - self._started, 3),
            "rate": round(self.rate, 3),
            "seconds_left": None if seconds_left is None else round(seconds_left, 3),
        }

    def describe(self) -> str:
        """State of the task as one line: label, done / total, rate, bytes written, time left, memory of the
        process."""
        total = f" / {short(self.total)}" if self.total else ""
        remaining = "" if (seconds := self.seconds_left) is None else f", {clock(seconds)} left"
        written = f", {short(self.written)}B written" if self.written else ""
        rate = f"{short(self.rate)} {self.unit}/s"
        resident_bytes = resident()
        memory = "" if resident_bytes is None else f", {megabytes(resident_bytes)}"
        return f"{self.label}: {short(self.done)}{total} {self.unit}, {rate}{written}{remaining}{memory}"


class Progress:
    """Shows progress on stderr, as bars or lines, and writes it to a log file.

    >>> with Progress(quiet=True) as progress:
    ...     task = progress.task("capture", total=100, unit="tokens")
    ...     task.advance(40)
    >>> task.done
    40

    Arguments:
        quiet: Whether to write nothing to stderr.
        log: File to which lines of JSON are appended.

    Raises:
        ConfigError: The log cannot be written.
    """

    def __init__(self, quiet: bool = False, log: str | Path | None = None) -> None:
        self.quiet = quiet
        self._lines = None if log is None else _open_log(Path(log))
        self._bars: Any = None

    def task(self, label: str, *, total: int | None = None, unit: str = "") -> Bar:
        """Start the counter of one task.

        Arguments:
            label: Name of the task.
            total: Number of units of the whole task; None if unknown.
            unit: Name of the units, such as "tokens".
        """
        task = Bar(self, label, total, unit)
        if self._bars is not None:
            task._bar = self._bars.add_task(label, total=total, shown="")
        return task

    def say(self, line: str) -> None:
        """Print one line above the bars."""
        if self._bars is not None:
            self._bars.console.print(line, highlight=False, markup=False)
        elif not self.quiet:
            echo(line, err=True)

    def __enter__(self) -> Progress:
        try:
            if not self.quiet and sys.stderr.isatty():
                self._bars = _bars()
                self._bars.start()
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except BaseException:  # interrupted
            self.close()
            raise

    def close(self) -> None:
        """Remove the bars and close the log; later counts are not shown."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _log(self, task: Bar) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(task.to_json()) + "\n")
            # Flushed, so that `tail -f` and a killed run show every step.
            self._lines.flush()

    def _show(self, task: Bar) -> None:
        if self.quiet:
            return
        if self._bars is not None:
            self._bars.update(task._bar, completed=task.done, shown=task.describe())
        elif time.monotonic() - task._printed > _LINE_EVERY:
            task._printed = time.monotonic()
            echo(task.describe(), err=True)


def _bars() -> Any:
    """rich's progress display on stderr, with a line of text and a bar for each task."""
    from rich.progress import BarColumn, Progress as Bars, TextColumn

    from ..store.display.console import EscapingConsole

    # No markup: names of models and prompts may contain brackets.
    columns = TextColumn("{task.fields[shown]}", markup=False), BarColumn()
    return Bars(*columns, console=EscapingConsole(stderr=True), transient=True)


def _open_log(path: Path) -> TextIO:
    """Open a log file for appending; ConfigError if it cannot be written."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the progress log {str(path)!r} cannot be written ({error.strerror}); name another file"
        ) from None


def short(count: float) -> str:
    """Format a count with three digits and a metric prefix: "1.25M"."""
    for prefix in _PREFIXES[:-1]:
        if abs(count) < 1000:
            return f"{count:.3g}{prefix}"
        count /= 1000
    return f"{count:.3g}{_PREFIXES[-1]}" if count < 1000 else f"{count:.0f}{_PREFIXES[-1]}"


def clock(seconds: float) -> str:
    """Format seconds as "0:07", "12:03" or "3:00:00"."""
    total = int(seconds + 0.5)
    hours, minutes, seconds_left = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
