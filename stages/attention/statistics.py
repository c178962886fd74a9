"""What a head's attention is like: how spread, how far back, how much of it on BOS, over many prompts.

Border: stored attention patterns; knows no tokens, no model, and never imports torch.

Idea: most heads of most models rest on the first position when they have nothing to do (Xiao et al. 2023,
"Efficient Streaming Language Models with Attention Sinks"), so that a share says more beside that of BOS.

Axes: layer, pair (lower triangles of all prompts end to end), head, prompt.
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
        "distance": Output(("layer", "head"), "tokens", "mean distance looked back"),
    },
    cells="layer",
    memory=1.0,
)
def head_statistics(pattern: xr.DataArray, row_size: xr.DataArray, *, first_query: int = 1) -> xr.Dataset:
    """What every head's attention is like, mean over the queries of all prompts; each query weighs the same.

    pattern, row_size: as for `head_scores`.  first_query: the first token of a prompt can only look at itself
    and is left out by default.
    Returns float64 [layer, head]: entropy in nats (0: one key, log n: n keys alike), shares of weight 0 to 1,
    distance in tokens.
    """
    import xarray as xr

    rows = PatternRows.of(row_size, pattern, first_query)
    names = ("entropy", "bos_share", "current_share", "distance")
    found = np.zeros((len(names), pattern.sizes["layer"], pattern.sizes["head"]))
    for layer in range(pattern.sizes["layer"]):
        for block in rows.blocks(pattern.isel(layer=layer)):
            kept = block.query >= first_query
            weights, key = block.weights[kept], block.key[kept]
            back = block.query[kept] - key
            # A weight may be 0, by rounding or a window; so is its term.
            logs = np.log(np.maximum(weights, np.finfo(np.float32).tiny))
            found[0, layer] -= np.einsum("ph,ph->h", weights, logs, dtype=np.float64)
            found[1, layer] += weights[key == 0].sum(0, dtype=np.float64)
            found[2, layer] += weights[back == 0].sum(0, dtype=np.float64)
            found[3, layer] += np.einsum("ph,p->h", weights, back.astype(np.float64))
    found /= int((rows.sizes - first_query).sum())
    data = {name: (("layer", "head"), values) for name, values in zip(names, found, strict=True)}
    return xr.Dataset(data, coords=head_coords(pattern))
