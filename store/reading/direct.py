"""From a dataset that was opened back to the shards it shows, without dask in between.

Border: datasets that still say which run they were opened from; what is asked of them is the accessor's
business.

A scattered row of a dask array costs a chunk; of a memory-mapped shard, a page.
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
    """The run a dataset was opened from; EntryNotFound if it does not say."""
    source = dataset.encoding.get(SOURCE)
    if source is None:
        raise EntryNotFound(
            "this dataset does not say which stored run it is; open it with store.entry(digest).open()"
        )
    return entry_at(str(source))


def unchunked(dataset: xr.Dataset) -> xr.Dataset:
    """The same, straight over the shards where variables still are the stored ones seen through dask."""
    if not dataset.chunks or SOURCE not in dataset.encoding:
        return dataset
    entry = entry_of(dataset)
    held = entry.specs
    direct = {
        name: _direct(dataset[name], entry)
        for name in dataset.data_vars
        if name in held and dataset[name].chunks
    }
    return dataset.assign({name: array for name, array in direct.items() if array is not None})


def _direct(array: xr.DataArray, entry: Entry) -> xr.Variable | None:
    """The variable as opened without dask; None when the dask array is not the stored one itself.

    Told by its name, which digests what it is made of: a changed array keeps the source of its dataset.
    """
    layers = array["layer"].values.tolist() if "layer" in array.dims else None
    try:
        seen = open_entry(entry, [str(array.name)], layers, "segment")[array.name]
        plain = open_entry(entry, [str(array.name)], layers, None)[array.name]
    except EntryNotFound:
        return None
    if seen.dims != array.dims or seen.data.name != array.data.name:
        return None
    variable: xr.Variable = plain.variable
    return variable
