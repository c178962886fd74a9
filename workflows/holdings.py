"""Cached contents of a store for the browser pages: runs, results, their sizes and inputs.

A store of a thousand runs has tens of thousands of files. All are read once, in a thread, newest first; until
then `Snapshot` is partial. Afterwards a folder is read again only when its time stamp, or that of its
records, changes; key files never change.

Border: records, notes and sizes of a store; opens no array and changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ..store import Store
from ..store.errors import CorruptEntry
from ..store.files import Stat
from ..store.provenance import get_provenance
from ..store.records import ACTIVATION, RESULT, Record
from ..store.upkeep.collect import Usage, marked, measure
from ..store.upkeep.lineage import inputs_of
from ..store.upkeep.listing import ListedRun, runs
from ..store.upkeep.questions import Question, is_capture

__all__ = ["GRACE", "AskedQuestion", "HeldFolder", "Holdings", "Removal", "Snapshot"]

REFRESH = 1.0
"""Seconds after which a snapshot is refreshed."""
GRACE = 24 * 3600.0
"""Age in seconds below which `mizarr gc` deletes nothing by default."""
_WATCHED = ("", "/seg", "/manifest", "/provenance")
"""Subfolders whose time stamps show that something was written; without time stamps a folder is always
read."""

Note = Mapping[str, Any]
Removal = Literal["never", "with a quota", "now"]
"""When `mizarr gc` would remove a folder: never as it is now, only to meet a quota, or in any case."""
_REMOVED = {
    "with a quota": "goes when gc is given a quota and room is short",
    "now": "goes: nothing of it is published",
}
"""Future action of `mizarr gc` on a removable folder, in words, by `Removal`."""


@dataclass(frozen=True)
class HeldFolder:
    """Store folder of a model run or of a result."""

    usage: Usage
    """Size on disk, number of files and time of last use."""
    records: tuple[Record, ...]
    """Records of the keys under which the folder is published; empty for an unfinished one."""
    notes: tuple[Note, ...]
    """Provenance notes of its computations."""
    written: float
    """Modification time of the newest file of the folder, in seconds since the epoch. Pages show this instead
    of the last use, because showing a page is a use."""
    run: ListedRun | None = None
    """Row of the run in `mizarr ls`; None for a result."""

    @property
    def data(self) -> str:
        """Path relative to the store."""
        return self.usage.data

    @property
    def label(self) -> str:
        """Label to show: "run of <model>" for a run, the name of the stage for a result, "unfinished" without
        a record."""
        if self.run is not None:
            return f"run of {self.run.model}"
        return self.records[0].label if self.records else "unfinished"

    @property
    def is_cell(self) -> bool:
        """Whether the folder is a cell of a larger result: a part that was computed and committed by
        itself."""
        return "/cell/" in self.label

    def note(self, name: str) -> Any:
        """Value of a field in the first provenance note that has it; None if no note has it."""
        return next((note[name] for note in self.notes if note.get(name) is not None), None)

    @property
    def model(self) -> str:
        """Digest of a run's model; "" if the notes lack the digest."""
        run_note = self.note("run") or {}
        return str(run_note.get("model", ""))

    @cached_property
    def inputs(self) -> dict[str, list[str]]:
        """Inputs that the folder was computed from: name of the input -> content digests."""
        inputs: dict[str, list[str]] = {}
        for note in self.notes:
            inputs.update(inputs_of(note))
        return inputs


@dataclass(frozen=True)
class AskedQuestion:
    """A workflow that was run: its stored results, and the folders they were computed from."""

    question: Question
    """Name, model and settings of the workflow."""
    results: Mapping[str, HeldFolder]
    """Stored results, by their names in the workflow."""
    pieces: tuple[HeldFolder, ...]
    """Runs and other results that the results were computed from, directly or indirectly."""

    @property
    def bytes(self) -> int:
        """Bytes on disk of results and pieces, including those that other workflows share."""
        return sum(folder.usage.bytes for folder in (*self.results.values(), *self.pieces))


@dataclass(frozen=True)
class Snapshot:
    """Contents of a store at one moment."""

    store: Store
    """The store."""
    folders: Mapping[str, HeldFolder]
    """Runs and results of the store, by path relative to it."""
    pins: Mapping[str, str]
    """Name of each pin -> key that it protects from `mizarr gc`."""
    damaged: tuple[str, ...] = ()
    """Error messages of entries that could not be read."""
    unread: int = 0
    """Number of folders that were not read yet."""
    at: float = field(default_factory=time.time)
    """Time of the snapshot, in seconds since the epoch."""

    @cached_property
    def runs(self) -> list[HeldFolder]:
        """Runs, last written first."""
        folders = [folder for folder in self.folders.values() if folder.run is not None]
        return sorted(folders, key=lambda folder: (-folder.written, folder.data))

    @cached_property
    def results(self) -> list[HeldFolder]:
        """Committed results, and cells of larger results, last written first."""
        folders = [folder for folder in self.folders.values() if folder.run is None and folder.records]
        return sorted(folders, key=lambda folder: (-folder.written, folder.data))

    @cached_property
    def questions(self) -> list[AskedQuestion]:
        """Workflows that were run with this store, newest first, with their stored results."""
        by_key = {record.key: folder for folder in self.results for record in folder.records}
        questions = []
        for folder in self.results:
            for question in filter(None, map(Question.of_note, folder.notes)):
                results = {name: by_key[key] for name, key in question.results.items() if key in by_key}
                pieces = self._pieces(results.values())
                questions.append(AskedQuestion(question, results, pieces))
        return sorted(questions, key=lambda asked: (-asked.question.at, asked.question.workflow))

    @cached_property
    def asked_runs(self) -> list[HeldFolder]:
        """Runs that a user captured directly, or that no stored result was computed from."""
        return [run for run in self.runs if any(map(is_capture, run.notes)) or not self.made_of(run)]

    @cached_property
    def other_results(self) -> list[HeldFolder]:
        """Stored results outside all workflows: neither cells of a stage nor inputs of another result."""
        of_questions = {folder.data for question in self.questions for folder in question.results.values()}
        return [
            folder
            for folder in self.results
            if not folder.is_cell and folder.data not in of_questions and not self.made_of(folder)
        ]

    def _pieces(self, results: Iterable[HeldFolder]) -> tuple[HeldFolder, ...]:
        """Everything that some results were computed from, directly or indirectly, without the results."""
        start = {folder.data: folder for folder in results}
        reached, waiting = dict(start), list(start.values())
        while waiting:
            for source in self.made_from(waiting.pop()):
                if source.data not in reached:
                    reached[source.data] = source
                    waiting.append(source)
        return tuple(reached.values())[len(start) :]

    @cached_property
    def leftovers(self) -> list[HeldFolder]:
        """Folders of unfinished or killed computations: neither runs nor published results."""
        return [folder for folder in self.folders.values() if folder.run is None and not folder.records]

    @cached_property
    def by_content(self) -> dict[str, list[str]]:
        """Paths of folders by the digest of their content."""
        paths: dict[str, list[str]] = {}
        for folder in self.folders.values():
            for record in folder.records:
                paths.setdefault(record.content, []).append(folder.data)
        return paths

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """Paths of derived folders by content digest of their input."""
        paths: dict[str, list[str]] = {}
        for folder in self.folders.values():
            for contents in folder.inputs.values():
                for content in contents:
                    paths.setdefault(content, []).append(folder.data)
        return paths

    def made_from(self, folder: HeldFolder) -> list[HeldFolder]:
        """Stored folders that a result was computed from, without duplicates."""
        contents = [content for digests in folder.inputs.values() for content in digests]
        return self._named(data for content in contents for data in self.by_content.get(content, ()))

    def made_of(self, folder: HeldFolder) -> list[HeldFolder]:
        """Stored folders that were computed from a run or a result, without duplicates."""
        return self._named(
            data for record in folder.records for data in self._readers.get(record.content, ())
        )

    def _named(self, names: Iterable[str]) -> list[HeldFolder]:
        return [self.folders[name] for name in dict.fromkeys(names)]

    def pin(self, folder: HeldFolder) -> str:
        """Name of the pin that protects a folder; "" for none."""
        keys = {record.key for record in folder.records}
        return next((name for name, key in self.pins.items() if key in keys), "")

    @cached_property
    def _spared(self) -> set[str]:
        keys = {data: folder.records for data, folder in self.folders.items() if folder.records}
        return marked(self.store, keys, self.at - GRACE, self._notes)

    def _notes(self, data: str) -> Sequence[Note]:
        folder = self.folders.get(data)
        return () if folder is None else folder.notes

    def removal(self, folder: HeldFolder) -> Removal:
        """When `mizarr gc` would remove a folder: "never", "with a quota" or "now"."""
        if self.pin(folder) or folder.data in self._spared:
            return "never"
        if folder.records:
            return "with a quota"
        return "now" if folder.usage.used < self.at - GRACE else "never"

    def fate(self, folder: HeldFolder) -> str:
        """What `mizarr gc` would do with a folder, as a phrase for pages; code reads `removal` instead."""
        removal = self.removal(folder)
        if removal != "never":
            return _REMOVED[removal]
        if name := self.pin(folder):
            return f"stays: pinned as {name}"
        if folder.data in self._spared:
            return "stays: younger than a day, in use, or behind something that is or is pinned"
        return "stays: begun within a day"


class Holdings:
    """Source of snapshots of a store's contents, which are cheap to take again; thread-safe."""

    def __init__(self, store: Store, refresh: float = REFRESH) -> None:
        self.store = store
        self._refresh = refresh
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._cached: dict[str, tuple[object, HeldFolder]] = {}
        self._damaged: list[str] = []
        self._folders = 0
        self._whole: Snapshot | None = None
        self._seen = 0.0
        self._looking: threading.Thread | None = None
        self._failed: BaseException | None = None

    def look(self, patience: float | None = None) -> Snapshot:
        """A snapshot of the store, no older than the refresh interval.

        patience: seconds to wait for the first complete snapshot, before a partial one is returned; None to
            wait until it is complete.
        """
        with self._lock:
            looking = self._looking
            if looking is None and time.monotonic() - self._seen > self._refresh:
                # A daemon: reading a large store never keeps the process from ending.
                looking = threading.Thread(target=self._look_again, name="mizarr-look", daemon=True)
                looking.start()
                self._looking = looking
        if looking is not None:
            looking.join(patience)
        if self._failed is not None:
            raise self._failed
        return self._whole or self._so_far()

    def _look_again(self) -> None:
        try:
            self._read_all()
            self._whole = self._so_far(is_whole=True)
            self._failed = None
        # An exception of a thread would only be printed; `look` raises it in the thread of the caller.
        except Exception as error:  # noqa: BLE001 - raised by `look`
            self._failed = error
        finally:
            with self._lock:
                self._seen, self._looking = time.monotonic(), None

    def _so_far(self, *, is_whole: bool = False) -> Snapshot:
        """Snapshot of what has been read. is_whole: whether everything has; otherwise at least one folder is
        reported as unread."""
        pins: dict[str, str] = {}
        with suppress(CorruptEntry):
            pins = self.store.pins()
        # A copy: a dict cannot be iterated while the reading thread adds to it.
        folders = {data: folder for data, (_, folder) in list(self._cached.items())}
        unread = 0 if is_whole else max(1, self._folders - len(folders) - len(self._damaged))
        return Snapshot(self.store, folders, pins, tuple(self._damaged), unread)

    def _read_all(self) -> None:
        damaged, records = [], {}
        by_data: dict[str, list[Record]] = {}
        folders = self.store.folders()
        self._folders = len(folders)
        for name in self.store.key_names(""):
            try:
                record = self._records.get(name) or self.store.lookup(name)
            except CorruptEntry as error:
                damaged.append(str(error))
                continue
            if record is not None:
                records[name] = record
                by_data.setdefault(record.data, []).append(record)
        self._records = records
        last_used = self.store.index.last_used()
        stats = {data: self._look_at(data) for data in folders}
        # A folder whose (time stamps, keys) are unchanged is not read again.
        states = {
            data: (
                tuple(None if stat is None else stat.stamp for stat in stats[data]),
                tuple(record.key for record in by_data.get(data, ())),
            )
            for data in folders
        }
        # During the first read, folders appear in the shared dict one by one, for partial snapshots.
        cached = self._cached if self._whole is None else {}
        for data in sorted(folders, key=lambda data: _newest(stats[data]), reverse=True):
            cached_state, folder = self._cached.get(data, (None, None))
            time_stamps, _ = states[data]
            # Without time stamps a folder is always read again.
            if folder is None or cached_state != states[data] or not any(time_stamps):
                try:
                    folder = self._folder(data, tuple(by_data.get(data, ())))
                except (CorruptEntry, OSError, LookupError) as error:
                    damaged.append(f"{data}: {error}")
                    continue
            cached[data] = states[data], _used(folder, last_used.get(data, 0.0))
        self._cached, self._damaged = cached, damaged

    def _look_at(self, data: str) -> list[Stat | None]:
        return [self.store.files.folder_stat(f"{data}{name}") for name in _WATCHED]

    def _folder(self, data: str, records: tuple[Record, ...]) -> HeldFolder:
        count, total, newest = measure(self.store.files, data)
        is_run = self.store.files.size(f"{data}/zarr.json") is not None
        labels = tuple(record.label for record in records)
        usage = Usage(data, ACTIVATION if is_run else RESULT, labels, total, count, newest)
        notes = tuple(get_provenance(self.store.files, data))
        listed = runs(self.store, [usage])
        return HeldFolder(usage, records, notes, newest, listed[0] if listed else None)


def _newest(looks: Iterable[Stat | None]) -> float:
    return max((stat.modified for stat in looks if stat is not None), default=0.0)


def _used(folder: HeldFolder, at: float) -> HeldFolder:
    """The folder with its time of last use raised to `at`, in seconds since the epoch, if that is later."""
    if at <= folder.usage.used:
        return folder
    run = None if folder.run is None else replace(folder.run, used=at)
    return replace(folder, usage=replace(folder.usage, used=at), run=run)
