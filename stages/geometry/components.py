"""Helpers that both PCA solvers share: argument checks, a reproducible sign of components, joining of
layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr


def check_components(hidden: int, n_components: int, n_omit: int) -> None:
    """Check that states of some width have as many principal components as requested.

    Arguments:
        hidden: hidden size of the states.
        n_components: number of components to return.
        n_omit: number of leading components to leave out.

    Raises:
        ShapeError: n_omit + n_components exceeds the hidden size, or one of them is too small.
    """
    if n_components < 1 or n_omit < 0 or n_omit + n_components > hidden:
        raise ShapeError(
            f"states of width {hidden} have {hidden} principal components: expected n_components >= 1, "
            f"n_omit >= 0 and n_omit + n_components <= {hidden}, found n_components={n_components} and "
            f"n_omit={n_omit}"
        )


def with_sign(vectors: Array) -> Array:
    """Flip the signs of vectors [component, hidden] so that the largest entry by magnitude of each is
    positive."""
    # The sign of an eigenvector is arbitrary, and differs between LAPACK builds.
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
    return vectors * np.where(largest < 0, -1.0, 1.0)


def stack_layers(parts: Iterable[xr.Dataset]) -> xr.Dataset:
    """Join datasets of single layers into one with a layer axis."""
    import xarray as xr

    stacked: xr.Dataset = xr.concat(list(parts), dim="layer", coords="minimal", compat="override")
    return stacked
