"""Every committed file against its recorded size and digest, several at a time, at sha256 speed.

Border: files and records; what they mean to an analysis is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ..catalog import Catalog
from ..errors import CorruptEntry, StoreError
from ..files import THREADS
from ..provenance import note_names
from ..records import RESULT, Record
from ..results import DATASET
from ..runs.coordinates import OF_LABELS
from ..runs.entries import group_attributes
from ..runs.vocabularies import VOCABULARIES
from ..sealed import files_of, unsealed
from .annotations import ANNOTATIONS

PINS = "pins"
LEASES = "leases"
_PARTS = {"keys": 2, "data": 3, PINS: 1, ANNOTATIONS: 2, LEASES: 1, VOCABULARIES: 1}
"""Where files lie, and how many steps of a name are the folder of what it belongs to."""


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


class _Names:
    """Names of files and folders; what lies below one of them counts."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._below = tuple(f"{name}/" for name in self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names or name.startswith(self._below)


def verify(store: Catalog, *, quick: bool, progress: Callable[[int, int], None] | None) -> list[Damage]:
    """Committed files that differ from their record, records that are unreadable or lead nowhere, and what
    lies where a file should and is none."""
    found = _strangers(store)
    strange = _Names(f"{damage.data}/{damage.file}" for damage in found)
    found += _dangling(store, strange)
    expected = []
    for data in store.folders():
        files, unreadable = committed_files(store, data, strange)
        found += unreadable
        expected += [
            (data, name, size, file_digest)
            for name, (size, file_digest) in files.items()
            if f"{data}/{name}" not in strange
        ]
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


def _strangers(store: Catalog) -> list[Damage]:
    """Links that lead nowhere, pipes, folders named as files: what a reader, or a writer, stumbles over."""
    found = []
    for part, steps in _PARTS.items():
        for name, what in store.files.non_files(part):
            if what == "a folder" and f"/{DATASET}/" in name:
                continue  # a variable of a result, which may have any name
            words = name.split("/")
            at = min(steps, len(words) - 1)
            found.append(Damage("/".join(words[:at]), "/".join(words[at:]), "a file", what))
    return found


def _dangling(store: Catalog, strange: _Names) -> list[Damage]:
    """Key files, pins, annotations and notes that cannot be read, keys without their manifest, runs not
    described. strange: names that are damage already."""
    found = []
    for name in store.files.list("keys"):
        folder, _, file = name.rpartition("/")
        try:
            record = None if name in strange else store.lookup(Path(name).stem)
        except CorruptEntry:
            found.append(Damage(folder, file, "a key file", "unreadable"))
            continue
        if record is not None:
            manifest = manifest_of(record)
            place = f"{record.data}/{manifest}"
            if place not in strange and store.files.size(place) is None:
                found.append(Damage(record.data, manifest, f"the manifest of {record.label}", "missing"))

    def look(folder: str, name: str, what: str, read: Callable[[str, bytes], object]) -> bool:
        """Whether a file is there and can be read; what cannot is noted."""
        try:
            if name in strange or (text := store.files.get(name)) is None:
                return False
            read(name, text)
        except CorruptEntry:
            found.append(Damage(folder, name.removeprefix(f"{folder}/"), what, "unreadable"))
            return False
        return True

    def describes_run(name: str, text: bytes) -> object:
        return group_attributes(store.files, name.removesuffix("/zarr.json"))

    for name in store.files.list(PINS):
        look(PINS, name, "a pin", unsealed)
    for name in store.files.list(ANNOTATIONS):
        look(name.rpartition("/")[0], name, "an annotation", unsealed)
    for name in store.files.list(VOCABULARIES):
        look(VOCABULARIES, name, "token strings", unsealed)
    for data in store.folders():
        for name in note_names(store.files, data):
            look(data, name, "a note", unsealed)
        is_run = look(data, f"{data}/zarr.json", "the description of a run", describes_run)
        if is_run and not _lists_labels(store, data):
            found.append(Damage(data, "coordinates", "a list of the files of its labels", "missing"))
    return found


def _lists_labels(store: Catalog, data: str) -> bool:
    """Whether a record, sound or not, lists the labels of a run, which may have none: it precedes the run."""
    listed = any(OF_LABELS.fullmatch(name) for name in store.files.children(f"{data}/coordinates"))
    return listed or "token_id" not in store.files.children(data)


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
    except CorruptEntry:
        return Damage(data, name, told, "no file that can be read")
    except StoreError:  # nobody can tell: no answer, or no permission
        raise
    except OSError as error:
        return Damage(data, name, told, f"unreadable ({error.strerror or error})")
    return None


def committed_files(
    store: Catalog, data: str, strange: _Names | None = None
) -> tuple[dict[str, tuple[int, str]], list[Damage]]:
    """File -> (size, digest) of all committed in a folder, published or not; and unreadable lists.

    strange: names that are no files.
    """
    files: dict[str, tuple[int, str]] = {}
    unreadable, strange = [], strange or _Names()
    for name in _lists(store, data):
        try:
            if name in strange or (text := store.files.get(name)) is None:
                continue
            record = unsealed(name, text)
            if "files" in record:
                files |= files_of(name, record)
        except CorruptEntry:
            unreadable.append(Damage(data, name.removeprefix(f"{data}/"), "a list of files", "unreadable"))
    return files, unreadable


def _lists(store: Catalog, data: str) -> Iterator[str]:
    """Names of the records in a folder that list its files."""
    yield f"{data}/manifest.json"
    for part in ("coordinates", "manifest", "seg"):
        for name in sorted(store.files.list(f"{data}/{part}")):
            if name.endswith(".json") and not name.endswith("/zarr.json"):
                yield name
