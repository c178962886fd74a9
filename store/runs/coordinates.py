"""Labels of a stored run: which token and prompt each row belongs to, as ordinary Zarr arrays.

Border: packed tokens in, files out, and back; knows nothing of activations.

Token ids and row sizes are part of what was computed, so every writer writes the same bytes. Texts and
character offsets are not: two writers may come with different ones, so the first to create
`coordinates/labels.json` says which labels this entry has, and the others leave theirs out. Arrays get their
`zarr.json` last: what is listed is complete.

    [token]      token_id prompt position char_start char_end
    [layer]      layer
    [prompt_id]  row_start row_size text pair_start; CF contiguous ragged: row_size has
                 sample_dimension="token"

Integers lie as shards (`shards.py`) of one chunk, which opening checks against its checksum: they say what
rows mean. Beyond some 64 MiB they stay mapped. `prompt` and `position` are spelled out for other readers of
entries below ten million tokens only.
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
from .packed import PackedTokens, rows_before
from .selections import Selection
from .shards import SUM_BYTES, ShardLayout, Written, crc32c, read_shard, shard_parts
from .zarr_metadata import CRC32C, UTF8_TEXT, array_metadata, group_metadata

SPELLED_OUT = 10_000_000
"""Tokens below which `prompt` and `position` are stored for readers without mizarr."""
BOOKKEEPING = ("coordinates", "seg", "manifest", "provenance")
"""Folders of an entry that hold no arrays. Each is an empty Zarr group, or Zarr would warn of strangers."""
LABELS, BARE = "labels.json", "bare.json"
"""Of the folder `coordinates`: which labels a run has; the record of a writer that came with others."""
OF_LABELS = re.compile(r"([0-9a-f]{12}|bare)\.json")
"""Names of records of labels there; those of selections, and of what describes arrays, are others."""
SAID = ("text", "char_start", "char_end")
"""Labels that do not follow from token ids and row sizes."""
EMPTY_GROUP = group_metadata({})
_TEXTS = 1 << 14  # texts per chunk
_HELD = 64 << 20  # bytes of a column up to which it is taken into memory when it is read
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
"""What each label is, as its attributes say it."""
NAMES = tuple(name for name in ABOUT if name not in ("layer", "prompt_id"))
"""Every coordinate but those of dimensions, for the `coordinates` attribute by which xarray tells labels
from data.
"""


def write_coordinates(
    folder: Folder, path: str, tokens: PackedTokens, layers: int | None, *, pairs: bool
) -> None:
    """Write the labels of the entry at `path` once; any number of writers converge.

    layers: length of the layer axis, None without one.  pairs: also where each prompt's pattern starts (for
    entries of one segment, whose pair axis has no gaps).
    """
    labels = _labels_digest(tokens)
    name = f"{path}/coordinates/{LABELS}"
    folder.put_new(name, sealed({"labels": labels}))
    ours = unsealed(name, folder.get(name) or b"", ("labels",))["labels"] == labels
    files = _integer_files(tokens, layers, pairs=pairs, labelled=ours)
    if ours and tokens.texts is not None:
        files |= _text_files(tokens.texts)
    made = folder.put_all({f"{path}/{name}": parts for name, parts in files.items()})
    told = {name: _measured(folder, f"{path}/{name}", parts, made) for name, parts in files.items()}
    record = f"coordinates/{f'{labels[7:19]}.json' if ours else BARE}"
    groups = {f"{path}/{name}/zarr.json": [EMPTY_GROUP] for name in BOOKKEEPING}
    folder.put_all({**groups, f"{path}/{record}": [sealed({"files": told})]})


def metadata_record(variable: str) -> str:
    """Where the digest of a variable's `zarr.json` is kept, relative to the entry."""
    return f"coordinates/{variable}.zarr.json"


def record_metadata(folder: Folder, path: str, variables: Iterable[str]) -> None:
    """Keep the digests of the variables' `zarr.json` for `verify`; the first to do so wins."""
    records = {}
    for variable in variables:
        if folder.get(f"{path}/{metadata_record(variable)}") is None:
            file = f"{variable}/zarr.json"
            told = {"files": {file: folder.measure(f"{path}/{file}")}}
            records[f"{path}/{metadata_record(variable)}"] = [sealed(told)]
    folder.put_all(records)


def check_metadata(folder: Folder, path: str, variable: str, text: bytes) -> None:
    """Raise CorruptEntry unless this is the `zarr.json` of a variable as it was recorded.

    Says nothing where it was not, by a writer that was killed in between.
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
    """Write which tokens the axis of a selection has rows for, once; any number of writers converge.

    bounds: where each segment starts on the axis, and its end. slots: rows a segment has room for on disk;
    those that are not used read -1. Of ten million tokens on only masks are spelled out, as the others follow
    from the lengths of the prompts.
    """
    name = f"{path}/coordinates/{selection.axis}.json"
    follows = tokens.n_tokens >= SPELLED_OUT and "mask" not in selection.canonical()
    if follows or folder.get(name) is not None:
        return
    kept = selection.kept(tokens)
    spread = np.full((len(bounds) - 1) * slots, -1, np.int64)
    number = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    spread[number * slots + np.arange(len(kept)) - bounds[number]] = kept
    layout = ShardLayout.whole(spread.dtype.name, len(spread))
    shard = layout.path(selection.axis, None, 0)
    about = {"long_name": "token of the run; -1 where there is none"}
    files: dict[str, list[Buffer]] = {
        shard: shard_parts(f"{path}/{shard}", spread, layout),
        f"{selection.axis}/zarr.json": [layout.metadata(spread.shape, (selection.axis,), about)],
    }
    made = folder.put_all({f"{path}/{file}": parts for file, parts in files.items()})
    told = {file: _measured(folder, f"{path}/{file}", parts, made) for file, parts in files.items()}
    folder.put_new(name, sealed({"files": told}))


def read_selected(folder: Folder, path: str, axis: str) -> npt.NDArray[Any]:
    """The tokens a selected axis has rows for, as they were written; EntryNotFound where they were not."""
    found = _read_integers(folder, path, axis, recorded(folder, path))
    if found is None:
        raise EntryNotFound(
            f"{folder.where(path)}: expected the tokens of {axis!r}, found none; capture them again"
        )
    return found[found >= 0]


def read_tokens(folder: Folder, path: str) -> PackedTokens:
    """The tokens of the entry at `path`, memory-mapped, with the labels that were stored.

    EntryNotFound when there are none, CorruptEntry when they do not fit together.
    """
    told = recorded(folder, path)
    columns = {
        name: _read_integers(folder, path, name, told)
        for name in ("token_id", "row_size", "char_start", "char_end")
    }
    ids, sizes = columns["token_id"], columns["row_size"]
    if ids is None or sizes is None:
        raise EntryNotFound(f"{folder.where(path)} holds no stored run; `mizarr ls` shows what is there")
    texts = _texts(folder, path, told)
    try:
        return PackedTokens(ids, sizes, texts, columns["char_start"], columns["char_end"])
    except ValueError as error:
        raise CorruptEntry(
            f"{folder.where(path)}: expected token coordinates that fit together, found that {error}; "
            f"{REPAIR}"
        ) from error


def read_texts(folder: Folder, path: str) -> StoredTexts | None:
    """The texts of the prompts of the entry at `path`, without its tokens; None where none were stored."""
    return _texts(folder, path, recorded(folder, path))


def _texts(folder: Folder, path: str, told: Mapping[str, Written]) -> StoredTexts | None:
    text = _read_metadata(folder, path, "text", told)
    if text is None:
        return None
    return StoredTexts(folder, path, int(text["shape"][0]))


class StoredTexts(Sequence[str]):
    """The texts of an entry's prompts, read a chunk at a time when they are asked for."""

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
        at = range(self._count)[i]
        return self._chunk(at // _TEXTS)[at % _TEXTS]

    def _read_chunk(self, n: int) -> list[str]:
        from numcodecs.vlen import VLenUTF8

        name = self._folder.where(f"{self._path}/text/c/{n}")
        raw = self._folder.get(f"{self._path}/text/c/{n}")
        if raw is None:
            raise CorruptEntry(f"{name}: expected texts of prompts, found no file; {REPAIR}")
        data, checksum = raw[:-SUM_BYTES], raw[-SUM_BYTES:]
        if checksum != crc32c(data).to_bytes(SUM_BYTES, "little"):
            raise CorruptEntry(f"{name}: expected texts with crc32c {checksum.hex()}, found others; {REPAIR}")
        return [str(text) for text in VLenUTF8().decode(data)]


def _integers(
    tokens: PackedTokens, layers: int | None, *, pairs: bool, labelled: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Name and values of every integer coordinate this entry gets."""
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
    """First pair of each prompt's packed attention pattern, int64 [prompt]."""
    starts = np.zeros(tokens.n_prompts, np.int64)
    np.cumsum(rows_before("pair", tokens.row_size, tokens.row_size)[:-1], out=starts[1:])
    return starts


def _dimension(name: str) -> str:
    if name == "layer":
        return "layer"
    return "prompt_id" if name in ("row_start", "row_size", "pair_start", "text") else "token"


def _integer_files(
    tokens: PackedTokens, layers: int | None, *, pairs: bool, labelled: bool
) -> dict[str, list[Buffer]]:
    """Files of the integer coordinates, relative to the entry; an array's `zarr.json` after its values."""
    files = {}
    for name, values in _integers(tokens, layers, pairs=pairs, labelled=labelled):
        layout = ShardLayout.whole(values.dtype.name, len(values))
        shard = layout.path(name, None, 0)
        files[shard] = shard_parts(shard, np.ascontiguousarray(values), layout)
        files[f"{name}/zarr.json"] = [layout.metadata((len(values),), (_dimension(name),), ABOUT[name])]
    return files


def _text_files(texts: Sequence[str]) -> dict[str, list[Buffer]]:
    """Files of the texts, relative to the entry."""
    from numcodecs.vlen import VLenUTF8

    files: dict[str, list[Buffer]] = {}
    for n in range(-(-len(texts) // _TEXTS)):
        block = np.full(_TEXTS if len(texts) > _TEXTS else len(texts), "", object)
        part = texts[n * _TEXTS : (n + 1) * _TEXTS]
        block[: len(part)] = part
        raw = bytes(VLenUTF8().encode(block))
        files[f"text/c/{n}"] = [raw, crc32c(raw).to_bytes(SUM_BYTES, "little")]
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


def _measured(folder: Folder, name: str, parts: Sequence[Buffer], made: Collection[str]) -> Written:
    """Size and digest of a file: of what was written if it is new, of what stands otherwise."""
    if name not in made:
        return folder.measure(name)
    return sum(memoryview(part).nbytes for part in parts), content_digest(*parts)


def recorded(folder: Folder, path: str) -> dict[str, Written]:
    """File -> (size, digest) of the coordinates, as their writers recorded them last of all."""
    files: dict[str, Written] = {}
    for name in sorted(folder.children(f"{path}/coordinates")):
        if name.endswith(".json") and not name.endswith("zarr.json") and name != LABELS:
            record = f"{path}/coordinates/{name}"
            files |= files_of(record, unsealed(record, folder.get(record) or b""))
    return files


def _read_metadata(
    folder: Folder, path: str, name: str, told: Mapping[str, Written]
) -> dict[str, Any] | None:
    """The `zarr.json` of a coordinate; None when there is none, nor ever was."""
    file = f"{name}/zarr.json"
    if name in SAID and told and file not in told:
        return None  # begun by a writer that was killed, and not what the run was given
    text = folder.get(f"{path}/{file}")
    if text is None and file not in told:
        return None
    _expect(f"{path}/{file}", text or b"", told.get(file))
    try:
        return dict(read_json(text or b""))
    except (ValueError, TypeError) as error:
        raise CorruptEntry(
            f"{path}/{file}: expected the description of an array, found {error}; {REPAIR}"
        ) from error


def _expect(name: str, text: bytes, told: Written | None) -> None:
    """Raise CorruptEntry unless a file is as it was recorded."""
    if told is not None and (found := content_digest(text)) != told[1]:
        raise CorruptEntry(f"{name}: expected {told[1]}, found {found}; {REPAIR}")


def _read_integers(
    folder: Folder, path: str, name: str, told: Mapping[str, Written]
) -> npt.NDArray[Any] | None:
    metadata = _read_metadata(folder, path, name, told)
    if metadata is None:
        return None
    layout = ShardLayout.from_metadata(metadata)
    if layout is None:
        raise CorruptEntry(
            f"{folder.where(path)}/{name}: expected numbers as they were captured, found them stored again "
            f"in another form; {REPAIR}"
        )
    rows, place = int(metadata["shape"][0]), f"{path}/{layout.path(name, None, 0)}"
    try:
        held = np.asarray(read_shard(folder.mapped(place), layout, rows))
    except FileNotFoundError:
        raise CorruptEntry(f"{folder.where(place)}: expected labels, found no file; {REPAIR}") from None
    # A copy is what was checked, whatever becomes of the file.
    return held.copy() if held.nbytes <= _HELD else held


def _labels_digest(tokens: PackedTokens) -> str:
    """`sha256:…` of the texts and character offsets."""
    state = hashlib.sha256()
    for column in (tokens.char_start, tokens.char_end):
        state.update(b"-" if column is None else np.ascontiguousarray(column, "<i4").data)
    for text in tokens.texts or ():
        raw = text.encode()
        state.update(len(raw).to_bytes(8, "little") + raw)
    return f"sha256:{state.hexdigest()}"
