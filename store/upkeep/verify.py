"""Verify: compare every committed file with its recorded size and checksum, in parallel, at the speed of
sha256."""

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
"""Folders of the store -> number of leading path components that name the run, result or folder a file
belongs to."""


@dataclass(frozen=True)
class Damage:
    """A file of the store that is missing, damaged, or differs from the recorded size or checksum."""

    data: str
    """Folder of the run or result, relative to the store; or "keys/ab", "pins" and the like."""
    file: str
    """Path of the file relative to that folder."""
    expected: str
    """Recorded size or checksum, "123 bytes" or "sha256:…"; or what should be there, such as "a pin"."""
    found: str
    """Actual size or checksum, a description of the damage, or "missing"."""

    def __str__(self) -> str:
        return f"{self.data}/{self.file}: expected {self.expected}, found {self.found}"


class _Names:
    """Set of paths in which a file counts as contained if it lies in a contained folder."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._below = tuple(f"{name}/" for name in self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names or name.startswith(self._below)


def verify(store: Catalog, *, quick: bool, progress: Callable[[int, int], None] | None) -> list[Damage]:
    """Compare all committed files of a store with their recorded sizes and checksums.

    Arguments:
        store: The store.
        quick: Whether to compare sizes only, without reading the files.
        progress: Called with (bytes verified, bytes in total) after each file.

    Returns:
        Sorted by path: files that differ from their record, records that are unreadable or whose data is
        missing, and folders, links or pipes in the place of a file.
    """
    damages = _non_files(store)
    non_files = _Names(f"{damage.data}/{damage.file}" for damage in damages)
    damages += _damaged_records(store, non_files)
    expected = []  # (folder, file, size, checksum)
    for folder in store.folders():
        files, unreadable = committed_files(store, folder, non_files)
        damages += unreadable
        expected += [
            (folder, name, size, checksum)
            for name, (size, checksum) in files.items()
            if f"{folder}/{name}" not in non_files
        ]
    total, verified_bytes = sum(size for _, _, size, _ in expected), 0
    with ThreadPoolExecutor(THREADS) as pool:
        # Threads suffice: sha256 and reading release the GIL.
        size_of_check = {
            pool.submit(_damage_of, store, folder, name, size, checksum, quick=quick): size
            for folder, name, size, checksum in expected
        }
        for check in as_completed(size_of_check):
            if (damage := check.result()) is not None:
                damages.append(damage)
            verified_bytes += size_of_check[check]
            if progress is not None:
                progress(verified_bytes, total)
    return sorted(damages, key=lambda damage: (damage.data, damage.file))


def _non_files(store: Catalog) -> list[Damage]:
    """Find links, pipes, devices and folders in the place of files, at which readers or writers would
    fail."""
    damages = []
    for part, steps in _PARTS.items():
        for name, kind in store.files.non_files(part):
            if kind == "a folder" and f"/{DATASET}/" in name:
                continue  # a variable of a result may be named like a file
            components = name.split("/")
            depth = min(steps, len(components) - 1)
            damages.append(Damage("/".join(components[:depth]), "/".join(components[depth:]), "a file", kind))
    return damages


def _damaged_records(store: Catalog, non_files: _Names) -> list[Damage]:
    """Find unreadable key files, pins, annotations, notes and descriptions of runs, and missing manifests.

    Arguments:
        store: The store.
        non_files: Paths that are already reported as damage.
    """
    damages = []
    for name in store.files.list("keys"):
        folder, _, file = name.rpartition("/")
        try:
            record = None if name in non_files else store.lookup(Path(name).stem)
        except CorruptEntry:
            damages.append(Damage(folder, file, "a key file", "unreadable"))
            continue
        if record is not None:
            manifest = manifest_of(record)
            manifest_path = f"{record.data}/{manifest}"
            if manifest_path not in non_files and store.files.size(manifest_path) is None:
                damages.append(Damage(record.data, manifest, f"the manifest of {record.label}", "missing"))

    def is_readable(folder: str, name: str, kind: str, read: Callable[[str, bytes], object]) -> bool:
        """Whether a file exists and is readable; reports an unreadable one."""
        try:
            if name in non_files or (text := store.files.get(name)) is None:
                return False
            read(name, text)
        except CorruptEntry:
            damages.append(Damage(folder, name.removeprefix(f"{folder}/"), kind, "unreadable"))
            return False
        return True

    def describes_run(name: str, text: bytes) -> object:
        return group_attributes(store.files, name.removesuffix("/zarr.json"))

    for name in store.files.list(PINS):
        is_readable(PINS, name, "a pin", unsealed)
    for name in store.files.list(ANNOTATIONS):
        is_readable(name.rpartition("/")[0], name, "an annotation", unsealed)
    for name in store.files.list(VOCABULARIES):
        is_readable(VOCABULARIES, name, "token strings", unsealed)
    for data in store.folders():
        for name in note_names(store.files, data):
            is_readable(data, name, "a note", unsealed)
        # An unreadable description is reported once, not together with everything it describes.
        is_run = is_readable(data, f"{data}/zarr.json", "the description of a run", describes_run)
        if is_run and not _lists_labels(store, data):
            damages.append(Damage(data, "coordinates", "a list of the files of its labels", "missing"))
    return damages


def _lists_labels(store: Catalog, data: str) -> bool:
    """Whether a run's labels are listed in a record, readable or not; True for a run that has no labels
    yet."""
    is_listed = any(OF_LABELS.fullmatch(name) for name in store.files.children(f"{data}/coordinates"))
    return is_listed or "token_id" not in store.files.children(data)


def manifest_of(record: Record) -> str:
    """Path of a record's manifest, relative to its folder."""
    return "manifest.json" if record.kind == RESULT else f"manifest/{record.label.replace('/', '.')}.json"


def _damage_of(
    store: Catalog, folder: str, name: str, size: int, checksum: str, *, quick: bool
) -> Damage | None:
    """Compare a file with its recorded size and, unless `quick`, its checksum; None if it is intact."""
    path = f"{folder}/{name}"
    try:
        actual_size = store.files.size(path)
        if actual_size is not None and actual_size != size:
            return Damage(folder, name, f"{size} bytes", f"{actual_size} bytes")
        if actual_size is None:
            return Damage(folder, name, checksum, "missing")
        if not quick and (actual := store.files.measure(path)[1]) != checksum:
            return Damage(folder, name, checksum, actual)
    except (FileNotFoundError, NotADirectoryError):
        return Damage(folder, name, checksum, "missing")
    except CorruptEntry:
        return Damage(folder, name, checksum, "no file that can be read")
    except StoreError:  # the bucket does not answer, or refuses: this says nothing about damage
        raise
    except OSError as error:
        return Damage(folder, name, checksum, f"unreadable ({error.strerror or error})")
    return None


def committed_files(
    store: Catalog, data: str, strange: _Names | None = None
) -> tuple[dict[str, tuple[int, str]], list[Damage]]:
    """Collect the recorded checksums of all files of a run or result, published or not.

    Arguments:
        store: The store.
        data: Folder of the run or result.
        strange: Paths where a folder, link or pipe is in the place of a file; None for no such paths.

    Returns:
        File -> (bytes, checksum), and a Damage for each record that cannot be read.
    """
    files: dict[str, tuple[int, str]] = {}
    unreadable, non_files = [], strange or _Names()
    for name in _records_with_files(store, data):
        try:
            if name in non_files or (text := store.files.get(name)) is None:
                continue
            record = unsealed(name, text)
            if "files" in record:
                files |= files_of(name, record)
        except CorruptEntry:
            unreadable.append(Damage(data, name.removeprefix(f"{data}/"), "a list of files", "unreadable"))
    return files, unreadable


def _records_with_files(store: Catalog, data: str) -> Iterator[str]:
    """Yield paths of the records of a run or result that list files with checksums."""
    yield f"{data}/manifest.json"
    for part in ("coordinates", "manifest", "seg"):
        for name in sorted(store.files.list(f"{data}/{part}")):
            if name.endswith(".json") and not name.endswith("/zarr.json"):
                yield name
