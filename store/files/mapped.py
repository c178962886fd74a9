"""Bytes of one file, seen as memory: mapped where it lies on a disk, fetched as needed elsewhere.

Border: bytes; which of them are rows, index or checksum is known elsewhere.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

__all__ = ["Mapped"]


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
