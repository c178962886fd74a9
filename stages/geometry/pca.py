"""Principal components of stored states in one pass over them, from moments that add up across segments.

Border: numpy on labelled arrays. Knows neither models nor stores; reads lazy arrays block by block, so that
a corpus of any length costs one block and one hidden x hidden matrix of memory.

Idea: a segment is summarised by (n, mean, scatter = sum of (x - mean)(x - mean)'), see row_moments.py.
Summaries of two segments merge exactly, hence each can be cached under its own segment, and eigh of the
merged scatter gives the components.

Axes: hidden; `hidden_` is the second hidden axis of a scatter; component (coordinate = number of the
component, 0 = largest variance). A `layer` dim is kept apart; every other dim is samples.
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
    "Moments",
    "merge_moments",
    "moments",
    "pca",
    "principal_components",
    "project_to_pcs",
    "reconstruct_from_pcs",
    "row_blocks",
    "scree",
]


SOLVERS = ("auto", "eigh", "randomized")
WIDE = 16384
"""Hidden size above which "auto" does without the hidden x hidden matrix."""


def merge_moments(parts: Iterable[xr.Dataset]) -> xr.Dataset:
    """Moments of all parts together, layer by layer; the order of parts changes rounding only (float64)."""
    parts = list(parts)
    if not parts:
        raise ShapeError("expected the moments of at least one segment, found none")
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
    """Count, mean and scatter of states, the cacheable summary of one segment.

    states: [layer?, samples..., hidden], any float dtype incl. ml_dtypes.bfloat16, in memory or lazy.
    block: rows held at a time (default: 64 MiB, 4k to 32k rows); changes rounding only.
    Returns n [layer?], mean [layer?, hidden], scatter [layer?, hidden, hidden_], float64 (n is int64).
    """
    if "layer" in states.dims:
        return stack_layers(moments(states.isel(layer=i), block=block) for i in range(states.sizes["layer"]))
    found = Moments.of(row_blocks(states, block))
    return _labelled(found, states.coords, "float64" if states.dtype == np.float64 else "float32")


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

    summary: as `moments` returns it.  n_omit: leading components to leave out (the first ones of a residual
    stream often only say "massive dimension" or "first token"); ratios still refer to the whole variance.
    Returns, all float64:
      components [layer?, component, hidden]: orthonormal rows by descending variance, the entry of largest
        magnitude positive.
      explained_variance [layer?, component]: n - 1 convention.
      explained_variance_ratio [layer?, component]: share of the total variance; 0 when that is 0.
      mean [layer?, hidden].
    Components beyond the rank of the data are zero rows with zero variance: nothing is ever NaN.
    Raises ShapeError if n_omit + n_components exceeds the hidden size.
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
    """Principal components of states [layer?, samples..., hidden], as `principal_components` returns them.

    solver: "eigh", exact, from moments in one pass; "randomized" (randomized_pca.py), in several passes and
    without a hidden x hidden matrix; "auto": the latter above a hidden size of 16384, where that matrix is 2
    GiB. seed: of the randomised solver.
    """
    if solver not in SOLVERS:
        raise ShapeError(f"expected a solver among {', '.join(SOLVERS)}, found {solver!r}")
    if solver == "randomized" or (solver == "auto" and states.sizes.get("hidden", 0) > WIDE):
        wide: xr.Dataset = randomized_components(states, n_components=n_components, n_omit=n_omit, seed=seed)
        return wide
    found: xr.Dataset = principal_components(moments(states), n_components=n_components, n_omit=n_omit)
    return found


@stage(
    version=1,
    inputs={"summary": None},
    outputs={
        "explained_variance": Output(("layer", "component"), "1", "variance along each component"),
        "explained_variance_ratio": Output(("layer", "component"), "1", "share of the total variance"),
        "cumulative_ratio": Output(("layer", "component"), "1", "share of the leading components together"),
        "participation_ratio": Output(("layer",), "1", "dimensions that share the variance"),
    },
)
def scree(summary: xr.Dataset) -> xr.Dataset:
    """How the variance is spread over all components: what a scree plot shows.

    summary: as `moments` returns it.
    Returns float64 explained_variance (n - 1 convention), explained_variance_ratio, cumulative_ratio [layer?,
    component]; participation_ratio [layer?] = (sum of variances)^2 / sum of their squares: 1 for a line,
    hidden for a ball, 0 without variance.
    """
    found = principal_components(summary, n_components=summary.sizes["hidden"])
    ratio = found["explained_variance_ratio"]
    squares = (ratio**2).sum("component")
    told: xr.Dataset = found[["explained_variance", "explained_variance_ratio"]]
    return told.assign(
        cumulative_ratio=ratio.cumsum("component"),
        participation_ratio=(ratio.sum("component") ** 2 / squares.where(squares > 0)).fillna(0.0),
    )


def project_to_pcs(states: xr.DataArray, fitted: xr.Dataset, *, centre: bool = True) -> xr.DataArray:
    """Coordinates [..., component] of states [..., hidden]; the mean is removed unless `centre` is False."""
    import xarray as xr

    shifted = states - fitted["mean"] if centre else states
    found: xr.DataArray = xr.dot(shifted, fitted["components"], dim="hidden").transpose(..., "component")
    return found


def reconstruct_from_pcs(
    projected: xr.DataArray, fitted: xr.Dataset, *, centred: bool = True
) -> xr.DataArray:
    """States [..., hidden] with these coordinates; `centred` says whether projecting removed the mean."""
    import xarray as xr

    states: xr.DataArray = xr.dot(projected, fitted["components"], dim="component").transpose(..., "hidden")
    return states + fitted["mean"] if centred else states


def _labelled(m: Moments, coords: Any, arithmetic: str) -> xr.Dataset:
    """Moments as a dataset; of the coordinates only the scalar `layer` still has a meaning."""
    import xarray as xr

    return xr.Dataset(
        {"n": np.int64(m.n), "mean": ("hidden", m.mean), "scatter": (("hidden", "hidden_"), m.scatter)},
        coords={"layer": coords["layer"]} if "layer" in coords else {},
        attrs={"arithmetic": arithmetic},
    )


def _moments_of(part: xr.Dataset) -> Moments:
    return Moments(int(part["n"]), part["mean"].values, part["scatter"].values)


def _eigen(m: Moments, n_omit: int, n_components: int, eps: float) -> tuple[Array, Array, Array]:
    """Components, variances and ratios of one scatter; eigenvalues within rounding of zero are zero."""
    hidden = len(m.mean)
    values, vectors = np.linalg.eigh(m.scatter)
    values, vectors = values[::-1].copy(), vectors[:, ::-1].T
    # Where the rank ends, rounding leaves eigenvalues of about eps * sqrt(hidden) times the largest one.
    real = values > 4 * eps * np.sqrt(hidden) * max(values[0], 0.0)
    real &= np.arange(hidden) < m.n - 1
    real &= values[0] > m.n * (eps * np.linalg.norm(m.mean)) ** 2  # else equal rows up to their own rounding
    values = np.where(real, values, 0.0)
    vectors = with_sign(np.where(real[:, None], vectors, 0.0))
    total = float(np.trace(m.scatter))
    chosen = slice(n_omit, n_omit + n_components)
    variance = values[chosen] / max(m.n - 1, 1)
    ratio = values[chosen] / total if real.any() else np.zeros(n_components)
    return vectors[chosen], variance, ratio
