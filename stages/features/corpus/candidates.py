"""Candidates for top-k tables: collected from the blocks of a corpus until there are enough to be ranked
together.

Border: arrays; the caller decides which candidates win.
"""

from __future__ import annotations

import numpy as np

from ....store.arrays import Array
from .sparse import BLOCK

__all__ = ["Candidates"]


class Candidates:
    """Buffer of candidates for tables [row, place], until their number reaches the tables' size.

    Ranking after every block would rank the table entries again and again.

    Arguments:
        places: Number of places of a table; at least BLOCK candidates are collected.
    """

    def __init__(self, places: int) -> None:
        # At least a block: for small tables one ranking would otherwise follow every few tokens.
        self._enough = max(BLOCK, places)
        self._waiting: list[tuple[Array, ...]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Array, *columns: Array) -> bool:
        """Add candidates, [candidate] each; returns whether there are enough to rank them."""
        self._waiting.append((row, *columns))
        self._count += len(row)
        return self._count >= self._enough

    def take_with(self, *tables: Array) -> list[Array]:
        """Concatenate table entries and buffered candidates, and empty the buffer, which must not be empty.

        Arguments:
            tables: Tables [row, place] in column order; -1 in the first table marks an empty place.

        Returns:
            Row indices, then the columns.
        """
        row, *columns = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._count = [], 0
        # Table entries are re-ranked together with the candidates.
        entries = np.flatnonzero(tables[0] >= 0)
        return [
            np.concatenate([entries // tables[0].shape[1], row]),
            *(
                np.concatenate([table.ravel()[entries], column])
                for table, column in zip(tables, columns, strict=True)
            ),
        ]
