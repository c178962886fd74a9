"""Derived results: labelled datasets of any size, written once and found again by key.

Border: labels and bytes; what a stage computed, and whether it should run at all, is decided in the pipeline.

Every attempt to store a result is a folder of its own with an ordinary Zarr v3 group in it, which plain
`xr.open_zarr` reads. It becomes the result when `keys/<key>.json` names it. The first attempt to get there
wins and the others remove themselves, so no file is ever written by two, and a killed attempt is a stray
folder that nobody reads.

    data/<ab>/<key>.<random>/
        dataset/                  the Zarr group, by itself, as Zarr warns of strangers among its arrays
        manifest.json             R and, for `verify`, {path: [size, digest]}
        provenance/<when>.json    request, parents, versions: how it came about; never part of R

Text is stored as Zarr's `string`: fixed-length unicode has no Zarr v3 specification and other readers refuse
it. Values are stored as they are: no fill values, no scaling, no compression (float activations gain at most
9 %), and every chunk with its crc32c, which any reader of Zarr checks. What describes the arrays is compared
with the manifest when a result is opened.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import records
from .attributes import shielded, unshielded
from .content import as_text, content_of, storable_dtype
from .digest import content_digest, digest
from .errors import REPAIR, CorruptEntry, ShapeError
from .files import Folder, is_below, open_folder
from .provenance import put_provenance
from .records import Record
from .sealed import files_of, read_json, sealed, unsealed

if TYPE_CHECKING:
    from pathlib import Path

    import xarray as xr

    from .keys import ResultKey

log = logging.getLogger(__name__)

DATASET = "dataset"
_DESCRIPTION = "/zarr.json"
_WHOLE = 64 << 20  # bytes up to which an in-memory array is one chunk, and a result opens without dask
_LONGEST_NAME = 200  # bytes of UTF-8; a file system takes 255, of which names of temporary files take some
_CHUNK = 16 << 20  # bytes of a chunk of larger in-memory arrays


def require_storable_names(names: Iterable[object]) -> None:
    """Raise ShapeError for a name of a variable that no folder can have: each variable is stored in one."""
    for name in names:
        is_plain = isinstance(name, str) and "/" not in name and is_below(name) and not name.startswith(".")
        if not is_plain or f"/{name}" == _DESCRIPTION or not _fits(str(name)):
            raise ShapeError(
                f"expected variables named by 1 to {_LONGEST_NAME} bytes of UTF-8 without '/', '\\' and "
                f"control characters, not '.…' and not {_DESCRIPTION[1:]!r}, found {name!r:.80}; rename it"
            )


def _fits(name: str) -> bool:
    try:
        return len(name.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:  # a lone surrogate
        return False


def prepare(dataset: xr.Dataset) -> tuple[xr.Dataset, dict[str, dict[str, Any]]]:
    """The dataset in storable form, and the Zarr encoding of each variable.

    Nothing is computed. ShapeError for names and dtypes that cannot be stored.
    """
    require_storable_names(dataset.variables)
    dataset = shielded(dataset.drop_encoding())
    texts = {}
    for name, variable in dataset.variables.items():
        if storable_dtype(str(name), variable.dtype) == "string":
            texts[name] = (variable.dims, as_text(str(name), variable), variable.attrs)
    coords = {name: value for name, value in texts.items() if name in dataset.coords}
    dataset = dataset.assign_coords(coords).assign({n: v for n, v in texts.items() if n not in coords})
    from zarr.codecs import Crc32cCodec

    encoding = {
        str(name): {"compressors": (Crc32cCodec(),), "_FillValue": None, "chunks": _chunks(variable)}
        for name, variable in dataset.variables.items()
    }
    return dataset, encoding


def _chunks(variable: xr.Variable) -> tuple[int, ...]:
    if variable.chunks is not None:
        return tuple(max(1, *sizes) for sizes in variable.chunks)
    shape = tuple(max(1, size) for size in variable.shape)
    if variable.nbytes <= _WHOLE or not shape:
        return shape
    rows = max(1, _CHUNK * shape[0] // variable.nbytes)
    return (rows, *shape[1:])


def write_result(
    files: Folder,
    key: ResultKey,
    dataset: xr.Dataset,
    provenance: Mapping[str, Any],
    confirm: Callable[[], None] = lambda: None,
) -> Record:
    """Store `dataset` under `key` unless it is there already; returns the record that stands.

    Chunked (dask) variables are computed and written chunk by chunk.  provenance: plain values.  confirm:
    called before the key is; what it raises ends the attempt.
    Raises ShapeError for what cannot be stored, StoreFull, ReadOnlyStore; a failed attempt leaves nothing
    behind.
    """
    ready, encoding = prepare(dataset)
    data = f"data/{key.digest[:2]}/{key.digest}.{secrets.token_hex(4)}"
    record = None
    try:
        record = _attempt(files, data, key, ready, encoding, provenance)
        confirm()
        if files.put_new(record.path, record.to_bytes()):
            return record
    except BaseException:
        # An interrupt may come when the key is there already: then it leads to what was written.
        if record is None or files.get(record.path) != record.to_bytes():
            files.remove_tree(data)
        raise
    files.remove_tree(data)
    return _lost(files, record, provenance)


def _attempt(
    files: Folder,
    data: str,
    key: ResultKey,
    ready: xr.Dataset,
    encoding: Mapping[str, Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> Record:
    """Write everything of an attempt but the key."""
    from .group.written import are_plain, write_arrays

    contents = []

    def fill(folder: Path) -> None:
        place = folder / DATASET
        if are_plain(ready, _WHOLE):
            contents.append(content_of(_decoded(write_arrays(place, ready))))
            return
        ready.to_zarr(place, zarr_format=3, consolidated=False, encoding=encoding, align_chunks=True)
        found = {file.parent: file.read_bytes() for file in place.glob(f"**{_DESCRIPTION}")}
        described = {"" if at == place else at.name: text for at, text in found.items()}
        contents.append(content_of(read_group(open_folder(folder), DATASET, described, key.stage)))

    written = files.build(data, fill)
    (content,) = contents
    manifest = {"content": content, "files": written}
    files.put_new(f"{data}/manifest.json", sealed(manifest))
    label = f"{key.stage}/{key.version}"
    note = {"key": key.digest, "request": key.request(), "content": content, "label": label}
    put_provenance(files, data, {**provenance, **note})
    return Record(key.digest, records.RESULT, data, content, records.now(), label)


def _lost(files: Folder, record: Record, provenance: Mapping[str, Any]) -> Record:
    """The record that came first; a difference in content is noted beside it, for people."""
    text = files.get(record.path)
    if text is None:
        raise CorruptEntry(
            f"{record.path} vanished while it was read: gc or quarantine ran; compute it again"
        )
    first = Record.from_bytes(record.key, text)
    if first.content != record.content:
        log.warning(
            "%s %s gave %s where %s is stored: it is not deterministic; the stored result stands",
            record.label,
            record.short,
            record.content,
            first.content,
        )
        note = {"key": record.key, "label": record.label, "nondeterministic": record.content}
        put_provenance(files, first.data, {**provenance, **note})
    return first


def read_group(files: Folder, folder: str, described: Mapping[str, bytes], what: str) -> xr.Dataset:
    """A result's Zarr group as a lazy dataset, values exactly as stored, variables by name.

    described: the `zarr.json` of each array, by name, and of the group itself as "".  what: the result, for
    people.
    """
    import xarray as xr

    from .group.stored import stored_variables
    from .reading import accessor  # noqa: F401 - registers ds.mi

    arrays = {name: described[name] for name in sorted(described) if name}
    attributes = json.loads(described[""]).get("attributes", {})
    return _decoded(xr.Dataset(stored_variables(files, folder, arrays, what), attrs=attributes))


def _decoded(raw: xr.Dataset) -> xr.Dataset:
    """Arrays as they are stored -> variables as they were given."""
    import xarray as xr

    decoded: xr.Dataset = xr.decode_cf(raw, mask_and_scale=False, decode_times=False)
    return unshielded(decoded)


def read_result(files: Folder, record: Record) -> xr.Dataset:
    """A stored result, lazy: straight over the files when it is small, chunked by dask when it is not.

    Raises CorruptEntry when the folder the record names is gone, cannot be read or is not described as it was
    written; and, when values are read, where a chunk is not what its checksum says.
    """
    dataset = _read(files, record.data, f"{record.label} {record.short}")
    if dataset.nbytes <= _WHOLE:
        return dataset
    chunked = {
        str(name): variable.chunk(
            dict(zip(variable.dims, variable.encoding["chunks"], strict=True)),
            name=f"{name}-{digest('stored', record.data, str(name))[:32]}",
        )
        for name, variable in dataset.variables.items()
        if name not in dataset.indexes and variable.dims
    }
    return _with_variables(dataset, chunked)


def read_result_at(files: Folder, data: str) -> xr.Dataset:
    """The result in a folder of a store, lazy straight over its files; raises as `read_result`."""
    return _read(files, data, f"result {data.rpartition('/')[2][:12]}")


def _read(files: Folder, data: str, what: str) -> xr.Dataset:
    """A result by its folder, relative to the store, checked as far as it can be without reading values."""
    from .group.stored import told_as_damage

    folder = f"{data}/{DATASET}"
    described = _descriptions(files, data, what)
    with told_as_damage(what, files.where(folder)):
        return read_group(files, folder, described, what)


def _descriptions(files: Folder, data: str, what: str) -> dict[str, bytes]:
    """The `zarr.json` of each array by name, of the group as "".

    Raises CorruptEntry unless each is the one the manifest lists, and chunks have their sizes: a chunk that
    is gone would read as zeros.
    """
    name = f"{data}/manifest.json"
    text = files.get(name)
    if text is None:
        raise CorruptEntry(f"{what}: expected its list of files, {name}, found none; {REPAIR}")
    listed = files_of(name, unsealed(name, text))
    lengths = files.sizes(data, [file for file in listed if not file.endswith(_DESCRIPTION)])
    described = {}
    for file, (size, told) in listed.items():
        if file.endswith(_DESCRIPTION):
            there = files.get(f"{data}/{file}")
            expected, found = told, "none" if there is None else content_digest(there)
            described[file.removeprefix(DATASET).removesuffix(_DESCRIPTION).strip("/")] = there or b""
        else:
            expected, length = f"{size} bytes", lengths[file]
            found = "none" if length is None else f"{length} bytes"
        if found != expected:
            raise CorruptEntry(f"{what}: {data}/{file}: expected {expected}, found {found}; {REPAIR}")
    _expect_bounded(described, listed, f"{what}: {data}/{DATASET}")
    return described


def _expect_bounded(
    described: Mapping[str, bytes], listed: Mapping[str, tuple[int, str]], where: str
) -> None:
    """Raise CorruptEntry for an array that is larger than its files can hold, or in chunks that none has."""
    from .group.grids import expect_bounded

    stored: Counter[str] = Counter()
    for file, (size, _) in listed.items():
        if not file.endswith(_DESCRIPTION):
            stored[file.removeprefix(f"{DATASET}/").partition("/")[0]] += int(size)
    for name, text in described.items():
        try:
            if name:
                expect_bounded(read_json(text), stored[name])
        except (ValueError, AttributeError) as error:
            raise CorruptEntry(
                f"{where}/{name}: expected an array as it was written, found {error}; {REPAIR}"
            ) from error


def _with_variables(dataset: xr.Dataset, changed: Mapping[str, xr.Variable]) -> xr.Dataset:
    labels = {name: variable for name, variable in changed.items() if name in dataset.coords}
    data = {name: variable for name, variable in changed.items() if name not in labels}
    return dataset.assign_coords(labels).assign(data)
