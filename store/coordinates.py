"""Labels of a stored run: which token and prompt each row belongs to, as ordinary Zarr arrays.

Border: packed tokens in, files out, and back; knows nothing of activations.

Token ids and row sizes are part of what was computed, so every writer writes the same bytes. Texts and
character
offsets are not: two writers may come with different ones, so the first to create `coordinates/labels.json`
says which labels this entry has, and the others leave theirs out. Arrays get their `zarr.json` last: what is
listed is complete.

    token_id prompt position [token]   char_start char_end [token]   layer [layer]
    row_start row_size text pair_start [prompt_id]      CF contiguous ragged: row_size has
    sample_dimension="token"

Integers lie as raw shards (`shards.py`), which opening maps into memory: a billion ids cost nothing until
read. `prompt` and `position` are spelled out for other readers of entries below ten million tokens only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from .digest import Buffer, content_digest, file_digest
from .errors import CorruptEntry, EntryNotFound
from .files import Folder
from .packed import PackedTokens
from .provenance import as_json
from .shards import ShardLayout, array_metadata, read_shard, shard_parts

SPELLED_OUT = 10_000_000
"""Tokens below which `prompt` and `position` are stored for readers without mizarr."""
BOOKKEEPING = ("coordinates", "seg", "manifest", "provenance")
"""Folders of an entry that hold no arrays. Each is an empty Zarr group, or Zarr would warn of strangers."""
_EMPTY_GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
_TEXTS = 1 << 14  # texts per chunk
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
    folder.put_new(f"{path}/coordinates/labels.json", as_json({"labels": labels}))
    ours = json.loads(folder.get(f"{path}/coordinates/labels.json") or b"{}").get("labels") == labels
    files = _integer_files(tokens, layers, pairs=pairs, labelled=ours)
    if ours and tokens.texts is not None:
        files |= _text_files(tokens.texts)
    made = folder.put_all({f"{path}/{name}": parts for name, parts in files.items()})
    told = {name: _measured(folder, f"{path}/{name}", parts, made) for name, parts in files.items()}
    record = f"coordinates/{labels[7:19] if ours else 'bare'}.json"
    groups = {f"{path}/{name}/zarr.json": [_EMPTY_GROUP] for name in BOOKKEEPING}
    folder.put_all({**groups, f"{path}/{record}": [as_json({"files": told})]})


def metadata_record(variable: str) -> str:
    """Where the digest of a variable's `zarr.json` is kept, relative to the entry."""
    return f"coordinates/{variable}.zarr.json"


def record_metadata(folder: Folder, path: str, variables: Iterable[str]) -> None:
    """Keep the digests of the variables' `zarr.json` for `verify`; the first to do so wins."""
    records = {}
    for variable in variables:
        if folder.get(f"{path}/{metadata_record(variable)}") is None:
            file = f"{variable}/zarr.json"
            told = {"files": {file: _measure(folder, f"{path}/{file}")}}
            records[f"{path}/{metadata_record(variable)}"] = [as_json(told)]
    folder.put_all(records)


def read_tokens(folder: Folder, path: str) -> PackedTokens:
    """The tokens of the entry at `path`, memory-mapped, with the labels that were stored.

    EntryNotFound when there are none, CorruptEntry when they do not fit together.
    """
    ids, sizes = _read_integers(folder, path, "token_id"), _read_integers(folder, path, "row_size")
    if ids is None or sizes is None:
        raise EntryNotFound(f"{folder.path(path)} holds no stored run; `mizarr ls` shows what is there")
    start, end = _read_integers(folder, path, "char_start"), _read_integers(folder, path, "char_end")
    texts = StoredTexts(folder, path, len(sizes)) if folder.get(f"{path}/text/zarr.json") else None
    try:
        return PackedTokens(ids, sizes, texts, start, end)
    except ValueError as error:
        raise CorruptEntry(
            f"the token coordinates of {folder.path(path)} do not fit together: {error}"
        ) from error


class StoredTexts(Sequence[str]):
    """The texts of an entry's prompts, read a chunk at a time when they are asked for."""

    def __init__(self, folder: Folder, path: str, count: int) -> None:
        self._folder, self._path, self._count = folder, path, count
        self._chunk = lru_cache(maxsize=4)(self._read_chunk)

    def __reduce__(self) -> tuple[type[StoredTexts], tuple[Folder, str, int]]:
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

        raw = self._folder.get(f"{self._path}/text/c/{n}")
        if raw is None:
            raise CorruptEntry(f"{self._folder.path(self._path)}/text/c/{n} is missing; run `mizarr verify`")
        return [str(text) for text in VLenUTF8().decode(raw)]


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
    np.cumsum((tokens.row_size * (tokens.row_size + 1) // 2)[:-1], out=starts[1:])
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
        layout = ShardLayout.of(values.dtype.name, (), len(values), layered=False)
        shard = layout.path(name, None, 0)
        files[shard] = shard_parts(shard, np.ascontiguousarray(values), layout)
        metadata = array_metadata(layout, (len(values),), (_dimension(name),), ABOUT[name])
        files[f"{name}/zarr.json"] = [metadata]
    return files


def _text_files(texts: Sequence[str]) -> dict[str, list[Buffer]]:
    """Files of the texts, relative to the entry."""
    from numcodecs.vlen import VLenUTF8

    files: dict[str, list[Buffer]] = {}
    for n in range(-(-len(texts) // _TEXTS)):
        block = np.full(_TEXTS if len(texts) > _TEXTS else len(texts), "", object)
        part = texts[n * _TEXTS : (n + 1) * _TEXTS]
        block[: len(part)] = part
        files[f"text/c/{n}"] = [bytes(VLenUTF8().encode(block))]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [len(texts)],
        "data_type": "string",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [min(_TEXTS, len(texts))]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "",
        "codecs": [{"name": "vlen-utf8", "configuration": {}}],
        "attributes": ABOUT["text"],
        "dimension_names": ["prompt_id"],
        "storage_transformers": [],
    }
    return {**files, "text/zarr.json": [json.dumps(metadata, indent=1).encode()]}


def _measured(folder: Folder, name: str, parts: Sequence[Buffer], made: Collection[str]) -> list[int | str]:
    """Size and digest of a file: of what was written if it is new, of what stands otherwise."""
    if name not in made:
        return _measure(folder, name)
    return [sum(memoryview(part).nbytes for part in parts), content_digest(*parts)]


def _measure(folder: Folder, name: str) -> list[int | str]:
    return [folder.path(name).stat().st_size, file_digest(folder.path(name))]


def _read_integers(folder: Folder, path: str, name: str) -> npt.NDArray[Any] | None:
    text = folder.get(f"{path}/{name}/zarr.json")
    if text is None:
        return None
    metadata = json.loads(text)
    rows = int(metadata["shape"][0])
    layout = ShardLayout.of(metadata["data_type"], (), rows, layered=False)
    return read_shard(folder.path(f"{path}/{layout.path(name, None, 0)}"), layout, rows)


def _labels_digest(tokens: PackedTokens) -> str:
    """`sha256:…` of the texts and character offsets."""
    state = hashlib.sha256()
    for column in (tokens.char_start, tokens.char_end):
        state.update(b"-" if column is None else np.ascontiguousarray(column, "<i4").data)
    for text in tokens.texts or ():
        raw = text.encode()
        state.update(len(raw).to_bytes(8, "little") + raw)
    return f"sha256:{state.hexdigest()}"
