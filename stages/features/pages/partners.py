"""Which features fire together: correlated in strength, or present at the same tokens.

Over a sample of tokens, drawn by content (draws.py), or all of them where there are no more. Of pairs that
were together once nothing is said. With x_f the activations of feature f at the n tokens of the sample, 0
where it is silent, and S_f the tokens where it is not,

    correlation = cov(x_f, x_g) / (sd(x_f) sd(x_g)),   cosine = x_f . x_g / (|x_f| |x_g|),
    jaccard = |S_f and S_g| / |S_f or S_g|,

the first two as SAE dashboards have them (sae_vis, RollingCorrCoef: "pearson" and "cossim").

Border: the ragged arrays of one layer in; never imports torch. Holds the sample, and some features times all.

Axes: feature; rank, 0 = closest. -1: no partner of that rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array, Floats, Ints
from ....store.errors import StageError
from ...logits.ranking import ranked, row_bounds
from ..corpus.sparse import blocks as blocks_of
from ..corpus.statistics import counted
from .chosen import features_of, join_features
from .draws import token_numbers

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_partners"]

CELLS = 1 << 20
"""Of some features times all, and of pairs that are counted, at a time."""
TOGETHER = 2
"""Tokens that two features must share."""


@stage(
    version=1,
    inputs={"encoded": None, "blocks": ("block", "slot")},
    outputs={
        "correlated": Output(("feature", "rank"), "1", "features most correlated; -1: none"),
        "correlation": Output(("feature", "rank"), "1", "Pearson correlation of activations; 0: none"),
        "cosine": Output(("feature", "rank"), "1", "cosine of activations; 0: none"),
        "companion": Output(("feature", "rank"), "1", "features active at the same tokens; -1: none"),
        "jaccard": Output(("feature", "rank"), "1", "tokens of both over tokens of either; 0: none"),
        "together": Output(("feature", "rank"), "tokens", "tokens of both in the sample"),
    },
    cells="block",
    combine=join_features,
    memory=0.5,
)
def feature_partners(
    encoded: xr.Dataset, blocks: xr.DataArray, *, k: int = 8, tokens: int = 1 << 15, seed: int = 0
) -> xr.Dataset:
    """The k features closest to each, by correlation and by the tokens they share.

    encoded: as a layer's encoding gives it. blocks: `feature_blocks`. tokens: of the sample, at most. attrs:
    n_tokens, how many there were. Raises StageError for k or tokens below 1.
    """
    import xarray as xr

    if min(k, tokens) < 1:
        raise StageError(f"expected k and tokens of at least 1, found {k} and {tokens}")
    chosen = features_of(blocks, int(encoded.attrs["n_features"]))
    sample = _Sample.of(encoded, tokens, seed)
    shape = (len(chosen), k)
    found = {name: np.full(shape, -1, np.int32) for name in ("correlated", "companion")}
    values = {name: np.zeros(shape, np.float32) for name in ("correlation", "cosine", "jaccard")}
    together = np.zeros(shape, np.int64)
    for some in sample.portions(chosen):
        pairs = sample.pairs(chosen[some])
        kept, rank = _closest(pairs, sample.correlation(pairs), k)
        at = some.start + pairs.row[kept], rank
        found["correlated"][at] = pairs.column[kept]
        values["correlation"][at] = sample.correlation(pairs)[kept]
        values["cosine"][at] = sample.cosine(pairs)[kept]
        kept, rank = _closest(pairs, sample.jaccard(pairs), k)
        at = some.start + pairs.row[kept], rank
        found["companion"][at] = pairs.column[kept]
        values["jaccard"][at] = sample.jaccard(pairs)[kept]
        together[at] = pairs.count[kept]
    told = {name: (("feature", "rank"), array) for name, array in {**found, **values}.items()}
    return xr.Dataset(
        {**told, "together": (("feature", "rank"), together)},
        coords={"feature": chosen, "rank": np.arange(k), "layer": encoded["layer"]},
        attrs={"n_tokens": sample.n_tokens},
    )


@dataclass(frozen=True)
class _Pairs:
    """Features of a portion with others they share tokens with, themselves left out; all [pair].

    row: place in the portion.  feature, column: the pair.  count: tokens of both.  dot: sum of products.
    """

    row: Ints
    feature: Ints
    column: Ints
    count: Ints
    dot: Floats
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class _Sample:
    """What is active at some tokens: row by row (ptr), features ascending."""

    ptr: Ints
    feature: Array
    value: Array
    size: int

    @classmethod
    def of(cls, encoded: xr.Dataset, tokens: int, seed: int) -> _Sample:
        """The tokens with the smallest numbers, of those that may have features; equal ones by place."""
        may = np.flatnonzero(counted(encoded))
        if len(may) > tokens:
            # Other numbers than those that draw examples, which would be the same tokens for every feature.
            numbers = token_numbers(encoded, seed + 1)[may]
            may = may[np.argsort(numbers, kind="stable")[:tokens]]
        is_in = np.zeros(encoded.sizes["edge"] - 1, bool)
        is_in[may] = True
        feature, value = [], []
        for block in blocks_of(encoded):
            kept = np.flatnonzero(is_in[block.token])
            feature.append(block.feature[kept])
            value.append(block.value[kept])
        lengths = np.diff(encoded["token_ptr"].values)[is_in]
        empty = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        return cls(
            np.concatenate([[0], lengths.cumsum()]),
            np.concatenate(feature or empty[0]),
            np.concatenate(value or empty[1]),
            int(encoded.attrs["n_features"]),
        )

    @property
    def n_tokens(self) -> int:
        return len(self.ptr) - 1

    @cached_property
    def owner(self) -> Ints:
        """Token of each activation, counted in the sample."""
        return np.repeat(np.arange(self.n_tokens), np.diff(self.ptr))

    @cached_property
    def by_feature(self) -> Ints:
        """Activations in order of feature, then token."""
        return np.argsort(self.feature, kind="stable")

    @cached_property
    def counts(self) -> Ints:
        """Tokens of each feature."""
        return np.bincount(self.feature, minlength=self.size)

    @cached_property
    def starts(self) -> Ints:
        """Where each feature begins in `by_feature`; the last one is their number."""
        return np.concatenate([[0], self.counts.cumsum()])

    @cached_property
    def mean(self) -> Floats:
        """Of each feature's activations, over all tokens."""
        return np.bincount(self.feature, self.value, self.size) / max(self.n_tokens, 1)

    @cached_property
    def square(self) -> Floats:
        """Mean square of each feature's activations, over all tokens."""
        squares = np.bincount(self.feature, self.value.astype(np.float64) ** 2, self.size)
        return squares / max(self.n_tokens, 1)

    def portions(self, chosen: Ints) -> Iterator[slice]:
        """Features whose pairs fit a block, one portion after another."""
        lengths = np.diff(self.ptr)
        work = np.bincount(self.feature, lengths[self.owner], self.size)[chosen]
        most = max(1, CELLS // self.size)
        start = 0
        while start < len(chosen):
            within = np.searchsorted(work[start : start + most].cumsum(), CELLS, side="right")
            stop = start + max(1, int(within))
            yield slice(start, min(stop, len(chosen)))
            start = stop

    def pairs(self, features: Ints) -> _Pairs:
        """Who shares tokens with some features, and how: sums over the rows of the tokens each is active
        at."""
        ranges = zip(self.starts[features], self.starts[features + 1], strict=True)
        own = np.concatenate([self.by_feature[start:stop] for start, stop in ranges])
        row = np.repeat(np.arange(len(features)), self.counts[features])
        token = self.owner[own]
        lengths = np.diff(self.ptr)[token]
        ends = lengths.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        other = np.arange(total) + np.repeat(self.ptr[token] - (ends - lengths), lengths)
        cell = np.repeat(row * self.size, lengths) + self.feature[other]
        shape = (len(features), self.size)
        count = np.bincount(cell, minlength=shape[0] * shape[1])
        product = np.repeat(self.value[own].astype(np.float64), lengths) * self.value[other]
        dot: Floats = np.bincount(cell, product, len(count)).astype(np.float64, copy=False)
        count.reshape(shape)[np.arange(len(features)), features] = 0
        shared = np.flatnonzero(count >= TOGETHER)
        at, column = np.divmod(shared, self.size)
        return _Pairs(at, features[at], column, count[shared], dot[shared], shape)

    def correlation(self, pairs: _Pairs) -> Floats:
        """Pearson, of activations at all tokens of the sample."""
        a, b = pairs.feature, pairs.column
        spread = np.sqrt(np.maximum(self.square - self.mean**2, 0))
        covariance = pairs.dot / max(self.n_tokens, 1) - self.mean[a] * self.mean[b]
        return _share(covariance, spread[a] * spread[b])

    def cosine(self, pairs: _Pairs) -> Floats:
        """Of activations, as vectors over tokens."""
        a, b = pairs.feature, pairs.column
        return _share(pairs.dot / max(self.n_tokens, 1), np.sqrt(self.square[a] * self.square[b]))

    def jaccard(self, pairs: _Pairs) -> Floats:
        """Tokens of both over tokens of either."""
        either = self.counts[pairs.feature] + self.counts[pairs.column] - pairs.count
        return _share(pairs.count, either)


def _share(part: Array, whole: Array) -> Floats:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def _closest(pairs: _Pairs, measure: Floats, k: int) -> tuple[Ints, Ints]:
    """The k pairs of each row whose measure is largest, of those above 0: their places, and ranks."""
    dense = np.zeros(pairs.shape, np.float32)
    measure = measure.astype(np.float32)
    dense[pairs.row, pairs.column] = measure
    bound = np.maximum(row_bounds(dense, min(k, pairs.shape[1])), 0)
    near = np.flatnonzero((measure >= bound[pairs.row]) & (measure > 0))
    kept, rank = ranked(pairs.row[near], pairs.column[near], measure[near], k)
    return near[kept], rank
