"""Mean, scale and variance of the activations at each hook point, in one pass without keeping rows.

Border: rows in blocks; knows no features. Mean and squared deviations are merged block by block (Chan, Golub
and LeVeque 1983) in float64, because states of a residual stream have large means and small variances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from ...training_data.stored import Cell

__all__ = ["RowStatistics", "moments"]

CellT = TypeVar("CellT", bound="Cell")


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Mean, variance and norms of the activations at one hook point, over rows [row, width]."""

    count: int
    """Number of rows."""
    mean: Tensor
    """Mean row, float64 [width]."""
    variance: float
    """Total variance: mean squared Euclidean distance of a row from the mean row."""
    norm: float
    """Mean Euclidean norm of a row."""
    max_norm: float
    """Largest Euclidean norm of a row."""

    @classmethod
    def of(cls, rows: Tensor) -> RowStatistics:
        """Statistics of rows [row, width]; at least one row is required."""
        rows64 = rows.double()
        mean = rows64.mean(0)
        norms = rows64.norm(dim=1)
        variance = float((rows64 - mean).square().sum()) / len(rows)
        return cls(len(rows), mean, variance, float(norms.mean()), float(norms.max()))

    def __add__(self, other: RowStatistics) -> RowStatistics:
        """Statistics of both sets of rows together."""
        count = self.count + other.count
        # Both sets are weighted by their numbers of rows (Chan, Golub and LeVeque 1983).
        share = other.count / count
        difference = other.mean - self.mean
        return RowStatistics(
            count,
            self.mean + share * difference,
            (1 - share) * self.variance
            + share * other.variance
            + share * (1 - share) * float(difference @ difference),
            (1 - share) * self.norm + share * other.norm,
            max(self.max_norm, other.max_norm),
        )


def moments(blocks: Iterable[Mapping[CellT, Tensor]]) -> dict[CellT, RowStatistics]:
    """Statistics of each hook point over all blocks of rows.

    Arguments:
        blocks: Blocks of rows [row, width], by (hook kind, layer).
    """
    statistics: dict[CellT, RowStatistics] = {}
    for block in blocks:
        for hook_cell, rows in block.items():
            block_statistics = RowStatistics.of(rows)
            statistics[hook_cell] = (
                statistics[hook_cell] + block_statistics if hook_cell in statistics else block_statistics
            )
    return statistics
