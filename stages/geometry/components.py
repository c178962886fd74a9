"""What the two solvers of principal components share: how many there may be, their sign, layers as one.

Border: numbers and labels; solving is pca.py's and randomized_pca.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr


def check_components(hidden: int, n_components: int, n_omit: int) -> None:
    """ShapeError unless so many components can be left out, and so many taken, of so many dimensions."""
    if n_components < 1 or n_omit < 0 or n_omit + n_components > hidden:
        raise ShapeError(
            f"expected n_components >= 1 and n_omit >= 0 with n_omit + n_components <= hidden ({hidden}), "
            f"found n_components {n_components} and n_omit {n_omit}"
        )


def with_sign(vectors: Array) -> Array:
    """Rows [component, hidden] with the entry of largest magnitude positive: a sign that repeats."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
    return vectors * np.where(largest < 0, -1.0, 1.0)


def stack_layers(parts: Iterable[xr.Dataset]) -> xr.Dataset:
    """Datasets of single layers, as one."""
    import xarray as xr

    stacked: xr.Dataset = xr.concat(list(parts), dim="layer", coords="minimal", compat="override")
    return stacked
