"""In which layer do two kinds of text differ in where a marker looks? Head-averaged attention, by layer.

Border: stored attention patterns and places in them; knows no text, no model and never imports torch.

The protocol is that of plip-rs' layer scan, whose results the Deloson viewer shows: of every sample the mean,
over its targets, of the head-averaged attention from the marker to the target; by layer the two conditions
are compared with Welch's t test (Welch 1947, "The generalization of Student's problem when several different
population variances are involved").

Axes: layer, pair (lower triangles of all prompts end to end), head, sample, target (places looked at, of all
samples end to end), condition (A, B).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import MissingExtra, ShapeError
from .rows import HEAD

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
UNSEEN = -1
"""Pair of a target behind its marker, where a causal model cannot look: its weight is 0."""
SMALLEST = 0.001
"""Mean of B up to which a ratio is not told (0 stands for it)."""


class Welch(NamedTuple):
    """t statistic (positive: A is larger), degrees of freedom, two-sided p value."""

    t: float
    df: float
    p: float


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
        "mean": Output(("layer", "condition"), "1", "its mean over samples"),
        "std": Output(("layer", "condition"), "1", "its standard deviation over samples"),
        "n": Output(("layer", "condition"), "1", "samples"),
        "ratio": Output(("layer",), "1", "mean of A over mean of B; 0 where B has next to none"),
        "t": Output(("layer",), "1", "Welch's t statistic"),
        "df": Output(("layer",), "1", "its degrees of freedom"),
        "p": Output(("layer",), "1", "two-sided p value"),
    },
    cells="layer",
    memory=1.0,
)
def layer_scan(
    pattern: xr.DataArray, pair: xr.DataArray, sample: xr.DataArray, condition: xr.DataArray
) -> xr.Dataset:
    """Attention from marker to targets by layer and sample, and the comparison of the two conditions.

    pattern: [layer, pair, head], any float dtype, lazy; only the pairs asked for are read.  pair: int
    [target], where (marker, target) lies on the pair axis, `UNSEEN` for a target behind the marker.  sample:
    int [target], which sample it is of.  condition: int [sample], 0 for A, 1 for B.
    Raises ShapeError for samples without a target, and places that are not there.
    """
    import xarray as xr

    places, owner, group = (np.asarray(one.values, np.int64) for one in (pair, sample, condition))
    targets = np.bincount(owner, minlength=len(group))
    if len(targets) != len(group) or (targets == 0).any() or not np.isin(group, (0, 1)).all():
        raise ShapeError(
            f"expected targets of each of {len(group)} samples, all of condition 0 or 1, found targets of "
            f"{np.count_nonzero(targets)} and conditions {np.unique(group).tolist()}"
        )
    if len(places) and not UNSEEN <= places.min() <= places.max() < pattern.sizes["pair"]:
        raise ShapeError(
            f"expected pairs in {UNSEEN}..{pattern.sizes['pair'] - 1}, found {places.min()} to "
            f"{places.max()}; are they of the same prompts as the patterns?"
        )
    seen = np.flatnonzero(places != UNSEEN)
    read, back = np.unique(places[seen], return_inverse=True)
    values = pattern.isel(pair=read).transpose("layer", "pair", "head").values
    weights = np.zeros((pattern.sizes["layer"], len(places)))
    weights[:, seen] = values.mean(2, dtype=np.float64)[:, back]
    found = np.stack([np.bincount(owner, row, len(group)) for row in weights]) / targets
    parts = [[_moments(row[group == which]) for which in (0, 1)] for row in found]
    tests = [welch_t_test(*a, *b) for a, b in parts]
    by_layer = ("layer",)
    data: dict[str, Any] = {
        "weight": (("layer", "sample"), found),
        **{
            name: (("layer", "condition"), np.array([[part[i] for part in row] for row in parts]))
            for i, name in enumerate(("mean", "std", "n"))
        },
        "ratio": (by_layer, [a[0] / b[0] if b[0] > SMALLEST else 0.0 for a, b in parts]),
        **{name: (by_layer, [getattr(one, name) for one in tests]) for name in Welch._fields},
    }
    layers = pattern["layer"].values if "layer" in pattern.coords else np.arange(pattern.sizes["layer"])
    return xr.Dataset(data, coords={"layer": layers, "condition": list(CONDITIONS)})


def welch_t_test(mean: float, std: float, n: int, other_mean: float, other_std: float, other_n: int) -> Welch:
    """Welch's t test from the mean, sample standard deviation (n - 1) and size of two groups.

    Where one group has no spread the degrees of freedom are n + n' - 2, and t is 0 where neither has; with an
    empty group the answer is (0, 0, 1). Otherwise as `scipy.stats.ttest_ind(equal_var=False)`.
    Raises MissingExtra without scipy.
    """
    if n == 0 or other_n == 0:
        return Welch(0.0, 0.0, 1.0)
    error, other_error = std**2 / n, other_std**2 / other_n
    total = error + other_error
    t = (mean - other_mean) / math.sqrt(total) if total > 0 else 0.0
    if error > 0 and other_error > 0:
        df = total**2 / (error**2 / (n - 1) + other_error**2 / (other_n - 1))
    else:
        df = float(n + other_n - 2)
    return Welch(t, df, _two_sided(t, df) if df > 0 else 1.0)


def welch_t(weight: Array, is_b: Array) -> Array:
    """Welch's t of A over B in each layer, [layer]; 0 where neither has a spread.

    weight: [layer, sample]. is_b: bool [sample]; at least two samples of each.
    """
    parts = [weight[:, ~is_b], weight[:, is_b]]
    error = sum(part.var(axis=1, ddof=1) / part.shape[1] for part in parts)
    difference = parts[0].mean(1) - parts[1].mean(1)
    t: Array = np.divide(difference, np.sqrt(error), out=np.zeros_like(difference), where=error > 0)
    return t


def permuted_t(weight: Array, is_b: Array, draws: int, *, seed: int) -> Array:
    """The largest t of any layer when samples are dealt to the conditions anew: float64 [draw].

    The best layer is taken every time, so that the search among layers is counted (Westfall & Young 1993,
    "Resampling-Based Multiple Testing").
    """
    rng = np.random.default_rng(seed)
    return np.array([welch_t(weight, rng.permutation(is_b)).max() for _ in range(draws)])


def best_layer(found: xr.Dataset) -> tuple[int, float]:
    """(layer, p) of the smallest p among the layers where A looks more than B; (0, 1.0) where none does."""
    mean = found["mean"].transpose("layer", "condition").values
    ahead = np.flatnonzero(mean[:, 0] > mean[:, 1])
    if not len(ahead):
        return 0, 1.0
    best = int(ahead[found["p"].values[ahead].argmin()])
    return int(found["layer"][best]), float(found["p"][best])


def _moments(values: Array) -> tuple[float, float, int]:
    """Mean, sample standard deviation and size; zeros where there is nothing to take them of."""
    n = len(values)
    std = float(values.std(ddof=1)) if n > 1 else 0.0
    return (float(values.mean()) if n else 0.0), std, n


def _two_sided(t: float, df: float) -> float:
    """Probability of a t statistic at least this far from 0."""
    try:
        from scipy.stats import t as student
    except ImportError as error:
        raise MissingExtra(
            "t tests need scipy, which is not installed; pip install 'mizarr[probing]'"
        ) from error
    return float(2 * student.sf(abs(t), df))
