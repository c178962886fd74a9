"""Direct effects of features on the logits: tokens raised and lowered most, and a histogram over all tokens.

Only the direct path is counted, as in stages/features/effects/words.py; this stage computes it for all
features of a layer.

Border: a dictionary's decoders and a readout; no corpus. Memory holds some features times the vocabulary.

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
from .feature_blocks import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_logits"]

BLOCK_BYTES = 1 << 24
"""Largest size in bytes of the logits [feature, vocab] that are computed at once."""


@stage(
    version=1,
    inputs={"readout": None, "blocks": ("block", "slot")},
    outputs={
        "raised": Output(("feature", "rank"), "1", "tokens raised most"),
        "raised_by": Output(("feature", "rank"), "logits", "increase per unit of activation"),
        "lowered": Output(("feature", "rank"), "1", "tokens lowered most"),
        "lowered_by": Output(("feature", "rank"), "logits", "change per unit of activation"),
        "histogram": Output(("feature", "bin"), "tokens", "number of tokens by effect"),
        "low": Output(("feature",), "logits", "lower edge of the first bin"),
        "high": Output(("feature",), "logits", "upper edge of the last bin"),
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
    """Direct effects of features on the logits, in logits per unit of activation.

    The mean effect over the vocabulary is subtracted, since it changes no probability.

    Arguments:
        readout: Final norm and unembedding, from stages/logits/readout.py.
        blocks: Indices of the features, from `feature_blocks`.
        dictionary: The opened dictionary.
        layer: Layer that the features read.
        top_k: Number of tokens raised, and lowered, per feature.
        bins: Number of equal bins from the smallest to the largest effect.

    Raises:
        ShapeError: The readout has another width than the decoder.
    """
    import xarray as xr

    features = features_of(blocks, dictionary.n_features)
    shape = (len(features), min(top_k, readout.sizes["vocab"]))
    tokens: dict[str, Ints] = {name: np.empty(shape, np.int32) for name in ("raised", "lowered")}
    effect_sizes = {f"{name}_by": np.empty(shape, np.float32) for name in tokens}
    histogram = np.empty((len(features), bins), np.int64)
    ends = np.empty((2, len(features)), np.float32)
    pairs = np.stack([np.full_like(features, layer), features], axis=1)
    for rows, effects in effects_in_blocks(dictionary, pairs, readout, BLOCK_BYTES):
        histogram[rows], ends[0, rows], ends[1, rows] = _histograms(effects, bins)
        for name, sign in (("raised", 1), ("lowered", -1)):
            if sign < 0:
                np.negative(effects, out=effects)  # in place: the block is not used again, and large
            tokens[name][rows] = top_columns(effects, shape[1])
            effect_sizes[f"{name}_by"][rows] = sign * np.take_along_axis(effects, tokens[name][rows], axis=1)
    return xr.Dataset(
        {
            **{name: (("feature", "rank"), array) for name, array in {**tokens, **effect_sizes}.items()},
            "histogram": (("feature", "bin"), histogram),
            "low": ("feature", ends[0]),
            "high": ("feature", ends[1]),
        },
        coords={"feature": features, "rank": np.arange(shape[1]), "layer": layer},
    )


def _histograms(effects: Array, bins: int) -> tuple[Ints, Array, Array]:
    """(histogram of each row [row, bin], smallest value of each row, largest value of each row)."""
    low, high = effects.min(axis=1), effects.max(axis=1)
    # A constant row would divide by zero; all its values go to the first bin.
    scale = np.float32(bins) / np.where(high > low, high - low, 1)
    counts = np.empty((len(effects), bins), np.int64)
    width, half = bins + 1, effects.shape[1] // 2
    bin_of = np.empty(effects.shape[1], np.float32)
    for row, effect in enumerate(effects):  # one row at a time fits the cache
        np.subtract(effect, low[row], out=bin_of)
        np.multiply(bin_of, scale[row], out=bin_of)
        bin_numbers = bin_of.astype(np.int32)
        # bincount of pairs of values has half the entries: measured 40 us instead of 70 per row of 32,768.
        pairs = np.bincount(bin_numbers[:half] * width + bin_numbers[half : 2 * half], minlength=width**2)
        pair_counts = pairs.reshape(width, width)
        count = (
            pair_counts.sum(axis=0)
            + pair_counts.sum(axis=1)
            + np.bincount(bin_numbers[2 * half :], minlength=width)
        )
        counts[row] = count[:bins]
        counts[row, -1] += count[bins]  # the largest value belongs to the last bin
    return counts, low, high
