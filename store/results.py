"""Results of stages on disk: labelled datasets of any size, written once and found by key.

Every attempt to store a result writes a folder of its own with an ordinary Zarr v3 group, which plain
`xr.open_zarr` reads. The attempt becomes the result when `keys/<key>.json` names it. The first attempt wins
and the others remove their folders. So no file has two writers, no lock is needed, and a killed attempt is a
stray folder nobody reads.

    data/<ab>/<key>.<random>/
        dataset/                  the Zarr group, one level down, as Zarr warns of other members in a group
        manifest.json             content digest and, for `verify`, {path: [size, digest]}
        provenance/<when>.json    request, inputs, versions; part of no digest

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
_METADATA = "/zarr.json"  # end of the path of the metadata file of an array or group
# bytes up to which an in-memory array is stored as one chunk, and a result opens without dask
_ONE_CHUNK_BYTES = 64 << 20
_LONGEST_NAME = 200  # bytes of UTF-8: file systems allow 255, and temporary file names add some
_CHUNK_BYTES = 16 << 20  # per chunk of larger in-memory arrays


def require_storable_names(names: Iterable[object]) -> None:
    """Raise ShapeError for a variable name that is no valid folder name: each variable is a folder on
    disk."""
    for name in names:
        is_plain = isinstance(name, str) and "/" not in name and is_below(name) and not name.startswith(".")
        if not is_plain or f"/{name}" == _METADATA or not _is_short_enough(str(name)):
            raise ShapeError(
                f"the variable name {name!r:.80} cannot be stored; rename it to 1 to {_LONGEST_NAME} bytes "
                "of UTF-8 without '/', '\\' and control characters, no '.' in front, and not "
                f"{_METADATA[1:]!r}"
            )


def _is_short_enough(name: str) -> bool:
    try:
        return len(name.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:  # a lone surrogate
        return False


def prepare(dataset: xr.Dataset) -> tuple[xr.Dataset, dict[str, dict[str, Any]]]:
    """Convert a dataset to the form that is written to Zarr, without computing dask arrays.

    Returns:
        The converted dataset, and the arguments of xarray's Zarr `encoding` for each variable.

    Raises:
        ShapeError: A name or dtype cannot be stored.
    """
    require_storable_names(dataset.variables)
    # The encoding describes the file the dataset was opened from (chunks, filters), not the file to write.
    dataset = shielded(dataset.drop_encoding())
    text_variables = {}
    for name, variable in dataset.variables.items():
        if storable_dtype(str(name), variable.dtype) == "string":
            text_variables[name] = (variable.dims, as_text(str(name), variable), variable.attrs)
    dataset = with_variables(dataset, text_variables)
    from zarr.codecs import Crc32cCodec

    encoding = {
        str(name): {"compressors": (Crc32cCodec(),), "_FillValue": None, "chunks": _chunks(variable)}
        for name, variable in dataset.variables.items()
    }
    return dataset, encoding


def _chunks(variable: xr.Variable) -> tuple[int, ...]:
    """Shape of the Zarr chunks of a variable: its largest dask chunk, or some rows of an in-memory array."""
    if variable.chunks is not None:
        return tuple(max(1, *sizes) for sizes in variable.chunks)
    shape = tuple(max(1, size) for size in variable.shape)
    if variable.nbytes <= _ONE_CHUNK_BYTES or not shape:
        return shape
    rows = max(1, _CHUNK_BYTES * shape[0] // variable.nbytes)
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
        provenance: Plain values on how the result was computed; stored beside it, part of no digest.
        confirm: Called after writing and before publishing; if it raises, what was written is removed.

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


def _write_arrays(
    folder: Path, ready: xr.Dataset, encoding: Mapping[str, Mapping[str, Any]], label: str
) -> str:
    """Write a dataset as a Zarr group, and return its content digest.

    The digest is taken of the dataset as it is read back, so that every reader computes the same one.

    Arguments:
        folder: Folder of the result; the group is written to `DATASET` in it.
        ready: Dataset returned by `prepare`.
        encoding: Zarr encoding returned by `prepare`.
        label: Names the result in error messages.
    """
    from .group.written import are_plain, write_arrays

    group_folder = folder / DATASET
    if are_plain(ready, _ONE_CHUNK_BYTES):
        return content_of(_decoded(write_arrays(group_folder, ready)))
    ready.to_zarr(group_folder, zarr_format=3, consolidated=False, encoding=encoding, align_chunks=True)
    # `read_group` takes the zarr.json of each array by name; that of the group itself has the name "".
    metadata = {
        "" if file.parent == group_folder else file.parent.name: file.read_bytes()
        for file in group_folder.glob(f"**{_METADATA}")
    }
    return content_of(read_group(open_folder(folder), DATASET, metadata, label))


def _attempt(
    files: Folder,
    data: str,
    key: ResultKey,
    ready: xr.Dataset,
    encoding: Mapping[str, Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> Record:
    """Write the arrays, manifest and provenance of a result, but not the key file that makes it visible.

    Arguments:
        files: The store's files.
        data: New folder of this attempt, relative to the store.
        key: Key of the result.
        ready: Dataset returned by `prepare`.
        encoding: Zarr encoding returned by `prepare`.
        provenance: Plain values on how the result was computed.

    Returns:
        The record to publish.
    """
    contents = []

    def fill(folder: Path) -> None:
        """Write the arrays into a new folder, and note their content digest."""
        contents.append(_write_arrays(folder, ready, encoding, key.stage))

    written = files.build(data, fill)
    (content,) = contents
    manifest = {"content": content, "files": written}
    files.put_new(f"{data}/manifest.json", sealed(manifest))
    label = f"{key.stage}/{key.version}"
    note = {"key": key.digest, "request": key.request(), "content": content, "label": label}
    put_provenance(files, data, {**provenance, **note})
    return Record(key.digest, records.RESULT, data, content, records.now(), label)


def _earlier_record(files: Folder, record: Record, provenance: Mapping[str, Any]) -> Record:
    """Read the record that another writer published first; warn if its content differs from ours.

    Arguments:
        files: The store's files.
        record: Record of our own attempt, under the same key.
        provenance: How our attempt was computed; noted beside the stored result if the contents differ.
    """
    text = files.get(record.path)
    if text is None:
        raise CorruptEntry(
            f"the record {record.path} of {record.label} was removed by `mizarr gc` or `mizarr verify "
            "--quarantine` while it was read; run the command again"
        )
    published = Record.from_bytes(record.key, text)
    if published.content != record.content:
        log.warning(
            "stage %s is not deterministic: computed again under key %s it gave content %s, stored is %s; "
            "the stored result is kept",
            record.label,
            record.short,
            record.content,
            published.content,
        )
        note = {"key": record.key, "label": record.label, "nondeterministic": record.content}
        put_provenance(files, published.data, {**provenance, **note})
    return published


def read_group(files: Folder, folder: str, metadata: Mapping[str, bytes], label: str) -> xr.Dataset:
    """Open the Zarr group of a result lazily: values exactly as stored, variables sorted by name.

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
    """Restore text, coordinates and hidden attributes of a stored dataset; values are not masked, scaled or
    turned into times."""
    import xarray as xr

    decoded: xr.Dataset = xr.decode_cf(raw, mask_and_scale=False, decode_times=False)
    return unshielded(decoded)


def read_result(files: Folder, record: Record) -> xr.Dataset:
    """Open a stored result lazily: up to 64 MiB directly over its files, above as dask arrays.

    Arguments:
        files: The store's files.
        record: Published record of the result.

    Raises:
        CorruptEntry: The folder is missing or its metadata does not match the manifest. Reading values later
            raises it for a chunk that does not match its checksum.
    """
    dataset = _read(files, record.data, f"{record.label} {record.short}")
    if dataset.nbytes <= _ONE_CHUNK_BYTES:
        return dataset
    # Dask hashes an array to name it. A name made of the folder is free, and equal where it is opened again.
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
    """Open the result in a folder lazily, without dask.

    Arguments:
        files: The store's files.
        data: Folder of the result, relative to the store.

    Raises:
        CorruptEntry: See `read_result`.
    """
    return _read(files, data, f"result {data.rpartition('/')[2][:12]}")


def _read(files: Folder, data: str, label: str) -> xr.Dataset:
    """Open the result in a folder; verify the sizes of its files and the checksums of its metadata.

    Arguments:
        files: The store's files.
        data: Folder of the result, relative to the store.
        label: Name of the result in messages.
    """
    from .group.stored import damage_errors

    folder = f"{data}/{DATASET}"
    metadata = _verified_metadata(files, data, label)
    with damage_errors(label, files.where(folder)):
        return read_group(files, folder, metadata, label)


def _verified_metadata(files: Folder, data: str, label: str) -> dict[str, bytes]:
    """Read the `zarr.json` of each array, by name, and of the group, under ""; arguments as for `_read`.

    Raises:
        CorruptEntry: A `zarr.json` differs from its checksum in the manifest, or a chunk file from its size
            there. (A missing chunk file would otherwise read as zeros.)
    """
    name = f"{data}/manifest.json"
    text = files.get(name)
    if text is None:
        raise CorruptEntry(f"{label}: its list of files, {name}, is missing; {REPAIR}")
    manifest = files_of(name, unsealed(name, text))
    # Sizes only; reading values later verifies each chunk's crc32c.
    chunk_sizes = files.sizes(data, [file for file in manifest if not file.endswith(_METADATA)])
    metadata = {}
    for file, (size, checksum) in manifest.items():
        if file.endswith(_METADATA):
            content = files.get(f"{data}/{file}")
            expected, actual = checksum, "no file" if content is None else content_digest(content)
            array_name = file.removeprefix(DATASET).removesuffix(_METADATA).strip("/")
            metadata[array_name] = content or b""
        else:
            expected, actual_size = f"{size} bytes", chunk_sizes[file]
            actual = "no file" if actual_size is None else f"{actual_size} bytes"
        if actual != expected:
            raise CorruptEntry(f"{label}: {data}/{file}: expected {expected}, found {actual}; {REPAIR}")
    _require_possible_sizes(metadata, manifest, f"{label}: {data}/{DATASET}")
    return metadata


def _require_possible_sizes(
    metadata: Mapping[str, bytes], manifest: Mapping[str, tuple[int, str]], where: str
) -> None:
    """Raise CorruptEntry for an array that claims to be larger than its chunk files can hold.

    Arguments:
        metadata: `zarr.json` of each array by name; "" is the group.
        manifest: File path -> (bytes, checksum).
        where: Folder of the group, for messages.
    """
    from .group.grids import expect_bounded

    chunk_bytes: Counter[str] = Counter()
    for file, (size, _) in manifest.items():
        if not file.endswith(_METADATA):
            array_name = file.removeprefix(f"{DATASET}/").partition("/")[0]
            chunk_bytes[array_name] += int(size)
    for name, text in metadata.items():
        try:
            if name:
                expect_bounded(read_json(text), chunk_bytes[name])
        except (ValueError, AttributeError) as error:
            raise CorruptEntry(
                f"{where}/{name}: its zarr.json is not as mizarr wrote it: {error}; {REPAIR}"
            ) from error


def with_variables(dataset: xr.Dataset, changed: Mapping[Any, Any]) -> xr.Dataset:
    """Copy of a dataset in which some variables are replaced; coordinates stay coordinates.

    Arguments:
        dataset: The dataset.
        changed: New variables by name, in any form that `xarray.Dataset` takes.
    """
    labels = {name: variable for name, variable in changed.items() if name in dataset.coords}
    arrays = {name: variable for name, variable in changed.items() if name not in labels}
    return dataset.assign_coords(labels).assign(arrays)
