"""Labels, names and units of labelled arrays as text, and a check of array shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...store.arrays import Array
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr


def along(array: xr.DataArray, dim: str) -> tuple[str, ...]:
    """Coordinate labels along a dim, as text; floats in short form (`%g`).

    Arguments:
        array: The array.
        dim: Its dimension.
    """
    return tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in array[dim].values.tolist())


def word(dim: str) -> str:
    """A dim name as words: "query_position" becomes "query position"."""
    return dim.replace("_", " ")


def name(array: xr.DataArray) -> str:
    """Name of the quantity: the attribute `long_name`, else the array's name, else "value"."""
    return str(array.attrs.get("long_name", "value" if array.name is None else array.name))


def unit(array: xr.DataArray) -> str:
    """Unit of the values, from the attribute `units`; "" if missing or "1"."""
    unit = str(array.attrs.get("units", ""))
    return "" if unit == "1" else unit


def expect(label: str, values: Array, shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless an array has the expected shape.

    Arguments:
        label: Name of the array in the message.
        values: The array.
        shape: The expected shape.
    """
    if values.shape != shape:
        raise ShapeError(f"expected {label} of shape {shape}, as its labels say, found {values.shape}")
