"""Interrupts at chosen lines, for tests of what they leave behind."""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType, ModuleType
from typing import Any

LINES = 2_000
"""More lines than anything that is interrupted here runs through."""


def interrupt() -> None:
    """As Ctrl-C does."""
    raise KeyboardInterrupt


class AtLine:
    """Does something, once, at the n-th line that some files run on this thread.

    deed: what is done, by default an interrupt. once_each: only the first time that a line is run counts, so
    that loops count no more than what stands before and behind them.
    """

    def __init__(
        self,
        files: Collection[str],
        number: int,
        deed: Callable[[], object] = interrupt,
        *,
        once_each: bool = False,
    ) -> None:
        self.files, self.left, self.deed = files, number, deed
        self.seen: set[tuple[object, int]] | None = set() if once_each else None
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line" and self._counts(frame) and not _is_deaf(frame):
            self.left -= 1
            if self.left == 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                self.deed()
        return self

    def _counts(self, frame: FrameType) -> bool:
        if self.seen is None:
            return True
        line = frame.f_code, frame.f_lineno
        is_new = line not in self.seen
        self.seen.add(line)
        return is_new


def _is_deaf(frame: FrameType) -> bool:
    """Whether Python looks for no signal here, so that only a tracer can raise: at `try:`, and where a `with`
    is about to call `__exit__`."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return operation == "NOP" or (line.startswith("with ") and operation == "LOAD_CONST")


def at_lines(tracer: AtLine, use: Callable[[], object]) -> None:
    """Run something under a tracer, whose interrupt ends it."""
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        use()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def at_every_line(use: Callable[[], object], *modules: ModuleType) -> Iterator[str]:
    """Run something again and again, interrupted one line later each time; yields where that was."""
    for number in range(1, LINES):
        tracer = AtLine({module.__file__ for module in modules}, number)
        at_lines(tracer, use)
        if not tracer.place:
            return
        yield tracer.place
    raise AssertionError("it runs through more lines than there are tries")
