"""How alike the representations of two models, or of two runs of one, are: CKA, Procrustes, SVCCA.

Border: two sets of labelled states of the same tokens, from any two stores; numpy, no model, no torch. How
alike layers of one run are is similarity.py's.

All three compare what states do over tokens, not their coordinates, and follow from first and second moments
of the two side by side, so that tokens are read once, block by block, and their number costs no memory:

* CKA (Kornblith et al. 2019, eq. 4): |Sxy|_F^2 / (|Sxx|_F |Syy|_F), biased upwards for few tokens;
* Procrustes (Schönemann 1966; as Ding et al. 2021, "Grounding Representation Similarity", section 2.1): how
  near the best rotation and scale brings one to the other, |Sxy|_* / sqrt(tr Sxx tr Syy);
* SVCCA (Raghu et al. 2017): the mean correlation of the directions, within those that hold most of the
  variance of each, that go together best.

1 is the same but for what the measure does not see: rotation and scale, and of SVCCA any linear map. With as
many dimensions as tokens any two sets look alike; what the same states give when tokens of one are permuted
within each block stands beside each number.

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
MEASURES = ("cka", "procrustes", "svcca")


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
    """Similarity of every layer of `states` with every layer of `other`.

    states, other: [layer, token, hidden] of the same tokens in the same order, of any widths, any float
    dtype, lazy or not. variance: share that the directions kept for SVCCA hold. seed: of the permutations.
    Returns float64; NaN for a layer without variance.
    Raises ShapeError for other numbers of tokens, fewer than 2, or a share outside of (0, 1].
    """
    import xarray as xr

    states, other = as_layers(states), as_layers(other)
    n = states.sizes["token"]
    if n != other.sizes["token"] or n < 2:
        raise ShapeError(
            f"expected two or more states of the same tokens on both sides, found {n} and "
            f"{other.sizes['token']}; capture both models on one list of prompts"
        )
    if not 0 < variance <= 1:
        raise ShapeError(f"expected a share of the variance in (0, 1], found {variance:g}")
    widths = states.sizes["hidden"], other.sizes["hidden"]
    found = np.full((len(MEASURES), 2, states.sizes["layer"], other.sizes["layer"]), np.nan)
    for one, two in _groups(states.sizes["layer"], other.sizes["layer"], sum(widths) + widths[1]):
        scatter = Moments.of(_side_by_side(states, other, one, two, seed)).scatter
        for i, x in zip(one, _cut(0, len(one), widths[0]), strict=True):
            start = len(one) * widths[0]
            for j, y in zip(two, _cut(start, len(two), widths[1]), strict=True):
                behind = slice(y.start + len(two) * widths[1], y.stop + len(two) * widths[1])
                for row, against in enumerate((y, behind)):
                    parts = scatter[x, x], scatter[against, against], scatter[x, against]
                    found[:, row, i, j] = _measures(*parts, variance)
    return xr.Dataset(
        {**{name: (PAIRS, each) for name, each in zip(MEASURES, found, strict=True)}, "n": n},
        {
            "rows": ["matched", "shuffled"],
            "layer": ("layer", states["layer"].values, {"long_name": "layer"}),
            "other_layer": ("other_layer", other["layer"].values, {"long_name": "layer of the other"}),
        },
    )


def _measures(xx: Array, yy: Array, xy: Array, variance: float) -> tuple[float, float, float]:
    """cka, procrustes, svcca of centred scatters [hidden, hidden]."""
    spread = np.trace(xx), np.trace(yy)
    if min(spread) <= 0:
        return (float("nan"),) * 3
    # Scaled first: squares of large states would overflow nothing, but small ones lose their digits.
    xx, yy, xy = xx / spread[0], yy / spread[1], xy / np.sqrt(spread[0] * spread[1])
    cka = np.square(xy).sum() / np.sqrt(np.square(xx).sum() * np.square(yy).sum())
    procrustes = np.linalg.svd(xy, compute_uv=False).sum()
    kept = [_whitening(each, variance) for each in (xx, yy)]
    correlations = np.linalg.svd(kept[0].T @ xy @ kept[1], compute_uv=False)
    return float(cka), float(procrustes), float(correlations.clip(0, 1).mean())


def _whitening(scatter: Array, variance: float) -> Floats:
    """[hidden, kept]: the first principal directions that hold a share of the variance, over the root of
    theirs."""
    values, vectors = np.linalg.eigh(scatter)
    values, vectors = values[::-1], vectors[:, ::-1]
    held = np.cumsum(values) / values.sum()
    # All of it: but for what rounding makes of directions in which nothing varies.
    count = min(int(np.searchsorted(held, variance - 1e-12)) + 1, int((values > 1e-10 * values[0]).sum()))
    found: Floats = vectors[:, :count] / np.sqrt(values[:count])
    return found


def _groups(layers: int, others: int, width: int) -> Iterator[tuple[range, range]]:
    """Pairs of layer ranges that cover every pair once, their scatter within `GRAM_BYTES`; width: of one
    layer of the first and of the second twice."""
    size = max(1, int((GRAM_BYTES / 20) ** 0.5) // width)
    for start in range(0, layers, size):
        for first in range(0, others, size):
            yield range(start, min(start + size, layers)), range(first, min(first + size, others))


def _cut(start: int, count: int, width: int) -> list[slice]:
    return [slice(start + i * width, start + (i + 1) * width) for i in range(count)]


def _side_by_side(
    states: xr.DataArray, other: xr.DataArray, one: Sequence[int], two: Sequence[int], seed: int
) -> Iterator[Array]:
    """Blocks [token, columns] of layers of the first, of the second, and of the second with its tokens
    permuted."""
    sides = states.isel(layer=list(one)), other.isel(layer=list(two))
    rng = np.random.default_rng(seed)
    columns = [each.sizes["layer"] * each.sizes["hidden"] for each in sides]

    def read(here: slice) -> Array:
        count = here.stop - here.start
        block = np.empty((count, columns[0] + 2 * columns[1]), np.float32)
        first, second, third = np.split(block, [columns[0], sum(columns)], axis=1)
        for side, into in zip(sides, (first, second), strict=True):
            into[:] = read_rows(side, here, np.arange(count)).reshape(count, -1)
        np.take(second, rng.permutation(count), axis=0, out=third)
        return block

    for _, block in ahead(token_ranges(states, columns[0] + 2 * columns[1]), read):
        yield block
