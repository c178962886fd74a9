"""A group or an array of a store in zarr's eyes, where it lies in no folder of this machine.

Border: names and bytes; reads through `Folder`. Writes nothing: results are written in a real folder first.
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
    """What lies below a folder of a store, read-only."""

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
        """Itself; there is no other way to open it."""
        return self

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The bytes of a file, or of a range of it; None when there is none."""
        found = await asyncio.to_thread(self._read, f"{self._folder}/{key}", byte_range)
        return None if found is None else prototype.buffer.from_bytes(found)

    def _read(self, name: str, asked: ByteRequest | None) -> bytes | None:
        match asked:
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
        """As `get`, of each in turn."""
        return [await self.get(key, prototype, asked) for key, asked in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether there is a file of that name."""
        return await asyncio.to_thread(self._files.size, f"{self._folder}/{key}") is not None

    async def set(self, key: str, value: Buffer) -> None:
        """Refused: readers change nothing."""
        raise ReadOnlyStore(f"cannot write {key}: {self} is open for reading")

    async def delete(self, key: str) -> None:
        """Refused: readers change nothing."""
        raise ReadOnlyStore(f"cannot delete {key}: {self} is open for reading")

    async def list(self) -> AsyncIterator[str]:
        """Names of every file below the group."""
        async for name in self.list_prefix(""):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Every file whose name starts so."""
        top = f"{self._folder}/"
        for name in await asyncio.to_thread(lambda: [*self._files.list(self._folder)]):
            if name.removeprefix(top).startswith(prefix):
                yield name.removeprefix(top)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """What lies directly below a name."""
        folder = "/".join(part for part in (self._folder, prefix.strip("/")) if part)
        for name in await asyncio.to_thread(lambda: [*self._files.children(folder)]):
            yield name
