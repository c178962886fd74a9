"""Mean, scale and variance of the activations at each hook point, in one pass that keeps no rows.

Border: rows in blocks; knows no features. Sums are kept as a mean and squared deviations from it, and joined
block by block (Chan, Golub and LeVeque 1983), in float64: states of a residual stream are large where their
variance is small.
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
    """Of one hook point over some rows.

    count: rows. mean: float64 [width]. variance: total, the mean squared distance from the mean. norm,
    max_norm: mean and largest Euclidean norm of a row.
    """

    count: int
    mean: Tensor
    variance: float
    norm: float
    max_norm: float

    @classmethod
    def of(cls, rows: Tensor) -> RowStatistics:
        """Of rows [row, width], at least one."""
        wide = rows.double()
        mean = wide.mean(0)
        norms = wide.norm(dim=1)
        variance = float((wide - mean).square().sum()) / len(rows)
        return cls(len(rows), mean, variance, float(norms.mean()), float(norms.max()))

    def __add__(self, other: RowStatistics) -> RowStatistics:
        """Of both sets of rows together."""
        count = self.count + other.count
        share = other.count / count
        apart = other.mean - self.mean
        return RowStatistics(
            count,
            self.mean + share * apart,
            (1 - share) * self.variance + share * other.variance + share * (1 - share) * float(apart @ apart),
            (1 - share) * self.norm + share * other.norm,
            max(self.max_norm, other.max_norm),
        )


def moments(blocks: Iterable[Mapping[CellT, Tensor]]) -> dict[CellT, RowStatistics]:
    """Of every cell over all blocks: cell -> [row, width] each."""
    found: dict[CellT, RowStatistics] = {}
    for block in blocks:
        for cell, rows in block.items():
            here = RowStatistics.of(rows)
            found[cell] = found[cell] + here if cell in found else here
    return found
