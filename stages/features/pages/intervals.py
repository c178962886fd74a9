"""Histogram of each feature's activations, and examples drawn from intervals of strength.

The range from 0 to a feature's largest activation is divided into equal intervals, as in SAE dashboards
(sae_vis, "INTERVAL a - b, CONTAINS p %"): the strongest examples alone do not show what a feature responds to
weakly. The histogram is finer, and its bins subdivide the intervals.

Border: the ragged arrays of one layer and its statistics in; never imports torch. Memory holds a block of the
corpus and the results of a block of features; the corpus is read once per block of features.

Axes: feature; bin = of the histogram; interval = from weak to strong; draw = order of the draw, not of
strength.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array, Ints
from ....store.errors import StageError
from ...logits.ranking import in_order, ranks
from ..corpus.candidates import Candidates
from ..corpus.sparse import blocks as blocks_of, rows_of
from .draws import Numbers, feature_numbers, mixed, token_numbers
from .feature_blocks import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_intervals"]


@stage(
    version=1,
    inputs={"encoded": None, "statistics": None, "blocks": ("block", "slot")},
    outputs={
        "histogram": Output(("feature", "bin"), "tokens", "tokens by activation, from 0 to the largest"),
        "interval_count": Output(("feature", "interval"), "tokens", "tokens by interval of activation"),
        "token": Output(("feature", "interval", "draw"), "1", "packed token drawn; -1: none"),
        "value": Output(("feature", "interval", "draw"), "1", "activation there; 0: none"),
    },
    cells="block",
    combine=join_features,
    memory=0.25,
)
def feature_intervals(
    encoded: xr.Dataset,
    statistics: xr.Dataset,
    blocks: xr.DataArray,
    *,
    bins: int = 50,
    intervals: int = 5,
    draws: int = 4,
    seed: int = 0,
) -> xr.Dataset:
    """Histogram of each feature's activations, and random tokens from equal intervals of activation.

    The draw depends only on the content of the prompts (draws.py), and takes a repeated text at most once per
    interval.

    Arguments:
        encoded: Active features of the layer, from `encode_features`.
        statistics: Result of `feature_statistics` for the layer.
        blocks: Indices of the features, from `feature_blocks`.
        bins: Number of bins, a multiple of `intervals`. An activation on a boundary counts in the upper bin,
            the largest activation in the last bin.
        intervals: Number of equal intervals from 0 to the feature's largest activation.
        draws: Number of tokens drawn per interval.
        seed: Seed of the draw.

    Raises:
        StageError: `bins` is no multiple of `intervals`, or a number is below 1.
        DictionaryError: A feature does not exist.
    """
    import xarray as xr

    if min(bins, intervals, draws) < 1 or bins % intervals:
        raise StageError(
            "expected the number of bins to be a multiple of the number of intervals, and bins, intervals "
            f"and draws to be at least 1, found {bins} bins, {intervals} intervals and {draws} draws"
        )
    n_features = int(encoded.attrs["n_features"])
    features = features_of(blocks, n_features)
    row_of_feature = rows_of(features, n_features)
    largest = statistics["max_activation"].values[features]
    # Features that never fire have no range; scale 0 avoids a division by zero.
    bins_per_unit = np.divide(np.float32(bins), largest, out=np.zeros_like(largest), where=largest > 0)
    numbers, feature_salt = token_numbers(encoded, seed), feature_numbers(features)
    counts = np.zeros(len(features) * bins, np.int64)
    drawn = _SmallestNumbers(len(features) * intervals, draws)
    is_all = len(features) == n_features
    for block in blocks_of(encoded):
        row, token, value = row_of_feature[block.feature], block.token, block.value
        # Skipped if all features are requested: indexing would copy the whole block.
        if not is_all:
            matches = np.flatnonzero(row >= 0)
            row, token, value = row[matches], token[matches], value[matches]
        # The clip puts the largest activation into the last bin, and guards against rounding.
        bin_index = np.clip((value * bins_per_unit[row]).astype(np.int32), 0, bins - 1)
        cell = row * bins + bin_index
        counts += np.bincount(cell, minlength=len(counts))
        drawn.add(cell // (bins // intervals), token, value, mixed(numbers[token] ^ feature_salt[row]))
    drawn.draw()
    histogram = counts.reshape(len(features), bins)
    shape = (len(features), intervals, draws)
    return xr.Dataset(
        {
            "histogram": (("feature", "bin"), histogram),
            "interval_count": (
                ("feature", "interval"),
                histogram.reshape(len(features), intervals, -1).sum(2),
            ),
            "token": (("feature", "interval", "draw"), drawn.token.reshape(shape)),
            "value": (("feature", "interval", "draw"), drawn.value.reshape(shape)),
        },
        coords={"feature": features, "layer": encoded["layer"]},
    )


class _SmallestNumbers:
    """A random draw of k tokens in each group: those with the smallest pseudorandom numbers so far."""

    def __init__(self, groups: int, k: int) -> None:
        self.k = k
        self.number = np.full((groups, k), np.iinfo(np.uint64).max, np.uint64)
        self.token = np.full((groups, k), -1, np.int64)
        self.value = np.zeros((groups, k), np.float32)
        # A contiguous copy, because it is read for every activation.
        self._threshold = self.number[:, -1].copy()
        self._candidates = Candidates(self.token.size)

    def add(self, group: Ints, token: Ints, value: Array, number: Numbers) -> None:
        """Add members of the groups to draw from; tokens must ascend from call to call.

        Arguments:
            group: Group of each member [member].
            token: Token of each member [member].
            value: Activation at each token [member].
            number: Pseudorandom number of each member [member].
        """
        entering = np.flatnonzero(number < self._threshold[group])
        if self._candidates.add(group[entering], token[entering], value[entering], number[entering]):
            self.draw()

    def draw(self) -> None:
        """Enter the collected members into the draw; must be called after the last `add`."""
        if not len(self._candidates):
            return
        group, token, value, number = self._candidates.take_with(self.token, self.value, self.number)
        # One integer sort instead of a lexsort: the key has the group and the leading bits of the number; the
        # remaining bits seldom decide. 63 bits, because sort keys are signed.
        bits = 63 - int(self.token.shape[0]).bit_length()
        key = (group << bits) | (number >> np.uint64(64 - bits)).astype(np.int64)
        order = in_order(key, number, token)
        # A repeated text has the same number; its first occurrence is used.
        is_repeated = (np.diff(group[order]) == 0) & (np.diff(number[order]) == 0)
        order = order[np.flatnonzero(np.concatenate([[True], ~is_repeated]))]
        rank = ranks(group[order])
        selected = np.flatnonzero(rank < self.k)
        order, at = order[selected], (group[order[selected]], rank[selected])
        self.number[at], self.token[at], self.value[at] = number[order], token[order], value[order]
        self._threshold = self.number[:, -1].copy()
