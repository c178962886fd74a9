"""Activations of a feature at the tokens around its examples.

Border: the ragged arrays of one layer and tokens in it; never imports torch. Memory holds a block of the
corpus, and the results of a block of features; token texts are looked up when pages are shown.

Axes: feature; example = the strongest tokens, then those of each interval from weak to strong; window =
tokens around an example, 0 = the example itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array, Ints
from ..corpus.examples import window_tokens
from ..corpus.sparse import ActiveBlock, blocks as blocks_of
from .feature_blocks import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["example_windows"]


@stage(
    version=1,
    inputs={"encoded": None, "strongest": None, "drawn": None, "blocks": ("block", "slot")},
    outputs={
        "token": Output(("feature", "example"), "1", "packed token of the example; -1: none"),
        "activation": Output(("feature", "example", "window"), "1", "activation; 0: none, or another prompt"),
    },
    cells="block",
    combine=join_features,
    memory=0.25,
)
def example_windows(
    encoded: xr.Dataset,
    strongest: xr.Dataset,
    drawn: xr.Dataset,
    blocks: xr.DataArray,
    *,
    before: int = 16,
    after: int = 8,
) -> xr.Dataset:
    """Activations around every example of some features.

    Arguments:
        encoded: Encoded layer, from `encode_features`.
        strongest: `top_examples` of it.
        drawn: `feature_intervals` of it.
        blocks: Features, from `feature_blocks`.
        before: Number of tokens before each example, within the same prompt.
        after: Number of tokens after it.
    """
    import xarray as xr

    features = features_of(blocks, int(encoded.attrs["n_features"]))
    parts = [
        strongest["token"].sel(feature=features).values,
        drawn["token"].sel(feature=features).values.reshape(len(features), -1),
    ]
    token = np.concatenate(parts, axis=1)
    window = np.arange(-before, after + 1)
    activation = np.zeros((*token.shape, len(window)), np.float32)
    _fill(activation, token, features, window, encoded)
    return xr.Dataset(
        {
            "token": (("feature", "example"), token),
            "activation": (("feature", "example", "window"), activation),
        },
        coords={"feature": features, "window": window, "layer": encoded["layer"]},
    )


def _fill(activation: Array, token: Ints, features: Ints, window: Ints, encoded: xr.Dataset) -> None:
    """Write activations around the examples into `activation`, block by block of the corpus."""
    prompt, size = encoded["prompt"].values, int(encoded.attrs["n_features"])
    # Examples by token, so that those near a block are one range. -1 (no example) comes first.
    flat, out = token.ravel(), activation.reshape(-1, len(window))
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    for block in blocks_of(encoded):
        if not len(block.token):
            continue
        start, stop = int(block.token[0]), int(block.token[-1])
        # Only examples whose window overlaps the block.
        near = slice(*np.searchsorted(ordered, [max(start - window[-1], 0), stop - window[0] + 1]))
        examples = order[near]
        tokens, is_in_block = window_tokens(flat[examples], window, prompt)
        is_in_block &= (tokens >= start) & (tokens <= stop)
        example, place = np.nonzero(is_in_block)
        cells = (tokens[example, place] - start) * size + features[examples[example] // token.shape[1]]
        hit, values = _looked_up(cells, block, start, stop, size)
        out[examples[example[hit]], place[hit]] = values


def _looked_up(cells: Ints, block: ActiveBlock, start: int, stop: int, size: int) -> tuple[Ints, Array]:
    """Index of the (token, feature) cells that are active in a block, and their activations.

    Most cells are not active, and a bit per hash of the active ones rules out most of these without a search.
    """
    keys = (block.token - start) * size + block.feature  # ascending, as tokens and their features are
    is_hashed = np.zeros(_HASHES, bool)
    is_hashed[keys & (_HASHES - 1)] = True
    candidates = np.flatnonzero(is_hashed[cells & (_HASHES - 1)])
    spot = np.searchsorted(keys, cells[candidates])
    # Past the end: any valid index, as the comparison below fails.
    spot[spot == len(keys)] = 0
    hit = keys[spot] == cells[candidates]
    return candidates[hit], block.value[spot[hit]]


_HASHES = 1 << 24
"""Number of bits of the hash filter, a power of 2."""
