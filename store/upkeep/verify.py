"""Every committed file against its recorded size and digest, several at a time, at sha256 speed.

Border: files and records; what they mean to an analysis is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..catalog import Catalog
from ..errors import CorruptEntry
from ..files import THREADS
from ..provenance import note_names, read_note
from ..records import PIN, RESULT, Record
from ..results import MANIFEST
from ..runs.committed import RECORD
from ..runs.entries import CELL_MANIFEST, group_attributes
from ..runs.vocabularies import CHECK, VOCABULARIES
from ..sealed import files_of, read_json, unsealed
from .annotations import ANNOTATION, ANNOTATIONS

PINS = "pins"


@dataclass(frozen=True)
class Damage:
    """One committed file that is not what was committed.

    data: folder of the run or result, relative to the store.  file: relative to that folder.
    expected, found: "<bytes> bytes" or "sha256:…"; found is "missing" when the file is gone.
    """

    data: str
    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.data}/{self.file}: expected {self.expected}, found {self.found}"


def verify(store: Catalog, *, quick: bool, progress: Callable[[int, int], None] | None) -> list[Damage]:
    """Committed files that differ from their record, and records that are unreadable or lead nowhere."""
    found = _dangling(store)
    expected = []
    for data in [*store.folders(), VOCABULARIES]:
        files, unreadable = committed_files(store, data)
        found += unreadable
        expected += [(data, name, int(size), str(told)) for name, (size, told) in files.items()]
    total, done = sum(size for _, _, size, _ in expected), 0
    with ThreadPoolExecutor(THREADS) as pool:
        checks = {pool.submit(_check, store, *one, quick=quick): one[2] for one in expected}
        for check in as_completed(checks):
            if (damage := check.result()) is not None:
                found.append(damage)
            done += checks[check]
            if progress is not None:
                progress(done, total)
    return sorted(found, key=lambda damage: (damage.data, damage.file))


def _dangling(store: Catalog) -> list[Damage]:
    """Key files, pins, annotations and notes that cannot be read, keys without their manifest, runs not
    described."""
    found = []
    for name in store.files.list("keys"):
        folder, _, file = name.rpartition("/")
        try:
            record = store.lookup(Path(name).stem)
        except CorruptEntry:
            found.append(Damage(folder, file, "a key file", "unreadable"))
            continue
        if record is not None:
            manifest = manifest_of(record)
            if store.files.size(f"{record.data}/{manifest}") is None:
                found.append(Damage(record.data, manifest, f"the manifest of {record.label}", "missing"))
    for name in store.files.list(PINS):
        if (text := store.files.get(name)) is not None:
            found += _unreadable(PINS, name.removeprefix(f"{PINS}/"), "a pin", unsealed, name, text, PIN)
    for name in store.files.list(ANNOTATIONS):
        if (text := store.files.get(name)) is not None:
            folder, _, file = name.rpartition("/")
            found += _unreadable(folder, file, "an annotation", unsealed, name, text, ANNOTATION)
    for data in store.folders():
        for name in note_names(store.files, data):
            if (text := store.files.get(name)) is not None:
                found += _unreadable(data, name.removeprefix(f"{data}/"), "a note", read_note, name, text)
        if store.files.get(f"{data}/zarr.json") is not None:
            described = group_attributes, store.files, data
            found += _unreadable(data, "zarr.json", "the description of a run", *described)
    return found


def _unreadable(
    data: str, file: str, what: str, read: Callable[..., object], *arguments: object
) -> list[Damage]:
    try:
        read(*arguments)
    except CorruptEntry:
        return [Damage(data, file, what, "unreadable")]
    return []


def manifest_of(record: Record) -> str:
    """Where a record's list of files lies, relative to its folder."""
    return "manifest.json" if record.kind == RESULT else f"manifest/{record.label.replace('/', '.')}.json"


def _check(store: Catalog, data: str, name: str, size: int, told: str, *, quick: bool) -> Damage | None:
    path = f"{data}/{name}"
    try:
        there = store.files.size(path)
        if there is not None and there != size:
            return Damage(data, name, f"{size} bytes", f"{there} bytes")
        if there is None:
            return Damage(data, name, told, "missing")
        if not quick and (found := store.files.measure(path)[1]) != told:
            return Damage(data, name, told, found)
    except (FileNotFoundError, NotADirectoryError):
        return Damage(data, name, told, "missing")
    except OSError as error:
        return Damage(data, name, told, f"unreadable ({error.strerror or error})")
    return None


def committed_files(store: Catalog, data: str) -> tuple[dict[str, list[Any]], list[Damage]]:
    """File -> [size, digest] of all committed in a folder, published or not; and unreadable lists."""
    files: dict[str, list[Any]] = {}
    unreadable = []
    for name, known in _lists(store, data):
        if (text := store.files.get(name)) is None:
            continue
        try:
            found = unsealed(name, text, known)
            files |= files_of(name, found) if "files" in found else {}
        except CorruptEntry:
            unreadable.append(Damage(data, name.removeprefix(f"{data}/"), "a list of files", "unreadable"))
    return files, unreadable


def _lists(store: Catalog, data: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Names of the records in a folder, and the fields each has."""
    if data == VOCABULARIES:
        yield from ((name, ("files",)) for name in store.files.list(data) if name.endswith(CHECK))
        return
    yield f"{data}/manifest.json", MANIFEST
    fields = {"coordinates": ("files",), "manifest": CELL_MANIFEST, "seg": RECORD}
    for part, known in fields.items():
        for name in sorted(store.files.list(f"{data}/{part}")):
            if name.endswith(".json") and not name.endswith("/zarr.json"):
                yield name, ("labels",) if name.endswith("/labels.json") else known


def unchecked(store: Catalog, folders: Sequence[str] | None = None) -> list[str]:
    """Stored arrays whose chunks carry no checksums, so that readers cannot check them, by name.

    folders: of runs and results, by default all. A description that cannot be read is left to `verify`.
    """
    found = []
    for data in store.folders() if folders is None else folders:
        for name in store.files.list(data):
            if name.endswith("/zarr.json"):
                with suppress(ValueError, LookupError, TypeError, AttributeError):
                    codecs = read_json(store.files.get(name) or b"{}").get("codecs", ())
                    if codecs and not _carry_checksums(codecs):
                        found.append(name.removesuffix("/zarr.json"))
    return sorted(found)


def _carry_checksums(codecs: Sequence[dict[str, Any]]) -> bool:
    inner = [one for codec in codecs for one in codec.get("configuration", {}).get("codecs", [codec])]
    return any(codec["name"] == "crc32c" for codec in inner)
