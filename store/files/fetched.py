"""An object as memory: a file with holes that are filled from the object store when they are needed.

Border: ranges of bytes; who knows which of them are there is the reader, by their checksums.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence

from .cache import ReadCache
from .mapped import Mapped

__all__ = ["Fetched"]


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
