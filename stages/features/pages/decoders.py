"""Directions of decoder vectors: features that write in similar directions, and their largest entries.

For features that write to several layers, the decoder of the last layer is used, because its path to the
logits is the shortest.

Border: a dictionary's decoders; no corpus. Memory holds the cosines of some features with all.

Axes: feature; rank, 0 = closest; dim = of the decoder vector, largest magnitude first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array
from ...logits.ranking import top_columns
from ..dictionary import Dictionary
from .feature_blocks import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["decoder_neighbours"]

CELLS = 1 << 21
"""Number of cosines that are computed at once."""
ALIGNED = 3
"""Number of entries of its decoder vector that are listed for each feature."""


@stage(
    version=1,
    inputs={"blocks": ("block", "slot")},
    outputs={
        "neighbour": Output(("feature", "rank"), "1", "features with the closest decoder vectors; -1: none"),
        "cosine": Output(("feature", "rank"), "1", "cosine of the decoder vectors; 0: none"),
        "norm": Output(("feature",), "1", "norm of the decoder vector"),
        "dim": Output(("feature", "largest"), "1", "dims of largest magnitude in the decoder vector"),
        "part": Output(("feature", "largest"), "1", "entry of the decoder vector in the dim"),
        "l1_share": Output(("feature", "largest"), "1", "share of the sum of magnitudes over all dims"),
    },
    cells="block",
    combine=join_features,
    resources=("dictionary",),
)
def decoder_neighbours(blocks: xr.DataArray, *, dictionary: Dictionary, layer: int, k: int = 8) -> xr.Dataset:
    """The k features of a layer whose decoder rows have the largest cosine with each feature's.

    The cosine of a zero row is 0. The dims correspond to the neuron alignment of SAE dashboards (sae_vis:
    neuron_alignment_indices, values, and l1 as a share).

    Arguments:
        blocks: Indices of the features, from `feature_blocks`.
        dictionary: The opened dictionary.
        layer: Layer that the features read.
        k: Number of neighbours per feature.
    """
    import torch
    import xarray as xr

    features = features_of(blocks, dictionary.n_features)
    k = min(k, dictionary.n_features - 1)  # a feature is no neighbour of itself
    target = max(dictionary.targets(layer))
    all_features = torch.arange(dictionary.n_features)
    # All decoder rows of a layer are in memory here: n_features x d_out float32.
    rows = dictionary.layer(layer).decoder_rows(all_features, target).cpu().numpy()
    norm = np.linalg.norm(rows, axis=1)
    unit = rows / np.where(norm > 0, norm, 1)[:, None]
    neighbour = np.full((len(features), k), -1, np.int32)
    cosine = np.zeros((len(features), k), np.float32)
    step = max(1, CELLS // len(rows))
    for start in range(0, len(features) if k else 0, step):
        block = features[start : start + step]
        cosines = unit[block] @ unit.T
        # A feature is no neighbour of itself.
        cosines[np.arange(len(block)), block] = -np.inf
        closest = top_columns(cosines, k)
        rows_of_block = slice(start, start + len(block))
        neighbour[rows_of_block] = closest
        cosine[rows_of_block] = np.take_along_axis(cosines, closest, axis=1)
    dim, part, share = _largest_entries(rows[features])
    pairs = {"neighbour": neighbour, "cosine": cosine}
    dims = {"dim": dim, "part": part, "l1_share": share}
    return xr.Dataset(
        {
            **{name: (("feature", "rank"), array) for name, array in pairs.items()},
            **{name: (("feature", "largest"), array) for name, array in dims.items()},
            "norm": ("feature", norm[features]),
        },
        coords={"feature": features, "rank": np.arange(k), "layer": layer},
        attrs={"written_layer": target},
    )


def _largest_entries(rows: Array) -> tuple[Array, Array, Array]:
    """(dims of largest magnitude, entries there, shares of the sum of magnitudes), each [feature, rank]."""
    size = np.abs(rows)
    dim = np.argsort(-size, axis=1, kind="stable")[:, :ALIGNED]
    total = size.sum(axis=1, keepdims=True)
    share = np.take_along_axis(size, dim, axis=1) / np.where(total > 0, total, 1)
    return dim.astype(np.int32), np.take_along_axis(rows, dim, axis=1), share
