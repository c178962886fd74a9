"""A labelled dataset as rows of a Parquet file, written a range of tokens at a time.

Border: labels and columns; file names and provenance are exports.py's.

Datasets with a token axis (runs, and results per token) have one row per token. Its labels are columns, the
number (`prompt`) and the text of its prompt among them, and what labels the whole dataset:

    long  (layer, token): `layer`, and a column per variable with the vector of that token at that layer (a
          list of fixed size, flattened in C order); null where a variable has no such layer
    wide  (token): a column per variable and layer, named "resid_post.5"

Other results become one row per number, with a column per axis (long only).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..attributes import plain
from ..errors import MissingExtra, ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["write_parquet"]

ROWS = 20_000_000
"""Numbers of a result without tokens up to which it is written, one row each."""
_GROUP = 16 << 20  # bytes of values in a row group


def write_parquet(dataset: xr.Dataset, path: Path, layout: str, note: Mapping[str, Any]) -> None:
    """Write a new Parquet file. note: goes into the file's metadata, under "mizarr".

    Raises ShapeError for attention patterns, which have two tokens per number, for states behind prompts,
    which have none, and for results too large to be one row per number; MissingExtra without pyarrow.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("Parquet needs pyarrow: pip install 'mizarr[corpora]'") from error
    matrices = dict.fromkeys(("pair", "square"), "attention patterns")
    packed = {**matrices, "prompt_id": "what prompts leave behind"}
    held = {str(dim) for array in dataset.data_vars.values() for dim in array.dims}
    refused = held & set(packed) if "token" in dataset.dims else held & set(matrices)
    if other := min(refused, default=None):
        raise ShapeError(
            f"expected variables with one token per number, found {packed[other]} ({other}); leave them out "
            "with --variables, or export to zarr, netcdf or npz"
        )
    tables = (
        _token_tables(dataset, layout, pa) if "token" in dataset.dims else _number_tables(dataset, layout, pa)
    )
    about = {**note, "layout": layout, "attrs": plain(dataset.attrs)}
    writer = None
    try:
        for table in tables:
            if writer is None:
                schema = table.schema.with_metadata({b"mizarr": json.dumps(about, sort_keys=True).encode()})
                writer = parquet.ParquetWriter(path, schema)
            writer.write_table(table.cast(writer.schema))
    finally:
        if writer is not None:
            writer.close()


def _token_tables(dataset: xr.Dataset, layout: str, pa: Any) -> Iterator[Any]:
    layers = _layers(dataset)
    for here in _ranges(dataset, len(layers) if layout == "long" and layers else 1):
        part = dataset.isel(token=here)
        labels = _labels(part, pa)
        if layout == "wide":
            values = {
                label: _vectors(array, pa)
                for name in part.data_vars
                for label, array in _by_layer(part, str(name), layers)
            }
            yield pa.table(labels | values)
            continue
        own: list[int | None] = [*layers] or [None]
        for layer in own:
            rows = part.sizes["token"]
            columns = {} if layer is None else {"layer": pa.array(np.full(rows, layer))}
            for name in part.data_vars:
                array = _at(part, str(name), layer)
                nothing = pa.nulls(rows, _type(part[name], pa))
                columns[str(name)] = nothing if array is None else _vectors(array, pa)
            yield pa.table(labels | columns)


def _labels(part: xr.Dataset, pa: Any) -> dict[str, Any]:
    """Columns of labels of a range of tokens."""
    rows = part.sizes["token"]
    columns = {}
    for name, coord in part.coords.items():
        if coord.dims == ("token",):
            columns[str(name)] = _column(coord.values, pa)
        elif not coord.dims:
            columns[str(name)] = _column(np.full(rows, coord.values), pa)
    if "prompt" not in part.coords or "prompt_id" not in part.coords:
        return columns
    held, prompt = np.unique(part["prompt"].values, return_inverse=True)
    columns["prompt"] = _column(part["prompt_id"].values[held][prompt], pa)
    if "text" in part.coords:
        texts = _column(part["text"][held].values, pa)
        columns["text"] = pa.DictionaryArray.from_arrays(pa.array(prompt, pa.int32()), texts)
    return columns


def _number_tables(dataset: xr.Dataset, layout: str, pa: Any) -> Iterator[Any]:
    if layout == "wide":
        raise ShapeError("expected a dataset with a token axis for layout 'wide', found none; use 'long'")
    rows = math.prod(dataset.sizes.values())
    if rows > ROWS:
        sizes = ", ".join(f"{dim} {size}" for dim, size in dataset.sizes.items())
        raise ShapeError(
            f"expected at most {ROWS} rows, one per number, found {rows} ({sizes}); name fewer variables "
            "with --variables, or export to zarr or netcdf"
        )
    frame = (
        dataset.to_dataframe().reset_index() if dataset.sizes else dataset.expand_dims("row").to_dataframe()
    )
    yield pa.table({str(name): _column(frame[name].to_numpy(), pa) for name in frame.columns})


def _ranges(dataset: xr.Dataset, rows: int) -> Iterator[slice]:
    """Token ranges of about `_GROUP` bytes in a row group, of which each range makes `rows`."""
    n = dataset.sizes["token"]
    wide = sum(array.nbytes for array in dataset.data_vars.values()) // (max(n, 1) * rows)
    step = max(1, _GROUP // max(wide, 1))
    for first in range(0, max(n, 1), step):
        yield slice(first, min(first + step, n))


def _layers(dataset: xr.Dataset) -> list[int]:
    """Every layer any variable has."""
    dims = [dim for dim in dataset.dims if str(dim).startswith("layer")]
    return sorted({int(layer) for dim in dims for layer in dataset[dim].values})


def _layer_dim(array: xr.DataArray) -> str | None:
    return next((str(dim) for dim in array.dims if str(dim).startswith("layer")), None)


def _at(dataset: xr.Dataset, name: str, layer: int | None) -> xr.DataArray | None:
    """A variable at a layer; itself where it has none, None where it lacks that one."""
    array = dataset[name]
    dim = _layer_dim(array)
    if dim is None:
        return array
    return array.sel({dim: layer}) if layer in array[dim].values else None


def _by_layer(dataset: xr.Dataset, name: str, layers: list[int]) -> Iterator[tuple[str, xr.DataArray]]:
    own: list[int | None] = [*layers] if _layer_dim(dataset[name]) is not None else [None]
    for layer in own:
        array = _at(dataset, name, layer)
        if array is not None:
            yield name if layer is None else f"{name}.{layer}", array


def _type(array: xr.DataArray, pa: Any) -> Any:
    """The Parquet type of what a variable holds per token and layer."""
    dims = [dim for dim in array.dims if dim != "token" and not str(dim).startswith("layer")]
    kind = pa.from_numpy_dtype(array.dtype)
    return pa.list_(kind, math.prod(array.sizes[dim] for dim in dims)) if dims else kind


def _vectors(array: xr.DataArray, pa: Any) -> Any:
    """One entry per token: a number, or a list of fixed size."""
    if "token" not in array.dims:
        raise ShapeError(
            f"expected {array.name!r} with a token axis, found {array.dims}; leave it out with --variables"
        )
    rows = array.transpose("token", ...).values
    flat = _column(np.ascontiguousarray(rows).reshape(-1), pa)
    return flat if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, math.prod(rows.shape[1:]))


def _column(values: npt.NDArray[Any], pa: Any) -> Any:
    if values.dtype.kind in "UTO":
        return pa.array([str(value) for value in values], pa.string())
    return pa.array(values)
