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

MOST_ROWS = 20_000_000
"""Maximum rows of a result without a token axis."""
_GROUP_BYTES = 16 << 20  # bytes of values per Parquet row group


def write_parquet(dataset: xr.Dataset, path: Path, layout: str, note: Mapping[str, Any]) -> None:
    """Write a run or result as a new Parquet file.

    Arguments:
        dataset: Run or result.
        path: The new file.
        layout: "long": a row per layer and token, a column per variable. "wide": a row per token, a column
            per variable and layer.
        note: Plain values on the origin of the data, stored in the file's metadata under "mizarr".

    Raises:
        ShapeError: The dataset has attention patterns (two tokens per number) or recurrent states (one per
            prompt), or is a result with more than 20 million numbers, which need a row each.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("export as Parquet needs pyarrow: pip install 'mizarr[corpora]'") from error
    # Axes of variables that have no row per token, and what these variables are.
    matrices = dict.fromkeys(("pair", "square"), "attention patterns")
    tokenless = {**matrices, "prompt_id": "states with one value per prompt"}
    has_tokens = "token" in dataset.dims
    dims = {str(dim) for array in dataset.data_vars.values() for dim in array.dims}
    refused = dims & set(tokenless if has_tokens else matrices)
    if refused_dim := min(refused, default=None):
        raise ShapeError(
            f"Parquet has a row per token, which does not fit {tokenless[refused_dim]} (axis {refused_dim}); "
            "name the other variables with --variables, or export with --format zarr, netcdf or npz"
        )
    tables = _token_tables(dataset, layout, pa) if has_tokens else [_number_table(dataset, layout, pa)]
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
    """Yield Arrow tables of a dataset with a token axis: one per range of tokens, in layout "long" one per
    range and layer."""
    layers = _layers(dataset)
    rows_per_token = len(layers) if layout == "long" and layers else 1
    for token_range in _token_ranges(dataset, rows_per_token):
        part = dataset.isel(token=token_range)
        labels = _label_columns(part, pa)
        if layout == "wide":
            values = {
                label: _vectors(array, pa)
                for name in part.data_vars
                for label, array in _arrays_by_layer(part, str(name), layers)
            }
            yield pa.table(labels | values)
            continue
        layers_or_none: list[int | None] = [*layers] or [None]
        for layer in layers_or_none:
            n_tokens = part.sizes["token"]
            columns = {} if layer is None else {"layer": pa.array(np.full(n_tokens, layer))}
            for name in part.data_vars:
                array = _at_layer(part, str(name), layer)
                nulls = pa.nulls(n_tokens, _value_type(part[name], pa))
                columns[str(name)] = nulls if array is None else _vectors(array, pa)
            yield pa.table(labels | columns)


def _label_columns(part: xr.Dataset, pa: Any) -> dict[str, Any]:
    """Arrow columns with the labels of each token: its coordinates, and number and text of its prompt."""
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


def _number_table(dataset: xr.Dataset, layout: str, pa: Any) -> Any:
    """Arrow table of a dataset without a token axis: a row per number, a column per axis and variable."""
    if layout == "wide":
        raise ShapeError(
            "layout 'wide' has a row per token, and this dataset has no token axis; use --layout long"
        )
    rows = math.prod(dataset.sizes.values())
    if rows > MOST_ROWS:
        sizes = ", ".join(f"{dim} {size}" for dim, size in dataset.sizes.items())
        raise ShapeError(
            f"Parquet would need {rows} rows, one per number ({sizes}), and at most {MOST_ROWS} are written; "
            "name fewer variables with --variables, or export with --format zarr or netcdf"
        )
    frame = (
        dataset.to_dataframe().reset_index() if dataset.sizes else dataset.expand_dims("row").to_dataframe()
    )
    return pa.table({str(name): _column(frame[name].to_numpy(), pa) for name in frame.columns})


def _token_ranges(dataset: xr.Dataset, rows_per_token: int) -> Iterator[slice]:
    """Yield token ranges whose Parquet row groups have about 16 MiB."""
    n_tokens = dataset.sizes["token"]
    total_bytes = sum(array.nbytes for array in dataset.data_vars.values())
    row_bytes = total_bytes // (max(n_tokens, 1) * rows_per_token)
    step = max(1, _GROUP_BYTES // max(row_bytes, 1))
    for start in range(0, max(n_tokens, 1), step):
        yield slice(start, min(start + step, n_tokens))


def _layers(dataset: xr.Dataset) -> list[int]:
    """Layer numbers that occur in any variable, sorted."""
    dims = [dim for dim in dataset.dims if str(dim).startswith("layer")]
    return sorted({int(layer) for dim in dims for layer in dataset[dim].values})


def _at_layer(dataset: xr.Dataset, name: str, layer: int | None) -> xr.DataArray | None:
    """One layer of a variable; None if it lacks the layer, the whole variable if it has no layer axis."""
    array = dataset[name]
    dim = layer_dim(array)
    if dim is None:
        return array
    return array.sel({dim: layer}) if layer in array[dim].values else None


def _arrays_by_layer(dataset: xr.Dataset, name: str, layers: list[int]) -> Iterator[tuple[str, xr.DataArray]]:
    """Yield (column name, array) for each layer of a variable, such as "resid_post.5"."""
    layers_or_none: list[int | None] = [*layers] if layer_dim(dataset[name]) is not None else [None]
    for layer in layers_or_none:
        array = _at_layer(dataset, name, layer)
        if array is not None:
            yield name if layer is None else f"{name}.{layer}", array


def _value_type(array: xr.DataArray, pa: Any) -> Any:
    """Parquet type of a variable's values per token and layer: a number or a fixed-size list."""
    dims = [dim for dim in array.dims if dim != "token" and not str(dim).startswith("layer")]
    kind = pa.from_numpy_dtype(array.dtype)
    return pa.list_(kind, math.prod(array.sizes[dim] for dim in dims)) if dims else kind


def _vectors(array: xr.DataArray, pa: Any) -> Any:
    """Values as one Parquet entry per token: a number or a fixed-size list."""
    if "token" not in array.dims:
        raise ShapeError(
            f"variable {array.name!r} has axes {array.dims}, and Parquet has a row per token; name the other "
            "variables with --variables"
        )
    rows = array.transpose("token", ...).values
    flat = _column(np.ascontiguousarray(rows).reshape(-1), pa)
    return flat if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, math.prod(rows.shape[1:]))


def _column(values: npt.NDArray[Any], pa: Any) -> Any:
    """Arrow array of numbers or texts, [row]."""
    if values.dtype.kind in "UTO":
        return pa.array([str(value) for value in values], pa.string())
    return pa.array(values)
