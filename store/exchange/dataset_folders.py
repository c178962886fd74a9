"""Export a run as a folder of Hugging Face `datasets`, for `Dataset.load_from_disk`.

    datasets   a row per prompt, of its own length: `input_ids`, `text` if stored, and a column per hook point
               [position, width]
    saelens    what `CacheActivationsRunner` of SAELens writes, for its `cached_activations_path`: a row per
               context of equal length, a column per hook point [position, width], and `token_ids`
    sparsify   a row per context with `input_ids` only, as sparsify runs the model itself

Contexts are cut from the start of each prompt and do not overlap; the incomplete context at its end is left
out. Rows keep the order of the store, as both trainers shuffle what they read.

Written with pyarrow alone: an Arrow stream and two JSON files, in the layout of datasets 2.14 and later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..digest import digest
from ..errors import ConfigError, MissingExtra, ShapeError
from ..reading.selection import layer_dim
from ..runs.packed import exclusive_sum

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["FOLDERS", "write_dataset_folder"]

FOLDERS = ("datasets", "saelens", "sparsify")
"""Kinds of folders, named after the library that reads them."""
# Names by which each library's loader looks for the token ids.
_IDS = {"datasets": "input_ids", "saelens": "token_ids", "sparsify": "input_ids"}
_FILE = "data-00000-of-00001.arrow"
_BATCH_BYTES = 16 << 20  # bytes of values per Arrow record batch

Indices = npt.NDArray[np.int64]


def write_dataset_folder(
    dataset: xr.Dataset, folder: Path, kind: str, note: Mapping[str, Any], context: int | None
) -> None:
    """Write a run as a new folder that Hugging Face `datasets.load_from_disk` reads.

    Arguments:
        dataset: An opened run.
        folder: The new folder.
        kind: Library that will read the folder: "datasets", "saelens" or "sparsify".
        note: Plain values on the origin of the data, stored as the description.
        context: Tokens per row; None for the length of a prompt, if all have the same length.

    Raises:
        ShapeError: A variable has no row per token; prompts differ in length and no context is given; or all
            prompts are shorter than the context.
        ConfigError: A context was given for "datasets", whose rows are whole prompts.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtra(f"export as {kind} needs pyarrow: pip install 'mizarr[corpora]'") from error
    starts, sizes = _row_tokens(dataset, kind, context)
    # sparsify runs the model itself and reads token ids only.
    columns = {} if kind == "sparsify" else _activation_columns(dataset)
    width = max((math.prod(array.shape[1:]) for array in columns.values()), default=1)
    length = int(sizes[0]) if kind != "datasets" else None
    features = _features(dataset, columns, kind, length)
    description = {
        "description": json.dumps(note, sort_keys=True),
        "citation": "",
        "homepage": "",
        "license": "",
    }
    metadata = {"info": {"features": features}}
    schema = _schema(dataset, columns, kind, length, pa).with_metadata({"huggingface": json.dumps(metadata)})
    folder.mkdir()
    with (folder / _FILE).open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        # Batches by bytes, because a context of a wide model can have gigabytes.
        float32_bytes = 4
        for rows in _batches(sizes, float32_bytes * width * max(1, len(columns))):
            writer.write_batch(_batch(dataset, columns, kind, starts, sizes, rows, schema, pa))
    state: dict[str, Any] = {
        "_data_files": [{"filename": _FILE}],
        # The datasets library caches by fingerprint, so it must depend on the content only.
        "_fingerprint": digest("dataset folder", json.dumps(note, sort_keys=True), features, kind)[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2), "utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps(description | {"features": features}, indent=2), "utf-8"
    )


def _row_tokens(dataset: xr.Dataset, kind: str, context: int | None) -> tuple[Indices, Indices]:
    """First token (index on the token axis) and number of tokens of each exported row, int64."""
    if "token" not in dataset.dims or "row_size" not in dataset.coords:
        raise ShapeError(
            f"format {kind} is for runs, whose prompts lie on a token axis, and this dataset has none; "
            "export it with --format zarr"
        )
    if "token_id" not in dataset.coords:
        raise ShapeError(
            f"format {kind} needs token ids, and this run was imported without; export it with --format zarr"
        )
    sizes = dataset["row_size"].values.astype(np.int64)
    starts = exclusive_sum(sizes)
    if kind == "datasets":
        if context is not None:
            raise ConfigError(
                f"format datasets writes whole prompts as rows, so context={context} has no meaning; leave "
                "--context (context=) out"
            )
        return starts, sizes
    if context is None:
        if len(np.unique(sizes)) != 1:
            raise ShapeError(
                f"rows of format {kind} have one length, and the prompts have {sizes.min()} to {sizes.max()} "
                "tokens; give the number of tokens per row with --context (context=)"
            )
        context = int(sizes[0])
    if context < 1:
        raise ConfigError(f"expected --context (context=) of at least 1 token, found {context}")
    n_contexts = sizes // context
    if not n_contexts.any():
        raise ShapeError(
            f"no prompt has the {context} tokens of a row, the longest has {sizes.max()}; give a smaller "
            "--context (context=)"
        )
    # Number of the context within its prompt: 0, 1, … for each prompt.
    nth = np.arange(n_contexts.sum()) - np.repeat(exclusive_sum(n_contexts), n_contexts)
    return np.repeat(starts, n_contexts) + nth * context, np.full(n_contexts.sum(), context, np.int64)


def _activation_columns(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """Column name -> activations [token, ...] of one layer; columns are named by hook point."""
    columns: dict[str, xr.DataArray] = {}
    for name, array in dataset.data_vars.items():
        if "token" not in array.dims:
            raise ShapeError(
                f"variable {name!r} has axes {array.dims}, without the token axis that each column needs; "
                "name the other variables with --variables"
            )
        hook = str(array.attrs.get("hook", name))
        dim = layer_dim(array)
        if dim is None:
            label = hook.format(int(array["layer"])) if "layer" in array.coords else hook
            columns[label] = array.transpose("token", ...)
            continue
        for index, layer in enumerate(array[dim].values.tolist()):
            # Two layers of a variable without a placeholder in its hook point still need two names.
            label = hook.format(layer) if "{}" in hook else f"{hook}.{layer}"
            columns[label] = array.isel({dim: index}).transpose("token", ...)
    return columns


def _batches(sizes: Indices, token_bytes: int) -> Iterator[slice]:
    """Yield ranges of rows that hold about 16 MiB, at least one row each.

    Arguments:
        sizes: Tokens per row.
        token_bytes: Bytes per token, all columns together.
    """
    ends, start = np.cumsum(sizes) * token_bytes, 0
    while start < len(sizes):
        written_bytes = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, written_bytes + _BATCH_BYTES, side="right")))
        yield slice(start, stop)
        start = stop


def _features(
    dataset: xr.Dataset, columns: Mapping[str, xr.DataArray], kind: str, length: int | None
) -> dict[str, Any]:
    """Column types in the form that `datasets` reads from dataset_info.json; `length`: tokens per row, None
    if rows differ."""
    features: dict[str, Any] = {}
    for label, array in columns.items():
        width, dtype = math.prod(array.shape[1:]), str(array.dtype)
        if length is not None:
            features[label] = {"shape": [length, width], "dtype": dtype, "_type": "Array2D"}
        else:
            row = {"feature": {"dtype": dtype, "_type": "Value"}, "length": width, "_type": "List"}
            features[label] = {"feature": row, "_type": "List"}
    ids: dict[str, Any] = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}
    features[_IDS[kind]] = ids if length is None else ids | {"length": length}
    if _has_text(dataset, kind):
        features["text"] = {"dtype": "string", "_type": "Value"}
    return features


def _schema(
    dataset: xr.Dataset, columns: Mapping[str, xr.DataArray], kind: str, length: int | None, pa: Any
) -> Any:
    """Arrow schema of the file, with the columns of `_features` in the same order."""
    fields = []
    for label, array in columns.items():
        number, width = pa.from_numpy_dtype(array.dtype), math.prod(array.shape[1:])
        if length is None:
            fields.append(pa.field(label, pa.list_(pa.list_(number, width))))
            continue
        # Array2D is an extension type that the datasets library registers; other readers see a list of lists.
        extension = {
            "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
            "ARROW:extension:metadata": json.dumps([[length, width], str(array.dtype)]),
        }
        fields.append(pa.field(label, pa.list_(pa.list_(number)), metadata=extension))
    fields.append(
        pa.field(_IDS[kind], pa.list_(pa.int32()) if length is None else pa.list_(pa.int32(), length))
    )
    if _has_text(dataset, kind):
        fields.append(pa.field("text", pa.string()))
    return pa.schema(fields)


def _batch(
    dataset: xr.Dataset,
    columns: Mapping[str, xr.DataArray],
    kind: str,
    starts: Indices,
    sizes: Indices,
    rows_slice: slice,
    schema: Any,
    pa: Any,
) -> Any:
    """Arrow record batch of some rows, each with `sizes` tokens from `starts` on."""
    counts = sizes[rows_slice]
    # Arrow lists are cut by offsets: row i of the batch has the tokens from offsets[i] to offsets[i + 1].
    offsets = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.repeat(starts[rows_slice] - offsets[:-1], counts) + np.arange(offsets[-1])
    arrays = []
    for array in columns.values():
        vectors = np.ascontiguousarray(array.isel(token=tokens).values).reshape(len(tokens), -1)
        flat, width = pa.array(vectors.reshape(-1)), vectors.shape[1]
        if kind == "datasets":
            inner = pa.FixedSizeListArray.from_arrays(flat, width)
        else:
            # Array2D is stored as a list of lists, not of fixed-size lists.
            inner = pa.ListArray.from_arrays(np.arange(len(vectors) + 1, dtype=np.int32) * width, flat)
        arrays.append(pa.ListArray.from_arrays(offsets.astype(np.int32), inner))
    ids = pa.array(dataset["token_id"].values[tokens].astype(np.int32))
    if kind == "datasets":
        arrays.append(pa.ListArray.from_arrays(offsets.astype(np.int32), ids))
    else:
        arrays.append(pa.FixedSizeListArray.from_arrays(ids, int(counts[0])))
    if _has_text(dataset, kind):
        arrays.append(pa.array([str(text) for text in dataset["text"][rows_slice].values], pa.string()))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _has_text(dataset: xr.Dataset, kind: str) -> bool:
    return kind == "datasets" and "text" in dataset.coords
