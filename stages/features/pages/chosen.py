"""Which features are looked at together: the unit in which pages are computed, cached and resumed.

Border: numbers of features; what is computed of them is each stage's.

Axes: block; slot = place in a block, -1 where the last one is not full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ....store.arrays import Ints
from ....store.errors import DictionaryError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_blocks", "features_of", "join_features", "places_of"]


def feature_blocks(features: Sequence[int] | int, size: int) -> xr.DataArray:
    """Features in blocks of at most `size`: int64 [block, slot].

    features: which ones, each once; a number: the first so many. Raises DictionaryError for none, for one
    named twice, and for a size below 1.
    """
    import xarray as xr

    chosen = np.arange(features) if isinstance(features, int) else np.array(features, np.int64)
    if not len(chosen) or size < 1 or len(np.unique(chosen)) < len(chosen):
        raise DictionaryError(
            f"expected features, each once, in blocks of at least one, found {len(chosen)} features of which "
            f"{len(np.unique(chosen))} differ, and a block of {size}"
        )
    size = -(-len(chosen) // -(-len(chosen) // size))  # as many in each: they are computed side by side
    padded = np.full(-(-len(chosen) // size) * size, -1, np.int64)
    padded[: len(chosen)] = chosen
    blocks = padded.reshape(-1, size)
    return xr.DataArray(blocks, {"block": np.arange(len(blocks))}, ("block", "slot"), name="feature")


def features_of(blocks: xr.DataArray, n_features: int) -> Ints:
    """The features of some blocks, end to end. Raises DictionaryError for one there is not."""
    found: Ints = blocks.values.ravel()
    found = found[found >= 0]
    if found.max(initial=0) >= n_features:
        raise DictionaryError(f"expected features from 0 to {n_features - 1}, found {found.max()}")
    return found


def places_of(features: Ints, n_features: int) -> Ints:
    """Where each of a layer's features stands among some, -1 for the others: [n_features]."""
    place = np.full(n_features, -1, np.int64)
    place[features] = np.arange(len(features))
    return place


def join_features(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Blocks of features end to end; lazy where they are."""
    import xarray as xr

    if len(parts) == 1:
        return parts[0]
    found: xr.Dataset = xr.concat(
        parts,
        "feature",
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="override",
        combine_attrs="override",
    )
    return found
