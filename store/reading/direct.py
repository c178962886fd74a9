"""From an opened dataset back to its shards, bypassing dask.

A scattered row of a dask array costs a whole chunk to read; a row of a memory-mapped shard costs a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import EntryNotFound
from ..identity import SOURCE
from .datasets import entry_at, open_entry

if TYPE_CHECKING:
    import xarray as xr

    from ..runs.entries import Entry


def entry_of(dataset: xr.Dataset) -> Entry:
    """Stored run from which a dataset was opened; EntryNotFound for datasets of other origin."""
    source = dataset.encoding.get(SOURCE)
    if source is None:
        raise EntryNotFound(
            "the dataset was not opened from a stored run; open one with store.entry(digest).open(), where "
            "`mizarr ls` shows the digest as DATA"
        )
    return entry_at(str(source))


def unchunked(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset without dask where possible: dask arrays that equal stored arrays become lazy arrays over
    the files."""
    if not dataset.chunks or SOURCE not in dataset.encoding:
        return dataset
    entry = entry_of(dataset)
    specs = entry.specs
    unchunked_arrays = {
        name: _stored_variable(dataset[name], entry)
        for name in dataset.data_vars
        if name in specs and dataset[name].chunks
    }
    return dataset.assign({name: array for name, array in unchunked_arrays.items() if array is not None})


def _stored_variable(array: xr.DataArray, entry: Entry) -> xr.Variable | None:
    """The stored variable without dask; None if the dask array was changed since it was opened.

    A changed array still carries the source of its dataset. But dask names an array by a digest of its
    construction, so the name shows whether it is the stored one.
    """
    layers = array["layer"].values.tolist() if "layer" in array.dims else None
    try:
        # Opening reads no activations, so building the expected dask array to compare its name is cheap.
        chunked = open_entry(entry, [str(array.name)], layers, "segment")[array.name]
        lazy = open_entry(entry, [str(array.name)], layers, None)[array.name]
    except EntryNotFound:
        return None
    if chunked.dims != array.dims or chunked.data.name != array.data.name:
        return None
    variable: xr.Variable = lazy.variable
    return variable
