"""Ranges of tokens in which stored states are read, the next one while this one is computed.

Border: labelled arrays with a token axis, lazy or not; knows nothing of what is computed on them.

A range is whole chunks of what dask reads at once, as dask reads all of a chunk for any row of it (measured:
15 ms for ten rows of a chunk of 128 MiB); chunks that are much too large are cut all the same. Arithmetic on
a stored corpus that is no more than a product per number waits for memory; a second thread reads ahead
meanwhile, numpy's copies and products holding no lock.
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
"""Of one float32 array [token, width] of a range; a handful of them exist at a time."""
_LARGEST = 4
"""Blocks up to which a chunk is not cut."""


def token_ranges(states: xr.DataArray, width: int) -> Iterator[slice]:
    """Ranges that together are the token axis of `states`.

    width: numbers per token of the widest array that is made of a range.
    """
    step = max(256, BLOCK_BYTES // (4 * max(width, 1)))
    start = end = 0
    for size in states.chunksizes.get("token", ()) or (states.sizes["token"],):
        if end > start and end + size - start > step:
            yield slice(start, end)
            start = end
        end += size
        while end - start > _LARGEST * step or (not states.chunksizes and end - start > step):
            yield slice(start, start + step)
            start += step
    if end > start:
        yield slice(start, end)


def read_rows(states: xr.DataArray, here: slice, chosen: Array, **at: int) -> Array:
    """Rows of a token range, float32 [row, ...]; only the range is read.

    at: places on further axes, e.g. layer=0.
    """
    # The variable alone: its labels are lazy too, and would be computed for every range.
    values = read_here(states.variable.isel({"token": here, **at}).transpose("token", ...))
    rows = values if len(chosen) == len(values) else values[chosen]
    return rows.astype(np.float32, copy=False)


def read_here(lazy: xr.Variable) -> Array:
    """What a variable holds, read in this thread: a chunk or two are no work for a pool of them."""
    if lazy.chunks is None or lazy.data.npartitions > 1:
        return lazy.load(scheduler="synchronous").values
    from dask.core import flatten
    from dask.local import get_sync

    # Of a single chunk dask's `compute` would make one more copy.
    array = lazy.data
    (key,) = flatten(array.__dask_keys__())
    values: Array = get_sync(array.__dask_optimize__(array.dask, [key]), key)
    return values


def ahead(items: Iterable[T], read: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Every item with what is read for it; the next is read while the caller works on this one."""
    with ThreadPoolExecutor(1) as reader:
        pending = None
        for item in items:
            following = (item, reader.submit(read, item))
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = following
        if pending is not None:
            yield pending[0], pending[1].result()
