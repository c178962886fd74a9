"""A file as read-only memory: a memory map on a disk, a sparse local copy of an object in a bucket.

Readers decide by the checksum of a chunk whether its bytes are valid, and fetch them otherwise.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .cache import ReadCache

__all__ = ["Fetched", "Mapped", "map_file", "mmap_of"]


def map_file(handle: int, size: int) -> mmap.mmap:
    """Map an open file into memory, read-only.

    Arguments:
        handle: Descriptor of the file.
        size: Size of the file in bytes.
    """
    # mmap refuses an empty file: a byte of ordinary memory stands in, which lies beyond the size 0.
    return mmap.mmap(handle, size, access=mmap.ACCESS_READ) if size else mmap.mmap(-1, 1)


def mmap_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """Memory map under an array or a view of one; None for an array in ordinary memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) else None


class Mapped:
    """A file of a store as read-only memory: a memory map, or a local copy of an object in a bucket."""

    is_whole = True
    """Whether all bytes are present; otherwise bytes that were not fetched read as zeros."""

    def __init__(self, data: mmap.mmap, size: int, where: str) -> None:
        """
        Arguments:
            data: Memory that begins with the bytes of the file.
            size: Number of these bytes.
            where: Path or URL of the file, for error messages.
        """
        self.data, self.size, self.where = data, size, where

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Download the byte ranges (start, stop) that are missing; a local file has all bytes."""


class Fetched(Mapped):
    """An object in a bucket as read-only memory, over a local file; bytes not downloaded yet are zero.

    Arguments:
        handle: Descriptor of a local file of `size` bytes; closed together with this object.
        size: Bytes of the object.
        where: URL of the object, for error messages.
        read: Downloads byte ranges (start, stop).
        cache: Counts what was downloaded against its quota.
    """

    is_whole = False

    def __init__(
        self,
        handle: int,
        size: int,
        where: str,
        read: Callable[[Sequence[tuple[int, int]]], Sequence[bytes]],
        cache: ReadCache,
    ) -> None:
        super().__init__(map_file(handle, size), size, where)
        self._handle, self._read, self._cache = handle, read, cache
        # The map alone keeps the pages, but fetch needs the descriptor as long as anyone holds rows.
        weakref.finalize(self, os.close, handle)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Download the byte ranges (start, stop)."""
        for (start, _), data in zip(ranges, self._read(ranges), strict=True):
            offset, remaining = start, memoryview(data)
            while remaining:
                # Through the descriptor: the map is read-only, and shows what is written to its file.
                written = os.pwrite(self._handle, remaining, offset)
                offset, remaining = offset + written, remaining[written:]
            self._cache.added(len(data))
