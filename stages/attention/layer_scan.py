"""Layer scan: attention from a marker token to target tokens, compared between two kinds of text.

The protocol of plip-rs' layer scan, whose results the Deloson viewer shows. For each sample: attention from
the marker, mean over heads and targets. For each layer: a comparison of the two conditions by Welch's t test
(Welch 1947, "The generalization of Student's problem when several different population variances are
involved").

Axes: layer, pair (lower triangles of all prompts end to end), head, sample, target (attended positions of all
samples end to end), condition (A, B). Needs no model and no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import MissingExtra, ShapeError
from .rows import HEAD, layer_numbers

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "CONDITIONS",
    "UNSEEN",
    "Welch",
    "best_layer",
    "layer_scan",
    "permuted_t",
    "welch_t",
    "welch_t_test",
]


CONDITIONS = ("A", "B")
"""Labels of the two kinds of text that are compared."""
UNSEEN = -1
"""Stands for the pair index of a target after its marker: a causal model cannot attend to it, its weight is
0."""
SMALLEST = 0.001
"""Mean weight of condition B below which the ratio of A to B is stored as 0."""


class Welch(NamedTuple):
    """Result of Welch's t test of two groups A and B."""

    t: float
    """The t statistic, positive if the mean of A is larger."""
    df: float
    """Degrees of freedom of the t distribution."""
    p: float
    """Two-sided p-value."""


@stage(
    version=1,
    inputs={
        "pattern": ("layer", "pair", HEAD),
        "pair": ("target",),
        "sample": ("target",),
        "condition": ("sample",),
    },
    outputs={
        "weight": Output(("layer", "sample"), "1", "attention from the marker, mean over targets and heads"),
        "mean": Output(("layer", "condition"), "1", "mean attention to targets over samples"),
        "std": Output(("layer", "condition"), "1", "standard deviation of that attention over samples"),
        "n": Output(("layer", "condition"), "1", "number of samples"),
        "ratio": Output(("layer",), "1", f"mean of A over mean of B; 0 where that of B is below {SMALLEST}"),
        "t": Output(("layer",), "1", "Welch's t statistic of A over B"),
        "df": Output(("layer",), "1", "degrees of freedom of Welch's t"),
        "p": Output(("layer",), "1", "two-sided p-value of Welch's t test"),
    },
    cells="layer",
    memory=1.0,
)
def layer_scan(
    pattern: xr.DataArray, pair: xr.DataArray, sample: xr.DataArray, condition: xr.DataArray
) -> xr.Dataset:
    """Attention from marker to targets by layer and sample, and the comparison of the two conditions.

    Arguments:
        pattern: Packed patterns, [layer, pair, head], any float dtype, lazy; only the needed pairs are read.
        pair: For each target the index of (marker, target) on the pair axis, int [target]; `UNSEEN` for a
            target after the marker.
        sample: Index of the sample that each target belongs to, int [target].
        condition: Condition of each sample, 0 for A, 1 for B, int [sample].

    Raises:
        ShapeError: A sample has no target, or a pair index is out of range.
    """
    import xarray as xr

    pair_index, sample_index, group = (
        np.asarray(array.values, np.int64) for array in (pair, sample, condition)
    )
    targets = np.bincount(sample_index, minlength=len(group))
    if len(targets) != len(group) or (targets == 0).any() or not np.isin(group, (0, 1)).all():
        raise ShapeError(
            f"expected at least one target for each of {len(group)} samples, and conditions 0 or 1; found "
            f"targets for {np.count_nonzero(targets)} samples and the conditions {np.unique(group).tolist()}"
        )
    if len(pair_index) and not UNSEEN <= pair_index.min() <= pair_index.max() < pattern.sizes["pair"]:
        raise ShapeError(
            f"expected pair indices from {UNSEEN} to {pattern.sizes['pair'] - 1}, as the patterns have "
            f"{pattern.sizes['pair']} pairs, found {pair_index.min()} to {pair_index.max()}; pass the pairs "
            "of the prompts that the patterns are of"
        )
    visible = np.flatnonzero(pair_index != UNSEEN)
    # Several targets may share a pair; each is read once, in ascending order.
    unique_pairs, unique_index = np.unique(pair_index[visible], return_inverse=True)
    values = pattern.isel(pair=unique_pairs).transpose("layer", "pair", "head").values
    weights = np.zeros((pattern.sizes["layer"], len(pair_index)))
    weights[:, visible] = values.mean(2, dtype=np.float64)[:, unique_index]
    sample_weights = np.stack([np.bincount(sample_index, row, len(group)) for row in weights]) / targets
    condition_moments = [
        [_moments(row[group == condition_index]) for condition_index in (0, 1)] for row in sample_weights
    ]
    tests = [welch_t_test(*a, *b) for a, b in condition_moments]
    data: dict[str, Any] = {
        "weight": (("layer", "sample"), sample_weights),
        **{
            name: (("layer", "condition"), np.array([[part[i] for part in row] for row in condition_moments]))
            for i, name in enumerate(("mean", "std", "n"))
        },
        # A ratio of a mean near 0 would only show noise.
        "ratio": ("layer", [a[0] / b[0] if b[0] > SMALLEST else 0.0 for a, b in condition_moments]),
        **{name: ("layer", [getattr(test, name) for test in tests]) for name in Welch._fields},
    }
    return xr.Dataset(data, coords={"layer": layer_numbers(pattern), "condition": list(CONDITIONS)})


def welch_t_test(mean: float, std: float, n: int, other_mean: float, other_std: float, other_n: int) -> Welch:
    """Welch's t test from the moments of two groups.

    Equals `scipy.stats.ttest_ind(equal_var=False)`, except for degenerate groups. If a group has no spread,
    the degrees of freedom are n + n' - 2, and t is 0 if neither has one. With an empty group the result is
    t = 0, df = 0, p = 1.

    Arguments:
        mean: Mean of group A.
        std: Sample standard deviation (n - 1) of group A.
        n: Size of group A.
        other_mean: Mean of group B.
        other_std: Sample standard deviation of group B.
        other_n: Size of group B.

    Raises:
        MissingExtra: scipy is not installed.
    """
    if n == 0 or other_n == 0:
        return Welch(0.0, 0.0, 1.0)
    error, other_error = std**2 / n, other_std**2 / other_n
    total = error + other_error
    t = (mean - other_mean) / math.sqrt(total) if total > 0 else 0.0
    # A spread in both groups implies n > 1 in both, so no division by 0 follows.
    if error > 0 and other_error > 0:
        df = total**2 / (error**2 / (n - 1) + other_error**2 / (other_n - 1))
    else:
        df = float(n + other_n - 2)
    return Welch(t, df, _two_sided(t, df) if df > 0 else 1.0)


def welch_t(weight: Array, is_b: Array) -> Array:
    """Welch's t statistic of condition A over B for each layer, float64 [layer]; 0 if neither has a spread.

    Arguments:
        weight: Attention weight of each sample, [layer, sample].
        is_b: Whether a sample has condition B, bool [sample]; at least two samples of each condition.
    """
    parts = [weight[:, ~is_b], weight[:, is_b]]
    error = sum(part.var(axis=1, ddof=1) / part.shape[1] for part in parts)
    difference = parts[0].mean(1) - parts[1].mean(1)
    t: Array = np.divide(difference, np.sqrt(error), out=np.zeros_like(difference), where=error > 0)
    return t


def permuted_t(weight: Array, is_b: Array, draws: int, *, seed: int) -> Array:
    """Null distribution of the largest t over layers, by permuting the conditions of samples: float64 [draw].

    The maximum over layers is taken in every draw, which accounts for the search among layers (Westfall &
    Young 1993, "Resampling-Based Multiple Testing").

    Arguments:
        weight: Attention weight of each sample, [layer, sample].
        is_b: Whether a sample has condition B, bool [sample].
        draws: Number of permutations.
        seed: Seed of the permutations.
    """
    rng = np.random.default_rng(seed)
    # One permutation for all layers: their dependence is kept, and the maximum is that of a real search.
    return np.array([welch_t(weight, rng.permutation(is_b)).max() for _ in range(draws)])


def best_layer(scan: xr.Dataset) -> tuple[int, float]:
    """The layer in which condition A exceeds B most significantly.

    Arguments:
        scan: Result of `layer_scan`.

    Returns:
        (layer number, p-value) of the smallest p-value among the layers where the mean of A is larger;
        (0, 1.0) if there is no such layer.
    """
    mean = scan["mean"].transpose("layer", "condition").values
    larger = np.flatnonzero(mean[:, 0] > mean[:, 1])
    if not len(larger):
        return 0, 1.0
    best = int(larger[scan["p"].values[larger].argmin()])
    return int(scan["layer"][best]), float(scan["p"][best])


def _moments(values: Array) -> tuple[float, float, int]:
    """(mean, sample standard deviation, number) of some values; 0 for a mean or deviation without values."""
    n = len(values)
    std = float(values.std(ddof=1)) if n > 1 else 0.0
    return (float(values.mean()) if n else 0.0), std, n


def _two_sided(t: float, df: float) -> float:
    """Two-sided p-value of a t statistic with `df` degrees of freedom."""
    try:
        from scipy.stats import t as student
    except ImportError as error:
        raise MissingExtra(
            "the p-value of a t test needs scipy, which is not installed; run pip install 'mizarr[probing]'"
        ) from error
    return float(2 * student.sf(abs(t), df))
