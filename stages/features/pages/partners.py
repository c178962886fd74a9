"""Features that fire together: correlated in strength, or active at the same tokens.

Computed on a sample of tokens drawn by content (draws.py), or on all tokens if they are fewer. Pairs that
share only one token are ignored. With x_f the activations of feature f at the n tokens of the sample, 0 where
it is not active, and S_f the tokens where it is active,

    correlation = cov(x_f, x_g) / (sd(x_f) sd(x_g)),   cosine = x_f . x_g / (|x_f| |x_g|),
    jaccard = |S_f and S_g| / |S_f or S_g|,

the first two as in SAE dashboards (sae_vis, RollingCorrCoef: "pearson" and "cossim").

Border: the ragged arrays of one layer in; never imports torch. Memory holds the sample, and the pairs of some
features.

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
from .draws import token_numbers
from .feature_blocks import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["feature_partners"]

PAIRS = 1 << 18
"""Largest number of co-occurrences of two features (one per shared token) that are counted at once."""
SLOTS = 1 << 20
"""Size of the hash table of counts, a power of 2; several times PAIRS, so that collisions are rare."""
FEATURES = 1 << 12
"""Largest number of features whose pairs are counted at once."""
TOGETHER = 2
"""Smallest number of tokens that a pair must share."""


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
    """The k features that are most correlated with each feature, and the k most often active at its tokens.

    Arguments:
        encoded: Active features of the layer, from `encode_features`.
        blocks: Indices of the features, from `feature_blocks`.
        k: Number of correlated features, and of features active at the same tokens.
        tokens: Largest number of tokens in the sample.
        seed: Seed of the draw.

    Returns:
        The variables in `outputs`; the attribute n_tokens is the number of tokens in the sample.

    Raises:
        StageError: `k` or `tokens` is below 1.
    """
    import xarray as xr

    if min(k, tokens) < 1:
        raise StageError(f"expected k and tokens to be at least 1, found k={k} and tokens={tokens}")
    features = features_of(blocks, int(encoded.attrs["n_features"]))
    sample = _Sample.of(encoded, tokens, seed)
    shape = (len(features), k)
    partner_indices = {name: np.full(shape, -1, np.int32) for name in ("correlated", "companion")}
    values = {name: np.zeros(shape, np.float32) for name in ("correlation", "cosine", "jaccard")}
    together = np.zeros(shape, np.int64)
    for portion in sample.portions(features):
        pairs = sample.pairs(features[portion])
        correlation, jaccard = sample.correlation(pairs), sample.jaccard(pairs)
        order, rank = _closest(pairs, correlation, k)
        at = portion.start + pairs.row[order], rank
        partner_indices["correlated"][at] = pairs.column[order]
        values["correlation"][at] = correlation[order]
        values["cosine"][at] = sample.cosine(pairs)[order]
        order, rank = _closest(pairs, jaccard, k)
        at = portion.start + pairs.row[order], rank
        partner_indices["companion"][at] = pairs.column[order]
        values["jaccard"][at] = jaccard[order]
        together[at] = pairs.count[order]
    variables = {name: (("feature", "rank"), array) for name, array in {**partner_indices, **values}.items()}
    return xr.Dataset(
        {**variables, "together": (("feature", "rank"), together)},
        coords={"feature": features, "rank": np.arange(k), "layer": encoded["layer"]},
        attrs={"n_tokens": sample.n_tokens},
    )


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a requested feature and another feature that are active at the same tokens; arrays [pair]."""

    row: Ints
    """Index of the requested feature among those requested."""
    feature: Ints
    """Index of the requested feature in the layer."""
    column: Ints
    """Index of the partner feature in the layer."""
    count: Ints
    """Number of sampled tokens at which both features are active."""
    dot: Floats
    """Sum over tokens of the product of the two activations."""


@dataclass(frozen=True, eq=False)
class _Sample:
    """Active features of a sample of tokens, token by token, features ascending."""

    ptr: Ints
    """Index in the other arrays at which the features of each token start, and at the end the length of these
    arrays [token + 1]."""
    feature: Array
    """Index of each active feature, int32 [active]."""
    value: Array
    """Activation of each active feature, float32 [active]."""
    size: int
    """Number of features of the layer."""

    @classmethod
    def of(cls, encoded: xr.Dataset, tokens: int, seed: int) -> _Sample:
        """Active features of `tokens` random tokens (or all, if fewer) that are not at left-out positions."""
        eligible = np.flatnonzero(counted(encoded))
        if len(eligible) > tokens:
            # seed + 1: not the numbers that draw examples, so that both draws are independent.
            numbers = token_numbers(encoded, seed + 1)[eligible]
            eligible = eligible[np.argsort(numbers, kind="stable")[:tokens]]
        is_in = np.zeros(encoded.sizes["edge"] - 1, bool)
        is_in[eligible] = True
        feature, value = [], []
        for block in blocks_of(encoded):
            sampled = np.flatnonzero(is_in[block.token])
            feature.append(block.feature[sampled])
            value.append(block.value[sampled])
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
        """Number of tokens of the sample."""
        return len(self.ptr) - 1

    @cached_property
    def owner(self) -> Ints:
        """Number, within the sample, of the token of each activation [active]."""
        return np.repeat(np.arange(self.n_tokens), np.diff(self.ptr))

    @cached_property
    def by_feature(self) -> Ints:
        """Order of the activations by feature, then token [active]."""
        return np.argsort(self.feature, kind="stable")

    @cached_property
    def counts(self) -> Ints:
        """Number of sampled tokens at which each feature is active [feature]."""
        return np.bincount(self.feature, minlength=self.size)

    @cached_property
    def starts(self) -> Ints:
        """Start of each feature in `by_feature`, and the total number at the end [feature + 1]."""
        return np.concatenate([[0], self.counts.cumsum()])

    @cached_property
    def mean(self) -> Floats:
        """Mean activation of each feature over all sampled tokens [feature]."""
        return np.bincount(self.feature, self.value, self.size) / max(self.n_tokens, 1)

    @cached_property
    def square(self) -> Floats:
        """Mean square of each feature's activations over all sampled tokens [feature]."""
        squares = np.bincount(self.feature, self.value.astype(np.float64) ** 2, self.size)
        return squares / max(self.n_tokens, 1)

    def portions(self, features: Ints) -> Iterator[slice]:
        """Yield slices of `features` with at most FEATURES features and PAIRS co-occurrences each.

        A feature with more than PAIRS co-occurrences has a slice of its own.
        """
        n_active = np.diff(self.ptr)  # number of active features per token
        # Co-occurrences of a feature: summed over its tokens, the number of features active there.
        co_occurrences = np.bincount(self.feature, weights=n_active[self.owner], minlength=self.size)[
            features
        ]
        ends = np.concatenate([[0], co_occurrences.cumsum()])
        start = 0
        while start < len(features):
            stop = int(np.searchsorted(ends, ends[start] + PAIRS, side="right")) - 1
            # At least one feature, even if it has more than PAIRS co-occurrences.
            stop = min(max(stop, start + 1), start + FEATURES, len(features))
            yield slice(start, stop)
            start = stop

    def pairs(self, features: Ints) -> _Pairs:
        """Pairs of some features with any other feature that share at least TOGETHER tokens."""
        # One entry per activation of the requested features.
        row = np.repeat(np.arange(len(features)), self.counts[features])
        activations = self.by_feature[np.repeat(self.starts[features], self.counts[features]) + ranks(row)]
        token = self.owner[activations]
        lengths = np.diff(self.ptr)[token]
        ends = lengths.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        partners = np.arange(total) + np.repeat(self.ptr[token] - (ends - lengths), lengths)
        cell = np.repeat(row * self.size, lengths) + self.feature[partners]
        # Most pairs share one token. Counting hashed cells removes nearly all of those before the sort. For
        # the remaining ones, cell and position are packed into one number, so that one sort groups them.
        # SLOTS is a power of 2, so the mask is a modulo.
        slot = cell & (SLOTS - 1)
        place = np.flatnonzero(np.bincount(slot, minlength=SLOTS)[slot] >= TOGETHER)
        bits = max(total, 1).bit_length()
        met = np.sort((cell[place] << bits) | place)
        cell = met >> bits
        starts = np.flatnonzero(np.diff(cell, prepend=-1))
        count = np.diff(starts, append=len(cell))
        at, column = np.divmod(cell[starts], self.size)
        shared = np.flatnonzero((count >= TOGETHER) & (features[at] != column))
        at, column, count, starts = at[shared], column[shared], count[shared], starts[shared]
        pair = np.repeat(np.arange(len(shared)), count)
        place = met[np.repeat(starts, count) + ranks(pair)] & ((1 << bits) - 1)
        left_activations = np.repeat(activations, lengths)[place]
        product = self.value[left_activations].astype(np.float64) * self.value[partners[place]]
        dot: Floats = np.bincount(pair, product, len(shared)).astype(np.float64, copy=False)
        return _Pairs(at, features[at], column, count, dot)

    def correlation(self, pairs: _Pairs) -> Floats:
        """Pearson correlation of activations over all tokens of the sample [pair]."""
        a, b = pairs.feature, pairs.column
        # Rounding may make the variance of a constant feature slightly negative.
        spread = np.sqrt(np.maximum(self.square - self.mean**2, 0))
        covariance = pairs.dot / max(self.n_tokens, 1) - self.mean[a] * self.mean[b]
        return _share(covariance, spread[a] * spread[b])

    def cosine(self, pairs: _Pairs) -> Floats:
        """Cosine similarity of activations over all tokens of the sample [pair]."""
        a, b = pairs.feature, pairs.column
        return _share(pairs.dot / max(self.n_tokens, 1), np.sqrt(self.square[a] * self.square[b]))

    def jaccard(self, pairs: _Pairs) -> Floats:
        """Number of tokens of both features divided by the number of tokens of either [pair]."""
        either = self.counts[pairs.feature] + self.counts[pairs.column] - pairs.count
        return _share(pairs.count, either)


def _share(part: Array, whole: Array) -> Floats:
    """Elementwise quotient of two arrays; 0 where `whole` is 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def _closest(pairs: _Pairs, measure: Floats, k: int) -> tuple[Ints, Ints]:
    """The k pairs of each row with the largest positive measure: (indices of the pairs, their ranks)."""
    measure = measure.astype(np.float32)
    positive = np.flatnonzero(measure > 0)
    order, rank = ranked(pairs.row[positive], pairs.column[positive], measure[positive], k)
    return positive[order], rank
