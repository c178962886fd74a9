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
    """Activations of features at the tokens around each of their examples.

    Arguments:
        encoded: Active features of the layer, from `encode_features`.
        strongest: Result of `top_examples` for the layer.
        drawn: Result of `feature_intervals` for the layer.
        blocks: Indices of the features, from `feature_blocks`.
        before: Number of tokens before each example, within the same prompt.
        after: Number of tokens after each example, within the same prompt.
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
    """Write activations around the examples into `activation` [feature, example, window].

    Arguments:
        activation: Array of zeros, which is filled.
        token: Token of each example [feature, example]; -1 for none.
        features: Index of each feature [feature].
        window: Offsets of the tokens from the example [window].
        encoded: Active features of the layer, read block by block.
    """
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
        example, offset = np.nonzero(is_in_block)
        # A token of the block and a feature as one integer, which `_active_cells` looks up.
        cells = (tokens[example, offset] - start) * size + features[examples[example] // token.shape[1]]
        active, values = _active_cells(cells, block, start, size)
        out[examples[example[active]], offset[active]] = values


def _active_cells(cells: Ints, block: ActiveBlock, start: int, size: int) -> tuple[Ints, Array]:
    """Which cells, (token - start) * size + feature, are active in a block: their indices and activations.

    Most cells are not active, and a bit per hash of the active ones rules out most of these without a search.
    """
    keys = (block.token - start) * size + block.feature  # ascending, as tokens and their features are
    is_hashed = np.zeros(_HASHES, bool)
    is_hashed[keys & (_HASHES - 1)] = True
    candidates = np.flatnonzero(is_hashed[cells & (_HASHES - 1)])
    index = np.searchsorted(keys, cells[candidates])
    # Past the end: any valid index, as the comparison below fails.
    index[index == len(keys)] = 0
    is_active = keys[index] == cells[candidates]
    return candidates[is_active], block.value[index[is_active]]


_HASHES = 1 << 24
"""Number of bits of the filter in `_active_cells`, a power of 2."""
