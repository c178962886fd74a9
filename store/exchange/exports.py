"""Stored runs and results as files other programs read: NetCDF, Zarr, Parquet, safetensors, npz, and folders
of Hugging Face `datasets`.

Border: a labelled dataset in, one file (for Zarr: one folder) out; which key it is of, and how that came
about, is told by the caller and goes along as one JSON note.

Every format is written block by block, so that memory does not grow with the corpus, under a temporary name
that becomes the final one when all is written: a killed export leaves nothing that looks like a file.
bfloat16, which only safetensors has, is widened to float32 elsewhere: the same values. How rows lie in a
Parquet file is said in parquet.py; tensors of safetensors and npz are named after hook points, one per
layer, so that the file can be imported again.
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
from ..errors import ConfigError, EntryNotFound, ShapeError, StoreFull, nearest
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
"""Format -> suffixes that say it; a folder of `datasets` has none."""
TableLayout = Literal["long", "wide"]
NOTE = "mizarr"
"""Where the note is in a file: an attribute, a metadata entry, or (npz) the array of bytes `mizarr.json`."""
TEXT_SUFFIX = ".json"
"""Texts in files that hold numbers only: the UTF-8 bytes of a JSON list, under their name with this
suffix.
"""
_BF16 = np.dtype(ml_dtypes.bfloat16)
_BLOCK = 16 << 20  # bytes in memory at once
_SPARE = 1 << 20  # bytes of labels and headers
_SPELLED_OUT = 1_000_000  # tokens up to which a file holds their strings
_READERS = 2  # threads that read chunks ahead of the one that writes; each holds one


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
    """Write what is stored under a key to a file; returns its path.

    key: a unique start of a key (one array, or a result), or of a run's digest (DATA of `mizarr ls`), then
    all of the run.  variables, layers: of a run, by default all.  Otherwise as `export`; the note tells key,
    content and provenance.
    """
    dataset, note, dtype = _opened(store, key, variables, layers)
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
    """Write a labelled dataset to a file; returns its path.

    format: netcdf, zarr, parquet, safetensors or npz, by default as the suffix says; datasets, saelens or
    sparsify, of which each is a folder (dataset_folders.py).  context: of the latter two, tokens of a row.
     layout: of Parquet,
    "long" or "wide".  note: plain values on where it comes from.  dtype: in which safetensors holds float32
    variables, "bfloat16" for states that were computed so.
    Raises ConfigError for an unknown format or a path that is taken, ShapeError for what the format cannot
    hold, StoreFull where the disk has no room, MissingExtra.
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
        raise ConfigError(f"expected layout 'long' or 'wide', found {layout!r}")
    if context is not None and kind not in FOLDERS:
        raise ConfigError(f"expected context with saelens or sparsify, found it with {kind}; leave it out")
    _check_names(dataset, kind)
    _expect_new(path)
    ready = _with_strings(dataset)
    ready = ready if kind == "safetensors" else _widened(ready)
    if kind == "sparsify":  # which runs the model itself: ids are all it reads
        ready = ready.drop_vars(list(ready.data_vars))
    halved = dtype == "bfloat16" and kind == "safetensors"
    _check_room(path, ready.nbytes // 2 if halved else ready.nbytes)
    told = {"format": 1, **(note or {})}

    def write(to: Path) -> None:
        import dask

        from ..reading.direct import unchunked

        with dask.config.set(num_workers=_READERS):
            if kind == "zarr":
                _write_zarr(ready, to, told)
            elif kind == "netcdf":
                from .netcdf import write_netcdf

                write_netcdf(ready, to, {NOTE: json.dumps(told, sort_keys=True)})
            elif kind in FOLDERS:
                write_dataset_folder(unchunked(ready), to, kind, told, context)
            elif kind == "parquet":
                from .parquet import write_parquet

                write_parquet(unchunked(ready), to, layout, told)
            else:
                _write_tensors(unchunked(ready), to, told, kind, dtype)

    return _atomically(path, write)


def format_of(path: Path, format: str | None) -> str:
    """The format by name or by suffix; ConfigError with the nearest for an unknown one."""
    if format is not None:
        if format not in FORMATS:
            near = nearest(format, FORMATS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"expected a format among {', '.join(FORMATS)}, found {format!r}{hint}")
        return format
    found = next((name for name, suffixes in FORMATS.items() if path.suffix.lower() in suffixes), None)
    if found is None:
        known = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes[:1])
        raise ConfigError(
            f"expected a file named by its format ({known}), found {path.name!r}; rename it, or give --format"
        )
    return found


def _opened(
    store: Store, key: str, variables: Sequence[str] | None, layers: Sequence[int] | None
) -> tuple[xr.Dataset, dict[str, Any], str | None]:
    """What a key names, a note on it, and the dtype its states are stored in."""
    if store.names_run(key):
        return _run(store.entry(key), variables, layers, store)
    record = store.record(key)
    about = {"key": record.key, "label": record.label, "content": record.content}
    about |= _portable(store.provenance(record))
    if record.kind == RESULT:
        if layers is not None:
            raise ConfigError(
                f"expected layers of a run only, found a result ({record.label}); leave --layers out"
            )
        dataset = store.open_result(record)
        return (dataset if variables is None else _chosen(dataset, variables)), about, None
    name, _, layer = record.label.partition("/")
    entry = store.entry(record.data.rpartition("/")[2])
    if unlike := [each for each in variables or () if each != name] + [
        str(each) for each in layers or () if str(each) != layer
    ]:
        raise EntryNotFound(
            f"expected parts of {record.label}, which is all that key {record.short} names, found "
            f"{', '.join(unlike)}; name the whole run: {entry.digest[:12]}"
        )
    return entry.open([name], [int(layer)] if layer else None, chunks="segment"), about, entry.dtype


def _run(
    entry: LabelledEntry, variables: Sequence[str] | None, layers: Sequence[int] | None, store: Store
) -> tuple[xr.Dataset, dict[str, Any], str | None]:
    cells = [(name, layer, entry.content(name, layer)) for name, layer in entry.published()]
    if not cells:
        raise EntryNotFound(f"nothing of run {entry.digest[:12]} is complete yet; capture it again first")
    about = {"run": entry.digest, "arrays": [list(cell) for cell in cells]}
    about |= _portable(store.provenance(entry.key(*cells[0][:2]).digest))
    return entry.open(variables, layers, chunks="segment"), about, entry.dtype


def _with_strings(dataset: xr.Dataset) -> xr.Dataset:
    """With the strings of its tokens, where the vocabulary is known and they are few enough for memory."""
    from ..reading import accessor  # noqa: F401 - registers ds.mi

    ids = dataset.coords.get("token_id")
    if "token_string" in dataset.coords or ids is None or ids.dims != ("token",) or ids.size > _SPELLED_OUT:
        return dataset
    if (strings := dataset.mi.token_strings) is None:
        return dataset
    return dataset.assign_coords(token_string=("token", strings, {"long_name": "token"}))


def _check_names(dataset: xr.Dataset, kind: str) -> None:
    """ShapeError for a dataset of no variables, and for names the format takes for paths."""
    if not dataset.data_vars:
        raise ShapeError("expected a dataset with variables, found none; name some to export")
    paths = [str(name) for name in (*dataset.variables, *dataset.dims) if "/" in str(name)]
    if paths and kind in ("netcdf", "zarr"):
        raise ShapeError(f"expected names without '/', found {paths[0]!r}, a path in {kind}; rename it")
    cut = [str(name) for name in (*dataset.variables, *dataset.dims) if "\0" in str(name)]
    if cut and kind in ("netcdf", "zarr"):
        raise ShapeError(f"expected names without NUL, found {cut[0]!r}, which no file holds; rename it")


def _widened(dataset: xr.Dataset) -> xr.Dataset:
    """bfloat16 as float32: the same values."""
    halves = {name: array for name, array in dataset.data_vars.items() if array.dtype == _BF16}
    return dataset.assign({name: array.astype(np.float32) for name, array in halves.items()})


def _chosen(dataset: xr.Dataset, variables: Sequence[str]) -> xr.Dataset:
    for name in variables:
        if name not in dataset.data_vars:
            held = [str(each) for each in dataset.data_vars]
            raise EntryNotFound(
                f"no variable {name!r}; there are {', '.join(held)}, nearest {nearest(name, held)!r}"
            )
    return dataset[list(variables)]


def _portable(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Provenance without the names of machines and folders, which are nobody's business elsewhere."""
    return {
        "provenance": [
            {name: value for name, value in note.items() if name not in ("host", "pid", "platform")}
            for note in notes
        ]
    }


def _check_room(path: Path, needed: int) -> None:
    """StoreFull if the disk cannot hold the values; a folder that is not there is an error of its own."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"expected a folder to write into, found none at {str(path.parent)!r}; make it first"
        )
    free = shutil.disk_usage(path.parent).free
    if needed + _SPARE > free:
        raise StoreFull(
            f"expected room for {needed / 1e9:.2f} GB at {path.parent}, found {free / 1e9:.2f} GB; export "
            "fewer layers or variables, or name another disk"
        )


def _atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """`write` under a temporary name, which becomes `path` when it is done; nothing is left of a failure."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write(hidden)
        _expect_new(path)  # once more: writing takes a while
        hidden.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StoreFull(
            f"no space left at {path.parent} while writing {path.name}, of which nothing is kept; free some "
            "space, export fewer layers or variables, or name another disk"
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.unlink(missing_ok=True)
    return path


def _expect_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(
            f"expected a new file, found {str(path)!r} there already; remove it or name another"
        )


def _write_zarr(dataset: xr.Dataset, path: Path, note: Mapping[str, Any]) -> None:
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
    tensors = [*_labels(dataset), *_values(dataset, dtype)]
    about = {**note, "dims": {t.name: dims for t, dims in tensors}, "attrs": plain(dataset.attrs)}
    text = json.dumps(about, sort_keys=True)
    if kind == "safetensors":
        write_safetensors(path, [tensor for tensor, _ in tensors], {NOTE: text})
    else:
        write_npz(path, [_text_tensor(f"{NOTE}{TEXT_SUFFIX}", text), *(tensor for tensor, _ in tensors)])


def _values(dataset: xr.Dataset, dtype: str | None) -> Iterator[tuple[Tensor, list[str]]]:
    """Every variable; under the name of its hook point, one tensor per layer, where no other claims it."""
    hooks = Counter(array.attrs.get("hook") for array in dataset.data_vars.values())
    for name, array in dataset.data_vars.items():
        kind = _BF16 if dtype == "bfloat16" and array.dtype == np.float32 else array.dtype
        hook = str(array.attrs.get("hook", name))
        layers = _layers(array) if "{}" in hook else {}
        if hooks[hook] > 1 or ("{}" in hook and not layers):
            hook, layers = str(name), {}
        parts = {hook.format(layer): array.variable[at] for layer, at in layers.items()}
        for called, part in (parts or {hook: array.variable}).items():
            yield _tensor(called, part, kind), list(map(str, part.dims))


def _layers(array: xr.DataArray) -> dict[int, dict[Hashable, int]]:
    """Every layer of an array, and where it lies; empty where the array does not say."""
    dim = next((dim for dim in array.dims if str(dim).startswith("layer")), None)
    if dim is not None:
        return {int(layer): {dim: i} for i, layer in enumerate(array[dim].values)}
    return {int(array["layer"]): {}} if "layer" in array.coords else {}


def _labels(dataset: xr.Dataset) -> Iterator[tuple[Tensor, list[str]]]:
    """Coordinates that are not counted by themselves; texts as JSON."""
    for name, coord in dataset.coords.items():
        if coord.dtype.kind in "UTO":
            text = json.dumps(np.asarray(coord.values).tolist())
            yield _text_tensor(f"{name}{TEXT_SUFFIX}", text), list(map(str, coord.dims))
        else:
            yield _tensor(str(name), coord.variable, coord.dtype), list(map(str, coord.dims))


def _tensor(name: str, variable: xr.Variable, dtype: npt.DTypeLike) -> Tensor:
    kind = np.dtype(dtype)
    if variable.dtype.kind not in "biuf" and variable.dtype != _BF16:
        raise ShapeError(f"{name!r} holds {variable.dtype}, which tensors do not; export to zarr")

    def blocks() -> Iterator[npt.NDArray[Any]]:
        chunk = variable.chunks[0][0] if variable.chunks else (variable.shape or (1,))[0]
        for at in slabs(variable.shape, variable.dtype.itemsize, chunk, _BLOCK):
            yield np.asarray(variable[at].values).astype(kind, copy=False)

    return Tensor(name, kind, variable.shape, blocks())


def _text_tensor(name: str, text: str) -> Tensor:
    raw = np.frombuffer(text.encode(), np.uint8)
    return Tensor(name, raw.dtype, raw.shape, [raw])
