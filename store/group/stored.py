"""The arrays of a result, read lazily; a chunk that is damaged is told as CorruptEntry.

Border: a group's place and what describes its arrays in, lazy variables out; which result they belong to is
only a name here. The descriptions were read and checked already, so that nothing is opened a second time.

An array of one chunk, as most are, is read from its file here; all others through zarr, which asks its loop
on another thread for every file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core import indexing

from ..arrays import Array
from ..errors import REPAIR, CorruptEntry, StoreError
from ..files import Folder
from ..sealed import read_json
from .one_chunk import OneChunk


class StoredArray(BackendArray):
    """An array of a result as xarray reads it, but for the error: CorruptEntry for a damaged chunk.

    array: the `BackendArray` that reads it. place: its folder. what: array and result, for people.
    """

    def __init__(self, array: Any, place: str, what: str) -> None:
        self._array, self._place, self._what = array, place, what
        self.dtype, self.shape = array.dtype, array.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        with told_as_damage(self._what, self._place):
            return self._array[key]


class ChunkArray(BackendArray):
    """An array that is one chunk.  folder: its name in the store."""

    def __init__(self, files: Folder, folder: str, chunk: OneChunk) -> None:
        self._files, self._name, self._chunk = files, f"{folder}/{chunk.path}", chunk
        self.dtype, self.shape = chunk.dtype, chunk.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self._part)

    def _part(self, at: tuple[int | slice, ...]) -> Array:
        held = self._chunk.values(self._files.get(self._name))
        return np.array(held[at], self.dtype)


def stored_variables(
    files: Folder, folder: str, described: Mapping[str, bytes], what: str
) -> dict[str, xr.Variable]:
    """Lazy variables of the group in a folder, values exactly as stored.

    described: the `zarr.json` of each array, by name. what: the result, for people.
    """
    variables = {}
    for name, text in described.items():
        place = f"{folder}/{name}"
        chunk = OneChunk.from_text(text)
        if chunk is None:
            variables[name] = _through_zarr(files, place, text, f"{name} of {what}")
            continue
        data = StoredArray(ChunkArray(files, place, chunk), files.where(place), f"{name} of {what}")
        encoding = _encoding(data.dtype, chunk.dims, chunk.chunks)
        variables[name] = xr.Variable(
            chunk.dims, indexing.LazilyIndexedArray(data), chunk.attributes, encoding
        )
    return variables


def _through_zarr(files: Folder, place: str, text: bytes, what: str) -> xr.Variable:
    # Here, because importing zarr takes a tenth of the time in which a cached answer is shown.
    import zarr
    from zarr.storage import LocalStore, StorePath

    metadata, where = read_json(text), files.zarr(place)
    store = LocalStore(where, read_only=True) if isinstance(where, Path) else where
    array = zarr.Array(zarr.AsyncArray(metadata, StorePath(store)))
    held = ZarrArrayWrapper(array)  # type: ignore[no-untyped-call]
    data = StoredArray(held, files.where(place), what)
    dims = metadata.get("dimension_names") or ()
    encoding = _encoding(data.dtype, dims, array.chunks)
    return xr.Variable(dims, indexing.LazilyIndexedArray(data), metadata.get("attributes", {}), encoding)


def _encoding(dtype: np.dtype[Any], dims: tuple[str, ...], chunks: tuple[int, ...]) -> dict[str, Any]:
    """The chunks of an array, as xarray's own reader says them."""
    told: dict[str, Any] = {"chunks": chunks, "preferred_chunks": dict(zip(dims, chunks, strict=True))}
    # Or xarray decodes text to objects, and forgets the rest.
    return told | ({"dtype": dtype} if dtype.kind == "T" else {})


@contextmanager
def told_as_damage(what: str, place: str) -> Iterator[None]:
    """Around a read: what zarr cannot make sense of is CorruptEntry. what: what is read, for people."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, ValueError, LookupError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise CorruptEntry(
            f"{what}: expected {place} as it was written, found that it cannot be read ({error}); {REPAIR}"
        ) from error
