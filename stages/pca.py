"""Principal components of stored states in one pass over them, from moments that add up across segments.

Border: numpy on labelled arrays. Knows neither models nor stores; reads lazy arrays block by block, so that
a corpus of any length costs one block and one hidden x hidden matrix of memory.

Idea: a segment is summarised by (n, mean, scatter = sum of (x - mean)(x - mean)'): one float32 matrix product
per block, summed in float64. A large common offset (residual streams have one) is subtracted before the
product, as it would eat the mantissa. Summaries of two segments merge exactly (Chan, Golub, LeVeque 1983,
"Algorithms for computing the sample variance"), hence each can be cached under its own segment, and eigh of
the merged scatter gives the components.

Axes: hidden; `hidden_` is the second hidden axis of a scatter; component (coordinate = number of the
component, 0 = largest variance). A `layer` dim is kept apart; every other dim is samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..pipeline import Output, stage
from ..store.errors import ShapeError

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
]

Array = npt.NDArray[Any]

BLOCK_BYTES = (
    1 << 26
)  # of float32 rows per matrix product, within 4k to 32k rows: fewer products, fewer additions
_TILE = 256


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and scatter of some rows: all that PCA and least squares need of them.

    n: number of rows.  mean: float64 [hidden].
    scatter: float64 [hidden, hidden], sum of (x - mean)(x - mean)'.
    """

    n: int
    mean: Array
    scatter: Array

    @classmethod
    def of(cls, blocks: Iterable[Array]) -> Moments:
        """Moments of rows that arrive as blocks [row, hidden]; multiplied as float32 (float64 if so)."""
        sums: _Sums | None = None
        for block in blocks:
            if len(block):
                sums = sums or _Sums(block)
                sums.add(block)
        if sums is None:
            raise ShapeError("expected at least one row, found none; select some tokens")
        return sums.moments()

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of rows together."""
        n = self.n + other.n
        if n == 0:
            return self
        delta = other.mean - self.mean
        scatter = self.scatter + other.scatter + np.outer(delta, delta) * (self.n * other.n / n)
        return Moments(n, self.mean + delta * (other.n / n), scatter)


class _Sums:
    """Running sums over blocks of rows: float64 totals of `kind` products.

    A column whose mean is many times its spread loses that many squared in a float32 product, so such rows
    are shifted by about their mean first. Where all means are small the shift would gain at most a factor of
    5 in rounding and cost a pass over memory (measured at 512 wide: 0.85 of the bare product instead of
    0.95).
    """

    def __init__(self, first: Array) -> None:
        width = first.shape[1]
        self.kind = np.float64 if first.dtype == np.float64 else np.float32
        sample = first[:: max(1, len(first) // 512)].astype(np.float64)
        offset, spread = sample.mean(axis=0), sample.std(axis=0)
        is_far = bool((np.abs(offset) > 2 * spread).any())
        self.shift = offset.astype(self.kind) if is_far else None
        self.n = 0
        self.total: npt.NDArray[np.float64] = np.zeros(width)
        self.gram: npt.NDArray[np.float64] = np.zeros((width, width))
        self._product: npt.NDArray[np.float64] = np.empty((width, width), self.kind)
        self._buffer = np.empty((0, width), self.kind)
        self._ones = np.ones(0, self.kind)

    def add(self, block: Array) -> None:
        rows = self._prepared(block)
        if len(rows) > len(self._ones):
            self._ones = np.ones(len(rows), self.kind)
        # numpy sees that both factors are one array and calls syrk: half the flops of a general product.
        np.matmul(rows.T, rows, out=self._product)
        self.gram += self._product
        self.total += np.asarray(self._ones[: len(rows)] @ rows, np.float64)
        self.n += len(rows)

    def moments(self) -> Moments:
        mean = self.total / self.n
        scatter = self.gram - np.outer(self.total, mean)
        return Moments(self.n, mean if self.shift is None else mean + self.shift, scatter)

    def _prepared(self, block: Array) -> Array:
        """The block in `kind`, shifted if need be, in a buffer that is allocated once."""
        if self.shift is None and block.dtype == self.kind:
            return block
        if len(block) > len(self._buffer):
            self._buffer = np.empty(block.shape, self.kind)
        out = self._buffer[: len(block)]
        for start in range(0, len(block), _TILE):  # a tile stays in the cache between widening and shifting
            self._fill(block[start : start + _TILE], out[start : start + _TILE])
        return out

    def _fill(self, rows: Array, out: Array) -> None:
        if rows.dtype.name == "bfloat16":  # widened from its bits: half the time of ml_dtypes' astype
            np.left_shift(rows.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
            rows = out
        if self.shift is not None:
            np.subtract(rows, self.shift, out=out, dtype=self.kind)
        elif rows is not out:
            np.copyto(out, rows)


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
    return _stack_layers(merge_moments(column) for column in by_layer.values())


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
        return _stack_layers(moments(states.isel(layer=i), block=block) for i in range(states.sizes["layer"]))
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

    hidden = summary.sizes["hidden"]
    if n_components < 1 or n_omit < 0 or n_omit + n_components > hidden:
        raise ShapeError(
            f"expected n_components >= 1 and n_omit >= 0 with n_omit + n_components <= hidden ({hidden}), "
            f"found n_components {n_components} and n_omit {n_omit}"
        )
    if "layer" in summary.dims:
        return _stack_layers(
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


def pca(states: xr.DataArray, *, n_components: int, n_omit: int = 0) -> xr.Dataset:
    """Principal components of states [layer?, samples..., hidden], as `principal_components` returns them."""
    found: xr.Dataset = principal_components(moments(states), n_components=n_components, n_omit=n_omit)
    return found


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


def row_blocks(states: xr.DataArray, block: int | None = None) -> Iterator[Array]:
    """Rows [row, hidden] of states [samples..., hidden], at most `block` at a time for one sample dim.

    Slices along the first sample dim only, so that a lazy array reads each stored byte once.
    Raises ShapeError without a hidden dim.
    """
    if "hidden" not in states.dims:
        raise ShapeError(
            f"expected a 'hidden' dim, found {states.dims}; rename the dim that holds the vector"
        )
    states = states.transpose(..., "hidden")
    if states.ndim == 1:
        yield states.values[None, :]
        return
    block = block or int(np.clip(BLOCK_BYTES // (4 * states.sizes["hidden"]), 4096, 32768))
    first, *others = states.dims[:-1]
    step = max(1, block // int(np.prod([states.sizes[name] for name in others], dtype=np.int64)))
    for start in range(0, states.sizes[first], step):
        values = states.isel({first: slice(start, start + step)}).values
        yield values.reshape(-1, values.shape[-1])


def _labelled(m: Moments, coords: Any, arithmetic: str) -> xr.Dataset:
    """Moments as a dataset; of the coordinates only the scalar `layer` still has a meaning."""
    import xarray as xr

    return xr.Dataset(
        {"n": np.int64(m.n), "mean": ("hidden", m.mean), "scatter": (("hidden", "hidden_"), m.scatter)},
        coords={"layer": coords["layer"]} if "layer" in coords else {},
        attrs={"arithmetic": arithmetic},
    )


def _stack_layers(parts: Iterable[xr.Dataset]) -> xr.Dataset:
    import xarray as xr

    stacked: xr.Dataset = xr.concat(list(parts), dim="layer", coords="minimal", compat="override")
    return stacked


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
    vectors = np.where(real[:, None], vectors, 0.0)
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
    vectors = vectors * np.where(largest < 0, -1.0, 1.0)
    total = float(np.trace(m.scatter))
    chosen = slice(n_omit, n_omit + n_components)
    variance = values[chosen] / max(m.n - 1, 1)
    ratio = values[chosen] / total if real.any() else np.zeros(n_components)
    return vectors[chosen], variance, ratio
