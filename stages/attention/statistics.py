"""Statistics of each head's attention over many prompts: entropy, distance, weight on BOS and current token.

Most heads of most models attend to the first position when they have nothing to do (Xiao et al. 2023,
"Efficient Streaming Language Models with Attention Sinks"). So read other scores together with the share of
BOS.

Axes: layer, pair (lower triangles of all prompts end to end), head, prompt. Needs no model and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from .rows import HEAD, PatternRows, head_coords

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["head_statistics"]


@stage(
    version=1,
    inputs={"pattern": ("layer", "pair", HEAD), "row_size": ("prompt",)},
    outputs={
        "entropy": Output(("layer", "head"), "nats", "entropy of a query's weights"),
        "bos_share": Output(("layer", "head"), "1", "weight on the first position, often a BOS"),
        "current_share": Output(("layer", "head"), "1", "weight on the current token"),
        "distance": Output(("layer", "head"), "tokens", "mean distance from query to key"),
    },
    cells="layer",
    memory=1.0,
)
def head_statistics(pattern: xr.DataArray, row_size: xr.DataArray, *, first_query: int = 1) -> xr.Dataset:
    """Statistics of every head, averaged over the queries of all prompts with equal weight.

    Arguments:
        pattern: Packed patterns, [layer, pair, head], any float dtype, lazy or not.
        row_size: Number of tokens of each prompt, int [prompt].
        first_query: First query position that counts; by default 1, as position 0 can only attend to itself.

    Returns:
        float64 [layer, head]: entropy in nats (0 if all weight is on one key, log n if it is equal on n
        keys), shares of the weight from 0 to 1, distance in tokens.
    """
    import xarray as xr

    rows = PatternRows.of(row_size, pattern, first_query)
    names = ("entropy", "bos_share", "current_share", "distance")
    sums = np.zeros((len(names), pattern.sizes["layer"], pattern.sizes["head"]))
    for layer in range(pattern.sizes["layer"]):
        for block in rows.blocks(pattern.isel(layer=layer)):
            is_counted = block.query >= first_query
            weights, key = block.weights[is_counted], block.key[is_counted]
            distance = block.query[is_counted] - key
            # A weight may be 0, by rounding or outside a window; its term w * log(w) is then 0, not NaN.
            logs = np.log(np.maximum(weights, np.finfo(np.float32).tiny))
            # Accumulated in float64: float32 sums over a corpus lose digits.
            sums[0, layer] -= np.einsum("ph,ph->h", weights, logs, dtype=np.float64)
            sums[1, layer] += weights[key == 0].sum(0, dtype=np.float64)
            sums[2, layer] += weights[distance == 0].sum(0, dtype=np.float64)
            sums[3, layer] += np.einsum("ph,p->h", weights, distance.astype(np.float64))
    # Every query has the same weight, so long prompts count more.
    sums /= int((rows.sizes - first_query).sum())
    data = {name: (("layer", "head"), values) for name, values in zip(names, sums, strict=True)}
    return xr.Dataset(data, coords=head_coords(pattern))
