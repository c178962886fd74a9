"""PCA of very wide states with a randomised solver that never holds a hidden x hidden matrix.

Idea: subspace iteration from a random start (Halko, Martinsson, Tropp 2011, "Finding Structure with
Randomness", algorithms 4.4 and 5.3). The scatter S is only applied to a narrow matrix Q [hidden, width], as
the sum over blocks of (x - mean)' ((x - mean) Q): one pass over the states. After a few passes with QR in
between, Q spans the leading components, and `eigh` of Q' S Q, width x width, gives them. Oversampling and
passes compensate for slowly decaying spectra.

Axes: hidden; component; samples as in pca.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from .components import check_components, stack_layers, with_sign
from .row_moments import row_blocks

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["randomized_components"]


OVERSAMPLING = 16
"""Number of columns of Q beyond the number of components."""
PASSES = 4
"""Default number of multiplications with the scatter before the last one; sklearn uses 4 to 7."""
_TILE = 256
"""Number of rows that are converted to float64 at a time."""


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={
        "components": Output(("layer", "component", "hidden"), "1", "directions of largest variance"),
        "explained_variance": Output(("layer", "component"), "1", "variance along each component"),
        "explained_variance_ratio": Output(("layer", "component"), "1", "share of the total variance"),
        "mean": Output(("layer", "hidden"), "1", "mean state"),
        "n": Output(("layer",), "tokens", "number of states"),
    },
    cells="layer",
    memory=1.0,
)
def randomized_components(
    states: xr.DataArray, *, n_components: int, n_omit: int = 0, seed: int = 0, passes: int = PASSES
) -> xr.Dataset:
    """Leading components of wide states; result as of `principal_components`, up to the solver's accuracy.

    Arguments:
        states: [layer?, samples..., hidden], any float dtype, in memory or lazy; read passes + 2 times.
        n_components: Number of components.
        n_omit: Leading components to leave out.
        seed: Seed of the random start.
        passes: Applications of the scatter before the last one; more of them separate components of nearly
            equal variance better.

    Raises:
        ShapeError: n_omit + n_components exceeds the hidden size, or there is no row.
    """
    import xarray as xr

    check_components(states.sizes["hidden"], n_components, n_omit)
    if "layer" in states.dims:
        return stack_layers(
            randomized_components(
                states.isel(layer=i), n_components=n_components, n_omit=n_omit, seed=seed, passes=passes
            )
            for i in range(states.sizes["layer"])
        )
    n, mean, total = _mean_and_variance(states)
    kept_components = slice(n_omit, n_omit + n_components)
    values, vectors = _leading(states, mean, n_omit + n_components, seed, passes)
    # float32 products leave eigenvalues of about this size beyond the rank of the data.
    is_significant = values > 4 * float(np.finfo(np.float32).eps) * np.sqrt(len(mean)) * max(values[0], 0.0)
    is_significant &= np.arange(len(values)) < n - 1
    values = np.where(is_significant, values, 0.0)
    # The total variance comes from its own pass, as the trace of a scatter that is never formed.
    return xr.Dataset(
        {
            "components": (
                ("component", "hidden"),
                with_sign(np.where(is_significant[:, None], vectors, 0.0))[kept_components],
            ),
            "explained_variance": ("component", values[kept_components] / max(n - 1, 1)),
            "explained_variance_ratio": (
                "component",
                values[kept_components] / total if total > 0 else values[kept_components],
            ),
            "mean": ("hidden", mean),
            "n": np.int64(n),
        },
        coords={
            "component": np.arange(n_omit, n_omit + n_components),
            **({"layer": states["layer"]} if "layer" in states.coords else {}),
        },
    )


def _mean_and_variance(states: xr.DataArray) -> tuple[int, Array, float]:
    """Number of rows, mean and total variance of states, by merging blocks (Chan et al. 1983).

    Returns:
        (number of rows, mean float64 [hidden], trace of the scatter).

    Raises:
        ShapeError: There is no row.
    """
    n, mean, total = 0, np.zeros(states.sizes["hidden"]), 0.0
    for block in row_blocks(states):
        block_mean = block.mean(axis=0, dtype=np.float64)
        tiles = (block[start : start + _TILE] for start in range(0, len(block), _TILE))
        within = sum(float(np.square(tile - block_mean).sum()) for tile in tiles)
        delta = block_mean - mean
        n_rows = n + len(block)
        total += within + float(delta @ delta) * n * len(block) / max(n_rows, 1)
        mean = mean + delta * (len(block) / max(n_rows, 1))
        n = n_rows
    if n == 0:
        raise ShapeError("expected at least one state for a PCA, found none; select some tokens")
    return n, mean, total


def _leading(states: xr.DataArray, mean: Array, count: int, seed: int, passes: int) -> tuple[Array, Array]:
    """(largest eigenvalues of the scatter, descending; their eigenvectors [component, hidden]).

    Arguments:
        states: [samples..., hidden].
        mean: Mean of the states, [hidden].
        count: Number of eigenvalues.
        seed: Seed of the random start.
        passes: Number of multiplications with the scatter before the last one.
    """
    width = min(count + OVERSAMPLING, len(mean))
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(mean), width)))[0]
    for _ in range(passes):
        basis = np.linalg.qr(_scatter_times(states, mean, basis))[0]
    small = basis.T @ _scatter_times(states, mean, basis)
    # Symmetrised: rounding makes Q' S Q slightly asymmetric.
    values, rotation = np.linalg.eigh((small + small.T) / 2)
    order = np.argsort(values)[::-1][:count]
    return values[order], (basis @ rotation[:, order]).T


def _scatter_times(states: xr.DataArray, mean: Array, basis: Array) -> Array:
    """Product of the scatter of states and a basis, float64 [hidden, width], in one pass over the states.

    Arguments:
        states: [samples..., hidden]; blocks are multiplied as float32.
        mean: Mean of the states, [hidden].
        basis: [hidden, width].
    """
    narrow, centre = basis.astype(np.float32), mean.astype(np.float32)
    product = np.zeros(basis.shape)
    for block in row_blocks(states):
        # Centred explicitly: for large means, correcting the product afterwards would cancel.
        rows = np.subtract(block, centre, dtype=np.float32)
        product += rows.T @ (rows @ narrow)
    return product
