"""Which features fire together: correlated in strength, or present at the same tokens.

Over a sample of tokens, drawn by content (draws.py), or all of them where there are no more. Of pairs that
were together once nothing is said. With x_f the activations of feature f at the n tokens of the sample, 0
where it is silent, and S_f the tokens where it is not,

    correlation = cov(x_f, x_g) / (sd(x_f) sd(x_g)),   cosine = x_f . x_g / (|x_f| |x_g|),
    jaccard = |S_f and S_g| / |S_f or S_g|,

the first two as SAE dashboards have them (sae_vis, RollingCorrCoef: "pearson" and "cossim").

Border: the ragged arrays of one layer in; never imports torch. Holds the sample, and the pairs of
some features.

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
from ...logits.ranking import ranked, ranks
from ..corpus.sparse import blocks as blocks_of
from ..corpus.statistics import counted
from .chosen import features_of, join_features
from .draws import token_numbers

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_partners"]

PAIRS = 1 << 18
"""Meetings of two features that are counted at a time."""
SLOTS = 1 << 20
"""In which they are counted, a power of 2: several times as many, so that few pairs share one."""
FEATURES = 1 << 12
"""Features whose pairs are counted at a time, at most."""
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
        correlation, jaccard = sample.correlation(pairs), sample.jaccard(pairs)
        kept, rank = _closest(pairs, correlation, k)
        at = some.start + pairs.row[kept], rank
        found["correlated"][at] = pairs.column[kept]
        values["correlation"][at] = correlation[kept]
        values["cosine"][at] = sample.cosine(pairs)[kept]
        kept, rank = _closest(pairs, jaccard, k)
        at = some.start + pairs.row[kept], rank
        found["companion"][at] = pairs.column[kept]
        values["jaccard"][at] = jaccard[kept]
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
        """At how many tokens each feature is active, [feature]."""
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
        done = np.concatenate([[0], work.cumsum()])
        start = 0
        while start < len(chosen):
            stop = int(np.searchsorted(done, done[start] + PAIRS, side="right")) - 1
            stop = min(max(stop, start + 1), start + FEATURES, len(chosen))
            yield slice(start, stop)
            start = stop

    def pairs(self, features: Ints) -> _Pairs:
        """Who shares tokens with some features, and how: sums over the rows of the tokens each is active
        at."""
        row = np.repeat(np.arange(len(features)), self.counts[features])
        own = self.by_feature[np.repeat(self.starts[features], self.counts[features]) + ranks(row)]
        token = self.owner[own]
        lengths = np.diff(self.ptr)[token]
        ends = lengths.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        other = np.arange(total) + np.repeat(self.ptr[token] - (ends - lengths), lengths)
        cell = np.repeat(row * self.size, lengths) + self.feature[other]
        # Most pairs meet once. A count of cells, of which some fall together, tells nearly all of those;
        # of the others, pair and place are one number, so that one sort brings them together.
        slot = cell & (SLOTS - 1)
        place = np.flatnonzero(np.bincount(slot, minlength=SLOTS)[slot] >= TOGETHER)
        bits = max(total, 1).bit_length()
        met = np.sort((cell[place] << bits) | place)
        cell = met >> bits
        first = np.flatnonzero(np.diff(cell, prepend=-1))
        count = np.diff(first, append=len(cell))
        at, column = np.divmod(cell[first], self.size)
        shared = np.flatnonzero((count >= TOGETHER) & (features[at] != column))
        at, column, count, first = at[shared], column[shared], count[shared], first[shared]
        pair = np.repeat(np.arange(len(shared)), count)
        place = met[np.repeat(first, count) + ranks(pair)] & ((1 << bits) - 1)
        left = np.repeat(own, lengths)[place]
        product = self.value[left].astype(np.float64) * self.value[other[place]]
        dot: Floats = np.bincount(pair, product, len(shared)).astype(np.float64, copy=False)
        return _Pairs(at, features[at], column, count, dot)

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
    measure = measure.astype(np.float32)
    above = np.flatnonzero(measure > 0)
    kept, rank = ranked(pairs.row[above], pairs.column[above], measure[above], k)
    return above[kept], rank
