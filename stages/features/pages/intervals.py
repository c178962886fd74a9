"""How strongly each feature fires where it fires, with examples of every strength.

The range from 0 to a feature's largest activation is cut into equal intervals, as SAE dashboards cut it
(sae_vis, "INTERVAL a - b, CONTAINS p %"): the strongest examples alone say little of what a feature is like
when it is weak. The histogram is finer, and its bins lie in the intervals.

Border: the ragged arrays of one layer and its statistics in; never imports torch. Holds a block of the corpus
and what is told of a block of features; reads the corpus once for each of those.

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
from ..corpus.sparse import blocks as blocks_of
from .chosen import features_of, join_features, places_of
from .draws import Numbers, feature_numbers, mixed, token_numbers

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
    """Activations of features by strength, and `draws` tokens of each interval.

    encoded: as a layer's encoding gives it. statistics: `feature_statistics` of it. blocks: `feature_blocks`.
    bins: of the histogram, a multiple of intervals. An activation on a boundary counts above it, the largest
    in the last interval. The draw is by content (draws.py), each text at most once in an interval. Raises
    StageError for bins that do not lie in intervals, DictionaryError for a feature there is not.
    """
    import xarray as xr

    if min(bins, intervals, draws) < 1 or bins % intervals:
        raise StageError(
            f"expected bins that are a multiple of the intervals, and at least one draw, found {bins} bins, "
            f"{intervals} intervals and {draws} draws"
        )
    size = int(encoded.attrs["n_features"])
    chosen = features_of(blocks, size)
    place = places_of(chosen, size)
    largest = statistics["max_activation"].values[chosen]
    scale = np.divide(np.float32(bins), largest, out=np.zeros_like(largest), where=largest > 0)
    numbers, own = token_numbers(encoded, seed), feature_numbers(chosen)
    counts = np.zeros(len(chosen) * bins, np.int64)
    drawn = _Drawn(len(chosen) * intervals, draws)
    is_all = len(chosen) == size
    for block in blocks_of(encoded):
        row, token, value = place[block.feature], block.token, block.value
        if not is_all:
            here = np.flatnonzero(row >= 0)
            row, token, value = row[here], token[here], value[here]
        where = np.clip((value * scale[row]).astype(np.int32), 0, bins - 1)
        cell = row * bins + where
        counts += np.bincount(cell, minlength=len(counts))
        drawn.add(cell // (bins // intervals), token, value, mixed(numbers[token] ^ own[row]))
    drawn.draw()
    histogram = counts.reshape(len(chosen), bins)
    shape = (len(chosen), intervals, draws)
    return xr.Dataset(
        {
            "histogram": (("feature", "bin"), histogram),
            "interval_count": (("feature", "interval"), histogram.reshape(len(chosen), intervals, -1).sum(2)),
            "token": (("feature", "interval", "draw"), drawn.token.reshape(shape)),
            "value": (("feature", "interval", "draw"), drawn.value.reshape(shape)),
        },
        coords={"feature": chosen, "layer": encoded["layer"]},
    )


class _Drawn:
    """The k members of each group with the smallest numbers, as far as they have been seen."""

    def __init__(self, groups: int, k: int) -> None:
        self.k = k
        self.number = np.full((groups, k), np.iinfo(np.uint64).max, np.uint64)
        self.token = np.full((groups, k), -1, np.int64)
        self.value = np.zeros((groups, k), np.float32)
        self._last = self.number[:, -1].copy()  # beside each other, as they are read for every activation
        self._waiting = Candidates(self.token.size)

    def add(self, group: Ints, token: Ints, value: Array, number: Numbers) -> None:
        """Take more into account; tokens come in ascending order from call to call."""
        entering = np.flatnonzero(number < self._last[group])
        if self._waiting.add(group[entering], token[entering], value[entering], number[entering]):
            self.draw()

    def draw(self) -> None:
        """Look through those that wait; to be called when all have come."""
        if not len(self._waiting):
            return
        group, token, value, number = self._waiting.taken(self.token, self.value, self.number)
        # Groups, and of the numbers as many bits as there is room for: the others seldom decide.
        bits = 63 - int(self.token.shape[0]).bit_length()
        key = (group << bits) | (number >> np.uint64(64 - bits)).astype(np.int64)
        order = in_order(key, number, token)
        # The same text again has the same number; what was seen first stays.
        again = (np.diff(group[order]) == 0) & (np.diff(number[order]) == 0)
        order = order[np.flatnonzero(np.concatenate([[True], ~again]))]
        rank = ranks(group[order])
        kept = np.flatnonzero(rank < self.k)
        order, at = order[kept], (group[order[kept]], rank[kept])
        self.number[at], self.token[at], self.value[at] = number[order], token[order], value[order]
        self._last = self.number[:, -1].copy()
