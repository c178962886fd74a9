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
contiguous array. `prompt` and `position` can be computed, and are stored for other readers only in entries
below ten million tokens.
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
"""Folders of an entry without arrays. Each is an empty Zarr group, because plain `xr.open_zarr` lists all
members and warns of those that are neither array nor group."""
LABELS, BARE = "labels.json", "bare.json"
"""Files in `coordinates`: the digest of the run's labels; the record of a writer whose labels were not
accepted."""
OF_LABELS = re.compile(r"([0-9a-f]{12}|bare)\.json")
"""Matches records of labels in `coordinates`, as opposed to records of selections and array metadata."""
SAID = ("text", "char_start", "char_end")
"""Labels that cannot be computed from token ids and row sizes."""
EMPTY_GROUP = group_metadata({})
_TEXTS = 1 << 14  # texts per chunk
_HELD = 64 << 20  # bytes; larger columns stay memory-mapped, smaller ones are copied when verified
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
"""Attributes of each coordinate."""
NAMES = tuple(name for name in ABOUT if name not in ("layer", "prompt_id"))
"""Coordinates that are no dimensions, for the `coordinates` attribute by which xarray tells them from data
variables."""


def write_coordinates(
    folder: Folder, path: str, tokens: PackedTokens, layers: int | None, *, pairs: bool
) -> None:
    """Write the coordinates of the entry at `path`; any number of writers converge on the same files.

    Arguments:
        folder: The store's files.
        path: Folder of the entry.
        tokens: The run's prompts.
        layers: Length of the layer axis; None without one.
        pairs: Whether to store where each prompt's attention pattern starts, which only an entry of one
            segment can have, as its pair axis has no gaps.
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
    checksums = {name: _measured(folder, f"{path}/{name}", parts, created) for name, parts in files.items()}
    # The name has the digest of the labels, so that writers with equal labels converge on one record.
    record = f"coordinates/{f'{labels[7:19]}.json' if is_accepted else BARE}"
    # Together with the record and last: a killed writer leaves no record, and the next one starts over.
    groups = {f"{path}/{name}/zarr.json": [EMPTY_GROUP] for name in BOOKKEEPING}
    folder.put_all({**groups, f"{path}/{record}": [sealed({"files": checksums})]})


def metadata_record(variable: str) -> str:
    """Path, relative to the entry, of the record with the checksum of a variable's `zarr.json`."""
    return f"coordinates/{variable}.zarr.json"


def record_metadata(folder: Folder, path: str, variables: Iterable[str]) -> None:
    """Record the checksums of variables' `zarr.json`, for readers and `verify`; existing records stay.

    Arguments:
        folder: The store's files.
        path: Folder of the entry.
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

    Passes if there is no record, because its writer was killed before writing one.

    Arguments:
        folder: The store's files.
        path: Folder of the entry.
        variable: Name of the variable.
        text: Content of its `zarr.json`.

    Raises:
        CorruptEntry: They differ.
    """
    name = f"{path}/{metadata_record(variable)}"
    if (record := folder.get(name)) is not None:
        files = files_of(name, unsealed(name, record))
        _expect(f"{path}/{variable}/zarr.json", text, files.get(f"{variable}/zarr.json"))


def write_selected(
    folder: Folder,
    path: str,
    tokens: PackedTokens,
    selection: Selection,
    bounds: npt.NDArray[np.int64],
    slots: int,
) -> None:
    """Write the token list of a selection's axis; any number of writers converge on the same files.

    Not stored for entries of ten million tokens or more, except for masks: there the list follows from the
    lengths of the prompts.

    Arguments:
        folder: The store's files.
        path: Folder of the entry.
        tokens: The run's prompts.
        selection: Which tokens have rows.
        bounds: First row of each segment on the axis, and the end of the last.
        slots: Rows per segment on disk; unused ones are -1.
    """
    name = f"{path}/coordinates/{selection.axis}.json"
    is_derivable = tokens.n_tokens >= SPELLED_OUT and "mask" not in selection.canonical()
    if is_derivable or folder.get(name) is not None:
        return
    indices = selection.indices(tokens)
    # Laid out like the selected array itself, gaps included, so that other readers can match rows by index.
    spread = np.full((len(bounds) - 1) * slots, -1, np.int64)
    segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    spread[segment * slots + np.arange(len(indices)) - bounds[segment]] = indices
    layout = ShardLayout.whole(spread.dtype.name, len(spread))
    shard = layout.path(selection.axis, None, 0)
    attributes = {"long_name": "token of the run; -1 where there is none"}
    files: dict[str, list[Buffer]] = {
        shard: shard_parts(f"{path}/{shard}", spread, layout),
        f"{selection.axis}/zarr.json": [layout.metadata(spread.shape, (selection.axis,), attributes)],
    }
    created = folder.put_all({f"{path}/{file}": parts for file, parts in files.items()})
    checksums = {file: _measured(folder, f"{path}/{file}", parts, created) for file, parts in files.items()}
    folder.put_new(name, sealed({"files": checksums}))


def read_selected(folder: Folder, path: str, axis: str) -> npt.NDArray[Any]:
    """Token list of a selection's axis, int64.

    Arguments:
        folder: The store's files.
        path: Folder of the entry.
        axis: Name of the axis, which is also that of the stored array.

    Raises:
        EntryNotFound: The list is not stored.
    """
    indices = _read_integers(folder, path, axis, recorded(folder, path))
    if indices is None:
        raise EntryNotFound(
            f"{folder.where(path)}: expected the tokens of {axis!r}, found none; capture them again"
        )
    return indices[indices >= 0]


def read_tokens(folder: Folder, path: str) -> PackedTokens:
    """Tokens of an entry with their stored labels; large columns are memory-mapped.

    Arguments:
        folder: The store's files.
        path: Folder of the entry.

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
        raise EntryNotFound(f"{folder.where(path)} holds no stored run; `mizarr ls` shows what is there")
    texts = _texts(folder, path, checksums)
    try:
        return PackedTokens(ids, sizes, texts, columns["char_start"], columns["char_end"])
    except ValueError as error:
        raise CorruptEntry(
            f"{folder.where(path)}: expected token coordinates that fit together, found that {error}; "
            f"{REPAIR}"
        ) from error


def read_texts(folder: Folder, path: str) -> StoredTexts | None:
    """Texts of an entry's prompts, without opening its tokens; arguments as for `read_tokens`.

    Returns:
        None if no texts are stored.
    """
    return _texts(folder, path, recorded(folder, path))


def _texts(folder: Folder, path: str, checksums: Mapping[str, FileChecksum]) -> StoredTexts | None:
    text = _read_metadata(folder, path, "text", checksums)
    if text is None:
        return None
    return StoredTexts(folder, path, int(text["shape"][0]))


class StoredTexts(Sequence[str]):
    """Texts of an entry's prompts, read and cached in chunks on access."""

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
        return self._chunk(index // _TEXTS)[index % _TEXTS]

    def _read_chunk(self, n: int) -> list[str]:
        from numcodecs.vlen import VLenUTF8

        name = self._folder.where(f"{self._path}/text/c/{n}")
        raw = self._folder.get(f"{self._path}/text/c/{n}")
        if raw is None:
            raise CorruptEntry(f"{name}: expected texts of prompts, found no file; {REPAIR}")
        data, checksum = raw[:-SUM_BYTES], raw[-SUM_BYTES:]
        if raw != with_crc32c(data):
            raise CorruptEntry(f"{name}: expected texts with crc32c {checksum.hex()}, found others; {REPAIR}")
        return [str(text) for text in VLenUTF8().decode(data)]


def _integers(
    tokens: PackedTokens, layers: int | None, *, pairs: bool, labelled: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield name and values of the integer coordinates to store."""
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
    if name == "layer":
        return "layer"
    return "prompt_id" if name in ("row_start", "row_size", "pair_start", "text") else "token"


def _integer_files(
    tokens: PackedTokens, layers: int | None, *, pairs: bool, labelled: bool
) -> dict[str, list[Buffer]]:
    """Files of the integer coordinates, relative to the entry, each array's `zarr.json` after its values."""
    files = {}
    for name, values in _integers(tokens, layers, pairs=pairs, labelled=labelled):
        layout = ShardLayout.whole(values.dtype.name, len(values))
        shard = layout.path(name, None, 0)
        files[shard] = shard_parts(shard, np.ascontiguousarray(values), layout)
        files[f"{name}/zarr.json"] = [layout.metadata((len(values),), (_dimension(name),), ABOUT[name])]
    return files


def _text_files(texts: Sequence[str]) -> dict[str, list[Buffer]]:
    """Files of the texts, relative to the entry; encoded as zarr's vlen-utf8."""
    from numcodecs.vlen import VLenUTF8

    files: dict[str, list[Buffer]] = {}
    for n in range(-(-len(texts) // _TEXTS)):
        # Zarr's chunks have a fixed number of items, so the last one is filled with empty texts.
        block = np.full(_TEXTS if len(texts) > _TEXTS else len(texts), "", object)
        chunk_texts = texts[n * _TEXTS : (n + 1) * _TEXTS]
        block[: len(chunk_texts)] = chunk_texts
        files[f"text/c/{n}"] = [with_crc32c(bytes(VLenUTF8().encode(block)))]
    metadata = array_metadata(
        "string",
        [len(texts)],
        [min(_TEXTS, len(texts))],
        [UTF8_TEXT, CRC32C],
        dims=["prompt_id"],
        fill_value="",
        attributes=ABOUT["text"],
    )
    return {**files, "text/zarr.json": [metadata]}


def _measured(folder: Folder, name: str, parts: Sequence[Buffer], created: Collection[str]) -> FileChecksum:
    """Size and checksum of a file: computed from `parts` if this process created it, else read."""
    return file_checksum(*parts) if name in created else folder.measure(name)


def recorded(folder: Folder, path: str) -> dict[str, FileChecksum]:
    """Recorded sizes and checksums of all coordinate files; arguments as for `read_tokens`.

    Returns:
        Path relative to the entry -> (size, checksum). Of several records of a file, the last by name counts.
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
    """Parse the `zarr.json` of a coordinate; None if it was never recorded and does not exist."""
    file = f"{name}/zarr.json"
    # Texts and offsets are optional, so only the record tells a stray file from one of this run.
    if name in SAID and checksums and file not in checksums:
        return None  # left by a writer that was killed, or whose labels were not accepted
    text = folder.get(f"{path}/{file}")
    if text is None and file not in checksums:
        return None
    _expect(f"{path}/{file}", text or b"", checksums.get(file))
    try:
        return dict(read_json(text or b""))
    except (ValueError, TypeError) as error:
        raise CorruptEntry(
            f"{path}/{file}: expected the description of an array, found {error}; {REPAIR}"
        ) from error


def _expect(name: str, text: bytes, checksum: FileChecksum | None) -> None:
    """Raise CorruptEntry unless a file's content has the recorded checksum."""
    if checksum is not None and (actual := content_digest(text)) != checksum[1]:
        raise CorruptEntry(f"{name}: expected {checksum[1]}, found {actual}; {REPAIR}")


def _read_integers(
    folder: Folder, path: str, name: str, checksums: Mapping[str, FileChecksum]
) -> npt.NDArray[Any] | None:
    metadata = _read_metadata(folder, path, name, checksums)
    if metadata is None:
        return None
    layout = ShardLayout.from_metadata(metadata)
    if layout is None:
        raise CorruptEntry(
            f"{folder.where(path)}/{name}: expected numbers as they were captured, found them rewritten "
            f"in another format; {REPAIR}"
        )
    rows, shard = int(metadata["shape"][0]), f"{path}/{layout.path(name, None, 0)}"
    try:
        values = np.asarray(read_shard(folder.mapped(shard), layout, rows))
    except FileNotFoundError:
        raise CorruptEntry(f"{folder.where(shard)}: expected labels, found no file; {REPAIR}") from None
    # The copy keeps the verified values, even if the file changes later.
    return values.copy() if values.nbytes <= _HELD else values


def _labels_digest(tokens: PackedTokens) -> str:
    """`sha256:…` of the texts and character offsets."""
    state = hashlib.sha256()
    for column in (tokens.char_start, tokens.char_end):
        state.update(b"-" if column is None else np.ascontiguousarray(column, "<i4").data)
    for text in tokens.texts or ():
        raw = text.encode()
        state.update(len(raw).to_bytes(8, "little") + raw)
    return f"sha256:{state.hexdigest()}"
