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


class AtLine:
    """Raises KeyboardInterrupt at the n-th line that some files run on this thread, once."""

    def __init__(self, files: Collection[str], number: int) -> None:
        self.files, self.left = files, number
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line" and not _is_deaf(frame):
            self.left -= 1
            if self.left == 0:
                self.place = f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


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
