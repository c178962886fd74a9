"""Export runs and results to NetCDF, Zarr, Parquet, safetensors, npz, and folders of Hugging Face `datasets`.

Every format is written block by block, so memory does not grow with the corpus, and under a temporary name
that is renamed at the end: a killed export leaves nothing that looks complete. bfloat16, which only
safetensors has, is widened to float32 elsewhere, without loss. Tensors in safetensors and npz are named after
hook points, one per layer, so that the file can be imported again. Where the data came from is stored in the
file as one JSON note.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..arrays import as_count, as_path, require_kind
from ..attributes import plain
from ..content import slabs
from ..errors import ConfigError, EntryNotFound, ShapeError, StoreFull, did_you_mean, nearest
from ..reading.selection import layer_dim
from ..records import RESULT
from .dataset_folders import FOLDERS, write_dataset_folder
from .tensors import Tensor, write_npz, write_safetensors

if TYPE_CHECKING:
    import xarray as xr

    from ..reading.labelled import LabelledEntry
    from ..store import Store

__all__ = ["FORMATS", "export", "export_key"]

FORMATS = {
    "netcdf": (".nc", ".nc4", ".netcdf"),
    "zarr": (".zarr",),
    "parquet": (".parquet", ".pq"),
    "safetensors": (".safetensors",),
    "npz": (".npz",),
    **dict.fromkeys(FOLDERS, ()),
}
"""Format -> file name suffixes; folders of `datasets` have none."""
TableLayout = Literal["long", "wide"]
NOTE = "mizarr"
"""Place of the note in a file: attribute, metadata entry, or (npz) `mizarr.json`, an array of bytes."""
TEXT_SUFFIX = ".json"
"""Suffix of text arrays in formats without text: the UTF-8 bytes of a JSON list."""
_BF16 = np.dtype(ml_dtypes.bfloat16)
_BLOCK_BYTES = 16 << 20  # bytes in memory per block
_SPARE_BYTES = 1 << 20  # for labels and headers, in the check of free space
_MOST_STRINGS = 1_000_000  # runs with more tokens are exported without token strings
_READERS = 2  # threads that read ahead of the writer; each holds a chunk in memory


def export_key(
    store: Store,
    key: str,
    path: str | Path,
    *,
    format: str | None = None,
    variables: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    layout: TableLayout = "long",
    context: int | None = None,
) -> Path:
    """Export a stored array, result or run to the file format of another program.

    Arguments:
        store: The store.
        key: First hex digits of a key, for one array or result; or of a run's digest (column DATA of
            `mizarr ls`), for the whole run.
        path: The new file, or the new folder for formats zarr, datasets, saelens and sparsify.
        format: See `export`.
        variables: Names of the variables to export; None for all.
        layers: Layers of a run to export; None for all.
        layout: See `export`.
        context: See `export`.

    Returns:
        The path. A note in the file has the key, the content digest and the provenance.
    """
    dataset, note, dtype = _open_for_export(store, key, variables, layers)
    return export(dataset, path, format=format, layout=layout, note=note, dtype=dtype, context=context)


def export(
    dataset: xr.Dataset,
    path: str | Path,
    *,
    format: str | None = None,
    layout: TableLayout = "long",
    note: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    context: int | None = None,
) -> Path:
    """Export a labelled dataset to the file format of another program.

    Arguments:
        dataset: The dataset.
        path: The new file, or the new folder for formats zarr, datasets, saelens and sparsify.
        format: netcdf, zarr, parquet, safetensors or npz, or the library that will read a folder: datasets,
            saelens or sparsify. None decides by the suffix of the path.
        layout: For Parquet, "long" (a row per token and layer) or "wide" (a row per token, a column per
            variable and layer).
        note: Plain values on the origin of the data, stored in the file.
        dtype: Dtype for float32 variables in safetensors: "bfloat16" if that is what the model computed in;
            None for float32.
        context: For saelens and sparsify, tokens per row; None if all prompts have one length.

    Returns:
        The path.

    Raises:
        ConfigError: Unknown format, or the path exists.
        ShapeError: The format cannot hold the dataset.
        StoreFull: Not enough free disk space.
        MissingExtra: The format's library is not installed.
    """
    import xarray as xr

    path = as_path(path, "path")
    require_kind(
        dataset, xr.Dataset, "dataset as an xarray.Dataset", "write array.to_dataset() for a single array"
    )
    if context is not None:
        as_count(context, "context")
    kind = format_of(path, format)
    if layout not in ("long", "wide"):
        raise ConfigError(f"expected --layout (layout=) 'long' or 'wide', found {layout!r}")
    if context is not None and kind not in FOLDERS:
        raise ConfigError(
            f"--context (context=) is for formats saelens and sparsify, found it with {kind}; leave it out"
        )
    _check_names(dataset, kind)
    _require_absent(path)
    ready = _with_token_strings(dataset)
    ready = ready if kind == "safetensors" else _widened(ready)
    if kind == "sparsify":  # it runs the model itself, so only token ids are written
        ready = ready.drop_vars(list(ready.data_vars))
    # float32 in memory takes half the bytes where it is written as bfloat16.
    is_halved = dtype == "bfloat16" and kind == "safetensors"
    _check_free_space(path, ready.nbytes // 2 if is_halved else ready.nbytes)
    full_note = {"format": 1, **(note or {})}

    def write(target: Path) -> None:
        import dask

        from ..reading.direct import unchunked

        # dask's default of one thread per core would hold one chunk each in memory.
        with dask.config.set(num_workers=_READERS):
            if kind == "zarr":
                _write_zarr(ready, target, full_note)
            elif kind == "netcdf":
                from .netcdf import write_netcdf

                write_netcdf(ready, target, {NOTE: json.dumps(full_note, sort_keys=True)})
            elif kind in FOLDERS:
                write_dataset_folder(unchunked(ready), target, kind, full_note, context)
            elif kind == "parquet":
                from .parquet import write_parquet

                write_parquet(unchunked(ready), target, layout, full_note)
            else:
                _write_tensors(unchunked(ready), target, full_note, kind, dtype)

    return _atomically(path, write)


def format_of(path: Path, format: str | None) -> str:
    """Decide which file format to write, by its name or the suffix of the path.

    Arguments:
        path: The new file, whose suffix decides if no format is given.
        format: Name of a format, such as "netcdf"; None for the suffix.

    Returns:
        Name of the format.

    Raises:
        ConfigError: The name or suffix is unknown; the message suggests the nearest name.
    """
    if format is not None:
        if format not in FORMATS:
            hint = did_you_mean(format, FORMATS)
            raise ConfigError(f"expected --format among {', '.join(FORMATS)}, found {format!r}{hint}")
        return format
    matching = next((name for name, suffixes in FORMATS.items() if path.suffix.lower() in suffixes), None)
    if matching is None:
        suffixes_text = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes[:1])
        raise ConfigError(
            f"the suffix of {path.name!r} names no export format; end the name in {suffixes_text}, or give "
            f"--format with one of {', '.join(FORMATS)}"
        )
    return matching


def _open_for_export(
    store: Store, key: str, variables: Sequence[str] | None, layers: Sequence[int] | None
) -> tuple[xr.Dataset, dict[str, Any], str | None]:
    """Open a key or run; return dataset, note on its origin, and storage dtype (None for results)."""
    if store.names_run(key):
        return _open_run(store.entry(key), variables, layers, store)
    record = store.record(key)
    note = {"key": record.key, "label": record.label, "content": record.content}
    note |= _public_provenance(store.provenance(record))
    if record.kind == RESULT:
        if layers is not None:
            raise ConfigError(
                f"--layers selects layers of a run, and key {record.short} is a result ({record.label}); "
                "leave --layers out"
            )
        dataset = store.open_result(record)
        return (dataset if variables is None else _with_only(dataset, variables)), note, None
    # The key of one array of a run, labelled "variable/layer".
    name, _, layer = record.label.partition("/")
    entry = store.entry(record.data.rpartition("/")[2])
    absent = [item for item in variables or () if item != name]
    absent += [str(item) for item in layers or () if str(item) != layer]
    if absent:
        raise EntryNotFound(
            f"key {record.short} is {record.label} alone, without {', '.join(absent)}; name the whole run "
            f"instead: {entry.digest[:12]}"
        )
    return entry.open([name], [int(layer)] if layer else None, chunks="segment"), note, entry.dtype


def _open_run(
    entry: LabelledEntry, variables: Sequence[str] | None, layers: Sequence[int] | None, store: Store
) -> tuple[xr.Dataset, dict[str, Any], str | None]:
    """Open the published arrays of a run; returns what `_open_for_export` does."""
    arrays = [(name, layer, entry.content(name, layer)) for name, layer in entry.published()]
    if not arrays:
        raise EntryNotFound(
            f"no array of run {entry.digest[:12]} is complete yet; run its `mizarr capture` command again"
        )
    note = {"run": entry.digest, "arrays": [list(array) for array in arrays]}
    # The notes lie beside the run, so the key of any of its arrays leads to all of them.
    note |= _public_provenance(store.provenance(entry.key(*arrays[0][:2]).digest))
    return entry.open(variables, layers, chunks="segment"), note, entry.dtype


def _with_token_strings(dataset: xr.Dataset) -> xr.Dataset:
    """Add the coordinate `token_string`, if the vocabulary is known and the tokens are few enough for
    memory."""
    from ..reading import accessor  # noqa: F401 - registers ds.mi

    ids = dataset.coords.get("token_id")
    if "token_string" in dataset.coords or ids is None or ids.dims != ("token",) or ids.size > _MOST_STRINGS:
        return dataset
    if (strings := dataset.mi.token_strings) is None:
        return dataset
    return dataset.assign_coords(token_string=("token", strings, {"long_name": "token"}))


def _check_names(dataset: xr.Dataset, kind: str) -> None:
    """Raise ShapeError for a dataset without variables, or names of variables that the format cannot hold."""
    if not dataset.data_vars:
        raise ShapeError(
            "the dataset to export has no variables; name some that are stored with --variables (variables=)"
        )
    paths = [str(name) for name in (*dataset.variables, *dataset.dims) if "/" in str(name)]
    if paths and kind in ("netcdf", "zarr"):
        raise ShapeError(
            f"the name {paths[0]!r} has a '/', which {kind} reads as a path; rename this variable or "
            "dimension"
        )
    with_nul = [str(name) for name in (*dataset.variables, *dataset.dims) if "\0" in str(name)]
    if with_nul and kind in ("netcdf", "zarr"):
        raise ShapeError(
            f"the name {with_nul[0]!r} has a NUL character, which {kind} cannot hold; rename this variable "
            "or dimension"
        )


def _widened(dataset: xr.Dataset) -> xr.Dataset:
    """Convert bfloat16 variables to float32, which is exact."""
    arrays = {name: array for name, array in dataset.data_vars.items() if array.dtype == _BF16}
    return dataset.assign({name: array.astype(np.float32) for name, array in arrays.items()})


def _with_only(dataset: xr.Dataset, variables: Sequence[str]) -> xr.Dataset:
    """The dataset with the named variables; EntryNotFound if it lacks one."""
    for name in variables:
        if name not in dataset.data_vars:
            variables_present = [str(variable) for variable in dataset.data_vars]
            raise EntryNotFound(
                f"no variable {name!r} to export; there are {', '.join(variables_present)}, the most similar "
                f"is {nearest(name, variables_present)!r}"
            )
    return dataset[list(variables)]


def _public_provenance(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Provenance without host, process and platform, which are private, under the name "provenance"."""
    return {
        "provenance": [
            # An exported file leaves the machine; host names and process ids should not.
            {name: value for name, value in note.items() if name not in ("host", "pid", "platform")}
            for note in notes
        ]
    }


def _check_free_space(path: Path, needed: int) -> None:
    """Raise StoreFull if the disk lacks `needed` bytes, ConfigError if the parent folder is missing."""
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {str(path.parent)!r} to export into does not exist; create it first")
    free = shutil.disk_usage(path.parent).free
    if needed + _SPARE_BYTES > free:
        raise StoreFull(
            f"the export {path.name} needs {needed / 1e9:.2f} GB, and {path.parent} has {free / 1e9:.2f} GB "
            "free; export fewer layers or variables, or name another disk"
        )


def _atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Run `write` on a temporary path, then rename that to `path`; leaves nothing on failure."""
    # Same folder, so that the final rename is atomic.
    hidden = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write(hidden)
        _require_absent(path)  # checked again, because writing took a while
        hidden.rename(path)
    except OSError as error:
        # EFBIG: the limit of FAT is 4 GiB per file.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StoreFull(
            f"no space left at {path.parent} while writing {path.name}, which was removed; free some "
            "space, export fewer layers or variables, or name another disk"
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.unlink(missing_ok=True)
    return path


def _require_absent(path: Path) -> None:
    if path.exists():
        raise ConfigError(
            f"the file to export to, {str(path)!r}, exists already; remove it, or name another file"
        )


def _write_zarr(dataset: xr.Dataset, path: Path, note: Mapping[str, Any]) -> None:
    """Write a dataset as a Zarr v3 group that plain `xr.open_zarr` reads without a warning."""
    from zarr.errors import ZarrUserWarning

    from ..results import prepare

    ready, encoding = prepare(dataset)
    ready = ready.assign_attrs({NOTE: json.dumps(note, sort_keys=True)})
    with warnings.catch_warnings():
        # Version 3 does not specify consolidated metadata yet, but without it plain `xr.open_zarr` warns.
        warnings.simplefilter("ignore", ZarrUserWarning)
        ready.to_zarr(path, zarr_format=3, consolidated=True, encoding=encoding, align_chunks=True)


def _write_tensors(
    dataset: xr.Dataset, path: Path, note: Mapping[str, Any], kind: str, dtype: str | None
) -> None:
    """Write coordinates and values of a dataset as tensors, to a safetensors or npz file."""
    tensors = [*_coordinate_tensors(dataset), *_value_tensors(dataset, dtype)]
    full_note = {**note, "dims": {t.name: dims for t, dims in tensors}, "attrs": plain(dataset.attrs)}
    text = json.dumps(full_note, sort_keys=True)
    if kind == "safetensors":
        write_safetensors(path, [tensor for tensor, _ in tensors], {NOTE: text})
    else:
        write_npz(path, [_text_tensor(f"{NOTE}{TEXT_SUFFIX}", text), *(tensor for tensor, _ in tensors)])


def _value_tensors(dataset: xr.Dataset, dtype: str | None) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield (tensor, names of its dimensions): one per layer, named by hook point such as
    "blocks.3.hook_resid_post", or one per variable where hook points do not tell variables apart."""
    n_variables_of_hook = Counter(array.attrs.get("hook") for array in dataset.data_vars.values())
    for name, array in dataset.data_vars.items():
        file_dtype = _BF16 if dtype == "bfloat16" and array.dtype == np.float32 else array.dtype
        # The hook point of a variable with layers has "{}" in the place of the layer.
        hook = str(array.attrs.get("hook", name))
        layers = _layer_indices(array) if "{}" in hook else {}
        # Two variables of one hook point (e.g. a selection of tokens beside the whole) would otherwise share
        # a name.
        if n_variables_of_hook[hook] > 1 or ("{}" in hook and not layers):
            hook, layers = str(name), {}
        variables = {hook.format(layer): array.variable[index] for layer, index in layers.items()}
        for tensor_name, variable in (variables or {hook: array.variable}).items():
            yield _tensor(tensor_name, variable, file_dtype), list(map(str, variable.dims))


def _layer_indices(array: xr.DataArray) -> dict[int, dict[Hashable, int]]:
    """Layer number -> index that selects it, {dimension: i}; empty for an array without layer coordinate."""
    dim = layer_dim(array)
    if dim is not None:
        return {int(layer): {dim: i} for i, layer in enumerate(array[dim].values)}
    return {int(array["layer"]): {}} if "layer" in array.coords else {}


def _coordinate_tensors(dataset: xr.Dataset) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield (tensor, names of its dimensions) for each coordinate; texts become the bytes of a JSON list."""
    for name, coord in dataset.coords.items():
        if coord.dtype.kind in "UTO":
            text = json.dumps(np.asarray(coord.values).tolist())
            yield _text_tensor(f"{name}{TEXT_SUFFIX}", text), list(map(str, coord.dims))
        else:
            yield _tensor(str(name), coord.variable, coord.dtype), list(map(str, coord.dims))


def _tensor(name: str, variable: xr.Variable, dtype: npt.DTypeLike) -> Tensor:
    """Tensor to write to a file, which reads a variable block by block; ShapeError for a dtype without a
    tensor form."""
    kind = np.dtype(dtype)
    if variable.dtype.kind not in "biuf" and variable.dtype != _BF16:
        raise ShapeError(
            f"variable {name!r} has dtype {variable.dtype}, which safetensors and npz cannot hold; export "
            "with --format zarr"
        )

    def blocks() -> Iterator[npt.NDArray[Any]]:
        chunk = variable.chunks[0][0] if variable.chunks else (variable.shape or (1,))[0]
        for slab in slabs(variable.shape, variable.dtype.itemsize, chunk, _BLOCK_BYTES):
            yield np.asarray(variable[slab].values).astype(kind, copy=False)

    return Tensor(name, kind, variable.shape, blocks())


def _text_tensor(name: str, text: str) -> Tensor:
    """Tensor of the UTF-8 bytes of a text, for formats without text."""
    raw = np.frombuffer(text.encode(), np.uint8)
    return Tensor(name, raw.dtype, raw.shape, [raw])
