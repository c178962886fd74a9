"""A flag for passes in which unrelated runs share tensors, so that results must not depend on their number.

In a sweep over runs (passes/sweep.py), the numbers of rows, queries and keys depend on which runs were
requested together, which are already stored, and how workers share them. torch and its libraries choose
kernels by these numbers, and the kernels sum in different orders. Within `beside_others` no kernel is chosen
by them: rows and queries are padded to whole blocks, even a single one, and one library computes all
products.

Elsewhere the numbers are always the same: for example, a generated token is always a single row.

Border: a context variable; the files that read it know the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["beside_others", "is_beside_others"]

_IS_BESIDE: ContextVar[bool] = ContextVar("is_beside_others", default=False)


@contextmanager
def beside_others() -> Iterator[None]:
    """Context in which the bits of a run's results do not depend on how many other rows are computed with
    it."""
    before = _IS_BESIDE.set(True)
    try:
        yield
    finally:
        _IS_BESIDE.reset(before)


def is_beside_others() -> bool:
    """Whether the caller runs in a pass in which unrelated runs share tensors (within `beside_others`)."""
    return _IS_BESIDE.get()
