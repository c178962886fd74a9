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
    """Candidates for tables [row, place], collected until they are as many as the tables have places.

    Ranking after every block would rank the entries of the tables again and again.

    Arguments:
        places: Number of places of a table; at least BLOCK candidates are collected.
    """

    def __init__(self, places: int) -> None:
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
        """Rows and columns of all table entries followed by all candidates; removes the candidates, of which
        there must be at least one.

        Arguments:
            tables: Tables [row, place] in the order of the columns; -1 in the first table marks an empty
                place.
        """
        row, *columns = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._count = [], 0
        entries = np.flatnonzero(tables[0] >= 0)
        return [
            np.concatenate([entries // tables[0].shape[1], row]),
            *(
                np.concatenate([table.ravel()[entries], column])
                for table, column in zip(tables, columns, strict=True)
            ),
        ]
