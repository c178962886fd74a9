"""Similarity of the representations of two models, or two runs: CKA, Procrustes, SVCCA.

The inputs are two sets of states of the same tokens, from any two stores. (Layers of one run: similarity.py.)

All three measures compare how states vary over tokens, not their coordinates. They follow from first and
second moments of both sets side by side, so tokens are read once, block by block, and their number costs no
memory:

* CKA (Kornblith et al. 2019, eq. 4): |Sxy|_F^2 / (|Sxx|_F |Syy|_F), biased upwards for few tokens;
* Procrustes (Schönemann 1966; as in Ding et al. 2021, "Grounding Representation Similarity", section 2.1):
  closeness after the best rotation and scale, |Sxy|_* / sqrt(tr Sxx tr Syy);
* SVCCA (Raghu et al. 2017): mean canonical correlation within the directions that hold most of the variance
  of each.

1 means equal up to what the measure ignores: rotation and scale, for SVCCA any linear map. With as many
dimensions as tokens any two sets look similar; the null value, from tokens permuted within each block, is
computed beside each number.

Axes: rows (matched, shuffled), layer, other_layer, token, hidden. All values without unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from ...store.errors import ShapeError
from ..corpus.state_cells import as_layers
from ..corpus.token_blocks import ahead, read_rows, token_ranges
from .row_moments import Moments
from .similarity import GRAM_BYTES

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["representation_similarity"]

PAIRS = ("rows", "layer", "other_layer")
"""Dims of each measure; "rows" is "matched", or "shuffled" for the null value."""
MEASURES = ("cka", "procrustes", "svcca")
"""Names of the measures, in the order in which `_measures` returns them."""


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden"), "other": ("layer", "token", "hidden")},
    outputs={
        "cka": Output(PAIRS, "1", "linear CKA"),
        "procrustes": Output(PAIRS, "1", "Procrustes similarity"),
        "svcca": Output(PAIRS, "1", "mean canonical correlation"),
        "n": Output((), "tokens", "number of states"),
    },
    memory=1.0,
    several_models=True,
)
def representation_similarity(
    states: xr.DataArray, other: xr.DataArray, *, variance: float = 0.99, seed: int = 0
) -> xr.Dataset:
    """CKA, Procrustes and SVCCA between all layers of `states` and all layers of `other`.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.
        other: [layer, token, hidden], the same tokens in the same order; may differ in width.
        variance: Share of the variance in the directions that SVCCA uses.
        seed: Seed of the permutations.

    Returns:
        float64; NaN for a layer without variance.

    Raises:
        ShapeError: The numbers of tokens differ, there are fewer than 2, or `variance` is outside of (0, 1].
    """
    import xarray as xr

    states, other = as_layers(states), as_layers(other)
    n = states.sizes["token"]
    if n != other.sizes["token"] or n < 2:
        raise ShapeError(
            "representations are compared on the same two or more tokens, found states of "
            f"{n} and of {other.sizes['token']} tokens; capture both models on the same prompts"
        )
    if not 0 < variance <= 1:
        raise ShapeError(f"expected variance, a share, above 0 and at most 1, found variance={variance:g}")
    widths = states.sizes["hidden"], other.sizes["hidden"]
    similarities = np.full((len(MEASURES), 2, states.sizes["layer"], other.sizes["layer"]), np.nan)
    for x_layers, y_layers in _groups(states.sizes["layer"], other.sizes["layer"], sum(widths) + widths[1]):
        scatter = Moments.of(_side_by_side(states, other, x_layers, y_layers, seed)).scatter
        for i, x in zip(x_layers, _cut(0, len(x_layers), widths[0]), strict=True):
            start = len(x_layers) * widths[0]
            for j, y in zip(y_layers, _cut(start, len(y_layers), widths[1]), strict=True):
                # The permuted copies of all y layers follow the y layers.
                permuted = slice(y.start + len(y_layers) * widths[1], y.stop + len(y_layers) * widths[1])
                for row, y_columns in enumerate((y, permuted)):
                    parts = scatter[x, x], scatter[y_columns, y_columns], scatter[x, y_columns]
                    similarities[:, row, i, j] = _measures(*parts, variance)
    return xr.Dataset(
        {**{name: (PAIRS, values) for name, values in zip(MEASURES, similarities, strict=True)}, "n": n},
        {
            "rows": ["matched", "shuffled"],
            "layer": ("layer", states["layer"].values, {"long_name": "layer"}),
            "other_layer": ("other_layer", other["layer"].values, {"long_name": "layer of the other"}),
        },
    )


def _measures(xx: Array, yy: Array, xy: Array, variance: float) -> tuple[float, float, float]:
    """(CKA, Procrustes similarity, SVCCA) of two sets of states; NaN if one has no variance.

    Arguments:
        xx: Scatter of the first set, [hidden, hidden].
        yy: Scatter of the second set.
        xy: Cross-scatter between the two.
        variance: Share of the variance in the directions that SVCCA uses.
    """
    spread = np.trace(xx), np.trace(yy)
    if min(spread) <= 0:
        return (float("nan"),) * 3
    # Scaled first: products of small states would lose digits.
    xx, yy, xy = xx / spread[0], yy / spread[1], xy / np.sqrt(spread[0] * spread[1])
    cka = np.square(xy).sum() / np.sqrt(np.square(xx).sum() * np.square(yy).sum())
    procrustes = np.linalg.svd(xy, compute_uv=False).sum()
    whitening = [_whitening(scatter, variance) for scatter in (xx, yy)]
    # Singular values of the whitened cross-covariance are the canonical correlations.
    correlations = np.linalg.svd(whitening[0].T @ xy @ whitening[1], compute_uv=False)
    return float(cka), float(procrustes), float(correlations.clip(0, 1).mean())


def _whitening(scatter: Array, variance: float) -> Floats:
    """Whitening matrix [hidden, direction]: principal directions, each divided by the root of its variance.

    Arguments:
        scatter: Scatter of the states, [hidden, hidden].
        variance: Share of the total variance; as many leading directions are used as hold it.
    """
    values, vectors = np.linalg.eigh(scatter)
    values, vectors = values[::-1], vectors[:, ::-1]
    cumulative = np.cumsum(values) / values.sum()
    # Even for a share of 1, directions whose variance is only rounding are left out.
    count = min(
        int(np.searchsorted(cumulative, variance - 1e-12)) + 1, int((values > 1e-10 * values[0]).sum())
    )
    whitening: Floats = vectors[:, :count] / np.sqrt(values[:count])
    return whitening


def _groups(layers: int, n_other: int, width: int) -> Iterator[tuple[range, range]]:
    """Yield pairs of layer ranges that cover every pair of layers once, with scatters within `GRAM_BYTES`.

    Arguments:
        layers: Number of layers of the first set.
        n_other: Number of layers of the second set.
        width: Columns per pair: hidden of the first plus twice hidden of the second.
    """
    # Bytes per entry of the scatter: float64 sum and scatter, 8 each, and a float32 product.
    size = max(1, int((GRAM_BYTES / 20) ** 0.5) // width)
    for start in range(0, layers, size):
        for other_start in range(0, n_other, size):
            yield (
                range(start, min(start + size, layers)),
                range(other_start, min(other_start + size, n_other)),
            )


def _cut(start: int, count: int, width: int) -> list[slice]:
    """Columns of each of `count` layers that lie side by side in a matrix.

    Arguments:
        start: First column of the first layer.
        count: Number of layers.
        width: Number of columns per layer.
    """
    return [slice(start + i * width, start + (i + 1) * width) for i in range(count)]


def _side_by_side(
    states: xr.DataArray, other: xr.DataArray, x_layers: Sequence[int], y_layers: Sequence[int], seed: int
) -> Iterator[Array]:
    """Yield blocks [token, column] of the states of both sets, side by side.

    The columns are the layers of the first set, those of the second set, and those of the second set again
    with their tokens permuted.

    Arguments:
        states: First set, [layer, token, hidden].
        other: Second set, [layer, token, hidden].
        x_layers: Indices of the layers of the first set.
        y_layers: Indices of the layers of the second set.
        seed: Seed of the permutations.
    """
    sides = states.isel(layer=list(x_layers)), other.isel(layer=list(y_layers))
    # `ahead` reads in order on one thread, so every call of `read` draws the same permutation again.
    rng = np.random.default_rng(seed)
    columns = [side.sizes["layer"] * side.sizes["hidden"] for side in sides]

    def read(token_range: slice) -> Array:
        count = token_range.stop - token_range.start
        block = np.empty((count, columns[0] + 2 * columns[1]), np.float32)
        x_block, y_block, shuffled_block = np.split(block, [columns[0], sum(columns)], axis=1)
        for side, target in zip(sides, (x_block, y_block), strict=True):
            target[:] = read_rows(side, token_range, np.arange(count)).reshape(count, -1)
        # Permuted within the block: the null needs no second read of the data.
        np.take(y_block, rng.permutation(count), axis=0, out=shuffled_block)
        return block

    for _, block in ahead(token_ranges(states, columns[0] + 2 * columns[1]), read):
        yield block
