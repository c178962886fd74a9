"""FactoredMatrix: a product of two matrices that is never multiplied out unless it is asked for.

Border: numpy and dask arrays; knows no model. Idea: a circuit of a head is a matrix of low rank, [hidden,
hidden] or [vocab, vocab], whose two factors are small (Elhage et al. 2021, "A Mathematical Framework for
Transformer Circuits"; TransformerLens' class of this name). Singular values, eigenvalues and norms follow
from the factors:

    A = Q_A R_A,  B' = Q_B R_B:   svd(A B) = Q_A svd(R_A R_B') Q_B',   eig(A B) = eig(B A) but for zeros

in float64 whatever the factors are in, as squares are summed. A factor may be a dask array, such as an
embedding that is read block by block; it must lie in one piece along the inner axis.

Axes: row, inner, column; `dims` gives rows and columns their names. A row vector is multiplied from the left:
x A B, so rows are what is read and columns what is written.
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
"""Rows and columns of what is multiplied out at once: 16 MiB of float32."""


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """left [row, inner] times right [inner, column]; see the module.

    dims: names of rows and columns. Raises ShapeError for factors that do not fit.
    """

    left: Any
    right: Any
    dims: tuple[str, str] = ("row", "column")

    __array_ufunc__ = None  # so that `array @ matrix` comes here

    def __post_init__(self) -> None:
        shapes = tuple(np.shape(factor) for factor in (self.left, self.right))
        if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][0]:
            raise ShapeError(
                f"expected factors [row, inner] and [inner, column], found {shapes[0]} and {shapes[1]}"
            )

    @classmethod
    def product(cls, *matrices: Any, dims: tuple[str, str] = ("row", "column")) -> FactoredMatrix:
        """The product of two or more matrices, cut where it is narrowest."""
        if len(matrices) < 2:
            raise ShapeError(f"expected at least two matrices to multiply, found {len(matrices)}")
        for one, other in pairwise(matrices):
            if len(np.shape(one)) != 2 or np.shape(one)[1] != np.shape(other)[0]:
                raise ShapeError(
                    f"expected matrices that can be multiplied, found {np.shape(one)} before "
                    f"{np.shape(other)}"
                )
        cut = min(range(1, len(matrices)), key=lambda i: np.shape(matrices[i])[0])
        return cls(_outwards(matrices[:cut][::-1], left=True), _outwards(matrices[cut:], left=False), dims)

    # -- what it is

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the product."""
        return int(self.left.shape[0]), int(self.right.shape[1])

    @property
    def inner(self) -> int:
        """Width of the factors: no more than this is its rank."""
        return int(self.left.shape[1])

    @property
    def T(self) -> FactoredMatrix:
        """The same map turned round: its factors, transposed, in reverse order."""
        return FactoredMatrix(self.right.T, self.left.T, self.dims[::-1])

    def __matmul__(self, other: Any) -> FactoredMatrix:
        """Times a matrix or another product, [column, …]."""
        if isinstance(other, FactoredMatrix):
            dims = (self.dims[0], other.dims[1])
            return FactoredMatrix.product(self.left, self.right, other.left, other.right, dims=dims)
        return FactoredMatrix.product(self.left, self.right, other, dims=self.dims)

    def __rmatmul__(self, other: Any) -> FactoredMatrix:
        return FactoredMatrix.product(other, self.left, self.right, dims=self.dims)

    def __mul__(self, scale: float) -> FactoredMatrix:
        return replace(self, left=self.left * scale)

    __rmul__ = __mul__

    # -- its numbers

    @overload
    def __getitem__(self, chosen: tuple[int, int]) -> float: ...
    @overload
    def __getitem__(self, chosen: Any) -> Any: ...
    def __getitem__(self, chosen: Any) -> Any:
        """[rows, columns]: a number for two indices, a vector where one of them is an index, and else the
        factored matrix of the rows and columns chosen, by slices or lists of indices."""
        rows, columns = chosen if isinstance(chosen, tuple) else (chosen, slice(None))
        left, right = self.left[rows], self.right[:, columns]
        if len(left.shape) == 2 and len(right.shape) == 2:
            return replace(self, left=left, right=right)
        found = _computed(left @ right)
        return float(found) if found.ndim == 0 else found

    def dense(self) -> Array:
        """Multiplied out, [row, column], in the dtype of the factors."""
        return _computed(self.left @ self.right)

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[slice, Array]]:
        """Rows and what they hold, [row, column], `size` rows at a time."""
        for start in range(0, self.shape[0], size):
            here = slice(start, min(start + size, self.shape[0]))
            yield here, _computed(self.left[here] @ self.right)

    def labelled(self, size: int | None = BLOCK, **coords: Any) -> xr.DataArray:
        """As a labelled array of its dims, lazy, in blocks of `size` rows and columns; None: in memory.
        coords: labels of rows or columns."""
        import xarray as xr

        if size is None:
            return xr.DataArray(self.dense(), dims=self.dims, coords=coords)
        import dask.array as da

        left, right = (
            da.asarray(factor).rechunk(chunks)
            for factor, chunks in ((self.left, {0: size, 1: -1}), (self.right, {0: -1, 1: size}))
        )
        return xr.DataArray(left @ right, dims=self.dims, coords=coords)

    # -- what follows from the factors, in float64

    def svd(self) -> tuple[Any, Floats, Any]:
        """(U [row, rank], singular values, falling, [rank], V [column, rank]): U diag(S) V' is the matrix.

        rank: the least of rows, columns and inner width. U and V are dask arrays where the factor is one.
        """
        (q_left, r_left), (q_right, r_right) = _qr(self.left), _qr(self.right.T)
        u, s, vt = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
        return q_left @ u, s, q_right @ vt.T

    @property
    def singular_values(self) -> Floats:
        """Falling, float64 [rank]; rank as of `svd`."""
        core = _triangle(self.left) @ _triangle(self.right.T).T
        return np.asarray(np.linalg.svd(core, compute_uv=False), np.float64)

    @property
    def eigenvalues(self) -> Array:
        """Those that the factors leave open, complex128 [inner], largest first; all others are 0. ShapeError
        for a matrix that is not square."""
        if self.shape[0] != self.shape[1]:
            raise ShapeError(f"expected a square matrix to have eigenvalues, found {self.shape}")
        core = _computed(_wide(self.right) @ _wide(self.left))
        found: Array = np.linalg.eigvals(core).astype(np.complex128)
        return found[np.argsort(-np.abs(found), kind="stable")]

    @property
    def frobenius_norm(self) -> float:
        """Root of the sum of squares of all entries."""
        return float(np.linalg.norm(_triangle(self.left) @ _triangle(self.right.T).T))

    @property
    def spectral_norm(self) -> float:
        """The largest singular value, 0 where there is none."""
        return float(self.singular_values.max(initial=0.0))


def _outwards(matrices: Sequence[Any], *, left: bool) -> Any:
    """Matrices of one side of the cut, the one at the cut first, multiplied from it outwards: no intermediate
    is wider than the cut."""
    found, *rest = matrices
    for each in rest:
        found = each @ found if left else found @ each
    return found


def _wide(factor: Any) -> Any:
    return factor.astype(np.float64)


def _computed(found: Any) -> Array:
    """A dask array's values, worked out in this thread block after block; an array as it is."""
    return np.asarray(found.compute() if hasattr(found, "compute") else found)


def _row_blocks(factor: Any) -> Iterator[Any]:
    sizes = factor.chunks[0] if hasattr(factor, "chunks") else (len(factor),)
    start = 0
    for size in sizes:
        yield factor[start : start + size]
        start += size


def _triangle(factor: Any) -> Floats:
    """R of factor = Q R, float64 [min(row, inner), inner]; of a dask array block after block, each with the
    triangle of those before it (Demmel et al. 2012, sequential TSQR)."""
    found: Floats = np.empty((0, factor.shape[1]))
    for block in _row_blocks(factor):
        found = np.asarray(np.linalg.qr(np.concatenate([found, _computed(_wide(block))]), mode="r"))
    return found


def _qr(factor: Any) -> tuple[Any, Floats]:
    """Q [row, rank] and R [rank, inner]; of a dask array Q is one."""
    if not hasattr(factor, "compute"):
        q, r = np.linalg.qr(_wide(factor))
        return q, r
    import dask.array as da

    rows, inner = factor.shape
    if rows < 2 * inner:
        return _qr(_computed(factor))
    # Blocks at least as tall as wide: dask gets others wrong.
    size = max(inner, *factor.chunks[0])
    cuts = [*range(0, max(1, rows - size), size), rows]
    chunks = tuple(end - start for start, end in pairwise(cuts))
    q, r = da.linalg.qr(_wide(factor).rechunk((chunks, -1)))
    return q, _computed(r)
