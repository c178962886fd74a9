"""SQLite caches: location of prompts, last use of folders, digests of files, results of slow checks.

Caches only, never the truth. Readers check every answer of a store's index against the records on disk, and
deleting `index.sqlite` costs only time. So no failure here is an error: a locked, damaged or unwritable
database reads as empty and drops writes.

One SQLite file, safe for many processes through SQLite's own locks and short transactions. No write-ahead
log, because its side files would need write permission even for readers.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from .digest import file_digest
from .files import cache_folder, is_settled, stamp

T = TypeVar("T")
C = TypeVar("C", bound="_Cache")

_USE_RESOLUTION = 60.0  # seconds; a use within this time of the last noted one is not written
_BLOCKS, _BLOCK = 16, 4096  # number and bytes of the blocks sampled from a file
_ATTEMPTS = 3  # attempts to digest a file that changes while it is read
_MOST_ENCODINGS = 64 << 20  # bytes of the cache file; a prompt of 100 tokens takes 2 KB
_VARIABLES = 500  # bound parameters per SQL statement; old SQLite allows 999


class _Cache:
    """Cache in a SQLite file that may be locked, damaged or deleted at any moment, which is no error.

    Arguments:
        path: The file, created on first write; None keeps the cache in memory of this process.
        read_only: Whether writes are ignored; a missing file then reads as empty.
    """

    schema = ""
    """SQL that creates the tables where they are missing."""

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._closing: Callable[[], object] = lambda: None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[type[Self], Path | None, bool]]:
        return _reopen, (type(self), self._path, self._read_only)

    def close(self) -> None:
        """Close the file; the next access opens it again."""
        self._closing()
        self._connection = None

    def _read(self, query: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        """Result of a query; `nothing` if the file is missing or cannot be read."""
        with self._lock:
            try:
                db = self._connect()
                return nothing if db is None else query(db)
            except sqlite3.Error:
                return nothing

    def _write(self, change: Callable[[sqlite3.Connection], object]) -> None:
        """Apply a change in one transaction; drop it if the file cannot be written."""
        if self._read_only:
            return
        with self._lock:
            for attempt in range(2):
                try:
                    db = self._connect()
                    if db is not None:
                        # One transaction: readers see all rows of an entry or none.
                        with db:
                            change(db)
                    return
                except sqlite3.OperationalError:
                    return  # locked for long, disk full, or not writable: drop the write
                except sqlite3.DatabaseError:
                    self._discard()  # damaged: delete the file and try once with a new one
                    if attempt:
                        return

    def _connect(self) -> sqlite3.Connection | None:
        """Database connection, opened at first use and after a fork; None without a database file."""
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        # After a fork the parent's connection would corrupt the database: it is dropped without being closed.
        self._pid = os.getpid()
        self._connection = None
        if self._path is None:
            db = sqlite3.connect(":memory:", check_same_thread=False)
        elif self._path.exists() and not self._path.is_file():
            return None  # opening a pipe as a database would block until somebody writes into it
        elif self._read_only:
            if not self._path.exists():
                return None
            db = sqlite3.connect(
                f"{self._path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False
            )
        else:
            db = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
        if not self._read_only:
            db.execute("PRAGMA synchronous = OFF")  # a lost index is rebuilt, so no fsync
            db.executescript(self.schema)
        self._connection = db
        # weakref.finalize also runs at interpreter exit while modules still exist, unlike __del__.
        self._closing = weakref.finalize(self, _close, db, self._pid)
        return db

    def _discard(self) -> None:
        self.close()
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


class StoreIndex(_Cache):
    """Index of one store: which run has a prompt and in which row, and when a folder was last used."""

    schema = """
        CREATE TABLE IF NOT EXISTS prompts (family TEXT, prompt TEXT, data TEXT, row INTEGER,
            PRIMARY KEY (family, prompt, data)) WITHOUT ROWID;
        CREATE TABLE IF NOT EXISTS uses (data TEXT PRIMARY KEY, at REAL) WITHOUT ROWID;
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        super().__init__(path, read_only=read_only)
        self._used: dict[str, float] = {}

    def add_prompts(self, family: str, data: str, prompts: Iterable[str]) -> None:
        """Enter the prompts of a run into the index.

        Arguments:
            family: Digest of all else that the run depends on (model, interventions, numerics, dtype).
            data: Folder of the run.
            prompts: Digests of the run's prompts, in order.
        """
        rows = [(family, prompt, data, row) for row, prompt in enumerate(prompts)]
        self._write(lambda db: db.executemany("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?)", rows))

    def find_prompts(self, family: str, prompts: Sequence[str]) -> dict[str, dict[str, int]]:
        """Find stored runs by their prompts.

        Arguments:
            family: Digest of all else that the run depends on, see `add_prompts`.
            prompts: Digests of the prompts.

        Returns:
            Folder of the run -> {digest of a prompt: its number in the run}.
        """

        def read(db: sqlite3.Connection) -> dict[str, dict[str, int]]:
            rows_by_entry: dict[str, dict[str, int]] = {}
            for start in range(0, len(prompts), _VARIABLES):
                batch = prompts[start : start + _VARIABLES]
                marks = ",".join("?" * len(batch))
                query = f"SELECT data, prompt, row FROM prompts WHERE family = ? AND prompt IN ({marks})"
                for data, prompt, row in db.execute(query, (family, *batch)):
                    # The file may have been tampered with, so types are checked before use.
                    if isinstance(data, str) and data.isprintable() and isinstance(row, int):
                        rows_by_entry.setdefault(data, {})[prompt] = row
            return rows_by_entry

        return self._read(read, {})

    def touch(self, data: str) -> None:
        """Note that the run or result in a folder is used now, which garbage collection goes by."""
        now = time.time()
        if now - self._used.get(data, 0.0) < _USE_RESOLUTION:
            return
        # In memory first: otherwise a loop over one run would write a row per access.
        self._used[data] = now
        self._write(lambda db: db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?)", (data, now)))

    def last_used(self) -> dict[str, float]:
        """Folder -> time of its last noted use, in seconds since the epoch."""
        nothing: list[tuple[str, object]] = []
        now, query = time.time(), "SELECT data, at FROM uses"
        uses = self._read(lambda db: db.execute(query).fetchall(), nothing)
        return {data: min(at, now) for data, at in uses if isinstance(at, float)}

    def forget(self, data: str) -> None:
        """Remove all rows about a folder."""
        self._used.pop(data, None)

        def drop(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM prompts WHERE data = ?", (data,))
            db.execute("DELETE FROM uses WHERE data = ?", (data,))

        self._write(drop)

    def clear(self) -> None:
        """Empty the index."""
        self._used.clear()
        self._write(lambda db: db.executescript("DELETE FROM prompts; DELETE FROM uses;"))


class FileDigests(_Cache):
    """Cache of the sha256 digests of files, which are valid until a file changes.

    A change is noticed by the file's stamp (inode, size, times) and a digest of sixteen blocks of it. A file
    that changed within one clock tick before it was read, or is dated in the future, is not cached, as its
    next change might not change the stamp. The blocks are for file systems on which a stamp can survive a
    change: those without a reliable ctime, or with the clock of another machine.
    """

    schema = """
        CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, stat TEXT, digest TEXT) WITHOUT ROWID;
    """

    def digest(self, path: Path) -> str:
        """`sha256:…` of a file; OSError if it cannot be read."""
        real = path.resolve()
        for _ in range(_ATTEMPTS):
            before, now = real.stat(), time.time()
            state = _state(real, before)
            if (cached := self._cached_digest(real, state)) is not None:
                return cached
            computed = file_digest(real)
            # Otherwise the file was written while it was digested, and the digest belongs to no version of
            # it.
            if stamp(real.stat()) == stamp(before):
                if is_settled(before, now):
                    self._remember(real, state, computed)
                return computed
        raise OSError(f"the file {real} changes while it is read; wait until it is written completely")

    @staticmethod
    def state(path: Path) -> tuple[str, bool]:
        """Describe the state of a file without reading it whole.

        Returns:
            Text that changes when the file changes, and whether the next change is certain to change it.

        Raises:
            OSError: The file cannot be read.
        """
        real, now = path.resolve(), time.time()
        status = real.stat()
        return _state(real, status), is_settled(status, now)

    def _cached_digest(self, real: Path, state: str) -> str | None:
        query = "SELECT digest FROM files WHERE path = ? AND stat = ?"
        row = self._read(lambda db: db.execute(query, (str(real), state)).fetchone(), None)
        return None if row is None else str(row[0])

    def _remember(self, real: Path, state: str, file_digest: str) -> None:
        row = (str(real), state, file_digest)
        self._write(lambda db: db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", row))


class Verdicts(_Cache):
    """Cache of results of slow checks: (digest of what was checked, name and version of the check) -> result,
    a text."""

    schema = """
        CREATE TABLE IF NOT EXISTS verdicts (subject TEXT, witness TEXT, verdict TEXT,
            PRIMARY KEY (subject, witness)) WITHOUT ROWID;
    """

    def find(self, subject: str) -> dict[str, str]:
        """Results of all checks of a subject (given by its digest): name and version of the check ->
        result."""
        return self._read(
            lambda db: dict(
                db.execute("SELECT witness, verdict FROM verdicts WHERE subject = ?", (subject,)).fetchall()
            ),
            {},
        )

    def add(self, subject: str, witness: str, verdict: str) -> None:
        """Store the result of a check.

        Arguments:
            subject: Digest of what was checked.
            witness: Name and version of the check.
            verdict: Result of the check, a text.
        """
        self._write(
            lambda db: db.execute(
                "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?)", (subject, witness, verdict)
            )
        )


def file_digests() -> FileDigests:
    """The user's cache of file digests, shared by all stores, in $MIZARR_CACHE or ~/.cache/mizarr."""
    return FileDigests(_user_cache() / "digests.sqlite")


def layout_verdicts() -> Verdicts:
    """The user's cache of checks in which unknown model families were compared with transformers."""
    return Verdicts(_user_cache() / "layouts.sqlite")


def encodings() -> Verdicts:
    """The user's cache of encoded texts, for tokenizers that are slow to load; deleted above 64 MiB."""
    path = _user_cache() / "encodings.sqlite"
    with suppress(OSError):
        if path.stat().st_size > _MOST_ENCODINGS:
            path.unlink()
    return Verdicts(path)


def _user_cache() -> Path:
    """The user's cache folder, created if possible."""
    folder = cache_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _state(real: Path, status: os.stat_result) -> str:
    """Text that changes when a file changes: its stamp, and a digest of sixteen blocks."""
    return f"{':'.join(map(str, stamp(status)))}:{_sample(real, status.st_size)}"


def _sample(path: Path, size: int) -> str:
    """Hex digest of blocks spread evenly over a file, including its first and last."""
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for i in range(_BLOCKS):
            # Evenly spaced from the first block to the last; for short files the blocks overlap.
            file.seek(max(0, size - _BLOCK) * i // (_BLOCKS - 1))
            state.update(file.read(_BLOCK))
    return state.hexdigest()


def _close(db: sqlite3.Connection, pid: int) -> None:
    """Close a connection in the process that opened it."""
    with suppress(sqlite3.Error):
        if pid == os.getpid():
            db.close()


def _reopen(kind: type[C], path: Path | None, read_only: bool) -> C:
    return kind(path, read_only=read_only)
