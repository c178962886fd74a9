"""The arrays of a result, read through zarr; a chunk zarr finds damaged is told as CorruptEntry.

Border: a group's place and what describes its arrays in, lazy variables out; which result they belong to is
only a name here. The descriptions were read and checked already, so that nothing is opened a second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xarray as xr
import zarr
from xarray.backends import BackendArray
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core import indexing
from zarr.storage import LocalStore, StorePath

from .errors import REPAIR, CorruptEntry, StoreError


class StoredArray(BackendArray):
    """An array of a result as xarray reads it, but for the error: CorruptEntry for a damaged chunk.

    place: its folder. what: array and result, for people.
    """

    def __init__(self, array: zarr.Array[Any], place: str, what: str) -> None:
        self._place, self._what = place, what
        self._array = ZarrArrayWrapper(array)  # type: ignore[no-untyped-call]
        self.dtype, self.shape = self._array.dtype, self._array.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        with told_as_damage(self._what, self._place):
            return self._array[key]


def stored_variables(
    place: Any, described: Mapping[str, bytes], where: str, what: str
) -> dict[str, xr.Variable]:
    """Lazy variables of a group, values exactly as stored.

    place: as `Folder.zarr` says it. described: the `zarr.json` of each array, by name. where, what: the
    group's folder and the result, for people.
    """
    store = LocalStore(place, read_only=True) if isinstance(place, Path) else place
    variables = {}
    for name, text in described.items():
        metadata = json.loads(text)
        array = zarr.Array(zarr.AsyncArray(metadata, StorePath(store, name)))
        data = StoredArray(array, f"{where}/{name}", f"{name} of {what}")
        dims = metadata.get("dimension_names") or ()
        encoding = {
            "chunks": array.chunks,
            "preferred_chunks": dict(zip(dims, array.chunks, strict=True)),
            "compressors": array.compressors,
        }
        if data.dtype.kind == "T":  # or xarray decodes text to objects, and forgets the rest
            encoding["dtype"] = data.dtype
        lazy = indexing.LazilyIndexedArray(data)
        variables[name] = xr.Variable(dims, lazy, metadata.get("attributes", {}), encoding)
    return variables


@contextmanager
def told_as_damage(what: str, place: str) -> Iterator[None]:
    """Around a read: what zarr cannot make sense of is CorruptEntry. what: what is read, for people."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise CorruptEntry(
            f"{what}: expected {place} as it was written, found that it cannot be read ({error}); {REPAIR}"
        ) from error
