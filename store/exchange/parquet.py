"""Export a dataset as a Parquet file, a range of tokens at a time.

A dataset with a token axis (a run, or a result per token) has one row per token. Labels of tokens, the number
(`prompt`) and text of the prompt, and labels of the whole dataset are columns. Layouts:

    long  a row per (layer, token): column `layer`, and a column per variable with the vector of that token at
          that layer (fixed-size list, flattened in C order), null if the variable lacks the layer
    wide  a row per token: a column per variable and layer, named "resid_post.5"

Other results have a row per number, with a column per axis (long only).
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
from ..reading.selection import layer_dim

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["write_parquet"]

ROWS = 20_000_000
"""Maximum rows of a result without a token axis."""
_GROUP = 16 << 20  # bytes of values per row group


def write_parquet(dataset: xr.Dataset, path: Path, layout: str, note: Mapping[str, Any]) -> None:
    """Write a new Parquet file.

    Arguments:
        dataset: Run or result.
        path: The new file.
        layout: "long" or "wide".
        note: Plain values for the file's metadata, under "mizarr".

    Raises:
        ShapeError: Attention patterns (two tokens per number), states after prompts (no token), or a result
            with too many numbers for one row each.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("Parquet needs pyarrow: pip install 'mizarr[corpora]'") from error
    matrices = dict.fromkeys(("pair", "square"), "attention patterns")
    packed = {**matrices, "prompt_id": "what prompts leave behind"}
    dims = {str(dim) for array in dataset.data_vars.values() for dim in array.dims}
    refused = dims & set(packed) if "token" in dataset.dims else dims & set(matrices)
    if refused_dim := min(refused, default=None):
        raise ShapeError(
            f"expected variables with one token per number, found {packed[refused_dim]} ({refused_dim}); "
            "leave them out with --variables, or export to zarr, netcdf or npz"
        )
    tables = (
        _token_tables(dataset, layout, pa) if "token" in dataset.dims else _number_tables(dataset, layout, pa)
    )
    metadata = {**note, "layout": layout, "attrs": plain(dataset.attrs)}
    writer = None
    try:
        for table in tables:
            if writer is None:
                schema = table.schema.with_metadata(
                    {b"mizarr": json.dumps(metadata, sort_keys=True).encode()}
                )
                writer = parquet.ParquetWriter(path, schema)
            # Later ranges may infer another type, for example null for a column without values.
            writer.write_table(table.cast(writer.schema))
    finally:
        if writer is not None:
            writer.close()


def _token_tables(dataset: xr.Dataset, layout: str, pa: Any) -> Iterator[Any]:
    layers = _layers(dataset)
    for token_range in _ranges(dataset, len(layers) if layout == "long" and layers else 1):
        token_slice = dataset.isel(token=token_range)
        labels = _labels(token_slice, pa)
        if layout == "wide":
            values = {
                label: _vectors(array, pa)
                for name in token_slice.data_vars
                for label, array in _by_layer(token_slice, str(name), layers)
            }
            yield pa.table(labels | values)
            continue
        layers_or_none: list[int | None] = [*layers] or [None]
        for layer in layers_or_none:
            rows = token_slice.sizes["token"]
            columns = {} if layer is None else {"layer": pa.array(np.full(rows, layer))}
            for name in token_slice.data_vars:
                array = _at(token_slice, str(name), layer)
                nulls = pa.nulls(rows, _type(token_slice[name], pa))
                columns[str(name)] = nulls if array is None else _vectors(array, pa)
            yield pa.table(labels | columns)


def _labels(part: xr.Dataset, pa: Any) -> dict[str, Any]:
    """Label columns for a range of tokens."""
    rows = part.sizes["token"]
    columns = {}
    for name, coord in part.coords.items():
        if coord.dims == ("token",):
            columns[str(name)] = _column(coord.values, pa)
        elif not coord.dims:
            columns[str(name)] = _column(np.full(rows, coord.values), pa)
    if "prompt" not in part.coords or "prompt_id" not in part.coords:
        return columns
    # Only the texts of this range are read.
    prompt_rows, prompt = np.unique(part["prompt"].values, return_inverse=True)
    columns["prompt"] = _column(part["prompt_id"].values[prompt_rows][prompt], pa)
    if "text" in part.coords:
        texts = _column(part["text"][prompt_rows].values, pa)
        # Dictionary encoding: each text is stored once instead of once per token.
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
    """Token ranges that make row groups of about `_GROUP` bytes, if each token has `rows` rows."""
    n = dataset.sizes["token"]
    wide = sum(array.nbytes for array in dataset.data_vars.values()) // (max(n, 1) * rows)
    step = max(1, _GROUP // max(wide, 1))
    for start in range(0, max(n, 1), step):
        yield slice(start, min(start + step, n))


def _layers(dataset: xr.Dataset) -> list[int]:
    """Layer numbers that occur in any variable, sorted."""
    dims = [dim for dim in dataset.dims if str(dim).startswith("layer")]
    return sorted({int(layer) for dim in dims for layer in dataset[dim].values})


def _at(dataset: xr.Dataset, name: str, layer: int | None) -> xr.DataArray | None:
    """Select a layer of a variable; None if it lacks the layer, the variable itself if it has no layer
    axis."""
    array = dataset[name]
    dim = layer_dim(array)
    if dim is None:
        return array
    return array.sel({dim: layer}) if layer in array[dim].values else None


def _by_layer(dataset: xr.Dataset, name: str, layers: list[int]) -> Iterator[tuple[str, xr.DataArray]]:
    layers_or_none: list[int | None] = [*layers] if layer_dim(dataset[name]) is not None else [None]
    for layer in layers_or_none:
        array = _at(dataset, name, layer)
        if array is not None:
            yield name if layer is None else f"{name}.{layer}", array


def _type(array: xr.DataArray, pa: Any) -> Any:
    """Parquet type of a variable's values per token and layer: a number or a fixed-size list."""
    dims = [dim for dim in array.dims if dim != "token" and not str(dim).startswith("layer")]
    kind = pa.from_numpy_dtype(array.dtype)
    return pa.list_(kind, math.prod(array.sizes[dim] for dim in dims)) if dims else kind


def _vectors(array: xr.DataArray, pa: Any) -> Any:
    """Values as one Parquet entry per token: a number or a fixed-size list."""
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
