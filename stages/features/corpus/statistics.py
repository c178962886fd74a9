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
    """How often and how strongly each feature of a layer is active in a corpus.

    Arguments:
        encoded: Active features of the layer, from `encode_features`. Its attribute `zero_positions` is the
            number of positions at the start of each prompt that do not count.

    Returns:
        The variables in `outputs`, and as attributes n_tokens, the number of tokens that count, and mean_l0,
        the
        mean number of active features at a token.

    Raises:
        ShapeError: No token counts.
    """
    import xarray as xr

    n_features = int(encoded.attrs["n_features"])
    firing_count = np.zeros(n_features, np.int64)
    activation_sum, largest = np.zeros(n_features), np.full(n_features, -np.inf, np.float32)
    for block in blocks(encoded):
        # Converted once: bincount and indexing would each convert int32 indices.
        feature = block.feature.astype(np.int64)
        firing_count += np.bincount(feature, minlength=n_features)
        activation_sum += np.bincount(feature, weights=block.value, minlength=n_features)
        # np.maximum.at is slow, so it gets only values above the maximum so far.
        larger = np.flatnonzero(block.value > largest[feature])
        np.maximum.at(largest, feature[larger], block.value[larger])
    active_per_token = np.diff(encoded["token_ptr"].values)[counted(encoded)]
    if not len(active_per_token):
        raise ShapeError(
            "expected at least one token after the positions at the start of each prompt that are left out "
            "(zero_positions), found none; encode longer prompts"
        )
    with np.errstate(divide="ignore"):  # log10(0) = -inf marks features that never fire
        log10_frequency = np.log10(firing_count / len(active_per_token))
    l0_count = np.bincount(active_per_token)
    return xr.Dataset(
        {
            "firing_count": ("feature", firing_count),
            "log10_frequency": ("feature", log10_frequency),
            "mean_activation": ("feature", activation_sum / np.maximum(firing_count, 1)),
            "max_activation": ("feature", np.where(firing_count > 0, largest, 0)),
            "l0_count": ("l0", l0_count),
        },
        coords={
            "feature": np.arange(n_features),
            "l0": np.arange(len(l0_count)),
            "layer": encoded["layer"],
        },
        attrs={"n_tokens": len(active_per_token), "mean_l0": float(active_per_token.mean())},
    )


def counted(encoded: xr.Dataset) -> npt.NDArray[np.bool_]:
    """Whether each token counts, bool [token]: it is not among the first positions that are left out."""
    zero_positions = int(encoded.attrs.get("zero_positions", 0))
    return is_counted(encoded, encoded.sizes["edge"] - 1, zero_positions)
