"""Which rows of a graph are computed, and in which order.

All of them where all features may have a row: features in order, then logits. Otherwise greedily, as
circuit-tracer does: the logits first; then, again and again, the features that have most influence by way of
the rows there are, until as many as are wanted have been chosen.

Border: numbers of nodes and rows that exist; knows no tensors and no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....store.arrays import Ints, as_count
from ....store.digest import LARGEST
from ....store.errors import StageError
from .influence import partial_influence

__all__ = ["RowSelection"]

Blocks = Sequence[tuple[Ints, Any]]


@dataclass(frozen=True)
class RowSelection:
    """How many features get a row of their own: at most `most` (None for all), `at_once` of them between two
    rankings."""

    most: int | None = None
    at_once: int = 2048

    def __post_init__(self) -> None:
        for value, name in ((self.most, "max_feature_nodes"), (self.at_once, "batch_size")):
            if value is not None:
                as_count(value, name, least=-LARGEST, error=StageError)
        if (self.most is not None and self.most < 1) or self.at_once < 1:
            raise StageError(
                f"expected max_feature_nodes, batch_size and update_interval of 1 or more, found "
                f"{self.most} features, {self.at_once} at once"
            )

    def canonical(self) -> dict[str, int] | None:
        """Plain values for a key; None for all features."""
        return None if self.most is None else {"most": self.most, "at_once": self.at_once}

    def is_complete(self, features: int) -> bool:
        """Whether this many features all get a row."""
        return self.most is None or self.most >= features

    def rows(self, features: int, logits: int) -> int:
        """How many rows there will be."""
        return logits + (features if self.most is None else min(self.most, features))

    def visits(
        self, features: int, weights: npt.NDArray[np.float64], sources: int, so_far: Callable[[], Blocks]
    ) -> Iterator[Ints]:
        """What is computed next, group by group: features by index, logits from `features` on.

        weights [logit]: of the logits. sources: columns of a row. so_far: rows of all groups before, as
        (item of each row, weights [row, source]).
        """
        logits = np.arange(features, features + len(weights))
        if self.is_complete(features):
            yield np.arange(features + len(weights))
            return
        yield logits
        assert self.most is not None  # is_complete otherwise
        visited = np.zeros(features, bool)
        start = np.zeros(sources + len(weights))
        start[sources:] = weights
        while (left := self.most - int(visited.sum())) > 0:
            # Logits lie behind all sources, so an item is its node but for the columns that are no features.
            blocks = [
                (np.where(items < features, items, items - features + sources), w) for items, w in so_far()
            ]
            rank = np.argsort(-partial_influence(blocks, start)[:features], kind="stable")
            chosen = rank[~visited[rank]][: min(self.at_once, left)]
            visited[chosen] = True
            yield chosen
