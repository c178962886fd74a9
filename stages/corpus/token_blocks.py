"""Reads stored states in ranges of tokens, the next range in a second thread while the caller computes.

A range is made of whole dask chunks, because dask reads a whole chunk for any row of it (measured: 15 ms for
ten rows of a chunk of 128 MiB); only much larger chunks are cut. A stage with one product per stored number
is limited by memory reads, which overlap with arithmetic as numpy releases the GIL.

Border: labelled arrays with a token axis, lazy or not; independent of what is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ...store.arrays import Array

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["ahead", "read_here", "read_rows", "token_ranges"]

T = TypeVar("T")
R = TypeVar("R")

BLOCK_BYTES = 1 << 24
"""Size in bytes of one float32 array [token, width] of a range; about five such arrays exist at once."""
_LARGEST = 4
"""Size above which a dask chunk is cut, in multiples of BLOCK_BYTES."""


def token_ranges(states: xr.DataArray, width: int) -> Iterator[slice]:
    """Yield consecutive ranges of tokens that cover the token axis of `states` and fit in memory.

    Arguments:
        states: Array with a token axis, lazy or not.
        width: Numbers per token of the widest float32 array that the caller makes of a range.
    """
    step = max(256, BLOCK_BYTES // (4 * max(width, 1)))
    start = end = 0
    for size in states.chunksizes.get("token", ()) or (states.sizes["token"],):
        if end > start and end + size - start > step:
            yield slice(start, end)
            start = end
        end += size
        # An array in memory has no chunks, and is cut at every step.
        while end - start > _LARGEST * step or (not states.chunksizes and end - start > step):
            yield slice(start, start + step)
            start += step
    if end > start:
        yield slice(start, end)


def read_rows(states: xr.DataArray, tokens: slice, rows: Array, **at: int) -> Array:
    """Values at some tokens of a range, float32 [row, ...]; only the range is read.

    Arguments:
        states: Array with a token axis, lazy or not.
        tokens: Range of tokens.
        rows: Indices within the range, ascending.
        at: Index to select on each of some other axes, such as layer=0.
    """
    # The variable alone: coordinates are lazy too, and would be computed for every range.
    values = read_here(states.variable.isel({"token": tokens, **at}).transpose("token", ...))
    selected = values if len(rows) == len(values) else values[rows]  # indexing would copy all rows
    return selected.astype(np.float32, copy=False)


def read_here(lazy: xr.Variable) -> Array:
    """Values of a lazy variable, computed in the calling thread.

    For few chunks dask's thread pool costs more than it gains.
    """
    if lazy.chunks is None or lazy.data.npartitions > 1:
        return lazy.load(scheduler="synchronous").values
    from dask.core import flatten
    from dask.local import get_sync

    # dask's `compute` would copy a single chunk once more to concatenate it.
    array = lazy.data
    (key,) = flatten(array.__dask_keys__())
    values: Array = get_sync(array.__dask_optimize__(array.dask, [key]), key)
    return values


def ahead(items: Iterable[T], read: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Yield (item, read(item)); a second thread reads the next item while the caller works on this one.

    Arguments:
        items: Items in the order in which they are read.
        read: Function that reads one item; called in the second thread.
    """
    # Submitted before the last item is yielded, and never more than one ahead: two blocks in memory.
    with ThreadPoolExecutor(1) as reader:
        pending = None
        for item in items:
            following = (item, reader.submit(read, item))
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = following
        if pending is not None:
            yield pending[0], pending[1].result()
