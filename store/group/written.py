"""The arrays of a small result, each of one chunk, written as xarray and zarr write them, byte for byte.

Border: a dataset in storable form and a folder to be made in, a Zarr v3 group of files out; large results,
and what dask computes, go through zarr itself. How values are encoded is asked of xarray, how they lie is
known in `one_chunk.py`.

zarr asks its loop, on another thread, for every file that it writes or looks for, some forty times a result.
Measured with eight small arrays: three times the processor time of this, and five with files in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends.zarr import encode_zarr_variable
from xarray.conventions import encode_dataset_coordinates

from ..runs.zarr_metadata import group_metadata
from .one_chunk import TEXT, OneChunk

__all__ = ["are_plain", "write_arrays"]


def are_plain(dataset: xr.Dataset, most: int) -> bool:
    """Whether a dataset has at most so many bytes, none of them for dask to compute, and names of folders."""
    return dataset.nbytes <= most and all(
        isinstance(name, str)
        and name.strip(".")
        and not {"/", "\\"} & set(name)
        and variable.chunks is None
        and variable.dtype.isnative
        for name, variable in dataset.variables.items()
    )


def write_arrays(place: Path, dataset: xr.Dataset) -> xr.Dataset:
    """Write a dataset as a group, each array one chunk; returns it undecoded, as it would be read back.

    place: a folder to be made.  dataset: as `results.prepare` gives it.
    Raises TypeError for attributes that are no JSON, OSError as the system says it.
    """
    variables, attributes = encode_dataset_coordinates(dataset)
    place.mkdir()
    raw = {name: _written(place, str(name), variable) for name, variable in variables.items()}
    return xr.Dataset(raw, attrs=_described(place, group_metadata(attributes))["attributes"])


def _written(place: Path, name: str, variable: xr.Variable) -> xr.Variable:
    """Write one array; returns what is read back."""
    variable.encoding = {"_FillValue": None}
    encoded = encode_zarr_variable(variable, name=name, zarr_format=3)
    attributes = {key: value for key, value in encoded.attrs.items() if key != "_FillValue"}
    values = np.asarray(encoded.values)
    if values.dtype.kind in "OT":
        values = values.astype(TEXT)
    array = OneChunk(values.dtype, values.shape, encoded.dims, attributes)
    folder = place / name
    folder.mkdir()
    found = _described(folder, array.text)
    chunk = array.chunk(values)
    if chunk is None:
        # Neither the sign of a zero nor the payload of a NaN is in what is not there.
        values = array.values(None)
    else:
        at = folder / array.path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(chunk)
    encoding = {"dtype": values.dtype} if values.dtype.kind == "T" else {}
    return xr.Variable(encoded.dims, values, found["attributes"], encoding)


def _described(folder: Path, text: bytes) -> dict[str, Any]:
    """Write `zarr.json`; returns what it says."""
    (folder / "zarr.json").write_bytes(text)
    found: dict[str, Any] = json.loads(text)
    return found
