"""Copy published runs and results from one store to another, to archive, move or merge them.

Every file is verified against its checksum on the way, and the key is written last: an interrupted copy
leaves nothing visible and is continued by the next call. What the target has under a key stays, and the
report lists keys whose contents differ. Files are copied byte for byte, because the content digest of a run
covers its files. Unfinished runs, pins and the index are not copied.

With a codec, shards of runs are compressed or decompressed in the target (`recoding.py`). Keys and contents
stay the same, because they are digests of the uncompressed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..catalog import Catalog
from ..errors import REPAIR, CorruptEntry, EntryNotFound, ReadOnlyStore
from ..files import THREADS
from ..keys import ActivationKey, RunKey
from ..provenance import note_names
from ..records import ACTIVATION, RESULT, Record
from ..runs.committed import PLAIN, record_name
from ..runs.coordinates import BARE, BOOKKEEPING, LABELS, OF_LABELS, SAID, metadata_record, recorded
from ..runs.entries import group_attributes
from ..runs.quantised import QUANTISED, is_scale, scale_name
from ..runs.shards import file_checksum
from ..runs.vocabularies import put_vocabulary, read_vocabulary
from ..sealed import files_of, sealed, unsealed
from .collect import lease
from .recoding import Differs, Recoding, check_codec, put_text, recoding_of
from .verify import manifest_of

__all__ = ["Copied", "copy"]

Files = Mapping[str, tuple[int, str]]


@dataclass
class Copied:
    """Outcome of a copy, as lists of keys."""

    copied: list[str] = field(default_factory=list)
    """Keys that this call made visible in the target."""
    present: list[str] = field(default_factory=list)
    """Keys present in the target already, with equal content."""
    different: list[str] = field(default_factory=list)
    """Keys in the target already, with another content, which stays."""
    bytes: int = 0
    """Bytes written."""


def copy(
    source: Catalog,
    target: Catalog,
    records: Iterable[Record],
    progress: Callable[[int], None] = lambda done: None,
    codec: str | None = None,
) -> Copied:
    """Copy the runs and results of some records.

    Arguments:
        source: Store to read.
        target: Store to write.
        records: Published records of `source`.
        progress: Called with the bytes written so far.
        codec: Compression of shards in the target, "none" for none, None as in the source. An array of which
            the target has some layers keeps the codec it has there.

    Raises:
        ConfigError: The codec is unknown.
        CorruptEntry: A file of the source does not match its checksum.
        ReadOnlyStore: The target cannot be written.
        StoreFull: The disk or quota of the target is full.
    """
    if target.read_only:
        raise ReadOnlyStore(f"cannot copy into {target.address}: opened with mode='r'; use mode='a'")
    check_codec(codec)
    outcome = Copied()
    for record in _with_scales(source, records):
        existing = target.lookup(record.key)
        if existing is not None:
            # Never overwritten, even if different: the target's downstream keys contain its own content.
            (outcome.present if existing.content == record.content else outcome.different).append(record.key)
            continue
        try:
            # Otherwise a gc in the source could remove files between the listing and the copy.
            with lease(source, record):
                if record.kind == RESULT:
                    _copy_result(source, target, record, outcome)
                else:
                    _copy_array(source, target, record, outcome, codec)
        except Differs:
            outcome.different.append(record.key)
            continue
        except (CorruptEntry, EntryNotFound):
            if source.lookup(record.key) is not None:
                raise
            continue  # gc removed it from the source meanwhile
        is_first = target.files.put_new(record.path, record.to_bytes())
        (outcome.copied if is_first else outcome.present).append(record.key)
        progress(outcome.bytes)
    return outcome


def _with_scales(source: Catalog, records: Iterable[Record]) -> Iterator[Record]:
    """Yield each record once, the record of an int8 variable's scales before its own."""
    seen: set[str] = set()
    runs: dict[str, Mapping[str, Any]] = {}
    for record in records:
        batch = [record]
        variable, slash, layer = record.label.partition("/")
        if record.kind == ACTIVATION and not is_scale(variable):
            if record.data not in runs:
                runs[record.data] = _run_attributes(source, record)
            attributes = runs[record.data]
            if attributes.get("dtype") == QUANTISED:
                run = RunKey.of_request(attributes["run"])
                key = ActivationKey(run, scale_name(variable), int(layer) if slash else None, QUANTISED)
                batch = [*([scales] if (scales := source.lookup(key.digest)) else []), record]
        for item in batch:
            if item.key not in seen:
                seen.add(item.key)
                yield item


def _run_attributes(source: Catalog, record: Record) -> Mapping[str, Any]:
    """Group attributes of a record's run; {} if gc removed it meanwhile."""
    try:
        attributes: Mapping[str, Any] = group_attributes(source.files, record.data)["mizarr"]
    except EntryNotFound:
        if source.lookup(record.key) is not None:
            raise
        return {}
    return attributes


def _copy_result(source: Catalog, target: Catalog, record: Record, outcome: Copied) -> None:
    name = f"{record.data}/manifest.json"
    text = _text(source, name)
    _put_files(source, target, record.data, files_of(name, unsealed(name, text)), outcome)
    put_text(target, name, text)
    _put_notes(source, target, record.data)


def _copy_array(source: Catalog, target: Catalog, record: Record, outcome: Copied, codec: str | None) -> None:
    """Copy one cell of a run: its labels first, then shards, segment records and manifest."""
    data, name = record.data, f"{record.data}/{manifest_of(record)}"
    _put_run(source, target, data, outcome)
    text = _text(source, name)
    manifest = unsealed(name, text, ("variable", "files", PLAIN))
    variable, cell = str(manifest["variable"]), record.label.replace("/", ".")
    listed: Files = files_of(name, manifest)
    plain: Files = files_of(name, manifest, PLAIN)
    if (recoding := recoding_of(source, target, data, variable, codec)) is not None:
        recoding.describe(target)
        listed, plain = _recode(source, target, recoding, listed, plain or listed, outcome)
        # A new manifest: sizes and checksums are those of the recoded files, R stays.
        text = sealed({**manifest, "files": listed, PLAIN: plain})
    else:
        for file_name in (f"{data}/{variable}/zarr.json", f"{data}/{metadata_record(variable)}"):
            if (content := source.files.get(file_name)) is not None:
                put_text(target, file_name, content)
        _put_files(source, target, data, listed, outcome)
    for n, (file, stored) in enumerate(listed.items()):
        stands_for = {file: plain[file]} if plain else {}
        # One record per cell instead of the source's per pass, because only some cells of a pass may be
        # copied.
        segment = {"segment": n, "cells": [cell], "files": {file: stored}, PLAIN: stands_for}
        target.files.put_new(record_name(data, n, [cell]), sealed(segment))
    target.files.put_new(name, text)


def _recode(
    source: Catalog, target: Catalog, recoding: Recoding, listed: Files, plain: Files, outcome: Copied
) -> tuple[Files, Files]:
    """Recode the shards of an array in parallel.

    Returns:
        Checksums of the files in the target, and of their uncompressed form ({} without compression).
    """

    def put(file: str) -> tuple[tuple[int, str], int]:
        return recoding.put(source, target, file, listed[file], plain[file])

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(put, listed))
    outcome.bytes += sum(written for _, written in results)
    stored = {file: checksum for file, (checksum, _) in zip(listed, results, strict=True)}
    return stored, plain if recoding.after.codec else {}


def _put_run(source: Catalog, target: Catalog, data: str, outcome: Copied) -> None:
    """Copy what a run has besides arrays. Its group comes last, as it marks the rest as complete."""
    group = f"{data}/zarr.json"
    attributes = group_attributes(source.files, data)
    if _is_there(target, data, attributes):
        return
    _put_labels(source, target, data, outcome)
    for name in (f"{data}/{folder}/zarr.json" for folder in BOOKKEEPING):
        if (text := source.files.get(name)) is not None:
            target.files.put_new(name, text)
    _put_notes(source, target, data)
    if (tokenizer := attributes.get("tokenizer")) and (strings := read_vocabulary(source.files, tokenizer)):
        put_vocabulary(target.files, tokenizer, strings)
    if not target.files.put_new(group, _text(source, group)):
        _is_there(target, data, attributes)  # created by another process just now: must be cut the same way


def _is_there(target: Catalog, data: str, attributes: Mapping[str, Any]) -> bool:
    """Whether the target has this run. Raises Differs if its segments have another length."""
    if target.files.get(f"{data}/zarr.json") is None:
        return False
    field = "segment_tokens"
    if group_attributes(target.files, data)["mizarr"][field] != attributes["mizarr"][field]:
        raise Differs(data)
    return True


def _put_labels(source: Catalog, target: Catalog, data: str, outcome: Copied) -> None:
    """Copy prompt labels and token coordinates of a run missing in the target.

    If another writer has begun the run there with other texts, those stay, and only ids and sizes are copied.
    """
    folder = f"{data}/coordinates"
    checksums = recorded(source.files, data)
    # Records of array metadata (<variable>.zarr.json) are copied together with the arrays.
    names = [name for name in source.files.children(folder) if not name.endswith("zarr.json")]
    target.files.put_new(f"{folder}/{LABELS}", _text(source, f"{folder}/{LABELS}"))
    is_same = _labels(target, folder) == _labels(source, folder)
    if not is_same:
        checksums = {
            file: checksum for file, checksum in checksums.items() if file.partition("/")[0] not in SAID
        }
        names = [name for name in names if not OF_LABELS.fullmatch(name)]
    _put_files(source, target, data, checksums, outcome)
    for name in names:
        if (text := source.files.get(f"{folder}/{name}")) is not None:
            target.files.put_new(f"{folder}/{name}", text)
    if not is_same:
        target.files.put_new(f"{folder}/{BARE}", sealed({"files": checksums}))


def _labels(store: Catalog, folder: str) -> str:
    name = f"{folder}/{LABELS}"
    return str(unsealed(name, _text(store, name), ("labels",))["labels"])


def _put_notes(source: Catalog, target: Catalog, data: str) -> None:
    for name in note_names(source.files, data):
        if (text := source.files.get(name)) is not None:
            target.files.put_new(name, text)


def _put_files(source: Catalog, target: Catalog, data: str, files: Files, outcome: Copied) -> None:
    """Copy files of a folder in parallel, verifying checksums; CorruptEntry or Differs on a mismatch."""

    def put(file: str) -> int:
        name, expected = f"{data}/{file}", files[file]
        if target.files.size(name) is None:
            content = source.files.get(name)
            actual = None if content is None else file_checksum(content)
            if content is None or actual != expected:
                raise CorruptEntry(
                    f"{source.files.where(name)}: expected {expected}, found {actual}; {REPAIR}"
                )
            if target.files.put_new(name, content):
                return len(content)
        if target.files.measure(name) != expected:
            raise Differs(name)
        return 0

    described = [file for file in files if file.endswith("zarr.json")]
    with ThreadPoolExecutor(THREADS) as pool:
        # `zarr.json` after the values: an array that is listed must be complete.
        for batch in ([file for file in files if file not in described], described):
            outcome.bytes += sum(pool.map(put, batch))


def _text(source: Catalog, name: str) -> bytes:
    if (text := source.files.get(name)) is None:
        raise CorruptEntry(f"{source.files.where(name)}: expected a list of files, found none; {REPAIR}")
    return text
