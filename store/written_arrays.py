"""The arrays of a small result, each of one chunk, written as xarray and zarr write them, byte for byte.

Border: a dataset in storable form and a folder to be made in, a Zarr v3 group of files out; large results,
and what dask computes, go through zarr itself. How values are encoded is asked of xarray; the files are ours.

zarr asks its loop, on another thread, for every file that it writes or looks for, some forty times a result.
Measured with eight small arrays: three times the processor time of this, and five with files in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends.zarr import encode_zarr_variable
from xarray.conventions import encode_dataset_coordinates

from .arrays import Array
from .runs.shards import SUM_BYTES, crc32c

__all__ = ["are_plain", "write_arrays"]

_TEXT = np.dtypes.StringDType()
_LENGTH = 4  # bytes of a length before text


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
    group = {"attributes": attributes, "zarr_format": 3, "node_type": "group"}
    raw = {name: _written(place, str(name), variable) for name, variable in variables.items()}
    return xr.Dataset(raw, attrs=_described(place, group)["attributes"])


def _written(place: Path, name: str, variable: xr.Variable) -> xr.Variable:
    """Write one array; returns what is read back."""
    variable.encoding = {"_FillValue": None}
    encoded = encode_zarr_variable(variable, name=name, zarr_format=3)
    attributes = {key: value for key, value in encoded.attrs.items() if key != "_FillValue"}
    values = np.asarray(encoded.values)
    if values.dtype.kind in "OT":
        values = values.astype(_TEXT)
    folder = place / name
    folder.mkdir()
    found = _described(folder, _metadata(values, encoded.dims, attributes))
    if _is_fill(values):
        # Neither the sign of a zero nor the payload of a NaN is in what is not there.
        values = np.full_like(values, {"f": np.nan, "T": ""}.get(values.dtype.kind, 0))
    else:
        at = folder.joinpath("c", *["0"] * values.ndim)
        at.parent.mkdir(parents=True, exist_ok=True)
        chunk = _chunk(values)
        at.write_bytes(chunk + crc32c(chunk).to_bytes(SUM_BYTES, "little"))
    encoding = {"dtype": values.dtype} if values.dtype.kind == "T" else {}
    return xr.Variable(encoded.dims, values, found["attributes"], encoding)


def _described(folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Write `zarr.json`; returns what it says."""
    text = json.dumps(metadata, indent=2)
    (folder / "zarr.json").write_text(text)
    found: dict[str, Any] = json.loads(text)
    return found


def _metadata(values: Array, dims: tuple[Any, ...], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What describes an array, fields in the order in which zarr writes them."""
    kind, itemsize = values.dtype.kind, values.dtype.itemsize
    if kind == "T":
        coding: dict[str, Any] = {"name": "vlen-utf8", "configuration": {}}
    else:
        coding = {"name": "bytes", **({"configuration": {"endian": "little"}} if itemsize > 1 else {})}
    return {
        "shape": values.shape,
        "data_type": "string" if kind == "T" else values.dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [max(1, size) for size in values.shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": {"f": "NaN", "c": [0.0, 0.0], "b": False, "T": ""}.get(kind, 0),
        "codecs": [coding, {"name": "crc32c"}],
        "attributes": attributes,
        **({"dimension_names": dims} if dims else {}),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _is_fill(values: Array) -> bool:
    """Whether a chunk is what zarr reads where there is none; it writes no such chunk."""
    if values.dtype.kind == "f":
        return bool(np.isnan(values).all())
    return not any(values.ravel()) if values.dtype.kind == "T" else not values.any()


def _chunk(values: Array) -> bytes:
    """The bytes of a chunk: C order, little-endian; of text its number, then each with its length (UTF-8)."""
    if values.dtype.kind != "T":
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    parts = [text.encode() for text in values.ravel().tolist()]
    lengths = [len(part).to_bytes(_LENGTH, "little") for part in parts]
    told = (each for pair in zip(lengths, parts, strict=True) for each in pair)
    return b"".join([len(parts).to_bytes(_LENGTH, "little"), *told])
