"""Candidates for a few places of each of many rows, as blocks of a corpus bring them.

Border: arrays; which candidates win is the caller's to say.
"""

from __future__ import annotations

import numpy as np

from ....store.arrays import Array
from .sparse import BLOCK

__all__ = ["Candidates"]


class Candidates:
    """What may come to stand in tables [row, place], waiting until it is as many as stands there: to rank
    block by block would be to rank the same ones again and again.
    """

    def __init__(self, places: int) -> None:
        """places: of a table; candidates are enough when they are as many, and no fewer than BLOCK."""
        self._enough = max(BLOCK, places)
        self._waiting: list[tuple[Array, ...]] = []
        self._many = 0

    def __len__(self) -> int:
        return self._many

    def add(self, row: Array, *columns: Array) -> bool:
        """Let more wait, [candidate] each; whether they are enough to be ranked now."""
        self._waiting.append((row, *columns))
        self._many += len(row)
        return self._many >= self._enough

    def taken(self, *tables: Array) -> list[Array]:
        """Rows and columns of what stands, and behind it of what waited, which waits no longer; there must be
        some. tables: [row, place] as the columns are, in the first -1 where nothing stands."""
        row, *columns = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._many = [], 0
        standing = np.flatnonzero(tables[0] >= 0)
        return [
            np.concatenate([standing // tables[0].shape[1], row]),
            *(
                np.concatenate([table.ravel()[standing], column])
                for table, column in zip(tables, columns, strict=True)
            ),
        ]
