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
    """Outcome of copying data to another store, as lists of keys (64 hex digits)."""

    copied: list[str] = field(default_factory=list)
    """Keys that this call made visible in the target."""
    present: list[str] = field(default_factory=list)
    """Keys present in the target already, with equal content."""
    different: list[str] = field(default_factory=list)
    """Keys present in the target already, with other content, which was kept."""
    bytes: int = 0
    """Bytes written to the target."""


def copy(
    source: Catalog,
    target: Catalog,
    records: Iterable[Record],
    progress: Callable[[int], None] = lambda done: None,
    codec: str | None = None,
) -> Copied:
    """Copy published arrays and results from one store to another.

    Arguments:
        source: Store to read.
        target: Store to write.
        records: Records of the arrays and results to copy, from `source`.
        progress: Called with the bytes written so far.
        codec: Compression of shards in the target: "zstd", "none", or None to keep that of the source. An
            array of which the target has some layers keeps the codec it has there.

    Raises:
        ConfigError: The codec is unknown.
        CorruptEntry: A file of the source does not match its checksum.
        ReadOnlyStore: The target cannot be written.
        StoreFull: The disk or quota of the target is full.
    """
    if target.read_only:
        raise ReadOnlyStore(
            f"cannot copy into the store {target.address}, which was opened with mode='r'; open it with "
            "mode='a'"
        )
    check_codec(codec)
    outcome = Copied()
    for record in _with_scales(source, records):
        existing = target.lookup(record.key)
        if existing is not None:
            # Never overwritten, even if different: keys of later results in the target contain its content.
            is_same = existing.content == record.content
            (outcome.present if is_same else outcome.different).append(record.key)
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
    """Yield each record once, and the record of an int8 array's scales before the record of the array: int8
    numbers have no meaning without scales."""
    yielded_keys: set[str] = set()
    attributes_of_run: dict[str, Mapping[str, Any]] = {}  # by folder
    for record in records:
        batch: list[Record | None] = [record]
        # Labels of arrays are "variable/layer", or "variable" without layers.
        variable, slash, layer = record.label.partition("/")
        if record.kind == ACTIVATION and not is_scale(variable):
            if record.data not in attributes_of_run:
                attributes_of_run[record.data] = _run_attributes(source, record)
            attributes = attributes_of_run[record.data]
            if attributes.get("dtype") == QUANTISED:
                run = RunKey.of_request(attributes["run"])
                key = ActivationKey(run, scale_name(variable), int(layer) if slash else None, QUANTISED)
                batch = [source.lookup(key.digest), record]
        for item in batch:
            if item is not None and item.key not in yielded_keys:
                yielded_keys.add(item.key)
                yield item


def _run_attributes(source: Catalog, record: Record) -> Mapping[str, Any]:
    """Description of the run that an array belongs to; empty if garbage collection removed it meanwhile."""
    try:
        attributes: Mapping[str, Any] = group_attributes(source.files, record.data)["mizarr"]
    except EntryNotFound:
        if source.lookup(record.key) is not None:
            raise
        return {}
    return attributes


def _copy_result(source: Catalog, target: Catalog, record: Record, outcome: Copied) -> None:
    """Copy the files, manifest and notes of a result, but not its record."""
    name = f"{record.data}/manifest.json"
    text = _required_file(source, name)
    _put_files(source, target, record.data, files_of(name, unsealed(name, text)), outcome)
    put_text(target, name, text)
    _put_notes(source, target, record.data)


def _copy_array(source: Catalog, target: Catalog, record: Record, outcome: Copied, codec: str | None) -> None:
    """Copy one array (variable, layer) of a run: labels of the run, then shards, segment records,
    manifest."""
    data, name = record.data, f"{record.data}/{manifest_of(record)}"
    _put_run(source, target, data, outcome)
    text = _required_file(source, name)
    manifest = unsealed(name, text, ("variable", "files", PLAIN))
    variable, cell = str(manifest["variable"]), record.label.replace("/", ".")
    shards: Files = files_of(name, manifest)
    uncompressed: Files = files_of(name, manifest, PLAIN)
    if (recoding := recoding_of(source, target, data, variable, codec)) is not None:
        recoding.describe(target)
        shards, uncompressed = _recode(source, target, recoding, shards, uncompressed or shards, outcome)
        # A new manifest: sizes and checksums are those of the recoded files, the content digest stays.
        text = sealed({**manifest, "files": shards, PLAIN: uncompressed})
    else:
        for file_name in (f"{data}/{variable}/zarr.json", f"{data}/{metadata_record(variable)}"):
            if (content := source.files.get(file_name)) is not None:
                put_text(target, file_name, content)
        _put_files(source, target, data, shards, outcome)
    for n, (file, checksum) in enumerate(shards.items()):
        uncompressed_shard = {file: uncompressed[file]} if uncompressed else {}
        # A segment record of the source may list several arrays, of which only some are copied; so each array
        # gets records of its own here.
        segment = {"segment": n, "cells": [cell], "files": {file: checksum}, PLAIN: uncompressed_shard}
        target.files.put_new(record_name(data, n, [cell]), sealed(segment))
    target.files.put_new(name, text)


def _recode(
    source: Catalog, target: Catalog, recoding: Recoding, shards: Files, uncompressed: Files, outcome: Copied
) -> tuple[Files, Files]:
    """Compress or decompress the shards of an array in parallel and write them to the target.

    Arguments:
        source: Store to read.
        target: Store to write.
        recoding: Conversion of this array.
        shards: Size and checksum of each file in the source.
        uncompressed: Size and checksum of each file's uncompressed form.
        outcome: Its bytes written are increased.

    Returns:
        Size and checksum of each file in the target, and of its uncompressed form ({} without compression).
    """

    def put(file: str) -> tuple[tuple[int, str], int]:
        return recoding.put(source, target, file, shards[file], uncompressed[file])

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(put, shards))
    outcome.bytes += sum(n_bytes for _, n_bytes in results)
    target_shards = {file: checksum for file, (checksum, _) in zip(shards, results, strict=True)}
    return target_shards, uncompressed if recoding.after.codec else {}


def _put_run(source: Catalog, target: Catalog, data: str, outcome: Copied) -> None:
    """Copy all of a run except arrays: labels, notes, token strings. Its group file comes last, as it marks
    the others as complete."""
    group = f"{data}/zarr.json"
    attributes = group_attributes(source.files, data)
    if _has_run(target, data, attributes):
        return
    _put_labels(source, target, data, outcome)
    for name in (f"{data}/{folder}/zarr.json" for folder in BOOKKEEPING):
        if (text := source.files.get(name)) is not None:
            target.files.put_new(name, text)
    _put_notes(source, target, data)
    if (tokenizer := attributes.get("tokenizer")) and (strings := read_vocabulary(source.files, tokenizer)):
        put_vocabulary(target.files, tokenizer, strings)
    if not target.files.put_new(group, _required_file(source, group)):
        _has_run(target, data, attributes)  # another process created it just now: compare its segment length


def _has_run(target: Catalog, data: str, attributes: Mapping[str, Any]) -> bool:
    """Whether the target has this run; raises Differs if it has it with segments of another length."""
    if target.files.get(f"{data}/zarr.json") is None:
        return False
    field = "segment_tokens"
    if group_attributes(target.files, data)["mizarr"][field] != attributes["mizarr"][field]:
        raise Differs(data)
    return True


def _put_labels(source: Catalog, target: Catalog, data: str, outcome: Copied) -> None:
    """Copy prompt labels (texts) and token coordinates (ids, positions) of a run.

    If another writer has begun the run in the target with other texts, these stay, and only token ids and
    row sizes are copied.
    """
    folder = f"{data}/coordinates"
    checksums = recorded(source.files, data)
    # Records of array metadata (<variable>.zarr.json) are copied together with the arrays.
    names = [name for name in source.files.children(folder) if not name.endswith("zarr.json")]
    target.files.put_new(f"{folder}/{LABELS}", _required_file(source, f"{folder}/{LABELS}"))
    is_same = _labels_digest(target, folder) == _labels_digest(source, folder)
    if not is_same:
        label_arrays = SAID  # coordinates that hold texts
        checksums = {
            file: checksum
            for file, checksum in checksums.items()
            if file.partition("/")[0] not in label_arrays
        }
        names = [name for name in names if not OF_LABELS.fullmatch(name)]
    _put_files(source, target, data, checksums, outcome)
    for name in names:
        if (text := source.files.get(f"{folder}/{name}")) is not None:
            target.files.put_new(f"{folder}/{name}", text)
    if not is_same:
        target.files.put_new(f"{folder}/{BARE}", sealed({"files": checksums}))


def _labels_digest(store: Catalog, folder: str) -> str:
    """Digest of a run's prompt labels, as its folder of coordinates records it."""
    name = f"{folder}/{LABELS}"
    return str(unsealed(name, _required_file(store, name), ("labels",))["labels"])


def _put_notes(source: Catalog, target: Catalog, data: str) -> None:
    """Copy the provenance notes and prompt labels of the folder `data` from source to target."""
    for name in note_names(source.files, data):
        if (text := source.files.get(name)) is not None:
            target.files.put_new(name, text)


def _put_files(source: Catalog, target: Catalog, data: str, files: Files, outcome: Copied) -> None:
    """Copy files of a folder in parallel, verifying checksums; CorruptEntry if a file of the source is
    damaged, Differs if the target has another one."""

    def put(file: str) -> int:
        name, expected = f"{data}/{file}", files[file]
        if target.files.size(name) is None:
            content = source.files.get(name)
            actual = None if content is None else file_checksum(content)
            if content is None or actual != expected:
                raise CorruptEntry(
                    f"{source.files.where(name)} is damaged: expected size and checksum {expected}, found "
                    f"{actual}; {REPAIR}"
                )
            if target.files.put_new(name, content):
                return len(content)
        if target.files.measure(name) != expected:
            raise Differs(name)
        return 0

    metadata = [file for file in files if file.endswith("zarr.json")]
    values = [file for file in files if file not in metadata]
    with ThreadPoolExecutor(THREADS) as pool:
        # `zarr.json` after the values: an array that readers see must be complete.
        for batch in (values, metadata):
            outcome.bytes += sum(pool.map(put, batch))


def _required_file(source: Catalog, name: str) -> bytes:
    """Content of a file of the source; CorruptEntry if it is missing."""
    if (text := source.files.get(name)) is None:
        raise CorruptEntry(f"the file {source.files.where(name)} is missing; {REPAIR}")
    return text
