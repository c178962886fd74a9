"""Blocks of features: the unit in which pages are computed, cached and resumed.

Border: indices of features; what is computed for them is defined by each stage.

Axes: block; slot = position in a block, -1 where the last block is not full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ....store.arrays import Ints
from ....store.errors import DictionaryError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_blocks", "features_of", "join_features"]


def feature_blocks(features: Sequence[int] | int, size: int) -> xr.DataArray:
    """Indices of features in blocks of at most `size`, int64 [block, slot]; -1 fills the last block.

    Arguments:
        features: Indices of features, each once; or a number n for the features 0 to n - 1.
        size: Largest number of features per block.

    Raises:
        DictionaryError: There are no features, one is named twice, or `size` is below 1.
    """
    import xarray as xr

    indices = np.arange(features) if isinstance(features, int) else np.array(features, np.int64)
    if not len(indices) or size < 1 or len(np.unique(indices)) < len(indices):
        raise DictionaryError(
            f"expected at least one feature, each feature once, and blocks of at least one, found "
            f"{len(indices)} features, {len(np.unique(indices))} of them different, and blocks of {size}"
        )
    # Blocks of equal size take equal times in parallel. -(-a // b) rounds a / b up.
    size = -(-len(indices) // -(-len(indices) // size))
    # -1 fills the last block, because the array is rectangular.
    padded = np.full(-(-len(indices) // size) * size, -1, np.int64)
    padded[: len(indices)] = indices
    blocks = padded.reshape(-1, size)
    return xr.DataArray(blocks, {"block": np.arange(len(blocks))}, ("block", "slot"), name="feature")


def features_of(blocks: xr.DataArray, n_features: int) -> Ints:
    """Indices of the features of some blocks, in one row [feature].

    Arguments:
        blocks: Blocks from `feature_blocks`, -1 for empty slots.
        n_features: Number of features of the layer.

    Raises:
        DictionaryError: An index does not exist.
    """
    indices: Ints = blocks.values.ravel()
    indices = indices[indices >= 0]
    if indices.max(initial=0) >= n_features:
        raise DictionaryError(f"expected feature indices from 0 to {n_features - 1}, found {indices.max()}")
    return indices


def join_features(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Results of several blocks of features, concatenated along `feature`; lazy if they are lazy."""
    import xarray as xr

    if len(parts) == 1:
        return parts[0]
    joined: xr.Dataset = xr.concat(
        parts,
        "feature",
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="override",
        combine_attrs="override",
    )
    return joined
