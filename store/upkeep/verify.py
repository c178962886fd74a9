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
    """Mismatch between a committed file and its record."""

    data: str
    """Folder of the run or result, relative to the store."""
    file: str
    """Path relative to that folder."""
    expected: str
    """"<n> bytes" or "sha256:…"."""
    found: str
    """Actual size or checksum, a description of damage, or "missing"."""

    def __str__(self) -> str:
        return f"{self.data}/{self.file}: expected {self.expected}, found {self.found}"


class _Names:
    """Set of paths that also contains everything below its members."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._below = tuple(f"{name}/" for name in self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names or name.startswith(self._below)


def verify(store: Catalog, *, quick: bool, progress: Callable[[int, int], None] | None) -> list[Damage]:
    """Find damage in a store.

    Arguments:
        store: The store.
        quick: Whether to compare sizes only, without reading the files.
        progress: Called with (bytes verified, bytes in total) after each file.

    Returns:
        Files that differ from their record, records that are unreadable or refer to nothing, and anything
        that stands where a file should but is none (a pipe, a folder), sorted by path.
    """
    damages = _strangers(store)
    strange = _Names(f"{damage.data}/{damage.file}" for damage in damages)
    damages += _dangling(store, strange)
    expected = []
    for data in store.folders():
        files, unreadable = committed_files(store, data, strange)
        damages += unreadable
        expected += [
            (data, name, size, file_digest)
            for name, (size, file_digest) in files.items()
            if f"{data}/{name}" not in strange
        ]
    total, verified_bytes = sum(size for _, _, size, _ in expected), 0
    with ThreadPoolExecutor(THREADS) as pool:
        # Threads suffice: sha256 and reading release the GIL.
        checks = {pool.submit(_check, store, *item, quick=quick): item[2] for item in expected}
        for check in as_completed(checks):
            if (damage := check.result()) is not None:
                damages.append(damage)
            verified_bytes += checks[check]
            if progress is not None:
                progress(verified_bytes, total)
    return sorted(damages, key=lambda damage: (damage.data, damage.file))


def _strangers(store: Catalog) -> list[Damage]:
    """Links, pipes, devices and folders in the place of files, which readers or writers would stumble
    over."""
    damages = []
    for part, steps in _PARTS.items():
        for name, kind in store.files.non_files(part):
            if kind == "a folder" and f"/{DATASET}/" in name:
                continue  # a variable of a result may be named like a file
            components = name.split("/")
            depth = min(steps, len(components) - 1)
            damages.append(Damage("/".join(components[:depth]), "/".join(components[depth:]), "a file", kind))
    return damages


def _dangling(store: Catalog, strange: _Names) -> list[Damage]:
    """Unreadable key files, pins, annotations and notes; keys without a manifest; runs without a description.

    Arguments:
        store: The store.
        strange: Paths that are already reported as damage.
    """
    damages = []
    for name in store.files.list("keys"):
        folder, _, file = name.rpartition("/")
        try:
            record = None if name in strange else store.lookup(Path(name).stem)
        except CorruptEntry:
            damages.append(Damage(folder, file, "a key file", "unreadable"))
            continue
        if record is not None:
            manifest = manifest_of(record)
            manifest_path = f"{record.data}/{manifest}"
            if manifest_path not in strange and store.files.size(manifest_path) is None:
                damages.append(Damage(record.data, manifest, f"the manifest of {record.label}", "missing"))

    def is_readable(folder: str, name: str, kind: str, read: Callable[[str, bytes], object]) -> bool:
        """Whether a file exists and is readable; reports an unreadable one."""
        try:
            if name in strange or (text := store.files.get(name)) is None:
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


def _check(store: Catalog, data: str, name: str, size: int, checksum: str, *, quick: bool) -> Damage | None:
    path = f"{data}/{name}"
    try:
        actual_size = store.files.size(path)
        if actual_size is not None and actual_size != size:
            return Damage(data, name, f"{size} bytes", f"{actual_size} bytes")
        if actual_size is None:
            return Damage(data, name, checksum, "missing")
        if not quick and (actual := store.files.measure(path)[1]) != checksum:
            return Damage(data, name, checksum, actual)
    except (FileNotFoundError, NotADirectoryError):
        return Damage(data, name, checksum, "missing")
    except CorruptEntry:
        return Damage(data, name, checksum, "no file that can be read")
    except StoreError:  # no answer or no permission: says nothing about damage
        raise
    except OSError as error:
        return Damage(data, name, checksum, f"unreadable ({error.strerror or error})")
    return None


def committed_files(
    store: Catalog, data: str, strange: _Names | None = None
) -> tuple[dict[str, tuple[int, str]], list[Damage]]:
    """Collect the recorded checksums of a folder, published or not.

    Arguments:
        store: The store.
        data: Folder of a run or result.
        strange: Paths that are no files.

    Returns:
        File -> (size, checksum), and damage for unreadable records.
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
    """Paths of the records in a folder that list files with checksums."""
    yield f"{data}/manifest.json"
    for part in ("coordinates", "manifest", "seg"):
        for name in sorted(store.files.list(f"{data}/{part}")):
            if name.endswith(".json") and not name.endswith("/zarr.json"):
                yield name
