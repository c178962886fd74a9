"""Lazy variables over the arrays of a result; a damaged chunk raises CorruptEntry.

Most arrays are one chunk and are read from their file directly. All others go through zarr, which costs a
round trip to its event loop on another thread for every file.
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
    """Lazy array of a stored result, for xarray; reading a damaged chunk raises CorruptEntry.

    Arguments:
        array: The `BackendArray` that reads the values.
        folder: Folder of the Zarr array, for error messages.
        label: Names the array and result in error messages.
    """

    def __init__(self, array: Any, folder: str, label: str) -> None:
        self._array, self._folder, self._label = array, folder, label
        self.dtype, self.shape = array.dtype, array.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        with damage_errors(self._label, self._folder):
            return self._array[key]


class ChunkArray(BackendArray):
    """Lazy array, for xarray, over a Zarr array of a single chunk file.

    Arguments:
        files: The store's files.
        folder: Path of the Zarr array.
        chunk: Description of the array.
    """

    def __init__(self, files: Folder, folder: str, chunk: OneChunk) -> None:
        self._files, self._name, self._chunk = files, f"{folder}/{chunk.path}", chunk
        self.dtype, self.shape = chunk.dtype, chunk.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self._part)

    def _part(self, key: tuple[int | slice, ...]) -> Array:
        values = self._chunk.values(self._files.get(self._name))
        # A copy: xarray may hand it to code that writes into it, and the buffer is read-only.
        return np.array(values[key], self.dtype)


def stored_variables(
    files: Folder, folder: str, metadata: Mapping[str, bytes], label: str
) -> dict[str, xr.Variable]:
    """Open the arrays of a Zarr group as lazy xarray variables, with values exactly as stored.

    Arguments:
        files: The store's files.
        folder: Path of the group.
        metadata: `zarr.json` of each array, by name; already read and verified, so nothing is opened twice.
        label: Names the result in error messages.
    """
    variables = {}
    for name, text in metadata.items():
        array_folder = f"{folder}/{name}"
        chunk = OneChunk.from_text(text)
        if chunk is None:
            variables[name] = _through_zarr(files, array_folder, text, f"{name} of {label}")
            continue
        data = StoredArray(
            ChunkArray(files, array_folder, chunk), files.where(array_folder), f"{name} of {label}"
        )
        encoding = _encoding(data.dtype, chunk.dims, chunk.chunks)
        variables[name] = xr.Variable(
            chunk.dims, indexing.LazilyIndexedArray(data), chunk.attributes, encoding
        )
    return variables


def _through_zarr(files: Folder, folder: str, text: bytes, label: str) -> xr.Variable:
    """Open an array through zarr as a lazy variable.

    Arguments:
        files: The store's files.
        folder: Path of the array.
        text: Content of its `zarr.json`.
        label: Names the array and result in error messages.
    """
    # Imported late: importing zarr takes a tenth of the time in which a cached answer is shown.
    import zarr
    from zarr.storage import LocalStore, StorePath

    metadata, where = read_json(text), files.zarr(folder)
    store = LocalStore(where, read_only=True) if isinstance(where, Path) else where
    # From the metadata that was verified against the manifest, instead of letting zarr read the file a second
    # time.
    array = zarr.Array(zarr.AsyncArray(metadata, StorePath(store)))
    wrapper = ZarrArrayWrapper(array)  # type: ignore[no-untyped-call]
    data = StoredArray(wrapper, files.where(folder), label)
    dims = metadata.get("dimension_names") or ()
    encoding = _encoding(data.dtype, dims, array.chunks)
    return xr.Variable(dims, indexing.LazilyIndexedArray(data), metadata.get("attributes", {}), encoding)


def _encoding(dtype: np.dtype[Any], dims: tuple[str, ...], chunks: tuple[int, ...]) -> dict[str, Any]:
    """The chunks of an array in the form of xarray's own zarr reader."""
    encoding: dict[str, Any] = {"chunks": chunks, "preferred_chunks": dict(zip(dims, chunks, strict=True))}
    # Without a dtype xarray would decode text to objects and drop the rest of the encoding.
    return encoding | ({"dtype": dtype} if dtype.kind == "T" else {})


@contextmanager
def damage_errors(label: str, folder: str) -> Iterator[None]:
    """Context manager around a read: exceptions that zarr raises on damaged data become CorruptEntry.

    Arguments:
        label: Names the array or result in error messages.
        folder: Folder of the array or result.
    """
    try:
        yield
    except StoreError:
        raise
    # zarr has no error class for damaged data; these are what codecs, checksums and JSON raise.
    except (OSError, ValueError, LookupError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise CorruptEntry(f"{label}: the Zarr files in {folder} are damaged ({error}); {REPAIR}") from error
