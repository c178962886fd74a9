"""Whether what is computed shares its tensors with whatever else happens to be asked for.

In a sweep over runs (passes/sweep.py) the numbers of rows, queries and keys are accidents of the plan: of
which runs were asked for together, which of them were stored, and how workers share them. Kernels that torch
or its libraries choose by such numbers sum in other orders. Within `beside_others` nothing is chosen by them:
rows and queries are filled up to whole blocks, even a single one, and one library multiplies all.

Elsewhere a single row, or query, is all there is (a token that is generated), every time.

Border: a flag of this thread of execution; who asks it knows kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["beside_others", "is_beside_others"]

_IS_BESIDE: ContextVar[bool] = ContextVar("is_beside_others", default=False)


@contextmanager
def beside_others() -> Iterator[None]:
    """Within, how many rows there are decides no bit."""
    before = _IS_BESIDE.set(True)
    try:
        yield
    finally:
        _IS_BESIDE.reset(before)


def is_beside_others() -> bool:
    """Whether this is computed within `beside_others`."""
    return _IS_BESIDE.get()
