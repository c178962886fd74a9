"""What some work took, as provenance tells it: seconds and memory.

Border: clocks and `memory`; knows no node. Nothing of it is in a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .memory import memory

__all__ = ["Took", "measured"]

Took = Callable[[], dict[str, Any]]
"""Says what the work has taken so far: {"seconds": …, "memory": …}, plain values."""


@contextmanager
def measured() -> Iterator[Took]:
    """Within: seconds since the beginning, and the memory of this process before, now and at most."""
    started = time.monotonic()
    with memory() as used:
        yield lambda: {"seconds": round(time.monotonic() - started, 6), "memory": used.to_json()}
