"""PCA of stored states in one pass, from moments that are additive over segments.

A segment is summarised by (n, mean, scatter = sum of (x - mean)(x - mean)'), see row_moments.py. Summaries of
two segments merge exactly, so each is cached under its own segment, and `eigh` of the merged scatter gives
the components. Lazy arrays are read block by block: a corpus of any length needs one block and one hidden x
hidden matrix in memory.

Axes: hidden; `hidden_` is the second hidden axis of a scatter; component (coordinate = number of the
component, 0 = largest variance). A `layer` dimension is kept; all other dimensions are samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from .components import check_components, stack_layers, with_sign
from .randomized_pca import randomized_components
from .row_moments import Moments, row_blocks

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "merge_moments",
    "moments",
    "pca",
    "principal_components",
    "project_to_pcs",
    "reconstruct_from_pcs",
    "scree",
]


SOLVERS = ("auto", "eigh", "randomized")
"""Names of the solvers of `pca`."""
WIDE = 16384
"""Hidden size above which the solver "auto" avoids the hidden x hidden matrix."""


def merge_moments(parts: Iterable[xr.Dataset]) -> xr.Dataset:
    """Merge the moments of several segments, per layer; their order changes float64 rounding only."""
    parts = list(parts)
    if not parts:
        raise ShapeError("expected the moments of at least one segment to merge, found none")
    if "layer" not in parts[0].dims:
        merged = reduce(Moments.merge, [_moments_of(part) for part in parts])
        return _labelled(merged, parts[0].coords, parts[0].attrs["arithmetic"])
    by_layer: dict[int, list[xr.Dataset]] = {}
    for part in parts:
        for i, layer in enumerate(part["layer"].values.tolist()):
            by_layer.setdefault(layer, []).append(part.isel(layer=i))
    return stack_layers(merge_moments(column) for column in by_layer.values())


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={
        "n": Output(("layer",), "tokens", "number of states"),
        "mean": Output(("layer", "hidden"), "1", "mean state"),
        "scatter": Output(("layer", "hidden", "hidden_"), "1", "sum of (x - mean)(x - mean)'"),
    },
    cells=("layer", "segment"),
    combine=merge_moments,
)
def moments(states: xr.DataArray, *, block: int | None = None) -> xr.Dataset:
    """Count, mean and scatter of states: the cacheable summary of one segment.

    Arguments:
        states: [layer?, samples..., hidden], any float dtype including ml_dtypes.bfloat16, in memory or lazy.
        block: Rows in memory at a time (default: 64 MiB, 4k to 32k rows); changes rounding only.

    Returns:
        n int64 [layer?]; mean [layer?, hidden] and scatter [layer?, hidden, hidden_], float64.
    """
    if "layer" in states.dims:
        # One layer at a time: a hidden x hidden product of all layers would not fit.
        return stack_layers(moments(states.isel(layer=i), block=block) for i in range(states.sizes["layer"]))
    summary = Moments.of(row_blocks(states, block))
    return _labelled(summary, states.coords, "float64" if states.dtype == np.float64 else "float32")


@stage(
    version=1,
    inputs={"summary": None},
    outputs={
        "components": Output(("layer", "component", "hidden"), "1", "directions of largest variance"),
        "explained_variance": Output(("layer", "component"), "1", "variance along each component"),
        "explained_variance_ratio": Output(("layer", "component"), "1", "share of the total variance"),
        "mean": Output(("layer", "hidden"), "1", "mean state"),
        "n": Output(("layer",), "tokens", "number of states"),
    },
)
def principal_components(summary: xr.Dataset, *, n_components: int, n_omit: int = 0) -> xr.Dataset:
    """Components of largest variance, from merged moments.

    Arguments:
        summary: Result of `moments` or `merge_moments`.
        n_components: Number of components.
        n_omit: Leading components to leave out (the first ones of a residual stream often only represent
            massive dimensions or the first token); ratios still refer to the total variance.

    Returns:
        All float64: components [layer?, component, hidden]: orthonormal rows by descending variance, the
        entry of largest magnitude positive; explained_variance [layer?, component]: with n - 1;
        explained_variance_ratio [layer?, component]: share of the total variance, 0 if that is 0; mean
        [layer?, hidden]. Components beyond the rank of the data are zero rows with zero variance; nothing is
        ever NaN.

    Raises:
        ShapeError: n_omit + n_components exceeds the hidden size.
    """
    import xarray as xr

    check_components(summary.sizes["hidden"], n_components, n_omit)
    if "layer" in summary.dims:
        return stack_layers(
            principal_components(summary.isel(layer=i), n_components=n_components, n_omit=n_omit)
            for i in range(summary.sizes["layer"])
        )
    eps = float(np.finfo(summary.attrs["arithmetic"]).eps)
    components, variance, ratio = _eigen(_moments_of(summary), n_omit, n_components, eps)
    return xr.Dataset(
        {
            "components": (("component", "hidden"), components),
            "explained_variance": ("component", variance),
            "explained_variance_ratio": ("component", ratio),
            "mean": summary["mean"],
            "n": summary["n"],
        },
        coords={"component": np.arange(n_omit, n_omit + n_components)},
    )


def pca(
    states: xr.DataArray, *, n_components: int, n_omit: int = 0, solver: str = "auto", seed: int = 0
) -> xr.Dataset:
    """Principal components of states [layer?, samples..., hidden]; result as of `principal_components`.

    Arguments:
        states: Any float dtype, in memory or lazy.
        n_components: Number of components.
        n_omit: Leading components to leave out.
        solver: "eigh" is exact and needs one pass; "randomized" (randomized_pca.py) needs several passes and
            no hidden x hidden matrix; "auto" takes the latter above a hidden size of 16384, where that matrix
            has 2 GiB.
        seed: Seed of the randomised solver.
    """
    if solver not in SOLVERS:
        raise ShapeError(f"expected one of {', '.join(SOLVERS)} as the solver of a PCA, found {solver!r}")
    if solver == "randomized" or (solver == "auto" and states.sizes.get("hidden", 0) > WIDE):
        wide: xr.Dataset = randomized_components(states, n_components=n_components, n_omit=n_omit, seed=seed)
        return wide
    components: xr.Dataset = principal_components(moments(states), n_components=n_components, n_omit=n_omit)
    return components


@stage(
    version=1,
    inputs={"summary": None},
    outputs={
        "explained_variance": Output(("layer", "component"), "1", "variance along each component"),
        "explained_variance_ratio": Output(("layer", "component"), "1", "share of the total variance"),
        "cumulative_ratio": Output(("layer", "component"), "1", "cumulative share of the leading components"),
        "participation_ratio": Output(("layer",), "1", "effective number of dimensions"),
    },
)
def scree(summary: xr.Dataset) -> xr.Dataset:
    """Distribution of the variance over all components, as shown by a scree plot.

    Arguments:
        summary: Result of `moments` or `merge_moments`.

    Returns:
        float64 explained_variance (with n - 1), explained_variance_ratio, cumulative_ratio [layer?,
        component]; participation_ratio [layer?] = (sum of variances)^2 / sum of their squares: 1 for a line,
        hidden for a ball, 0 without variance.
    """
    components = principal_components(summary, n_components=summary.sizes["hidden"])
    ratio = components["explained_variance_ratio"]
    squares = (ratio**2).sum("component")  # 0 without variance, where the ratio is 0 by definition
    result: xr.Dataset = components[["explained_variance", "explained_variance_ratio"]]
    return result.assign(
        cumulative_ratio=ratio.cumsum("component"),
        participation_ratio=(ratio.sum("component") ** 2 / squares.where(squares > 0)).fillna(0.0),
    )


def project_to_pcs(states: xr.DataArray, fitted: xr.Dataset, *, centre: bool = True) -> xr.DataArray:
    """Coordinates [..., component] of states along principal components.

    Arguments:
        states: [..., hidden].
        fitted: Result of `pca` or `principal_components`.
        centre: Whether to subtract the mean of the fitted states first.
    """
    import xarray as xr

    shifted = states - fitted["mean"] if centre else states
    projected: xr.DataArray = xr.dot(shifted, fitted["components"], dim="hidden").transpose(..., "component")
    return projected


def reconstruct_from_pcs(
    projected: xr.DataArray, fitted: xr.Dataset, *, centred: bool = True
) -> xr.DataArray:
    """States [..., hidden] with given coordinates along principal components.

    Arguments:
        projected: [..., component], from `project_to_pcs`.
        fitted: Result of `pca` or `principal_components`.
        centred: Whether the projection subtracted the mean, which is then added.
    """
    import xarray as xr

    states: xr.DataArray = xr.dot(projected, fitted["components"], dim="component").transpose(..., "hidden")
    return states + fitted["mean"] if centred else states


def _labelled(m: Moments, coords: Any, arithmetic: str) -> xr.Dataset:
    """Moments as a labelled dataset.

    Arguments:
        m: The moments.
        coords: Coordinates of the states; only a scalar `layer` is kept, as the others label single states.
        arithmetic: Dtype in which products were computed: "float32" or "float64".
    """
    import xarray as xr

    return xr.Dataset(
        {"n": np.int64(m.n), "mean": ("hidden", m.mean), "scatter": (("hidden", "hidden_"), m.scatter)},
        coords={"layer": coords["layer"]} if "layer" in coords else {},
        attrs={"arithmetic": arithmetic},
    )


def _moments_of(part: xr.Dataset) -> Moments:
    """The moments of one layer from a labelled dataset; inverse of `_labelled`."""
    return Moments(int(part["n"]), part["mean"].values, part["scatter"].values)


def _eigen(m: Moments, n_omit: int, n_components: int, eps: float) -> tuple[Array, Array, Array]:
    """Principal components of one scatter matrix.

    Arguments:
        m: Moments of the states.
        n_omit: Number of leading components to leave out.
        n_components: Number of components.
        eps: Machine epsilon of the arithmetic; eigenvalues within rounding errors of zero are set to zero.

    Returns:
        (components [component, hidden], variances [component], shares of the total variance [component]).
    """
    hidden = len(m.mean)
    # eigh of the scatter rather than an SVD of the states, which would have to be in memory.
    values, vectors = np.linalg.eigh(m.scatter)
    values, vectors = values[::-1].copy(), vectors[:, ::-1].T
    # Beyond the rank of the data, rounding leaves eigenvalues of about eps * sqrt(hidden) times the largest.
    is_significant = values > 4 * eps * np.sqrt(hidden) * max(values[0], 0.0)
    # Centring takes one degree of freedom: n points span at most n - 1 dimensions.
    is_significant &= np.arange(hidden) < m.n - 1
    # All rows equal up to the rounding of their mean: no direction is significant.
    is_significant &= values[0] > m.n * (eps * np.linalg.norm(m.mean)) ** 2
    values = np.where(is_significant, values, 0.0)
    vectors = with_sign(np.where(is_significant[:, None], vectors, 0.0))
    # The trace is the total variance, whatever components are computed.
    total = float(np.trace(m.scatter))
    kept_components = slice(n_omit, n_omit + n_components)
    variance = values[kept_components] / max(m.n - 1, 1)
    ratio = values[kept_components] / total if is_significant.any() else np.zeros(n_components)
    return vectors[kept_components], variance, ratio
