"""What features do to the logits themselves: the tokens each raises and lowers most, and how all of them
move.

The direct path only, as stages/features/effects/words.py tells it; this is the same for all features of a
layer, with a histogram over the vocabulary.

Border: a dictionary's decoders and a readout; no corpus. Holds some features times the vocabulary.

Axes: feature; rank, 0 = strongest; bin = of the histogram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array, Ints
from ...logits.ranking import top_columns
from ..dictionary import Dictionary
from ..effects.words import effects_in_blocks
from .chosen import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_logits"]

BLOCK_BYTES = 1 << 24
"""Of logits [feature, vocab] that exist at a time."""


@stage(
    version=1,
    inputs={"readout": None, "blocks": ("block", "slot")},
    outputs={
        "raised": Output(("feature", "rank"), "1", "tokens raised most"),
        "raised_by": Output(("feature", "rank"), "logits", "by so much per unit of activation"),
        "lowered": Output(("feature", "rank"), "1", "tokens lowered most"),
        "lowered_by": Output(("feature", "rank"), "logits", "by so much per unit of activation"),
        "histogram": Output(("feature", "bin"), "tokens", "tokens of the vocabulary by effect"),
        "low": Output(("feature",), "logits", "where the first bin begins"),
        "high": Output(("feature",), "logits", "where the last bin ends"),
    },
    cells="block",
    combine=join_features,
    resources=("dictionary",),
)
def feature_logits(
    readout: xr.Dataset,
    blocks: xr.DataArray,
    *,
    dictionary: Dictionary,
    layer: int,
    top_k: int = 10,
    bins: int = 50,
) -> xr.Dataset:
    """Effects of features on the logits, per unit of activation, less their mean over the vocabulary.

    readout: as stages/logits/readout.py gives it. blocks: `feature_blocks`. The bins are equal, from the
    smallest effect to the largest. Raises ShapeError for a readout of another width.
    """
    import xarray as xr

    chosen = features_of(blocks, dictionary.n_features)
    shape = (len(chosen), min(top_k, readout.sizes["vocab"]))
    tokens: dict[str, Ints] = {name: np.empty(shape, np.int32) for name in ("raised", "lowered")}
    by = {f"{name}_by": np.empty(shape, np.float32) for name in tokens}
    histogram = np.empty((len(chosen), bins), np.int64)
    ends = np.empty((2, len(chosen)), np.float32)
    pairs = np.stack([np.full_like(chosen, layer), chosen], axis=1)
    for some, effects in effects_in_blocks(dictionary, pairs, readout, BLOCK_BYTES):
        histogram[some], ends[0, some], ends[1, some] = _counted(effects, bins)
        for name, sign in (("raised", 1), ("lowered", -1)):
            if sign < 0:
                np.negative(effects, out=effects)  # it is ours, and large
            tokens[name][some] = top_columns(effects, shape[1])
            by[f"{name}_by"][some] = sign * np.take_along_axis(effects, tokens[name][some], axis=1)
    return xr.Dataset(
        {
            **{name: (("feature", "rank"), array) for name, array in {**tokens, **by}.items()},
            "histogram": (("feature", "bin"), histogram),
            "low": ("feature", ends[0]),
            "high": ("feature", ends[1]),
        },
        coords={"feature": chosen, "rank": np.arange(shape[1]), "layer": layer},
    )


def _counted(effects: Array, bins: int) -> tuple[Ints, Array, Array]:
    """Of each row the values by bin, and the range of the bins."""
    low, high = effects.min(axis=1), effects.max(axis=1)
    scale = np.float32(bins) / np.where(high > low, high - low, 1)
    counts = np.empty((len(effects), bins), np.int64)
    width, half = bins + 1, effects.shape[1] // 2
    bin_of = np.empty(effects.shape[1], np.float32)
    for row, effect in enumerate(effects):  # one at a time, which stays in the cache
        np.subtract(effect, low[row], out=bin_of)
        np.multiply(bin_of, scale[row], out=bin_of)
        found = bin_of.astype(np.int32)
        # Counted in pairs, which are half as many. Measured: 40 us a row of 32,768, 70 one by one.
        pairs = np.bincount(found[:half] * width + found[half : 2 * half], minlength=width**2)
        both = pairs.reshape(width, width)
        count = both.sum(axis=0) + both.sum(axis=1) + np.bincount(found[2 * half :], minlength=width)
        counts[row] = count[:bins]
        counts[row, -1] += count[bins]  # the largest
    return counts, low, high
