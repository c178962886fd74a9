"""Labelled arrays as the plain values of tables and documents, and plain values as labelled arrays.

    values_of(found["kl"], "layer", "head")             # numbers with axes in this order
    records(found, "layer", "layer", "kl", p="share")   # [{"layer": 0, "kl": 0.1, "p": 0.5}, ...]
    largest(found, found["kl"], 10, "kl")               # [{"layer": 3, "head": 1, "kl": 0.9}, ...]

Border: xarray in, numpy and Python out, or the other way about; knows no workflow and no view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..store.arrays import Floats

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["column", "labelled", "largest", "ranked", "record", "records", "stacked", "values_of"]


def values_of(array: xr.DataArray, *dims: str | Any) -> Floats:
    """Numbers of an array, with axes in the order of `dims`; as they lie without dims."""
    found: Floats = (array.transpose(*dims) if dims else array).values
    return found


def record(found: xr.Dataset, *names: str, **renamed: str) -> dict[str, Any]:
    """Variables of a dataset as Python values, under their own names or others: kl="kl_divergence"."""
    return {name: found[of].values.tolist() for name, of in _columns(names, renamed).items()}


def records(found: xr.Dataset, dim: str, *names: str, **renamed: str) -> list[dict[str, Any]]:
    """One `record` per index along a dimension; variables without the dimension are repeated in each."""
    columns = _columns(names, renamed)
    arrays = [found[of] for of in columns.values()]
    values = [
        array.transpose(dim, ...).values.tolist()
        if dim in array.dims
        else [array.values.tolist()] * found.sizes[dim]
        for array in arrays
    ]
    rows = zip(*values, strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def ranked(array: xr.DataArray, count: int | None = None) -> list[dict[str, Any]]:
    """Places of the largest cells, each as labels by dim: {"layer": 3, "head": 1}; the earlier of equal ones
    first, NaN left out. count: number of places; None for all."""
    flat = np.asarray(array.values, np.float64).ravel()
    order = [int(i) for i in np.argsort(-flat, kind="stable") if not np.isnan(flat[i])][:count]
    labels = {str(dim): array[dim].values.tolist() for dim in array.dims}
    places = zip(*np.unravel_index(order, array.shape), strict=True) if order else ()
    return [{dim: labels[dim][i] for dim, i in zip(labels, place, strict=True)} for place in places]


def largest(
    found: xr.Dataset, by: xr.DataArray, count: int | None, *names: str, **renamed: str
) -> list[dict[str, Any]]:
    """One `record` per cell of `by`, for its `count` largest cells, with the labels of the cell first."""
    return [place | record(found.sel(place), *names, **renamed) for place in ranked(by, count)]


def labelled(values: Any, name: str, unit: str = "1", **axes: Any) -> xr.DataArray:
    """Values with labels.

    Arguments:
        values: the numbers.
        name: what they are, for the scale of a drawing.
        unit: "1" for none.
        axes: names of the axes in order, with their labels; None for none.
    """
    import xarray as xr

    coords = {axis: list(labels) for axis, labels in axes.items() if labels is not None}
    return xr.DataArray(values, coords, tuple(axes), attrs={"units": unit, "long_name": name})


def column(values: Any, dim: str, name: str) -> xr.DataArray:
    """Values along one dim, as stages read them: token ids along "token"."""
    import xarray as xr

    return xr.DataArray(values, dims=dim, name=name)


def stacked(dim: str, parts: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Arrays of the same axes along a new one, labelled by their names: curves of one drawing."""
    import xarray as xr

    return xr.concat(list(parts.values()), dim, join="outer").assign_coords({dim: list(parts)})


def _columns(names: Iterable[str], renamed: Mapping[str, str]) -> dict[str, str]:
    return {**{name: name for name in names}, **renamed}
