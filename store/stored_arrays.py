"""One stored variable of a result, read through zarr; a chunk zarr finds damaged is told as CorruptEntry.

Border: an array's folder in, a lazy variable out; which result it belongs to is only a name here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xarray as xr
import zarr
from xarray.backends import BackendArray
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core import indexing

from .errors import REPAIR, CorruptEntry, StoreError
from .files import Folder


class StoredArray(BackendArray):
    """An array of a result as xarray reads it, but for the error: CorruptEntry for a damaged chunk.

    what: array and result, for people.
    """

    def __init__(self, files: Folder, place: str, what: str) -> None:
        self._place, self._what = files.where(place), what
        self._array = ZarrArrayWrapper(zarr.open_array(files.zarr(place), mode="r"))  # type: ignore[no-untyped-call]
        self.dtype, self.shape = self._array.dtype, self._array.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        with told_as_damage(self._what, self._place):
            return self._array[key]


def checked_variable(files: Folder, folder: str, name: str, variable: xr.Variable, what: str) -> xr.Variable:
    """A variable as xarray opened it from a group, as lazy as before, that tells a damaged chunk when it is
    read.

    folder: of the Zarr group, relative to the store. what: the result, for people.
    """
    array = indexing.LazilyIndexedArray(StoredArray(files, f"{folder}/{name}", f"{name} of {what}"))
    return xr.Variable(variable.dims, array, variable.attrs, variable.encoding)


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
