"""Bytes of one file, seen as memory: mapped where it lies on a disk, fetched as needed elsewhere.

Border: bytes; which of them are rows, index or checksum, and which of an object are there, is known to
readers by their checksums.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache import ReadCache

__all__ = ["Fetched", "Mapped"]


class Mapped:
    """A file as memory.

    data: its bytes, read-only. size: how many. where: the file, as an error names it. is_whole: whether all
    bytes are there; otherwise those that were not fetched are zeros.
    """

    is_whole = True

    def __init__(self, data: mmap.mmap, size: int, where: str) -> None:
        self.data, self.size, self.where = data, size, where

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have the bytes of these ranges (start, stop) read from where the file lies; mapped ones are."""


class Fetched(Mapped):
    """An object as memory; bytes that were neither fetched nor kept of an earlier reader are zeros.

    handle: of a file of `size` bytes, taken over. read: the bytes of ranges (start, stop).
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
        super().__init__(
            mmap.mmap(handle, size, access=mmap.ACCESS_READ) if size else mmap.mmap(-1, 1), size, where
        )
        self._handle, self._read, self._cache = handle, read, cache
        weakref.finalize(self, os.close, handle)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have the bytes of these ranges (start, stop) read."""
        for (start, _), part in zip(ranges, self._read(ranges), strict=True):
            at, waiting = start, memoryview(part)
            while waiting:
                written = os.pwrite(self._handle, waiting, at)
                at, waiting = at + written, waiting[written:]
            self._cache.added(len(part))
