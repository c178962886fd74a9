"""Call a function periodically on a background thread, such as renewing a lease; safe against interrupts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

__all__ = ["Repeated"]


class Repeated:
    """Background thread that calls a function at intervals, from `start` to `stop`, or within a `with` block.

    The thread also ends when this object is garbage-collected, because an interrupt (Ctrl-C) may come between
    `start` and the line that would have stored the object. So the function must not hold a reference to the
    owner.
    """

    def __init__(self, seconds: float, action: Callable[[], object], name: str) -> None:
        """
        Arguments:
            seconds: Time between two calls, and before the first.
            action: Function to call without arguments; an exception ends the thread.
            name: Name of the thread.
        """
        self._stopped = threading.Event()
        arguments = weakref.ref(self), self._stopped, seconds, action
        self._thread = threading.Thread(target=_repeat, args=arguments, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; may be called once."""
        try:
            self._thread.start()
        except BaseException:
            self._stopped.set()
            raise

    def stop(self, *, wait: bool = True) -> None:
        """End the thread; may be called again.

        Arguments:
            wait: Whether to wait for the end of a running call. Must be False while the caller holds a lock
                that the function takes.
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
    # A weak reference: with a strong one the thread itself would keep the object alive for ever.
    while not stopped.wait(seconds) and owner() is not None:
        action()
