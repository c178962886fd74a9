"""What features write, as directions: which others write alike, and which dims of the stream they lie along.

Of features that write to several layers, to the last of those: from there the way to the logits is shortest.

Border: a dictionary's decoders; no corpus. Holds some features times all.

Axes: feature; rank, 0 = closest; dim = of what is written, largest part first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array
from ...logits.ranking import top_columns
from ..dictionary import Dictionary
from .chosen import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["decoder_neighbours"]

CELLS = 1 << 21
"""Of some features times all at a time."""
ALIGNED = 3
"""Dims told of each feature."""


@stage(
    version=1,
    inputs={"blocks": ("block", "slot")},
    outputs={
        "neighbour": Output(("feature", "rank"), "1", "features that write most alike; -1: none"),
        "cosine": Output(("feature", "rank"), "1", "cosine of what they write; 0: none"),
        "norm": Output(("feature",), "1", "norm of what a unit writes"),
        "dim": Output(("feature", "largest"), "1", "dims it writes most to"),
        "part": Output(("feature", "largest"), "1", "what a unit writes there"),
        "l1_share": Output(("feature", "largest"), "1", "of the sum of magnitudes over all dims"),
    },
    cells="block",
    combine=join_features,
    resources=("dictionary",),
)
def decoder_neighbours(blocks: xr.DataArray, *, dictionary: Dictionary, layer: int, k: int = 8) -> xr.Dataset:
    """The k features of a layer whose decoder rows point most the way of each feature's.

    blocks: `feature_blocks`. Cosine of a row without direction is 0. The dims are what SAE dashboards call
    neuron alignment (sae_vis, "neuron_alignment_indices", values, and l1 as a share).
    """
    import torch
    import xarray as xr

    chosen = features_of(blocks, dictionary.n_features)
    k = min(k, dictionary.n_features - 1)
    target = max(dictionary.targets(layer))
    every = torch.arange(dictionary.n_features)
    rows = dictionary.layer(layer).decoder_rows(every, target).cpu().numpy()
    norm = np.linalg.norm(rows, axis=1)
    unit = rows / np.where(norm > 0, norm, 1)[:, None]
    neighbour = np.full((len(chosen), k), -1, np.int32)
    cosine = np.zeros((len(chosen), k), np.float32)
    step = max(1, CELLS // len(rows))
    for start in range(0, len(chosen) if k else 0, step):
        some = chosen[start : start + step]
        alike = unit[some] @ unit.T
        alike[np.arange(len(some)), some] = -np.inf
        near = top_columns(alike, k)
        here = slice(start, start + len(some))
        neighbour[here], cosine[here] = near, np.take_along_axis(alike, near, axis=1)
    dim, part, share = _aligned(rows[chosen])
    pairs = {"neighbour": neighbour, "cosine": cosine}
    dims = {"dim": dim, "part": part, "l1_share": share}
    return xr.Dataset(
        {
            **{name: (("feature", "rank"), array) for name, array in pairs.items()},
            **{name: (("feature", "largest"), array) for name, array in dims.items()},
            "norm": ("feature", norm[chosen]),
        },
        coords={"feature": chosen, "rank": np.arange(k), "layer": layer},
        attrs={"written_layer": target},
    )


def _aligned(rows: Array) -> tuple[Array, Array, Array]:
    """Dims of the largest magnitudes, what stands there, and its share of the sum of magnitudes."""
    size = np.abs(rows)
    dim = np.argsort(-size, axis=1, kind="stable")[:, :ALIGNED]
    total = size.sum(axis=1, keepdims=True)
    share = np.take_along_axis(size, dim, axis=1) / np.where(total > 0, total, 1)
    return dim.astype(np.int32), np.take_along_axis(rows, dim, axis=1), share
