"""int8 storage of activations: one byte per number, and one float32 scale per 64 numbers.

A variable stored as int8 is two arrays: the numbers, and `<variable>__scale` with one scale for each block of
64 neighbours on the last axis: value = number * scale. The scale is the largest magnitude of the block / 127,
so the rounding error is at most half a scale (plus float32 rounding). A block of zeros has scale 0. NaN and
infinities have no scale and are refused.

Why blocks of 64 (6 % more bytes) instead of one scale per row: a massive activation then costs only its own
block the precision. Relative RMS error in a residual stream of width 192: 0.0061 with blocks, 0.0071 with
rows. In rows of 2048 with two values a thousand times larger than the rest, the rest loses a quarter of its
norm with blocks and all of it with rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..errors import ShapeError
from .shards import ShardRows

QUANTISED = "int8"
"""Name of the storage dtype."""
BLOCK = 64
"""Neighbours on the last axis that share a scale."""
_LARGEST = 127  # -128 is not used, so that the range is symmetric
_SUFFIX = "__scale"
_STEP_NUMBERS = 1 << 20  # numbers per step, which bounds the temporary copies
_SMALLEST_NORMAL = np.finfo(np.float32).tiny


def scale_name(variable: str) -> str:
    """Name of the array with the scales of an int8 variable."""
    return f"{variable}{_SUFFIX}"


def scaled_name(variable: str) -> str:
    """Name of the variable that a scale array belongs to; other names are returned unchanged."""
    return variable.removesuffix(_SUFFIX)


def is_scale(variable: str) -> bool:
    """Whether an array's name says that it holds the scales of an int8 variable."""
    return variable.endswith(_SUFFIX)


def n_blocks(width: int) -> int:
    """Number of scales for a row of `width` numbers, one per block of 64; the last block may be shorter."""
    return -(-width // BLOCK)


def quantise(rows: Array, label: str) -> tuple[Array, Array]:
    """Round float32 activations to int8 numbers with a scale per block of 64 neighbours.

    Arguments:
        rows: float32 [row, …, width].
        label: Names these rows in error messages.

    Returns:
        Numbers, int8 [row, …, width], and scales, float32 [row, …, block]; value = number * scale.

    Raises:
        ShapeError: Another dtype, or NaN or infinities.
    """
    if rows.dtype != np.float32 or rows.ndim < 2:
        raise ShapeError(
            f"{label}: expected float32 of at least two axes to store as int8, found {rows.dtype} of shape "
            f"{list(rows.shape)}"
        )
    width, blocks = rows.shape[-1], n_blocks(rows.shape[-1])
    numbers = np.empty(rows.shape, np.int8)
    scales = np.empty((*rows.shape[:-1], blocks), np.float32)
    row_numbers = max(1, math.prod(rows.shape[1:]))
    step = max(1, _STEP_NUMBERS // row_numbers)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        block_numbers, scales[part] = _quantised(_in_blocks(rows[part], width, blocks), label)
        # Blocks side by side again, without the zeros that filled up the last one.
        numbers[part] = block_numbers.reshape(*block_numbers.shape[:-2], -1)[..., :width]
    return numbers, scales


def restored(values: Array, scales: Array) -> npt.NDArray[np.float32]:
    """Convert int8 numbers and their scales back to float32 activations [..., width].

    Arguments:
        values: Numbers, int8 [..., width].
        scales: Scale of each block of 64 numbers, float32 [..., block].
    """
    width = values.shape[-1]
    if width % BLOCK:
        expanded: Array = np.repeat(scales, BLOCK, axis=-1)[..., :width]
        return values * expanded
    blocks: Array = values.reshape(*values.shape[:-1], -1, BLOCK) * scales[..., None]
    return blocks.reshape(values.shape)


class RestoredRows:
    """Rows of an int8 shard as float32, [rows, ...]; indexing copies and dequantises them."""

    dtype = np.dtype(np.float32)

    def __init__(self, values: ShardRows, scales: ShardRows) -> None:
        self._values, self._scales = values, scales
        self.shape = values.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        rows = self[:]
        return rows.astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def __getitem__(self, key: Any) -> Array:
        return restored(self._values[key], self._scales[key])

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Yield a range of rows, one chunk at a time, as (offset from `start`, float32 rows).

        Arguments:
            start: First row.
            stop: End of the range (exclusive).
        """
        for offset, block in self._values.blocks(start, stop):
            yield offset, restored(block, self._scales[start + offset : start + offset + len(block)])


def _in_blocks(rows: Array, width: int, blocks: int) -> Array:
    """Split the last axis into blocks, [row, …, width] -> [row, …, block, 64], padded with zeros."""
    if width % BLOCK:
        ends = [(0, 0)] * (rows.ndim - 1)
        rows = np.pad(rows, [*ends, (0, blocks * BLOCK - width)])
    return rows.reshape(*rows.shape[:-1], blocks, BLOCK)


def _quantised(blocks: Array, label: str) -> tuple[Array, Array]:
    """int8 numbers [..., block, 64] and float32 scales [..., block] of float32 blocks."""
    largest = np.abs(blocks).max(axis=-1)
    if not np.isfinite(largest).all():
        raise ShapeError(
            f"{label} has NaN or infinities, which int8 cannot hold; store it as bfloat16 or float32 "
            "(--storage-dtype)"
        )
    # A subnormal scale has too few bits to keep the error below half a scale, hence at least the smallest
    # normal.
    scales = np.where(
        largest > 0, np.maximum(largest / np.float32(_LARGEST), _SMALLEST_NORMAL), np.float32(0)
    )
    # A block of zeros has scale 0; dividing by 1 instead gives zeros without a warning.
    divisor = np.where(scales > 0, scales, np.float32(1))[..., None]
    return np.rint(blocks / divisor).clip(-_LARGEST, _LARGEST).astype(np.int8), scales.astype(np.float32)


def scale_sizes(dims: Sequence[str], sizes: dict[str, int]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Dimension names and sizes of the scales of an int8 variable: its last axis becomes one of blocks.

    Arguments:
        dims: Dimension names of the variable.
        sizes: Size of each axis of one row of the variable, by name.
    """
    last = dims[-1]
    scale_sizes = {dim: size for dim, size in sizes.items() if dim != last}
    return (*dims[:-1], f"{last}_block"), {**scale_sizes, f"{last}_block": n_blocks(sizes[last])}
