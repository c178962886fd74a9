"""Sparse decomposition of a state into lens vectors of tokens; share of its squared norm in their span.

Vectors are chosen greedily: the next one has the largest signed product of its unit vector with the residual.
After each choice all coordinates are fitted again and stay nonnegative, by nonnegative least squares
("omp"; Lawson and Hanson 1974, chapter 23) or by one gradient step ("gp", gradient pursuit; Blumensath and
Davies 2008). Computed in float64, without torch.

Axes: vocab (tokens whose vectors may be chosen), hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from ...store.arrays import Array, Floats
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Decomposition", "decompose", "norm_share"]

_STOP = 2.0**-11.5
"""Smallest product of a unit vector with the residual, as a share of the state's norm: root of float32's
epsilon."""
_ABSENT = 2.0**-26
"""Smallest contribution, as a share of the state's norm, and smallest singular value of the chosen unit
vectors, as a share of the largest: root of float64's epsilon."""
_HALVINGS = 20
"""Number of times that a gradient step is halved before it is left out."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A state as a nonnegative combination of few lens vectors, and a rest."""

    selected: npt.NDArray[np.int64]
    """Tokens in the order of their choice, int [chosen]."""
    support: npt.NDArray[np.int64]
    """Those of them whose coordinate is not 0, int [token]."""
    coordinates: Floats
    """Coordinates of `support`, positive, float64 [token]."""
    reconstruction: Floats
    """Sum of coordinates times vectors, float64 [hidden]."""
    component: Floats
    """Orthogonal projection of the state on the span of all chosen vectors, float64 [hidden]."""
    rest: Floats
    """The state minus `component`, float64 [hidden]."""


def decompose(
    state: Array, vectors: xr.DataArray, *, k: int = 25, algorithm: Literal["omp", "gp"] = "omp"
) -> Decomposition:
    """Decompose a state into at most `k` lens vectors.

    Arguments:
        state: [hidden].
        vectors: lens vectors of a layer, [vocab, hidden], none of them 0.
        k: largest number of vectors.
        algorithm: how coordinates are fitted, see the module.

    Raises:
        ShapeError: `k` is out of range, or state and vectors do not match.
    """
    if set(vectors.dims) != {"vocab", "hidden"} or np.shape(state) != (vectors.sizes["hidden"],):
        raise ShapeError(
            f"decompose: expected a state [hidden] and the vectors of one layer [vocab, hidden], found the "
            f"shape {list(np.shape(state))} and the sizes {dict(vectors.sizes)}; select a layer and a token"
        )
    atoms = vectors.transpose("vocab", "hidden").values.astype(np.float64)
    if not 1 <= k <= len(atoms):
        raise ShapeError(f"decompose: expected k in 1..{len(atoms)}, the number of vectors, found {k}")
    if algorithm not in ("omp", "gp"):
        raise ShapeError(f"decompose: expected the algorithm 'omp' or 'gp', found {algorithm!r}")
    x, lengths = np.asarray(state, np.float64), np.linalg.norm(atoms, axis=1)
    scale, residual = float(np.linalg.norm(x)), x
    selected: list[int] = []
    coordinates: Floats = np.zeros(0)
    while len(selected) < k:
        products = atoms @ residual / lengths
        products[selected] = -np.inf
        best = int(products.argmax())
        if products[best] <= _STOP * scale:
            break
        selected.append(best)
        chosen = atoms[selected]
        if algorithm == "omp":
            coordinates = _nonnegative(chosen, x)
        else:
            coordinates = _gradient_step(chosen, x, np.append(coordinates, 0.0))
        residual = x - coordinates @ chosen
    chosen, ids = atoms[selected], vectors["vocab"].values[selected].astype(np.int64)
    is_present = coordinates * lengths[selected] > _ABSENT * scale
    _, values, right = np.linalg.svd(chosen / lengths[selected, None], full_matrices=False)
    basis = right[values > _ABSENT * values.max(initial=0.0)]
    component = basis.T @ (basis @ x)
    return Decomposition(
        selected=ids,
        support=ids[is_present],
        coordinates=coordinates[is_present],
        reconstruction=coordinates[is_present] @ chosen[is_present],
        component=component,
        rest=x - component,
    )


def norm_share(states: xr.DataArray, vectors: xr.DataArray, *, k: int = 25) -> xr.DataArray:
    """Share of each state's squared norm in the span of the first `k` lens vectors that `decompose` chooses.

    Arguments:
        states: [layer, token, hidden].
        vectors: lens vectors [layer, vocab, hidden]; layers that they lack are left out.
        k: largest number of vectors.

    Returns:
        float64 [layer, token], 0 to 1; NaN for a state of zeros.
    """
    import xarray as xr

    layers = [layer for layer in states["layer"].values.tolist() if layer in vectors["layer"].values]
    rows = states.sel(layer=layers).transpose("layer", "token", "hidden")
    shares = np.full(rows.shape[:2], np.nan)
    for i, layer in enumerate(layers):
        of_layer = vectors.sel(layer=layer)
        for j, state in enumerate(rows[i].values.astype(np.float64)):
            if square := float(state @ state):
                component = decompose(state, of_layer, k=k).component
                shares[i, j] = component @ component / square
    coords = {name: c for name, c in rows.coords.items() if "hidden" not in c.dims}
    attrs = {"units": "1", "long_name": f"share of the squared norm in {k} lens vectors"}
    return xr.DataArray(shares, dims=("layer", "token"), coords=coords, name="norm_share", attrs=attrs)


def _nonnegative(atoms: Floats, x: Floats) -> Floats:
    """Nonnegative least squares: c >= 0 that minimises |x - c @ atoms|, float64 [atom].

    The active set of Lawson and Hanson: add the atom with the largest gradient, solve without bounds, and
    step back to the bound where a coordinate would become negative.
    """
    n = len(atoms)
    c, is_free = np.zeros(n), np.zeros(n, bool)
    tolerance = 1e-12 * float(np.linalg.norm(x)) * float(np.linalg.norm(atoms, axis=1).max())
    # Terminates after finitely many sets; the limit guards against cycles by rounding.
    for _ in range(3 * n + 10):
        gradient = np.where(is_free, -np.inf, atoms @ (x - c @ atoms))
        if gradient.max() <= tolerance:
            break
        is_free[gradient.argmax()] = True
        while True:
            free = np.zeros(n)
            free[is_free] = np.linalg.lstsq(atoms[is_free].T, x, rcond=None)[0]
            is_bad = is_free & (free <= 0)
            if not is_bad.any():
                c = free
                break
            step = (c[is_bad] / (c[is_bad] - free[is_bad])).min()
            c = c + step * (free - c)
            is_free &= c > 1e-15 * np.abs(c).max()
            c[~is_free] = 0.0
    return c


def _gradient_step(atoms: Floats, x: Floats, c: Floats) -> Floats:
    """Coordinates after one gradient step of exact line-search length, clipped at 0, and halved while the
    error grows."""
    residual = x - c @ atoms
    gradient = atoms @ residual
    along = gradient @ atoms
    step, error = float(residual @ along) / float(along @ along), float(np.linalg.norm(residual))
    for _ in range(_HALVINGS + 1):
        changed: Floats = np.maximum(c + step * gradient, 0.0)
        if float(np.linalg.norm(x - changed @ atoms)) <= error:
            return changed
        step /= 2
    return c
