"""Torch on one thread, for work made of many small operations.

Threads that share an operation of less than a millisecond mostly wait for one another, at full load (measured
on two busy cores: four to eight times the processor time for the same graph). Small work runs on one thread,
or several pieces of it side by side, each on its own.

Border: the number of torch's threads in this process; knows no graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread_each"]

_LOCK = threading.Lock()  # torch has one number of threads for the whole process


@contextmanager
def one_thread_each(*, when: bool = True) -> Iterator[None]:
    """Operations of torch on one thread, in threads that are started within too; nothing changes unless
    `when`.

    One at a time, so that the number before comes back; not to be nested.
    """
    if not when:
        yield
        return
    with _LOCK:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            yield
        finally:
            try:
                torch.set_num_threads(before)
            except BaseException:  # interrupted
                torch.set_num_threads(before)
                raise
