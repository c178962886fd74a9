"""Count, mean and scatter of rows, accumulated block by block, for PCA and least squares.

One float32 matrix product per block, summed in float64. A large common offset, as residual streams have, is
subtracted before the product, because it would use up the mantissa. Summaries of two sets of rows merge
exactly (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...store.arrays import Array
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Moments", "row_blocks"]


BLOCK_BYTES = 1 << 26
"""Bytes of float32 rows per matrix product, within 4k to 32k rows; large blocks mean fewer additions."""
_TILE = 256
"""Number of rows that are converted and shifted at a time, so that they stay in the CPU cache."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Number, mean and scatter matrix of some rows (vectors)."""

    n: int
    """Number of rows."""
    mean: Array
    """Mean of the rows, float64 [hidden]."""
    scatter: Array
    """Sum over the rows x of (x - mean)(x - mean)', float64 [hidden, hidden]."""

    @classmethod
    def of(cls, blocks: Iterable[Array]) -> Moments:
        """Moments of rows that arrive in blocks [row, hidden].

        Products are computed in float32, for float64 rows in float64; they are summed in float64.

        Raises:
            ShapeError: There is no row.
        """
        sums: _Sums | None = None
        for block in blocks:
            if len(block):
                sums = sums or _Sums(block)
                sums.add(block)
        if sums is None:
            raise ShapeError(
                "expected at least one state to compute moments of, found none; select some tokens"
            )
        return sums.moments()

    def merge(self, other: Moments) -> Moments:
        """Moments of the rows of both sets together."""
        n = self.n + other.n
        if n == 0:
            return self
        delta = other.mean - self.mean
        scatter = self.scatter + other.scatter + np.outer(delta, delta) * (self.n * other.n / n)
        return Moments(n, self.mean + delta * (other.n / n), scatter)


class _Sums:
    """Running sums over blocks of rows: products in the dtype `kind`, totals in float64.

    In a column whose mean is many times its spread, a float32 product loses that ratio squared in precision.
    Such rows are shifted by about their mean first. If all means are small, the shift would gain at most a
    factor of 5 in rounding and cost a pass over memory (measured at width 512: 0.85 of the bare product
    instead of 0.95).
    """

    def __init__(self, first_block: Array) -> None:
        width = first_block.shape[1]
        self.kind = np.float64 if first_block.dtype == np.float64 else np.float32
        # About 512 rows spread over the first block are enough to estimate mean and spread.
        sample = first_block[:: max(1, len(first_block) // 512)].astype(np.float64)
        offset, spread = sample.mean(axis=0), sample.std(axis=0)
        is_far = bool((np.abs(offset) > 2 * spread).any())
        self.shift = offset.astype(self.kind) if is_far else None
        self.n = 0
        self.total: npt.NDArray[np.float64] = np.zeros(width)
        self.gram: npt.NDArray[np.float64] = np.zeros((width, width))
        self._product: npt.NDArray[np.float64] = np.empty((width, width), self.kind)
        self._buffer = np.empty((0, width), self.kind)
        self._ones = np.ones(0, self.kind)

    def add(self, block: Array) -> None:
        """Add the rows of a block [row, hidden]."""
        rows = self._converted(block)
        if len(rows) > len(self._ones):
            self._ones = np.ones(len(rows), self.kind)
        # numpy notices that both factors are one array and calls syrk: half the flops of a general product.
        np.matmul(rows.T, rows, out=self._product)
        self.gram += self._product
        self.total += np.asarray(self._ones[: len(rows)] @ rows, np.float64)
        self.n += len(rows)

    def moments(self) -> Moments:
        """Moments of all rows added so far."""
        mean = self.total / self.n
        scatter = self.gram - np.outer(self.total, mean)
        return Moments(self.n, mean if self.shift is None else mean + self.shift, scatter)

    def _converted(self, block: Array) -> Array:
        """The block in the dtype `kind`, shifted if necessary, in a buffer that is allocated once."""
        if self.shift is None and block.dtype == self.kind:
            return block
        if len(block) > len(self._buffer):
            self._buffer = np.empty(block.shape, self.kind)
        out = self._buffer[: len(block)]
        # a tile stays in the CPU cache between widening and shifting
        for start in range(0, len(block), _TILE):
            self._fill(block[start : start + _TILE], out[start : start + _TILE])
        return out

    def _fill(self, rows: Array, out: Array) -> None:
        """Write rows, converted to `kind` and shifted if necessary, into `out`."""
        if rows.dtype.name == "bfloat16":  # widened by bit shift: half the time of ml_dtypes' astype
            np.left_shift(rows.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
            rows = out
        if self.shift is not None:
            np.subtract(rows, self.shift, out=out, dtype=self.kind)
        elif rows is not out:
            np.copyto(out, rows)


def row_blocks(states: xr.DataArray, block: int | None = None) -> Iterator[Array]:
    """Yield rows [row, hidden] of states, block by block.

    Arguments:
        states: [samples..., hidden], in memory or lazy. Only the first sample dimension is sliced, so that
            each stored byte of a lazy array is read once.
        block: Most rows of a block, if there is one sample dimension; None for about 64 MiB of float32.

    Raises:
        ShapeError: There is no hidden dimension.
    """
    if "hidden" not in states.dims:
        raise ShapeError(
            f"expected states with a dim named 'hidden', found the dims {states.dims}; rename the dim along "
            "which a state's vector lies"
        )
    states = states.transpose(..., "hidden")
    if states.ndim == 1:
        yield states.values[None, :]
        return
    block = block or int(np.clip(BLOCK_BYTES // (4 * states.sizes["hidden"]), 4096, 32768))
    first_dim, *other_dims = states.dims[:-1]
    step = max(1, block // int(np.prod([states.sizes[name] for name in other_dims], dtype=np.int64)))
    for start in range(0, states.sizes[first_dim], step):
        values = states.isel({first_dim: slice(start, start + step)}).values
        yield values.reshape(-1, values.shape[-1])
