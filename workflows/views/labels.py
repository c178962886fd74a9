"""Labels, names and units of labelled arrays as text, and a check of array shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...store.arrays import Array
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr


def along(array: xr.DataArray, dim: str) -> tuple[str, ...]:
    """Coordinate labels of an array along a dim, as text; floats in short form (`%g`).

    Arguments:
        array: The array.
        dim: Name of the dim.
    """
    coordinates = array[dim].values.tolist()
    return tuple(f"{label:g}" if isinstance(label, float) else str(label) for label in coordinates)


def word(dim: str) -> str:
    """A dim name as words: "query_position" becomes "query position"."""
    return dim.replace("_", " ")


def name(array: xr.DataArray) -> str:
    """Name of the quantity that an array holds: its attribute `long_name`, else its name, else "value"."""
    return str(array.attrs.get("long_name", "value" if array.name is None else array.name))


def unit(array: xr.DataArray) -> str:
    """Unit of an array's values, from its attribute `units`; "" if that is missing or "1" (dimensionless)."""
    unit = str(array.attrs.get("units", ""))
    return "" if unit == "1" else unit


def expect(label: str, values: Array, shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless an array has the shape that the labels of a view require.

    Arguments:
        label: Name of the array in the message.
        values: The array.
        shape: The expected shape.
    """
    if values.shape != shape:
        raise ShapeError(
            f"expected {label} of shape {shape}, one entry per label of the view; found shape {values.shape}"
        )
