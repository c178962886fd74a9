"""FactoredMatrix: a product of two matrices, evaluated only on request.

Border: numpy and dask arrays; no model. A circuit of a head is a low-rank matrix [hidden, hidden] or [vocab,
vocab] with two small factors (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits";
TransformerLens' class of this name). Singular values, eigenvalues and norms follow from the factors:

    A = Q_A R_A,  B^T = Q_B R_B:   svd(A B) = Q_A svd(R_A R_B^T) Q_B^T,   eig(A B) = eig(B A) but for zeros

computed in float64 whatever the dtype of the factors. A factor may be a dask array, such as an embedding that
is read in blocks; it must be one chunk along the inner axis.

Axes: row, inner, column; `dims` names rows and columns. Vectors are rows, x A B: rows of the matrix are read,
columns are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ...store.arrays import Array, Floats
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["FactoredMatrix"]

BLOCK = 2048
"""Rows and columns evaluated at a time: 16 MiB of float32."""


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """The matrix product of `left` and `right`, which is evaluated only on request.

    Raises:
        ShapeError: the factors cannot be multiplied.
    """

    left: Any
    """Left factor, numpy or dask array [row, inner]."""
    right: Any
    """Right factor, numpy or dask array [inner, column]."""
    dims: tuple[str, str] = ("row", "column")
    """Names of the dims of the product: rows and columns."""

    # Without this, `array @ matrix` is taken by numpy instead of `__rmatmul__`.
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        shapes = tuple(np.shape(factor) for factor in (self.left, self.right))
        if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][0]:
            raise ShapeError(
                "expected two factors of shapes [row, inner] and [inner, column], found shapes "
                f"{shapes[0]} and {shapes[1]}"
            )

    @classmethod
    def product(cls, *matrices: Any, dims: tuple[str, str] = ("row", "column")) -> FactoredMatrix:
        """Product of two or more matrices, split into factors at the narrowest inner dimension.

        Arguments:
            matrices: numpy or dask arrays, each with as many rows as the one before has columns.
            dims: names of rows and columns of the product.

        Raises:
            ShapeError: for fewer than two matrices, or matrices that cannot be multiplied.
        """
        if len(matrices) < 2:
            raise ShapeError(
                f"a factored matrix needs at least two matrices to multiply, found {len(matrices)}"
            )
        for matrix, next_matrix in pairwise(matrices):
            if len(np.shape(matrix)) != 2 or np.shape(matrix)[1] != np.shape(next_matrix)[0]:
                raise ShapeError(
                    f"these matrices cannot be multiplied: shape {np.shape(matrix)} is followed by shape "
                    f"{np.shape(next_matrix)}, whose number of rows differs from the number of columns before"
                )
        # The rank is at most the narrowest inner dimension; factors of that width are the smallest.
        cut = min(range(1, len(matrices)), key=lambda i: np.shape(matrices[i])[0])
        left = _product_from_split(matrices[:cut][::-1], is_left=True)
        return cls(left, _product_from_split(matrices[cut:], is_left=False), dims)

    # -- structure

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the product."""
        return int(self.left.shape[0]), int(self.right.shape[1])

    @property
    def inner(self) -> int:
        """Width of the factors, an upper bound of the rank."""
        return int(self.left.shape[1])

    @property
    def T(self) -> FactoredMatrix:
        """The transposed product."""
        return FactoredMatrix(self.right.T, self.left.T, self.dims[::-1])

    def __matmul__(self, other: Any) -> FactoredMatrix:
        """Product with a matrix or another factored matrix, [column, …]."""
        if isinstance(other, FactoredMatrix):
            dims = (self.dims[0], other.dims[1])
            return FactoredMatrix.product(self.left, self.right, other.left, other.right, dims=dims)
        return FactoredMatrix.product(self.left, self.right, other, dims=self.dims)

    def __rmatmul__(self, other: Any) -> FactoredMatrix:
        return FactoredMatrix.product(other, self.left, self.right, dims=self.dims)

    def __mul__(self, scale: float) -> FactoredMatrix:
        return replace(self, left=self.left * scale)

    __rmul__ = __mul__

    # -- entries

    @overload
    def __getitem__(self, key: tuple[int, int]) -> float: ...
    @overload
    def __getitem__(self, key: Any) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        """[rows, columns]: a number for two indices, a vector for one, else a factored matrix."""
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        left, right = self.left[rows], self.right[:, columns]
        if len(left.shape) == 2 and len(right.shape) == 2:
            return replace(self, left=left, right=right)
        values = _computed(left @ right)
        return float(values) if values.ndim == 0 else values

    def dense(self) -> Array:
        """The evaluated product, [row, column], in the dtype of the factors."""
        return _computed(self.left @ self.right)

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[slice, Array]]:
        """Evaluated blocks of `size` rows: (slice of rows, [row, column])."""
        for start in range(0, self.shape[0], size):
            rows = slice(start, min(start + size, self.shape[0]))
            yield rows, _computed(self.left[rows] @ self.right)

    def labelled(self, size: int | None = BLOCK, **coords: Any) -> xr.DataArray:
        """The product as a labelled array.

        Arguments:
            size: rows and columns per block of a lazy dask array; None evaluates it in memory.
            coords: labels of rows or columns.
        """
        import xarray as xr

        if size is None:
            return xr.DataArray(self.dense(), dims=self.dims, coords=coords)
        import dask.array as da

        left, right = (
            da.asarray(factor).rechunk(chunks)
            for factor, chunks in ((self.left, {0: size, 1: -1}), (self.right, {0: -1, 1: size}))
        )
        return xr.DataArray(left @ right, dims=self.dims, coords=coords)

    # -- decompositions, in float64

    def svd(self) -> tuple[Any, Floats, Any]:
        """Singular value decomposition U diag(S) V^T.

        Returns:
            U [row, rank], S [rank] in descending order, V [column, rank], with rank the minimum of rows,
            columns and inner width. U and V are dask arrays where their factor is one.
        """
        # Only R_A R_B^T, [inner, inner], is decomposed: its cost does not grow with the vocabulary.
        (q_left, r_left), (q_right, r_right) = _qr(self.left), _qr(self.right.T)
        u, s, vt = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
        return q_left @ u, s, q_right @ vt.T

    @property
    def singular_values(self) -> Floats:
        """Singular values in descending order, float64 [rank]; rank as in `svd`."""
        core = _triangle(self.left) @ _triangle(self.right.T).T
        return np.asarray(np.linalg.svd(core, compute_uv=False), np.float64)

    @property
    def eigenvalues(self) -> Array:
        """The eigenvalues that may differ from 0, complex128 [inner], by descending absolute value.

        Raises:
            ShapeError: for a matrix that is not square.
        """
        if self.shape[0] != self.shape[1]:
            raise ShapeError(f"only a square matrix has eigenvalues, found shape {self.shape}")
        # eig(A B) and eig(B A) agree but for zeros, and B A is only [inner, inner].
        core = _computed(_as_float64(self.right) @ _as_float64(self.left))
        values: Array = np.linalg.eigvals(core).astype(np.complex128)
        return values[np.argsort(-np.abs(values), kind="stable")]

    @property
    def frobenius_norm(self) -> float:
        """Square root of the sum of squared entries."""
        return float(np.linalg.norm(_triangle(self.left) @ _triangle(self.right.T).T))

    @property
    def spectral_norm(self) -> float:
        """Largest singular value; 0 for an empty matrix."""
        return float(self.singular_values.max(initial=0.0))


def _product_from_split(matrices: Sequence[Any], *, is_left: bool) -> Any:
    """Product of the matrices on one side of the split, ordered from the split outwards.

    Multiplication starts at the split, so that no intermediate result is wider than the narrowest dimension.
    """
    product, *others = matrices
    for matrix in others:
        product = matrix @ product if is_left else product @ matrix
    return product


def _as_float64(factor: Any) -> Any:
    """A numpy or dask array converted to float64."""
    return factor.astype(np.float64)


def _computed(values: Any) -> Array:
    """Values of a dask array as numpy; a numpy array unchanged."""
    return np.asarray(values.compute() if hasattr(values, "compute") else values)


def _row_blocks(factor: Any) -> Iterator[Any]:
    """Rows of a factor in blocks: the chunks of a dask array, or all rows of a numpy array."""
    sizes = factor.chunks[0] if hasattr(factor, "chunks") else (len(factor),)
    start = 0
    for size in sizes:
        yield factor[start : start + size]
        start += size


def _triangle(factor: Any) -> Floats:
    """R of factor = Q R, float64 [min(row, inner), inner].

    A dask array is read block by block, each stacked under the previous R (sequential TSQR, Demmel et al.
    2012, "Communication-optimal Parallel and Sequential QR and LU Factorizations").
    """
    triangle: Floats = np.empty((0, factor.shape[1]))
    for block in _row_blocks(factor):
        stacked = np.concatenate([triangle, _computed(_as_float64(block))])
        triangle = np.asarray(np.linalg.qr(stacked, mode="r"))
    return triangle


def _qr(factor: Any) -> tuple[Any, Floats]:
    """Q [row, rank] and R [rank, inner]; Q is a dask array where the factor is one."""
    if not hasattr(factor, "compute"):
        q, r = np.linalg.qr(_as_float64(factor))
        return q, r
    import dask.array as da

    rows, inner = factor.shape
    # Too short to be cut into two blocks that are taller than wide: computed in memory.
    if rows < 2 * inner:
        return _qr(_computed(factor))
    # dask.array.linalg.qr returns wrong results for blocks with fewer rows than columns.
    size = max(inner, *factor.chunks[0])
    cuts = [*range(0, max(1, rows - size), size), rows]
    chunks = tuple(end - start for start, end in pairwise(cuts))
    q, r = da.linalg.qr(_as_float64(factor).rechunk((chunks, -1)))
    return q, _computed(r)
