"""Selects the features that get a row (incoming edges) in a graph, and the order of rows.

If all features may have a row: all features in order, then logits. Otherwise greedily, as circuit-tracer
does: the logits first; then repeatedly the features with most influence through the rows computed so far,
until the requested number of features have a row.
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
"""Blocks of computed rows: (target of each row, weights [row, source]) of each."""


@dataclass(frozen=True)
class RowSelection:
    """How many features get a row (incoming edges), and how often features are ranked by influence."""

    most: int | None = None
    """Largest number of features with a row; None for all active features."""
    at_once: int = 2048
    """Number of features that get a row between two rankings."""

    def __post_init__(self) -> None:
        # Only types are checked here; the ranges below, in one message.
        for value, name in ((self.most, "max_feature_nodes"), (self.at_once, "batch_size")):
            if value is not None:
                as_count(value, name, least=-LARGEST, error=StageError)
        if (self.most is not None and self.most < 1) or self.at_once < 1:
            raise StageError(
                "expected max_feature_nodes to be at least 1 (or None for all features), and batch_size * "
                f"update_interval to be at least 1, found {self.most} and {self.at_once}"
            )

    def canonical(self) -> dict[str, int] | None:
        """JSON values for the key of a graph; None if all features get a row, whatever the groups."""
        return None if self.most is None else {"most": self.most, "at_once": self.at_once}

    def rows(self, features: int, logits: int) -> int:
        """Number of rows of a graph's matrix.

        Arguments:
            features: Number of active features.
            logits: Number of explained logits.
        """
        return logits + (features if self.most is None else min(self.most, features))

    def visits(
        self, features: int, weights: npt.NDArray[np.float64], sources: int, so_far: Callable[[], Blocks]
    ) -> Iterator[Ints]:
        """Yield the targets whose rows are computed, group by group.

        Arguments:
            features: Number of active features.
            weights: Weight of each logit [logit].
            sources: Number of columns of a row.
            so_far: Function that returns the rows of all earlier groups.

        Yields:
            Targets of the next group: the index of a feature, or `features` plus the index of a logit.
        """
        logits = np.arange(features, features + len(weights))
        if self.most is None or self.most >= features:
            yield np.arange(features + len(weights))
            return
        yield logits
        visited = np.zeros(features, bool)
        start = np.zeros(sources + len(weights))
        start[sources:] = weights
        while (remaining := self.most - int(visited.sum())) > 0:
            # Items of logits follow the features, but their nodes follow all columns.
            blocks = [
                (np.where(items < features, items, items - features + sources), w) for items, w in so_far()
            ]
            # Stable: equal influence goes to the lower index on every machine; torch.argsort leaves it open.
            rank = np.argsort(-partial_influence(blocks, start)[:features], kind="stable")
            group = rank[~visited[rank]][: min(self.at_once, remaining)]
            visited[group] = True
            yield group
