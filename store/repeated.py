"""A function that a thread of its own calls now and then; the thread ends whenever an interrupt comes.

Border: functions and seconds; knows no store.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

__all__ = ["Repeated"]


class Repeated:
    """Calls a function every so many seconds on a thread of its own: from `start` to `stop`, or in a block.

    The thread also ends when nobody holds this object any more: an interrupt may come between `start` and the
    line that would have remembered to stop it. So the function must not hold whoever holds this.
    """

    def __init__(self, seconds: float, action: Callable[[], object], name: str) -> None:
        """Args:
        seconds: between two calls, and before the first one.
        action: that is called; what it raises ends the thread.
        name: of the thread.
        """
        self._stopped = threading.Event()
        about = weakref.ref(self), self._stopped, seconds, action
        self._thread = threading.Thread(target=_repeat, args=about, name=name, daemon=True)

    def start(self) -> None:
        """Begin; once."""
        try:
            self._thread.start()
        except BaseException:
            self._stopped.set()
            raise

    def stop(self, *, wait: bool = True) -> None:
        """End; harmless when asked again.

        Args:
            wait: until the last call is over. Not from within a lock that the function takes.
        """
        self._stopped.set()
        if wait and self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except BaseException:
            self._stopped.set()
            raise


def _repeat(
    owner: weakref.ref[Any], stopped: threading.Event, seconds: float, action: Callable[[], object]
) -> None:
    while not stopped.wait(seconds) and owner() is not None:
        action()
