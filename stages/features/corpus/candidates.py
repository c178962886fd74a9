"""Candidates for top-k tables, collected from blocks of a corpus until enough can be ranked together.

Border: arrays; the caller decides which candidates win.
"""

from __future__ import annotations

import numpy as np

from ....store.arrays import Array
from .sparse import BLOCK

__all__ = ["Candidates"]


class Candidates:
    """Buffer of candidates for top-k tables, ranked only once its size reaches a table's size.

    Ranking after every block would rank the entries of the tables again and again.

    Arguments:
        places: Number of entries of a table, rows times k; at least BLOCK candidates are collected.
    """

    def __init__(self, places: int) -> None:
        # At least a block: for small tables one ranking would otherwise follow every few tokens.
        self._enough = max(BLOCK, places)
        self._waiting: list[tuple[Array, ...]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Array, *columns: Array) -> bool:
        """Add candidates to the buffer, and return whether there are enough to rank them.

        Arguments:
            row: Row of the table for which each candidate competes [candidate].
            columns: Values of the candidates [candidate], one array per table.
        """
        self._waiting.append((row, *columns))
        self._count += len(row)
        return self._count >= self._enough

    def take_with(self, *tables: Array) -> list[Array]:
        """Empty the buffer, and return its candidates behind the entries that the tables hold already.

        Arguments:
            tables: Tables [row, k], in the order of the columns of `add`; -1 in the first marks an empty
            entry.

        Returns:
            Row of each entry and candidate, then its value in each table; all [entry].
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
