"""Coordinates of a stored run (tokens, prompts, layers, texts), as ordinary Zarr arrays.

    [token]      token_id prompt position char_start char_end
    [layer]      layer
    [prompt_id]  row_start row_size text pair_start; CF contiguous ragged: row_size has
                 sample_dimension="token"

Token ids and row sizes are part of what was computed, so all writers write the same bytes. Texts and
character offsets are labels, which may differ between writers: the first to create `coordinates/labels.json`
decides, and the others leave theirs out. An array's `zarr.json` is written after its values, so a listed
array is complete.

Integers are stored as shards (`shards.py`) of one chunk, so that opening verifies them and they form one
contiguous array. `prompt` and `position` can be computed, and are stored for other readers only in runs below
ten million tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ..digest import Buffer, content_digest
from ..errors import REPAIR, CorruptEntry, EntryNotFound
from ..files import Folder
from ..sealed import files_of, read_json, sealed, unsealed
from .packed import PackedTokens, exclusive_sum, rows_before
from .selections import Selection
from .shards import (
    SUM_BYTES,
    FileChecksum,
    ShardLayout,
    file_checksum,
    read_shard,
    shard_parts,
    with_crc32c,
)
from .zarr_metadata import CRC32C, UTF8_TEXT, array_metadata, group_metadata

SPELLED_OUT = 10_000_000
"""Number of tokens below which `prompt` and `position` are stored for readers without mizarr."""
BOOKKEEPING = ("coordinates", "seg", "manifest", "provenance")
"""Folders of a run that hold no arrays. Each is an empty Zarr group, because plain `xr.open_zarr` lists all
members and warns of those that are neither array nor group."""
LABELS, BARE = "labels.json", "bare.json"
"""Files in `coordinates`: the digest of the run's texts and character offsets; the record of a writer whose
texts differ from the stored ones."""
OF_LABELS = re.compile(r"([0-9a-f]{12}|bare)\.json")
"""Matches records of labels in `coordinates`, as opposed to records of selections and array metadata."""
SAID = ("text", "char_start", "char_end")
"""Coordinates with texts or character offsets, which cannot be computed from token ids and row sizes."""
EMPTY_GROUP = group_metadata({})
_TEXTS_PER_CHUNK = 1 << 14
_COPIED_BYTES = 64 << 20  # larger columns stay memory-mapped, smaller ones are copied when verified
ABOUT = {
    "token_id": {"long_name": "token id"},
    "prompt": {"long_name": "prompt the token belongs to"},
    "position": {"long_name": "position in the prompt"},
    "char_start": {"long_name": "first character of the token in its text"},
    "char_end": {"long_name": "end of the token's characters in its text"},
    "row_start": {"long_name": "first token of the prompt"},
    "row_size": {"long_name": "tokens of the prompt", "sample_dimension": "token"},
    "pair_start": {"long_name": "first pair of the prompt's attention pattern"},
    "text": {"long_name": "prompt as text"},
    "layer": {"long_name": "layer"},
    "prompt_id": {"long_name": "prompt"},
}
"""Attributes of each coordinate in Zarr."""
NAMES = tuple(name for name in ABOUT if name not in ("layer", "prompt_id"))
"""Coordinates that are no dimensions, for the `coordinates` attribute by which xarray tells them from data
variables."""


def write_coordinates(
    folder: Folder, path: str, tokens: PackedTokens, layers: int | None, *, pairs: bool
) -> None:
    """Write the coordinates of a run; any number of writers may do so at once and get the same files.

    Arguments:
        folder: The store's files.
        path: Folder of the run.
        tokens: Prompts of the run.
        layers: Length of the layer axis; None without one.
        pairs: Whether to store where each prompt's attention pattern starts on the pair axis. Only a run of
            one segment can have this, as its pair axis has no gaps.
    """
    labels = _labels_digest(tokens)
    name = f"{path}/coordinates/{LABELS}"
    folder.put_new(name, sealed({"labels": labels}))
    # Read back after put_new: another writer may have been first, with other labels.
    is_accepted = unsealed(name, folder.get(name) or b"", ("labels",))["labels"] == labels
    files = _integer_files(tokens, layers, pairs=pairs, labelled=is_accepted)
    if is_accepted and tokens.texts is not None:
        files |= _text_files(tokens.texts)
    created = folder.put_all({f"{path}/{name}": parts for name, parts in files.items()})
    checksums = {
        name: _stored_checksum(folder, f"{path}/{name}", parts, created) for name, parts in files.items()
    }
    # Named by 12 hex digits of the labels' digest, so that writers with equal labels converge on one record.
    short_digest = labels.removeprefix("sha256:")[:12]
    record = f"coordinates/{f'{short_digest}.json' if is_accepted else BARE}"
    # Together with the record and last: a killed writer leaves no record, and the next one starts over.
    groups = {f"{path}/{name}/zarr.json": [EMPTY_GROUP] for name in BOOKKEEPING}
    folder.put_all({**groups, f"{path}/{record}": [sealed({"files": checksums})]})


def metadata_record(variable: str) -> str:
    """Path, relative to the run's folder, of the record with the checksum of a variable's `zarr.json`."""
    return f"coordinates/{variable}.zarr.json"


def record_metadata(folder: Folder, path: str, variables: Iterable[str]) -> None:
    """Record the checksums of variables' `zarr.json`, for readers and `verify`; existing records stay.

    Arguments:
        folder: The store's files.
        path: Folder of the run.
        variables: Names of the variables, whose `zarr.json` must exist.
    """
    records = {}
    for variable in variables:
        if folder.get(f"{path}/{metadata_record(variable)}") is None:
            file = f"{variable}/zarr.json"
            record = {"files": {file: folder.measure(f"{path}/{file}")}}
            records[f"{path}/{metadata_record(variable)}"] = [sealed(record)]
    folder.put_all(records)


def check_metadata(folder: Folder, path: str, variable: str, text: bytes) -> None:
    """Compare a variable's `zarr.json` with its recorded checksum.

    Does nothing without a record, as the writer may have been killed before writing it.

    Arguments:
        folder: The store's files.
        path: Folder of the run.
        variable: Name of the variable.
        text: Content of its `zarr.json`.

    Raises:
        CorruptEntry: The checksum does not match.
    """
    name = f"{path}/{metadata_record(variable)}"
    if (record := folder.get(name)) is not None:
        files = files_of(name, unsealed(name, record))
        _require_checksum(f"{path}/{variable}/zarr.json", text, files.get(f"{variable}/zarr.json"))


def write_selected(
    folder: Folder,
    path: str,
    tokens: PackedTokens,
    selection: Selection,
    bounds: npt.NDArray[np.int64],
    slots: int,
) -> None:
    """Store which token each row of a selected array (such as "last token only") belongs to.

    Not stored for runs of ten million tokens or more, except for masks: the tokens then follow from the
    lengths of the prompts. Any number of writers may do so at once and get the same files.

    Arguments:
        folder: The store's files.
        path: Folder of the run.
        tokens: Prompts of the run.
        selection: Which tokens have rows.
        bounds: First row of each segment on the selection's axis, and the end of the last, [segment + 1].
        slots: Rows per segment on disk; unused ones are -1.
    """
    name = f"{path}/coordinates/{selection.axis}.json"
    is_derivable = tokens.n_tokens >= SPELLED_OUT and "mask" not in selection.canonical()
    if is_derivable or folder.get(name) is not None:
        return
    selected_tokens = selection.indices(tokens)
    # Laid out like the selected array itself, gaps included, so that other readers can match rows by index.
    token_of_row = np.full((len(bounds) - 1) * slots, -1, np.int64)
    segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    row_in_segment = np.arange(len(selected_tokens)) - bounds[segment]
    token_of_row[segment * slots + row_in_segment] = selected_tokens
    layout = ShardLayout.whole(token_of_row.dtype.name, len(token_of_row))
    shard = layout.path(selection.axis, None, 0)
    attributes = {"long_name": "token of the run; -1 where there is none"}
    files: dict[str, list[Buffer]] = {
        shard: shard_parts(f"{path}/{shard}", token_of_row, layout),
        f"{selection.axis}/zarr.json": [layout.metadata(token_of_row.shape, (selection.axis,), attributes)],
    }
    created = folder.put_all({f"{path}/{file}": parts for file, parts in files.items()})
    checksums = {
        file: _stored_checksum(folder, f"{path}/{file}", parts, created) for file, parts in files.items()
    }
    folder.put_new(name, sealed({"files": checksums}))


def read_selected(folder: Folder, path: str, axis: str) -> npt.NDArray[Any]:
    """Read which tokens have rows on a selection's axis, as indices on the token axis, int64 [row].

    Arguments:
        folder: The store's files.
        path: Folder of the run.
        axis: Name of the selection's axis, such as "token_last".

    Raises:
        EntryNotFound: The tokens are not stored.
    """
    indices = _read_integers(folder, path, axis, recorded(folder, path))
    if indices is None:
        raise EntryNotFound(
            f"run {folder.where(path)}: the array {axis!r}, which lists the selected tokens, is missing; "
            "capture these tokens again"
        )
    return indices[indices >= 0]


def read_tokens(folder: Folder, path: str) -> PackedTokens:
    """Read the prompts of a stored run: token ids, texts and character offsets; large columns are
    memory-mapped.

    Arguments:
        folder: The store's files.
        path: Folder of the run.

    Raises:
        EntryNotFound: There is no stored run.
        CorruptEntry: A file is damaged, or the columns do not fit together.
    """
    checksums = recorded(folder, path)
    columns = {
        name: _read_integers(folder, path, name, checksums)
        for name in ("token_id", "row_size", "char_start", "char_end")
    }
    ids, sizes = columns["token_id"], columns["row_size"]
    if ids is None or sizes is None:
        raise EntryNotFound(
            f"there is no stored run in {folder.where(path)}; `mizarr ls` lists the runs of a store"
        )
    texts = _texts(folder, path, checksums)
    try:
        return PackedTokens(ids, sizes, texts, columns["char_start"], columns["char_end"])
    except ValueError as error:
        raise CorruptEntry(
            f"run {folder.where(path)}: its token ids, row sizes and texts contradict each other ({error}); "
            f"{REPAIR}"
        ) from error


def read_texts(folder: Folder, path: str) -> StoredTexts | None:
    """Texts of a run's prompts, without reading its token ids; None if no texts are stored.

    Arguments:
        folder: The store's files.
        path: Folder of the run.
    """
    return _texts(folder, path, recorded(folder, path))


def _texts(folder: Folder, path: str, checksums: Mapping[str, FileChecksum]) -> StoredTexts | None:
    metadata = _read_metadata(folder, path, "text", checksums)
    return None if metadata is None else StoredTexts(folder, path, int(metadata["shape"][0]))


class StoredTexts(Sequence[str]):
    """Texts of a stored run's prompts, as a sequence that reads and caches chunks of 16,384 texts on
    access."""

    def __init__(self, folder: Folder, path: str, count: int) -> None:
        self._folder, self._path, self._count = folder, path, count
        self._chunk = lru_cache(maxsize=4)(self._read_chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTexts, (self._folder, self._path, self._count)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self._count))]
        index = range(self._count)[i]
        return self._chunk(index // _TEXTS_PER_CHUNK)[index % _TEXTS_PER_CHUNK]

    def _read_chunk(self, n: int) -> list[str]:
        from numcodecs.vlen import VLenUTF8

        name = self._folder.where(f"{self._path}/text/c/{n}")
        raw = self._folder.get(f"{self._path}/text/c/{n}")
        if raw is None:
            raise CorruptEntry(f"the file {name} with texts of prompts is missing; {REPAIR}")
        data, checksum = raw[:-SUM_BYTES], raw[-SUM_BYTES:]
        if raw != with_crc32c(data):
            raise CorruptEntry(
                f"the file {name} with texts of prompts does not match its crc32c {checksum.hex()}; {REPAIR}"
            )
        return [str(text) for text in VLenUTF8().decode(data)]


def _integers(
    tokens: PackedTokens, layers: int | None, *, pairs: bool, labelled: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield name and values of the integer coordinates to store; arguments as for `_integer_files`."""
    yield "token_id", tokens.ids
    yield "row_start", tokens.row_start
    yield "row_size", tokens.row_size
    if tokens.n_tokens < SPELLED_OUT:
        yield "prompt", tokens.prompt_of(slice(None))
        yield "position", tokens.position_of(slice(None))
    if labelled and tokens.char_start is not None and tokens.char_end is not None:
        yield "char_start", tokens.char_start
        yield "char_end", tokens.char_end
    if pairs:
        yield "pair_start", pair_starts(tokens)
    if layers is not None:
        yield "layer", np.arange(layers, dtype=np.int32)


def pair_starts(tokens: PackedTokens) -> npt.NDArray[np.int64]:
    """First row of each prompt on the "pair" axis, int64 [prompt]."""
    return exclusive_sum(rows_before("pair", tokens.row_size, tokens.row_size))


def _dimension(name: str) -> str:
    """Dimension of a coordinate: "layer", "prompt_id" or "token"."""
    if name == "layer":
        return "layer"
    return "prompt_id" if name in ("row_start", "row_size", "pair_start", "text") else "token"


def _integer_files(
    tokens: PackedTokens, layers: int | None, *, pairs: bool, labelled: bool
) -> dict[str, list[Buffer]]:
    """Make the files of the integer coordinates; each array's `zarr.json` comes after its values.

    Arguments:
        tokens: Prompts of the run.
        layers: Length of the layer axis; None without one.
        pairs: Whether to include `pair_start`.
        labelled: Whether to include character offsets.

    Returns:
        Path relative to the run's folder -> buffers of the file.
    """
    files = {}
    for name, values in _integers(tokens, layers, pairs=pairs, labelled=labelled):
        layout = ShardLayout.whole(values.dtype.name, len(values))
        shard = layout.path(name, None, 0)
        files[shard] = shard_parts(shard, np.ascontiguousarray(values), layout)
        files[f"{name}/zarr.json"] = [layout.metadata((len(values),), (_dimension(name),), ABOUT[name])]
    return files


def _text_files(texts: Sequence[str]) -> dict[str, list[Buffer]]:
    """Make the files of the prompts' texts, encoded as Zarr's vlen-utf8: path in the run's folder ->
    buffers."""
    from numcodecs.vlen import VLenUTF8

    files: dict[str, list[Buffer]] = {}
    chunk_length = min(_TEXTS_PER_CHUNK, len(texts))
    for n, start in enumerate(range(0, len(texts), _TEXTS_PER_CHUNK)):
        # Zarr's chunks have a fixed number of items, so the last one is filled with empty texts.
        block = np.full(chunk_length, "", object)
        chunk_texts = texts[start : start + chunk_length]
        block[: len(chunk_texts)] = chunk_texts
        files[f"text/c/{n}"] = [with_crc32c(bytes(VLenUTF8().encode(block)))]
    metadata = array_metadata(
        "string",
        [len(texts)],
        [chunk_length],
        [UTF8_TEXT, CRC32C],
        dims=["prompt_id"],
        fill_value="",
        attributes=ABOUT["text"],
    )
    return {**files, "text/zarr.json": [metadata]}


def _stored_checksum(
    folder: Folder, name: str, parts: Sequence[Buffer], created: Collection[str]
) -> FileChecksum:
    """Size and checksum of a file: computed from `parts` if this process created it, else from the file."""
    return file_checksum(*parts) if name in created else folder.measure(name)


def recorded(folder: Folder, path: str) -> dict[str, FileChecksum]:
    """Read the recorded sizes and checksums of all coordinate files of a run.

    Arguments:
        folder: The store's files.
        path: Folder of the run.

    Returns:
        Path relative to the run's folder -> (size, checksum). Of several records of a file, the last by name
        counts.
    """
    files: dict[str, FileChecksum] = {}
    for name in sorted(folder.children(f"{path}/coordinates")):
        if name.endswith(".json") and not name.endswith("zarr.json") and name != LABELS:
            record = f"{path}/coordinates/{name}"
            files |= files_of(record, unsealed(record, folder.get(record) or b""))
    return files


def _read_metadata(
    folder: Folder, path: str, name: str, checksums: Mapping[str, FileChecksum]
) -> dict[str, Any] | None:
    """Parse the `zarr.json` of a coordinate; None for a run without this coordinate.

    Arguments:
        folder: The store's files.
        path: Folder of the run.
        name: Name of the coordinate.
        checksums: Recorded sizes and checksums, from `recorded`.
    """
    file = f"{name}/zarr.json"
    # Texts and offsets are optional, so only the record tells a stray file from one of this run.
    if name in SAID and checksums and file not in checksums:
        return None  # left by a writer that was killed, or whose labels were not accepted
    text = folder.get(f"{path}/{file}")
    if text is None and file not in checksums:
        return None
    _require_checksum(f"{path}/{file}", text or b"", checksums.get(file))
    try:
        return dict(read_json(text or b""))
    except (ValueError, TypeError) as error:
        raise CorruptEntry(
            f"{path}/{file}: expected the JSON description of a Zarr array, found {error}; {REPAIR}"
        ) from error


def _require_checksum(name: str, text: bytes, checksum: FileChecksum | None) -> None:
    """Raise CorruptEntry unless a file's content has the recorded checksum; None for no record."""
    if checksum is not None and (actual := content_digest(text)) != checksum[1]:
        raise CorruptEntry(f"{name}: expected {checksum[1]}, found {actual}; {REPAIR}")


def _read_integers(
    folder: Folder, path: str, name: str, checksums: Mapping[str, FileChecksum]
) -> npt.NDArray[Any] | None:
    """Read an integer coordinate; None for a run without this coordinate. Arguments as for
    `_read_metadata`."""
    metadata = _read_metadata(folder, path, name, checksums)
    if metadata is None:
        return None
    layout = ShardLayout.from_metadata(metadata)
    if layout is None:
        raise CorruptEntry(
            f"the coordinate {folder.where(path)}/{name} was rewritten in another format by another program; "
            f"{REPAIR}"
        )
    rows, shard = int(metadata["shape"][0]), f"{path}/{layout.path(name, None, 0)}"
    try:
        values = np.asarray(read_shard(folder.mapped(shard), layout, rows))
    except FileNotFoundError:
        raise CorruptEntry(
            f"the file {folder.where(shard)} with the coordinate {name!r} is missing; {REPAIR}"
        ) from None
    # The copy keeps the verified values, even if the file changes later.
    return values.copy() if values.nbytes <= _COPIED_BYTES else values


def _labels_digest(tokens: PackedTokens) -> str:
    """`sha256:…` of the texts and character offsets of prompts."""
    state = hashlib.sha256()
    for column in (tokens.char_start, tokens.char_end):
        state.update(b"-" if column is None else np.ascontiguousarray(column, "<i4").data)
    for text in tokens.texts or ():
        raw = text.encode()
        state.update(len(raw).to_bytes(8, "little") + raw)
    return f"sha256:{state.hexdigest()}"
