"""A read-only `zarr.abc.store.Store` over a `Folder`, for groups and arrays in an object store.

There is no writing counterpart: results are written to a local folder and uploaded (`Folder.build`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from ..errors import ReadOnlyStore
from .folder import Folder

__all__ = ["FolderStore"]


class FolderStore(Store):
    """The files below one folder of a store, read-only. Keys are paths relative to that folder."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, files: Folder, folder: str) -> None:
        super().__init__(read_only=True)
        self._files, self._folder = files, folder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FolderStore) and (self._files, self._folder) == (other._files, other._folder)

    def __hash__(self) -> int:
        return hash((self._files, self._folder))

    def __str__(self) -> str:
        return self._files.where(self._folder)

    def __reduce__(self) -> tuple[type[FolderStore], tuple[Folder, str]]:
        return type(self), (self._files, self._folder)

    def with_read_only(self, read_only: bool = False) -> Store:
        """Return this store, which is always read-only."""
        return self

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read the content of a key, or a byte range of it; None for a missing key."""
        # Folder is synchronous; without a thread a slow request would block zarr's event loop for all other
        # chunks.
        data = await asyncio.to_thread(self._read, f"{self._folder}/{key}", byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    def _read(self, name: str, byte_range: ByteRequest | None) -> bytes | None:
        """Read a file, or a byte range of it in one of Zarr's forms; None if it is missing."""
        match byte_range:
            case RangeByteRequest(start, end):
                return self._files.get_range(name, start, end)
            case OffsetByteRequest(offset):
                return self._files.get_range(name, offset, None)
            case SuffixByteRequest(suffix):
                return self._files.get_range(name, -suffix, None)
        return self._files.get(name)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Read several keys or byte ranges, one after the other; None for missing keys."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether a file with this key exists."""
        return await asyncio.to_thread(self._files.size, f"{self._folder}/{key}") is not None

    async def set(self, key: str, value: Buffer) -> None:
        """Raise ReadOnlyStore, as this Zarr store cannot be written."""
        raise ReadOnlyStore(f"cannot write {key}: the Zarr store {self} is read-only; use Store.put_result")

    async def delete(self, key: str) -> None:
        """Raise ReadOnlyStore, as this Zarr store cannot be written."""
        raise ReadOnlyStore(f"cannot delete {key}: the Zarr store {self} is read-only; use `mizarr gc`")

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys: paths of files relative to the folder."""
        async for name in self.list_prefix(""):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield all keys that start with `prefix`."""
        top = f"{self._folder}/"
        for name in await asyncio.to_thread(lambda: [*self._files.list(self._folder)]):
            if name.removeprefix(top).startswith(prefix):
                yield name.removeprefix(top)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of files and folders directly below `prefix`."""
        folder = "/".join(part for part in (self._folder, prefix.strip("/")) if part)
        for name in await asyncio.to_thread(lambda: [*self._files.children(folder)]):
            yield name
