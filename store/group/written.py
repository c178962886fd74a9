"""Write a small result as a Zarr v3 group, each array one chunk, byte for byte as xarray and zarr would.

Values are encoded by xarray's functions and laid out by `one_chunk.py`. Large results and dask arrays go
through zarr itself.

Why not always zarr: it makes a round trip to its event loop on another thread for some forty files per
result. Measured with eight small arrays: three times the processor time of this module, five times with files
in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends.zarr import encode_zarr_variable
from xarray.conventions import encode_dataset_coordinates

from ..content import TEXT
from ..runs.zarr_metadata import group_metadata
from .one_chunk import OneChunk

__all__ = ["are_plain", "write_arrays"]


def are_plain(dataset: xr.Dataset, most: int) -> bool:
    """Whether `write_arrays` can write a dataset: it is small, in memory, and its names can name folders.

    Arguments:
        dataset: The dataset, as returned by `results.prepare`.
        most: Largest number of bytes of all arrays together.
    """
    has_plain_names = all(
        isinstance(name, str) and name.strip(".") and not {"/", "\\"} & set(name)
        for name in dataset.variables
    )
    in_memory = all(
        variable.chunks is None and variable.dtype.isnative for variable in dataset.variables.values()
    )
    return has_plain_names and in_memory and dataset.nbytes <= most


def write_arrays(folder: Path, dataset: xr.Dataset) -> xr.Dataset:
    """Write a dataset as a new Zarr group, each array as one chunk.

    Arguments:
        folder: Folder to be created.
        dataset: The dataset, as returned by `results.prepare`.

    Returns:
        The dataset as it would be read back, before decoding by xarray.

    Raises:
        TypeError: Attributes are not JSON values.
        OSError: The files could not be written.
    """
    variables, attributes = encode_dataset_coordinates(dataset)
    folder.mkdir()
    raw = {name: _write_array(folder, str(name), variable) for name, variable in variables.items()}
    return xr.Dataset(raw, attrs=_write_metadata(folder, group_metadata(attributes))["attributes"])


def _write_array(group_folder: Path, name: str, variable: xr.Variable) -> xr.Variable:
    """Write one array into the folder of its group; return it as it would be read back."""
    # Without this xarray adds a fill value of NaN to floats and masks equal values on reading.
    variable.encoding = {"_FillValue": None}
    encoded = encode_zarr_variable(variable, name=name, zarr_format=3)
    # xarray moves the fill value from encoding to attributes; zarr stores it elsewhere.
    attributes = {key: value for key, value in encoded.attrs.items() if key != "_FillValue"}
    values = np.asarray(encoded.values)
    if values.dtype.kind in "OT":
        values = values.astype(TEXT)
    array = OneChunk(values.dtype, values.shape, encoded.dims, attributes)
    folder = group_folder / name
    folder.mkdir()
    metadata = _write_metadata(folder, array.text)
    chunk = array.chunk(values)
    if chunk is None:
        # The file is omitted, so reading gives the fill value: signs of zeros and payloads of NaNs are lost.
        values = array.values(None)
    else:
        chunk_file = folder / array.path
        chunk_file.parent.mkdir(parents=True, exist_ok=True)
        chunk_file.write_bytes(chunk)
    encoding = {"dtype": values.dtype} if values.dtype.kind == "T" else {}
    return xr.Variable(encoded.dims, values, metadata["attributes"], encoding)


def _write_metadata(folder: Path, text: bytes) -> dict[str, Any]:
    """Write the `zarr.json` of an array or group; return its parsed content."""
    (folder / "zarr.json").write_bytes(text)
    metadata: dict[str, Any] = json.loads(text)
    return metadata
