"""Labels, names and units of labelled arrays, and the check that they fit the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...store.arrays import Array
from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr


def along(array: xr.DataArray, dim: str) -> tuple[str, ...]:
    """The labels along a dim, as text."""
    return tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in array[dim].values.tolist())


def word(dim: str) -> str:
    """A dim in words: "query position"."""
    return dim.replace("_", " ")


def name(array: xr.DataArray) -> str:
    """What the numbers are: their `long_name`, else the array's name, else "value"."""
    return str(array.attrs.get("long_name", "value" if array.name is None else array.name))


def unit(array: xr.DataArray) -> str:
    """Their unit; "" for none."""
    unit = str(array.attrs.get("units", ""))
    return "" if unit == "1" else unit


def expect(called: str, values: Array, shape: tuple[int, ...]) -> None:
    """ShapeError unless values are of this shape."""
    if values.shape != shape:
        raise ShapeError(f"expected {called} of shape {shape}, as its labels say, found {values.shape}")
