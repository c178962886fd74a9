"""Derived results: labelled datasets of any size, written once and found by key.

Every attempt to store a result writes a folder of its own with an ordinary Zarr v3 group, which plain
`xr.open_zarr` reads. The attempt becomes the result when `keys/<key>.json` names it. The first attempt wins
and the others remove their folders. So no file has two writers, no lock is needed, and a killed attempt is a
stray folder nobody reads.

    data/<ab>/<key>.<random>/
        dataset/                  the Zarr group, one level down, as Zarr warns of other members in a group
        manifest.json             R and, for `verify`, {path: [size, digest]}
        provenance/<when>.json    request, parents, versions; never part of R

Text is stored as Zarr's `string`, because fixed-length unicode has no Zarr v3 specification and other readers
refuse it. Values are stored without fill values, scaling or compression (float activations would gain at most
9 %); every chunk has a crc32c. The metadata of arrays is verified against the manifest when a result is
opened.
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
"""Folder of the Zarr group within the folder of a result."""
_DESCRIPTION = "/zarr.json"
# bytes up to which an in-memory array is stored as one chunk, and a result opens without dask
_WHOLE = 64 << 20
_LONGEST_NAME = 200  # bytes of UTF-8: file systems allow 255, and temporary file names add some
_CHUNK = 16 << 20  # bytes per chunk of larger in-memory arrays


def require_storable_names(names: Iterable[object]) -> None:
    """Raise ShapeError for a variable whose name cannot be a folder name, as each is stored in a folder."""
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
    """Convert a dataset to storable form without computing it.

    Returns:
        The dataset, and the Zarr encoding of each variable.

    Raises:
        ShapeError: A name or dtype cannot be stored.
    """
    require_storable_names(dataset.variables)
    # The encoding describes the file the dataset was opened from (chunks, filters) and must not shape this
    # one.
    dataset = shielded(dataset.drop_encoding())
    texts = {}
    for name, variable in dataset.variables.items():
        if storable_dtype(str(name), variable.dtype) == "string":
            texts[name] = (variable.dims, as_text(str(name), variable), variable.attrs)
    dataset = with_variables(dataset, texts)
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
    """Store a dataset, unless its key is published already.

    Dask variables are computed and written chunk by chunk. A failed attempt leaves nothing behind.

    Arguments:
        files: The store's files.
        key: Key of the result.
        dataset: The result.
        provenance: Plain values.
        confirm: Called after writing and before publishing; an exception abandons the attempt.

    Returns:
        The published record, which may be another writer's.

    Raises:
        ShapeError: The dataset cannot be stored.
        StoreFull: The disk or quota is full.
        ReadOnlyStore: The store cannot be written.
    """
    ready, encoding = prepare(dataset)
    data = f"data/{key.digest[:2]}/{key.digest}.{secrets.token_hex(4)}"
    record = None
    try:
        record = _attempt(files, data, key, ready, encoding, provenance)
        confirm()
        # The only step that makes the result visible, and atomic.
        if files.put_new(record.path, record.to_bytes()):
            return record
    except BaseException:
        # If the interrupt came after the key was created, the key refers to this folder, which must stay.
        if record is None or files.get(record.path) != record.to_bytes():
            files.remove_tree(data)
        raise
    files.remove_tree(data)
    return _earlier_record(files, record, provenance)


def _attempt(
    files: Folder,
    data: str,
    key: ResultKey,
    ready: xr.Dataset,
    encoding: Mapping[str, Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> Record:
    """Write data, manifest and provenance of an attempt; everything except the key."""
    from .group.written import are_plain, write_arrays

    contents = []

    def fill(folder: Path) -> None:
        group_folder = folder / DATASET
        if are_plain(ready, _WHOLE):
            # R from what would be read back, so that writing and reading agree on it by construction.
            contents.append(content_of(_decoded(write_arrays(group_folder, ready))))
            return
        ready.to_zarr(group_folder, zarr_format=3, consolidated=False, encoding=encoding, align_chunks=True)
        texts = {file.parent: file.read_bytes() for file in group_folder.glob(f"**{_DESCRIPTION}")}
        metadata = {
            "" if array_folder == group_folder else array_folder.name: text
            for array_folder, text in texts.items()
        }
        contents.append(content_of(read_group(open_folder(folder), DATASET, metadata, key.stage)))

    written = files.build(data, fill)
    (content,) = contents
    manifest = {"content": content, "files": written}
    files.put_new(f"{data}/manifest.json", sealed(manifest))
    label = f"{key.stage}/{key.version}"
    note = {"key": key.digest, "request": key.request(), "content": content, "label": label}
    put_provenance(files, data, {**provenance, **note})
    return Record(key.digest, records.RESULT, data, content, records.now(), label)


def _earlier_record(files: Folder, record: Record, provenance: Mapping[str, Any]) -> Record:
    """Record of the earlier writer; a different content is logged and noted as non-determinism."""
    text = files.get(record.path)
    if text is None:
        raise CorruptEntry(
            f"{record.path} vanished while it was read: gc or quarantine ran; compute it again"
        )
    published = Record.from_bytes(record.key, text)
    if published.content != record.content:
        log.warning(
            "%s %s gave %s where %s is stored: it is not deterministic; the stored result stands",
            record.label,
            record.short,
            record.content,
            published.content,
        )
        note = {"key": record.key, "label": record.label, "nondeterministic": record.content}
        put_provenance(files, published.data, {**provenance, **note})
    return published


def read_group(files: Folder, folder: str, metadata: Mapping[str, bytes], label: str) -> xr.Dataset:
    """Open the Zarr group of a result, lazy, values exactly as stored, variables sorted by name.

    Arguments:
        files: The store's files.
        folder: Path of the group.
        metadata: `zarr.json` of each array by name, and of the group under "".
        label: Names the result in error messages.
    """
    import xarray as xr

    from .group.stored import stored_variables
    from .reading import accessor  # noqa: F401 - registers ds.mi

    arrays = {name: metadata[name] for name in sorted(metadata) if name}
    attributes = json.loads(metadata[""]).get("attributes", {})
    return _decoded(xr.Dataset(stored_variables(files, folder, arrays, label), attrs=attributes))


def _decoded(raw: xr.Dataset) -> xr.Dataset:
    """Decode stored arrays (text, coordinates, shielded attributes), but neither fill values, scales nor
    times."""
    import xarray as xr

    decoded: xr.Dataset = xr.decode_cf(raw, mask_and_scale=False, decode_times=False)
    return unshielded(decoded)


def read_result(files: Folder, record: Record) -> xr.Dataset:
    """Open a stored result, lazy: directly over the files if it is small, as dask arrays otherwise.

    Arguments:
        files: The store's files.
        record: Published record of the result.

    Raises:
        CorruptEntry: The folder is missing or its metadata does not match the manifest; on reading values,
            also if a chunk does not match its checksum.
    """
    dataset = _read(files, record.data, f"{record.label} {record.short}")
    if dataset.nbytes <= _WHOLE:
        return dataset
    # Named by folder, so that dask recognises equal arrays of separately opened datasets without hashing
    # them.
    chunked = {
        str(name): variable.chunk(
            dict(zip(variable.dims, variable.encoding["chunks"], strict=True)),
            name=f"{name}-{digest('stored', record.data, str(name))[:32]}",
        )
        for name, variable in dataset.variables.items()
        if name not in dataset.indexes and variable.dims
    }
    return with_variables(dataset, chunked)


def read_result_at(files: Folder, data: str) -> xr.Dataset:
    """Open the result in a folder, lazy, without dask; raises like `read_result`.

    Arguments:
        files: The store's files.
        data: Folder of the result.
    """
    return _read(files, data, f"result {data.rpartition('/')[2][:12]}")


def _read(files: Folder, data: str, label: str) -> xr.Dataset:
    """Open a result by its folder, verifying all that can be verified without reading values."""
    from .group.stored import damage_errors

    folder = f"{data}/{DATASET}"
    metadata = _descriptions(files, data, label)
    with damage_errors(label, files.where(folder)):
        return read_group(files, folder, metadata, label)


def _descriptions(files: Folder, data: str, label: str) -> dict[str, bytes]:
    """Read and verify the `zarr.json` of each array by name, and of the group under "".

    Raises:
        CorruptEntry: One differs from the manifest, or a chunk file has another size. (A missing chunk file
            would otherwise read as zeros.)
    """
    name = f"{data}/manifest.json"
    text = files.get(name)
    if text is None:
        raise CorruptEntry(f"{label}: expected its list of files, {name}, found none; {REPAIR}")
    listed = files_of(name, unsealed(name, text))
    # Sizes only; reading values later verifies each chunk's crc32c.
    lengths = files.sizes(data, [file for file in listed if not file.endswith(_DESCRIPTION)])
    metadata = {}
    for file, (size, checksum) in listed.items():
        if file.endswith(_DESCRIPTION):
            content = files.get(f"{data}/{file}")
            expected, actual = checksum, "none" if content is None else content_digest(content)
            metadata[file.removeprefix(DATASET).removesuffix(_DESCRIPTION).strip("/")] = content or b""
        else:
            expected, length = f"{size} bytes", lengths[file]
            actual = "none" if length is None else f"{length} bytes"
        if actual != expected:
            raise CorruptEntry(f"{label}: {data}/{file}: expected {expected}, found {actual}; {REPAIR}")
    _expect_bounded(metadata, listed, f"{label}: {data}/{DATASET}")
    return metadata


def _expect_bounded(metadata: Mapping[str, bytes], listed: Mapping[str, tuple[int, str]], where: str) -> None:
    """Raise CorruptEntry for arrays larger than their files can hold, or with invalid chunks."""
    from .group.grids import expect_bounded

    stored: Counter[str] = Counter()
    for file, (size, _) in listed.items():
        if not file.endswith(_DESCRIPTION):
            stored[file.removeprefix(f"{DATASET}/").partition("/")[0]] += int(size)
    for name, text in metadata.items():
        try:
            if name:
                expect_bounded(read_json(text), stored[name])
        except (ValueError, AttributeError) as error:
            raise CorruptEntry(
                f"{where}/{name}: expected an array as it was written, found {error}; {REPAIR}"
            ) from error


def with_variables(dataset: xr.Dataset, changed: Mapping[Any, Any]) -> xr.Dataset:
    """The dataset with other values of some variables; coordinates stay coordinates.

    Arguments:
        dataset: The dataset.
        changed: New variables by name, in any form that `xarray.Dataset` takes.
    """
    labels = {name: variable for name, variable in changed.items() if name in dataset.coords}
    arrays = {name: variable for name, variable in changed.items() if name not in labels}
    return dataset.assign_coords(labels).assign(arrays)
