"""What a feature does around its examples: its activation at the tokens before and after each.

Border: the ragged arrays of one layer and places in it; never imports torch. Holds a block of the corpus, and
what is told of a block of features; the tokens themselves are looked up where they are shown.

Axes: feature; example = the strongest places, then those of each interval from weak to strong; window =
tokens around a place, 0 = the place itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array, Bools, Ints
from ..corpus.sparse import ActiveBlock, blocks as blocks_of
from .chosen import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["around", "example_windows"]


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

    encoded: as a layer's encoding gives it. strongest: `top_examples` of it. drawn: `feature_intervals` of
    it. blocks: `feature_blocks`. before, after: tokens of the same prompt on either side.
    """
    import xarray as xr

    chosen = features_of(blocks, int(encoded.attrs["n_features"]))
    parts = [
        strongest["token"].sel(feature=chosen).values,
        drawn["token"].sel(feature=chosen).values.reshape(len(chosen), -1),
    ]
    token = np.concatenate(parts, axis=1)
    window = np.arange(-before, after + 1)
    activation = np.zeros((*token.shape, len(window)), np.float32)
    _fill(activation, token, chosen, window, encoded)
    return xr.Dataset(
        {
            "token": (("feature", "example"), token),
            "activation": (("feature", "example", "window"), activation),
        },
        coords={"feature": chosen, "window": window, "layer": encoded["layer"]},
    )


def around(token: Ints, window: Ints, prompt: Ints) -> tuple[Ints, Bools]:
    """Packed tokens around some [...] and which of them there are: [..., window].

    token: -1 for none. prompt: of every token. What is in another prompt is not there.
    """
    found = token[..., None] + window
    there = (token >= 0)[..., None] & (found >= 0) & (found < len(prompt))
    found = np.where(there, found, 0)
    there &= prompt[found] == prompt[np.maximum(token, 0)][..., None]
    return found, there


def _fill(activation: Array, token: Ints, chosen: Ints, window: Ints, encoded: xr.Dataset) -> None:
    """Write what is active around the examples, block of the corpus by block."""
    prompt, size = encoded["prompt"].values, int(encoded.attrs["n_features"])
    flat, out = token.ravel(), activation.reshape(-1, len(window))
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    for block in blocks_of(encoded):
        if not len(block.token):
            continue
        first, last = int(block.token[0]), int(block.token[-1])
        near = slice(*np.searchsorted(ordered, [max(first - window[-1], 0), last - window[0] + 1]))
        some = order[near]
        where, there = around(flat[some], window, prompt)
        there &= (where >= first) & (where <= last)
        example, place = np.nonzero(there)
        wanted = (where[example, place] - first) * size + chosen[some[example] // token.shape[1]]
        hit, found = _looked_up(wanted, block, first, last, size)
        out[some[example[hit]], place[hit]] = found


def _looked_up(wanted: Ints, block: ActiveBlock, first: int, last: int, size: int) -> tuple[Ints, Array]:
    """Which of some (token, feature) cells of a block are active, and how strongly.

    Most are not, and a bit for each hash of what is active tells most of those without a search.
    """
    keys = (block.token - first) * size + block.feature  # ascending, as tokens and their features are
    seen = np.zeros(_HASHES, bool)
    seen[keys & (_HASHES - 1)] = True
    maybe = np.flatnonzero(seen[wanted & (_HASHES - 1)])
    spot = np.searchsorted(keys, wanted[maybe])
    spot[spot == len(keys)] = 0
    hit = keys[spot] == wanted[maybe]
    return maybe[hit], block.value[spot[hit]]


_HASHES = 1 << 24
