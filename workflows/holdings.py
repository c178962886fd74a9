"""What a store holds, remembered between pages: runs, results, their sizes, and what was made of what.

A store of a thousand runs has tens of thousands of files. All are looked at once, in a thread, the newest
first, and until that is done `Snapshot` is what was found so far; afterwards a folder is looked at again when
its own stamp, or that of its records, moved, and a key file never, as it never changes.

Border: records, notes and sizes of a store; opens no array and changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..store import Store
from ..store.errors import CorruptEntry
from ..store.files import Stat
from ..store.provenance import get_provenance
from ..store.records import ACTIVATION, RESULT, Record
from ..store.upkeep.collect import Usage, marked, measure
from ..store.upkeep.lineage import inputs_of
from ..store.upkeep.listing import ListedRun, runs
from ..store.upkeep.questions import Question, is_capture

__all__ = ["GRACE", "AskedQuestion", "HeldFolder", "Holdings", "Snapshot"]

REFRESH = 1.0
"""Seconds within which a store is not looked at again."""
GRACE = 24 * 3600.0
"""What `mizarr gc` leaves alone by default: what is younger, in seconds."""
_WATCHED = ("", "/seg", "/manifest", "/provenance")
"""Folders of a run whose change shows that something was written; where there are none, it is read anew."""

Note = Mapping[str, Any]


@dataclass(frozen=True)
class HeldFolder:
    """A run or a result: its records, what is noted about it, and, of a run, how it is listed.

    written: when its newest file was, in seconds since the epoch. Pages show this and not the last use, as
    looking at a page is a use.
    """

    usage: Usage
    records: tuple[Record, ...]
    notes: tuple[Note, ...]
    written: float
    run: ListedRun | None = None

    @property
    def data(self) -> str:
        """Where it lies, relative to the store."""
        return self.usage.data

    @property
    def label(self) -> str:
        """For people: of a result its stage, of a run its model."""
        if self.run is not None:
            return f"run of {self.run.model}"
        return self.records[0].label if self.records else "unfinished"

    @property
    def is_cell(self) -> bool:
        """Whether it is a piece of a larger result."""
        return "/cell/" in self.label

    def note(self, name: str) -> Any:
        """The first value noted under a name; None where nobody noted it."""
        return next((note[name] for note in self.notes if note.get(name) is not None), None)

    @property
    def model(self) -> str:
        """Digest of a run's model."""
        asked = self.note("run") or {}
        return str(asked.get("model", ""))

    @cached_property
    def inputs(self) -> dict[str, list[str]]:
        """What it was made from: name -> content digests."""
        found: dict[str, list[str]] = {}
        for note in self.notes:
            found.update(inputs_of(note))
        return found


@dataclass(frozen=True)
class AskedQuestion:
    """A workflow that was computed: its stored results, and the folders these were made from."""

    question: Question
    results: Mapping[str, HeldFolder]
    """Those of its results that are stored, by their names in the workflow."""
    pieces: tuple[HeldFolder, ...]
    """Runs and results that these were made from, and no others of the question."""

    @property
    def bytes(self) -> int:
        """Bytes on disk of results and pieces, those that other questions share counted in."""
        return sum(folder.usage.bytes for folder in (*self.results.values(), *self.pieces))


@dataclass(frozen=True)
class Snapshot:
    """A store at one moment. folders: by where they lie. damaged: what could not be read. unread: folders
    that were not looked at yet."""

    store: Store
    folders: Mapping[str, HeldFolder]
    pins: Mapping[str, str]
    damaged: tuple[str, ...] = ()
    unread: int = 0
    at: float = field(default_factory=time.time)

    @cached_property
    def runs(self) -> list[HeldFolder]:
        """Runs, the one written last first."""
        held = [each for each in self.folders.values() if each.run is not None]
        return sorted(held, key=lambda each: (-each.written, each.data))

    @cached_property
    def results(self) -> list[HeldFolder]:
        """Published results and their pieces, the one written last first."""
        held = [each for each in self.folders.values() if each.run is None and each.records]
        return sorted(held, key=lambda each: (-each.written, each.data))

    @cached_property
    def questions(self) -> list[AskedQuestion]:
        """Questions that were asked of this store, the newest first, as far as their results are there."""
        by_key = {record.key: folder for folder in self.results for record in folder.records}
        found = []
        for folder in self.results:
            for question in filter(None, map(Question.of_note, folder.notes)):
                results = {name: by_key[key] for name, key in question.results.items() if key in by_key}
                pieces = self._pieces(results.values())
                found.append(AskedQuestion(question, results, pieces))
        return sorted(found, key=lambda asked: (-asked.question.at, asked.question.workflow))

    @cached_property
    def asked_runs(self) -> list[HeldFolder]:
        """Runs that were captured for their own sake, or that no stored result was made from."""
        return [run for run in self.runs if any(map(is_capture, run.notes)) or not self.made_of(run)]

    @cached_property
    def other_results(self) -> list[HeldFolder]:
        """Results that belong to no question, are no cells, and that nothing else was made from."""
        asked = {folder.data for question in self.questions for folder in question.results.values()}
        return [
            folder
            for folder in self.results
            if not folder.is_cell and folder.data not in asked and not self.made_of(folder)
        ]

    def _pieces(self, results: Iterable[HeldFolder]) -> tuple[HeldFolder, ...]:
        """All that some results were made from, over any number of steps, without these."""
        given = {folder.data: folder for folder in results}
        found, waiting = dict(given), list(given.values())
        while waiting:
            for source in self.made_from(waiting.pop()):
                if source.data not in found:
                    found[source.data] = source
                    waiting.append(source)
        return tuple(found.values())[len(given) :]

    @cached_property
    def leftovers(self) -> list[HeldFolder]:
        """Folders without a key that are no runs: attempts that were begun, or killed."""
        return [each for each in self.folders.values() if each.run is None and not each.records]

    @cached_property
    def by_content(self) -> dict[str, list[str]]:
        """Folders by what they hold."""
        found: dict[str, list[str]] = {}
        for each in self.folders.values():
            for record in each.records:
                found.setdefault(record.content, []).append(each.data)
        return found

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """Folders by the contents they were made from."""
        found: dict[str, list[str]] = {}
        for each in self.folders.values():
            for contents in each.inputs.values():
                for content in contents:
                    found.setdefault(content, []).append(each.data)
        return found

    def made_from(self, folder: HeldFolder) -> list[HeldFolder]:
        """What a result was made from, as far as it is stored, each once."""
        contents = [content for some in folder.inputs.values() for content in some]
        return self._named(data for content in contents for data in self.by_content.get(content, ()))

    def made_of(self, folder: HeldFolder) -> list[HeldFolder]:
        """What was made from a run or a result, each once."""
        return self._named(
            data for record in folder.records for data in self._readers.get(record.content, ())
        )

    def _named(self, names: Iterable[str]) -> list[HeldFolder]:
        return [self.folders[name] for name in dict.fromkeys(names)]

    def pin(self, folder: HeldFolder) -> str:
        """Name of the pin that holds it; "" for none."""
        keys = {record.key for record in folder.records}
        return next((name for name, key in self.pins.items() if key in keys), "")

    @cached_property
    def _spared(self) -> set[str]:
        keys = {data: each.records for data, each in self.folders.items() if each.records}
        return marked(self.store, keys, self.at - GRACE, self._notes)

    def _notes(self, data: str) -> Sequence[Note]:
        folder = self.folders.get(data)
        return () if folder is None else folder.notes

    def fate(self, folder: HeldFolder) -> str:
        """What `mizarr gc` would do with it, in words."""
        if name := self.pin(folder):
            return f"stays: pinned as {name}"
        if folder.data in self._spared:
            return "stays: younger than a day, in use, or behind something that is or is pinned"
        if folder.records:
            return "goes when gc is given a quota and room is short"
        old = folder.usage.used < self.at - GRACE
        return "goes: nothing of it is published" if old else "stays: begun within a day"


class Holdings:
    """Looks at a store again and again, cheaply; safe for any number of threads."""

    def __init__(self, store: Store, refresh: float = REFRESH) -> None:
        self.store = store
        self._refresh = refresh
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._known: dict[str, tuple[object, HeldFolder]] = {}
        self._damaged: list[str] = []
        self._folders = 0
        self._whole: Snapshot | None = None
        self._seen = 0.0
        self._looking: threading.Thread | None = None
        self._failed: BaseException | None = None

    def look(self, patience: float | None = None) -> Snapshot:
        """What the store holds, no older than a second.

        patience: seconds to wait where it was never seen whole; then what was found so far. None: as long as
        it takes.
        """
        with self._lock:
            looking = self._looking
            if looking is None and time.monotonic() - self._seen > self._refresh:
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
        except Exception as error:  # noqa: BLE001 - raised where somebody asks
            self._failed = error
        finally:
            with self._lock:
                self._seen, self._looking = time.monotonic(), None

    def _so_far(self, *, is_whole: bool = False) -> Snapshot:
        """What was found until now; before the folders are counted one is told as unread."""
        pins: dict[str, str] = {}
        with suppress(CorruptEntry):
            pins = self.store.pins()
        known = {data: folder for data, (_, folder) in list(self._known.items())}
        unread = 0 if is_whole else max(1, self._folders - len(known) - len(self._damaged))
        return Snapshot(self.store, known, pins, tuple(self._damaged), unread)

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
        used = self.store.index.last_used()
        looks = {data: self._look_at(data) for data in folders}
        states = {
            data: (
                tuple(None if stat is None else stat.stamp for stat in looks[data]),
                tuple(record.key for record in by_data.get(data, ())),
            )
            for data in folders
        }
        known = self._known if self._whole is None else {}
        for data in sorted(folders, key=lambda data: _newest(looks[data]), reverse=True):
            before = self._known.get(data)
            try:
                folder = (
                    before[1]
                    if before is not None and before[0] == states[data] and any(states[data][0])
                    else self._folder(data, tuple(by_data.get(data, ())))
                )
            except (CorruptEntry, OSError, LookupError) as error:
                damaged.append(f"{data}: {error}")
                continue
            known[data] = states[data], _used(folder, used.get(data, 0.0))
        self._known, self._damaged = known, damaged

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
    """The folder with a later use."""
    if at <= folder.usage.used:
        return folder
    run = None if folder.run is None else replace(folder.run, used=at)
    return replace(folder, usage=replace(folder.usage, used=at), run=run)
