"""Runs torch on one thread, for work made of many small operations.

Threads that share an operation of less than a millisecond mostly wait for each other, busily (measured on two
busy cores: four to eight times the processor time for the same graph). So small work runs on one thread, or
several pieces of it run at the same time, each on one thread.
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
    """Context in which each torch operation uses one thread, also in threads that are started inside.

    Contexts exclude each other, so that the previous number of threads is restored; do not nest them.

    Arguments:
        when: Whether to do so; False changes nothing.
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
            # A KeyboardInterrupt may come here; without this the process would stay on one thread.
            except BaseException:
                torch.set_num_threads(before)
                raise
