"""What is published in one store, put into another: to keep, to move, or to bring two together.

Every file is compared with its digest on the way, and the key comes last, so a copy that was cut off left
nothing visible, and goes on where it was when it is asked again. What the target has under a key stays: the
first is right, and the caller is told where the contents differ. Files are copied as they lie; runs that are
not finished, pins and the index are not copied.

With a codec the shards of runs are compressed in the target, or plain again. Keys stay, and so do the digests
of contents, which are of plain bytes: what is stored otherwise is compared with them.

Border: files and records; what they mean to an analysis is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..catalog import Catalog
from ..digest import content_digest
from ..errors import REPAIR, CorruptEntry, EntryNotFound, ReadOnlyStore
from ..files import THREADS
from ..keys import ActivationKey, RunKey
from ..provenance import note_names
from ..records import ACTIVATION, RESULT, Record
from ..runs.committed import PLAIN, record_name
from ..runs.coordinates import BARE, BOOKKEEPING, LABELS, OF_LABELS, SAID, metadata_record, recorded
from ..runs.entries import group_attributes
from ..runs.quantised import QUANTISED, is_scale, scale_name
from ..runs.vocabularies import put_vocabulary, read_vocabulary
from ..sealed import files_of, sealed, unsealed
from .collect import lease
from .recoding import Differs, Recoding, check_codec, put_text, recoding_of
from .verify import manifest_of

__all__ = ["Copied", "copy"]

Files = Mapping[str, tuple[int, str]]


@dataclass
class Copied:
    """What a copy did, by key: made visible in the target; there already; there with another content, which
    stays. bytes: written."""

    copied: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    bytes: int = 0


def copy(
    source: Catalog,
    target: Catalog,
    records: Iterable[Record],
    progress: Callable[[int], None] = lambda done: None,
    codec: str | None = None,
) -> Copied:
    """Put what these records of `source` name into `target`. progress: called with the bytes done so far.

    codec: how shards of runs are compressed there, "none" for plain ones, None as they are; an array of which
    the target has some layers goes on as it is there. Raises ConfigError for another codec, CorruptEntry for
    a file of the source that is not what was recorded, ReadOnlyStore, StoreFull.
    """
    if target.read_only:
        raise ReadOnlyStore(f"cannot copy into {target.address}: opened with mode='r'; use mode='a'")
    check_codec(codec)
    done = Copied()
    for record in _with_scales(source, records):
        there = target.lookup(record.key)
        if there is not None:
            (done.present if there.content == record.content else done.different).append(record.key)
            continue
        try:
            with lease(source, record):
                if record.kind == RESULT:
                    _copy_result(source, target, record, done)
                else:
                    _copy_array(source, target, record, done, codec)
        except Differs:
            done.different.append(record.key)
            continue
        except (CorruptEntry, EntryNotFound):
            if source.lookup(record.key) is not None:
                raise
            continue  # gc took it meanwhile
        is_first = target.files.put_new(record.path, record.to_bytes())
        (done.copied if is_first else done.present).append(record.key)
        progress(done.bytes)
    return done


def _with_scales(source: Catalog, records: Iterable[Record]) -> Iterator[Record]:
    """The records, each once, and before those of what is stored in int8 those of its scales."""
    seen: set[str] = set()
    runs: dict[str, Mapping[str, Any]] = {}
    for record in records:
        found = [record]
        variable, slash, layer = record.label.partition("/")
        if record.kind == ACTIVATION and not is_scale(variable):
            if record.data not in runs:
                runs[record.data] = _about(source, record)
            about = runs[record.data]
            if about.get("dtype") == QUANTISED:
                run = RunKey.of_request(about["run"])
                key = ActivationKey(run, scale_name(variable), int(layer) if slash else None, QUANTISED)
                found = [*([scales] if (scales := source.lookup(key.digest)) else []), record]
        for each in found:
            if each.key not in seen:
                seen.add(each.key)
                yield each


def _about(source: Catalog, record: Record) -> Mapping[str, Any]:
    """What a run is; nothing where gc took it meanwhile."""
    try:
        about: Mapping[str, Any] = group_attributes(source.files, record.data)["mizarr"]
    except EntryNotFound:
        if source.lookup(record.key) is not None:
            raise
        return {}
    return about


def _copy_result(source: Catalog, target: Catalog, record: Record, done: Copied) -> None:
    name = f"{record.data}/manifest.json"
    text = _text(source, name)
    _put_files(source, target, record.data, files_of(name, unsealed(name, text)), done)
    put_text(target, name, text)
    _put_notes(source, target, record.data)


def _copy_array(source: Catalog, target: Catalog, record: Record, done: Copied, codec: str | None) -> None:
    """One (variable, layer) of a run, its labels before it, what says that it stands after it."""
    data, name = record.data, f"{record.data}/{manifest_of(record)}"
    _put_run(source, target, data, done)
    text = _text(source, name)
    manifest = unsealed(name, text, ("variable", "files", PLAIN))
    variable, cell = str(manifest["variable"]), record.label.replace("/", ".")
    listed: Files = files_of(name, manifest)
    plain: Files = files_of(name, manifest, PLAIN)
    if (recoding := recoding_of(source, target, data, variable, codec)) is not None:
        recoding.describe(target)
        listed, plain = _recode(source, target, recoding, listed, plain or listed, done)
        text = sealed({**manifest, "files": listed, PLAIN: plain})
    else:
        for each in (f"{data}/{variable}/zarr.json", f"{data}/{metadata_record(variable)}"):
            if (there := source.files.get(each)) is not None:
                put_text(target, each, there)
        _put_files(source, target, data, listed, done)
    for n, (file, stored) in enumerate(listed.items()):
        stands_for = {file: plain[file]} if plain else {}
        segment = {"segment": n, "cells": [cell], "files": {file: stored}, PLAIN: stands_for}
        target.files.put_new(record_name(data, n, [cell]), sealed(segment))
    target.files.put_new(name, text)


def _recode(
    source: Catalog, target: Catalog, recoding: Recoding, listed: Files, plain: Files, done: Copied
) -> tuple[Files, Files]:
    """Shards of an array, several at a time; what the target has, and what that stands for if compressed."""

    def one(file: str) -> tuple[tuple[int, str], int]:
        return recoding.put(source, target, file, listed[file], plain[file])

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(one, listed))
    done.bytes += sum(written for _, written in found)
    stored = {file: there for file, (there, _) in zip(listed, found, strict=True)}
    return stored, plain if recoding.after.codec else {}


def _put_run(source: Catalog, target: Catalog, data: str, done: Copied) -> None:
    """What a run has besides its arrays; its group comes last, and says that all of it is there."""
    group = f"{data}/zarr.json"
    attributes = group_attributes(source.files, data)
    if _is_there(target, data, attributes):
        return
    _put_labels(source, target, data, done)
    for name in (f"{data}/{each}/zarr.json" for each in BOOKKEEPING):
        if (text := source.files.get(name)) is not None:
            target.files.put_new(name, text)
    _put_notes(source, target, data)
    if (tokenizer := attributes.get("tokenizer")) and (strings := read_vocabulary(source.files, tokenizer)):
        put_vocabulary(target.files, tokenizer, strings)
    if not target.files.put_new(group, _text(source, group)):
        _is_there(target, data, attributes)  # by somebody else, just now


def _is_there(target: Catalog, data: str, attributes: Mapping[str, Any]) -> bool:
    """Whether the target has a run; Differs where it is cut otherwise. attributes: of its group."""
    if target.files.get(f"{data}/zarr.json") is None:
        return False
    cut = "segment_tokens"
    if group_attributes(target.files, data)["mizarr"][cut] != attributes["mizarr"][cut]:
        raise Differs(data)
    return True


def _put_labels(source: Catalog, target: Catalog, data: str, done: Copied) -> None:
    """The labels of a run that is not there yet. Where somebody else has begun it with other texts, as a
    capture or a copy that was cut off, those stay, and ids and sizes alone are put."""
    folder = f"{data}/coordinates"
    told = recorded(source.files, data)
    # Records of the arrays' descriptions (<variable>.zarr.json) go with the arrays.
    names = [name for name in source.files.children(folder) if not name.endswith("zarr.json")]
    target.files.put_new(f"{folder}/{LABELS}", _text(source, f"{folder}/{LABELS}"))
    ours = _labels(target, folder) == _labels(source, folder)
    if not ours:
        told = {file: about for file, about in told.items() if file.partition("/")[0] not in SAID}
        names = [name for name in names if not OF_LABELS.fullmatch(name)]
    _put_files(source, target, data, told, done)
    for name in names:
        if (text := source.files.get(f"{folder}/{name}")) is not None:
            target.files.put_new(f"{folder}/{name}", text)
    if not ours:
        target.files.put_new(f"{folder}/{BARE}", sealed({"files": told}))


def _labels(store: Catalog, folder: str) -> str:
    name = f"{folder}/{LABELS}"
    return str(unsealed(name, _text(store, name), ("labels",))["labels"])


def _put_notes(source: Catalog, target: Catalog, data: str) -> None:
    for name in note_names(source.files, data):
        if (text := source.files.get(name)) is not None:
            target.files.put_new(name, text)


def _put_files(source: Catalog, target: Catalog, data: str, files: Files, done: Copied) -> None:
    """Files of a folder, each compared with its digest, several at a time."""

    def one(file: str) -> int:
        name, told = f"{data}/{file}", files[file]
        if target.files.size(name) is None:
            content = source.files.get(name)
            found = None if content is None else (len(content), content_digest(content))
            if content is None or found != told:
                raise CorruptEntry(f"{source.files.where(name)}: expected {told}, found {found}; {REPAIR}")
            if target.files.put_new(name, content):
                return len(content)
        if target.files.measure(name) != told:
            raise Differs(name)
        return 0

    described = [file for file in files if file.endswith("zarr.json")]
    with ThreadPoolExecutor(THREADS) as pool:
        for some in ([file for file in files if file not in described], described):  # what is listed is whole
            done.bytes += sum(pool.map(one, some))


def _text(source: Catalog, name: str) -> bytes:
    if (text := source.files.get(name)) is None:
        raise CorruptEntry(f"{source.files.where(name)}: expected a list of files, found none; {REPAIR}")
    return text
