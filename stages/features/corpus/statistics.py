"""Firing frequency and strength of each feature of a stored corpus.

Border: the ragged arrays of one layer in, figures by feature out; never imports torch. Memory holds a block
of the corpus and a few numbers per feature.

Axes: feature; l0 = number of features active at a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ....pipeline import Output, stage
from ....store.errors import ShapeError
from .sparse import blocks, is_counted

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_statistics"]


@stage(
    version=1,
    inputs={"encoded": None},
    outputs={
        "firing_count": Output(("feature",), "tokens", "tokens at which the feature is active"),
        "log10_frequency": Output(("feature",), "1", "log10 of the share of tokens; -inf: never"),
        "mean_activation": Output(("feature",), "1", "mean activation where active; 0: never"),
        "max_activation": Output(("feature",), "1", "largest activation; 0: never"),
        "l0_count": Output(("l0",), "tokens", "tokens with that many active features"),
    },
)
def feature_statistics(encoded: xr.Dataset) -> xr.Dataset:
    """Figures of one layer's features over all tokens that can have features.

    Arguments:
        encoded: Encoded layer, from `encode_features`; its first `zero_positions` of each prompt are not
            counted.

    Returns:
        See `outputs`; attributes n_tokens and mean_l0.

    Raises:
        ShapeError: No token can have features.
    """
    import xarray as xr

    size = int(encoded.attrs["n_features"])
    count = np.zeros(size, np.int64)
    total, largest = np.zeros(size), np.full(size, -np.inf, np.float32)
    for block in blocks(encoded):
        # Converted once: bincount and indexing would each convert int32 indices.
        feature = block.feature.astype(np.int64)
        count += np.bincount(feature, minlength=size)
        total += np.bincount(feature, weights=block.value, minlength=size)
        # np.maximum.at is slow, so it gets only values above the maximum so far.
        larger = np.flatnonzero(block.value > largest[feature])
        np.maximum.at(largest, feature[larger], block.value[larger])
    per_token = np.diff(encoded["token_ptr"].values)[counted(encoded)]
    if not len(per_token):
        raise ShapeError(
            "expected at least one token that may have features, found none; encode longer prompts"
        )
    with np.errstate(divide="ignore"):  # log10(0) = -inf marks features that never fire
        frequency = np.log10(count / len(per_token))
    l0 = np.bincount(per_token)
    return xr.Dataset(
        {
            "firing_count": ("feature", count),
            "log10_frequency": ("feature", frequency),
            "mean_activation": ("feature", total / np.maximum(count, 1)),
            "max_activation": ("feature", np.where(count > 0, largest, 0)),
            "l0_count": ("l0", l0),
        },
        coords={"feature": np.arange(size), "l0": np.arange(len(l0)), "layer": encoded["layer"]},
        attrs={"n_tokens": len(per_token), "mean_l0": float(per_token.mean())},
    )


def counted(encoded: xr.Dataset) -> npt.NDArray[np.bool_]:
    """Whether each token of an encoded layer can have features, bool [token]."""
    zero_positions = int(encoded.attrs.get("zero_positions", 0))
    return is_counted(encoded, encoded.sizes["edge"] - 1, zero_positions)
