"""Threads of numpy's products: runs that overlap leave the process as it was."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np  # noqa: F401 - with its BLAS
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from mizarr.pipeline.context import blas_threads


def threads() -> list[int]:
    """Of every BLAS in this process."""
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_runs_that_overlap_put_back_what_was_before_them(first_ends_first: bool):
    with threadpool_limits(1, "blas"):
        before = threads()
        assert before and set(before) == {1}
        one, other = ExitStack(), ExitStack()
        one.enter_context(blas_threads(2))
        assert set(threads()) == {2}
        other.enter_context(blas_threads(3))
        assert set(threads()) == {2}  # the least of those asked for
        (one if first_ends_first else other).close()
        assert set(threads()) == {3 if first_ends_first else 2}
        (other if first_ends_first else one).close()
        assert threads() == before


def test_a_run_that_fails_puts_it_back_too():
    before = threads()
    with pytest.raises(ZeroDivisionError), blas_threads(before[0] + 1):
        1 / 0  # noqa: B018
    assert threads() == before
