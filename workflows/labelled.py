"""Conversions between labelled arrays and plain values of tables and JSON documents.

    values_of(result["kl"], "layer", "head")             # numbers with axes in this order
    records(result, "layer", "layer", "kl", p="share")   # [{"layer": 0, "kl": 0.1, "p": 0.5}, ...]
    largest(result, result["kl"], 10, "kl")              # [{"layer": 3, "head": 1, "kl": 0.9}, ...]

Border: xarray, numpy and Python values; knows no workflow and no view.
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
    """Numbers of a labelled array with its axes in the order `dims`; in stored order without `dims`."""
    values: Floats = (array.transpose(*dims) if dims else array).values
    return values


def record(result: xr.Dataset, *names: str, **renamed: str) -> dict[str, Any]:
    """Variables of a dataset as a dict of Python values.

    Arguments:
        result: the dataset.
        names: variables to include under their own names.
        renamed: variables to include under other names: kl="kl_divergence".
    """
    return {name: result[variable].values.tolist() for name, variable in _columns(names, renamed).items()}


def records(result: xr.Dataset, dim: str, *names: str, **renamed: str) -> list[dict[str, Any]]:
    """One dict of Python values per index along a dimension; variables without the dimension are repeated in
    each.

    Arguments:
        result: the dataset.
        dim: the dimension.
        names, renamed: see `record`.
    """
    columns = _columns(names, renamed)
    arrays = [result[variable] for variable in columns.values()]
    values = [
        array.transpose(dim, ...).values.tolist()
        if dim in array.dims
        else [array.values.tolist()] * result.sizes[dim]
        for array in arrays
    ]
    rows = zip(*values, strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def ranked(array: xr.DataArray, count: int | None = None) -> list[dict[str, Any]]:
    """Labels of the largest cells in descending order: [{"layer": 3, "head": 1}, …]. NaN cells are left out;
    the first of equal cells comes first.

    Arguments:
        array: the cells.
        count: number of cells; None for all.
    """
    flat = np.asarray(array.values, np.float64).ravel()
    # NaN cells sort last, but with count=None they would be listed.
    order = [int(i) for i in np.argsort(-flat, kind="stable") if not np.isnan(flat[i])][:count]
    labels = {str(dim): array[dim].values.tolist() for dim in array.dims}
    cells = zip(*np.unravel_index(order, array.shape), strict=True) if order else ()
    return [{dim: labels[dim][i] for dim, i in zip(labels, cell, strict=True)} for cell in cells]


def largest(
    result: xr.Dataset, by: xr.DataArray, count: int | None, *names: str, **renamed: str
) -> list[dict[str, Any]]:
    """One dict per cell of an array, largest value first: the labels of the cell, then variables of the
    dataset there.

    Arguments:
        result: dataset that the records are read from.
        by: array whose cells are ranked.
        count: number of cells; None for all.
        names, renamed: see `record`.
    """
    return [cell | record(result.sel(cell), *names, **renamed) for cell in ranked(by, count)]


def labelled(values: Any, name: str, unit: str = "1", **axes: Any) -> xr.DataArray:
    """An xarray array with named axes, labels, and the name and unit of its quantity.

    Arguments:
        values: the numbers.
        name: name of the quantity, for the scale of a drawing.
        unit: its unit; "1" for none.
        axes: names of the axes in order, with their labels; None for an axis without labels.
    """
    import xarray as xr

    coords = {axis: list(labels) for axis, labels in axes.items() if labels is not None}
    return xr.DataArray(values, coords, tuple(axes), attrs={"units": unit, "long_name": name})


def column(values: Any, dim: str, name: str) -> xr.DataArray:
    """A one-dimensional array as an input of a stage, such as token ids along "token".

    Arguments:
        values: the values.
        dim: name of the axis.
        name: name of the array.
    """
    import xarray as xr

    return xr.DataArray(values, dims=dim, name=name)


def stacked(dim: str, parts: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Concatenate arrays with equal axes along a new one, labelled by the keys of `parts`.

    Arguments:
        dim: name of the new axis.
        parts: arrays by label.
    """
    import xarray as xr

    return xr.concat(list(parts.values()), dim, join="outer").assign_coords({dim: list(parts)})


def _columns(names: Iterable[str], renamed: Mapping[str, str]) -> dict[str, str]:
    return {**{name: name for name in names}, **renamed}
