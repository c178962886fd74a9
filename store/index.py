"""SQLite caches: where a prompt was stored, when a folder was last used, what a file digested to or a check
found.

Border: caches, never the truth. Every answer of a store's index is checked by its reader against the records
on disk, and deleting `index.sqlite` loses nothing but time. So no failure in here is an error: a locked,
damaged or unwritable database reads as empty and forgets what it is told.

One SQLite file, safe for many processes (its own locks, short transactions, no write-ahead log, so that a
reader without write permission needs no side files). A read-only store opens it read-only, or works without.
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

_USE_RESOLUTION = 60.0  # seconds; a use within this of the last one is not written again
_BLOCKS, _BLOCK = 16, 4096  # of a file, and bytes of each
_ATTEMPTS = 3  # to digest a file that is being written
_MOST_ENCODINGS = 64 << 20  # bytes of the file; a prompt of 100 tokens takes 2 KB
_VARIABLES = 500  # bound parameters per statement; old SQLite allows 999


class _Cache:
    """A SQLite file that may be lost, locked or damaged at any moment.

    path: created on first write; None keeps the cache in memory for this process only.
    A `read_only` cache answers from an existing file and ignores writes.
    """

    schema = ""

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
        """Let go of the file; the next question opens it again."""
        self._closing()
        self._connection = None

    def _read(self, query: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        with self._lock:
            try:
                db = self._connect()
                return nothing if db is None else query(db)
            except sqlite3.Error:
                return nothing

    def _write(self, change: Callable[[sqlite3.Connection], object]) -> None:
        if self._read_only:
            return
        with self._lock:
            for attempt in range(2):
                try:
                    db = self._connect()
                    if db is not None:
                        with db:
                            change(db)
                    return
                except sqlite3.OperationalError:
                    return  # locked for long, disk full, not writable: forget it
                except sqlite3.DatabaseError:
                    self._discard()  # not a database any more: start afresh, once
                    if attempt:
                        return

    def _connect(self) -> sqlite3.Connection | None:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        # SQLite connections do not survive a fork; the parent's is dropped here without being closed.
        self._pid = os.getpid()
        self._connection = None
        if self._path is None:
            db = sqlite3.connect(":memory:", check_same_thread=False)
        elif self._path.exists() and not self._path.is_file():
            return None  # SQLite waits for whoever writes into a pipe
        elif self._read_only:
            if not self._path.exists():
                return None
            db = sqlite3.connect(
                f"{self._path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False
            )
        else:
            db = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
        if not self._read_only:
            db.execute("PRAGMA synchronous = OFF")  # a lost index is rebuilt; never wait for the disk
            db.executescript(self.schema)
        self._connection = db
        # When nobody holds this any more, or at exit, before modules are taken down: __del__ may come later.
        self._closing = weakref.finalize(self, _close, db, self._pid)
        return db

    def _discard(self) -> None:
        self.close()
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


class StoreIndex(_Cache):
    """The rebuildable index of one store: prompt -> entry and row, folder -> last use."""

    schema = """
        CREATE TABLE IF NOT EXISTS prompts (family TEXT, prompt TEXT, data TEXT, row INTEGER,
            PRIMARY KEY (family, prompt, data)) WITHOUT ROWID;
        CREATE TABLE IF NOT EXISTS uses (data TEXT PRIMARY KEY, at REAL) WITHOUT ROWID;
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        super().__init__(path, read_only=read_only)
        self._used: dict[str, float] = {}

    def add_prompts(self, family: str, data: str, prompts: Iterable[str]) -> None:
        """Remember that row i of entry `data` holds the i-th of `prompts` (digests).

        family: digest of what else the run depends on (model, interventions, numeric policy).
        """
        rows = [(family, prompt, data, row) for row, prompt in enumerate(prompts)]
        self._write(lambda db: db.executemany("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?)", rows))

    def find_prompts(self, family: str, prompts: Sequence[str]) -> dict[str, dict[str, int]]:
        """Where the prompts were seen: entry -> {prompt digest: row}, for entries that hold at least one."""

        def read(db: sqlite3.Connection) -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {}
            for start in range(0, len(prompts), _VARIABLES):
                part = prompts[start : start + _VARIABLES]
                marks = ",".join("?" * len(part))
                query = f"SELECT data, prompt, row FROM prompts WHERE family = ? AND prompt IN ({marks})"
                for data, prompt, row in db.execute(query, (family, *part)):
                    # It may hold anything.
                    if isinstance(data, str) and data.isprintable() and isinstance(row, int):
                        found.setdefault(data, {})[prompt] = row
            return found

        return self._read(read, {})

    def touch(self, data: str) -> None:
        """Note that the folder `data` was used now."""
        now = time.time()
        if now - self._used.get(data, 0.0) < _USE_RESOLUTION:
            return
        self._used[data] = now
        self._write(lambda db: db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?)", (data, now)))

    def last_used(self) -> dict[str, float]:
        """Seconds since the epoch of the last noted use, by data folder."""
        nothing: list[tuple[str, object]] = []
        now, query = time.time(), "SELECT data, at FROM uses"
        uses = self._read(lambda db: db.execute(query).fetchall(), nothing)
        return {data: min(at, now) for data, at in uses if isinstance(at, float)}

    def forget(self, data: str) -> None:
        """Drop all that is known about the folder `data`."""
        self._used.pop(data, None)

        def drop(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM prompts WHERE data = ?", (data,))
            db.execute("DELETE FROM uses WHERE data = ?", (data,))

        self._write(drop)

    def clear(self) -> None:
        """Empty the index, to be filled again from the entries."""
        self._used.clear()
        self._write(lambda db: db.executescript("DELETE FROM prompts; DELETE FROM uses;"))


class FileDigests(_Cache):
    """sha256 of files, computed once: remembered by real path, stamp (device, inode, size, mtime, ctime) and
    a digest of sixteen blocks spread over the file.

    A file changed within one tick of the clock before it was looked at, or dated in the future, is digested
    but not remembered: its next change might not show. The blocks are for file systems on which the stamp can
    be kept while the file is written over: without a ctime that every change moves, or through another clock.
    """

    schema = """
        CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, stat TEXT, digest TEXT) WITHOUT ROWID;
    """

    def digest(self, path: Path) -> str:
        """`sha256:…` of the file's bytes; OSError when it cannot be read."""
        real = path.resolve()
        for _ in range(_ATTEMPTS):
            before, now = real.stat(), time.time()
            state = _state(real, before)
            if (known := self._known(real, state)) is not None:
                return known
            found = file_digest(real)
            if stamp(real.stat()) == stamp(before):
                if is_settled(before, now):
                    self._remember(real, state, found)
                return found
        raise OSError(f"{real} is being written while it is digested; wait until it is whole")

    @staticmethod
    def state(path: Path) -> tuple[str, bool]:
        """What a file is remembered by, and whether its next change would show in that: then its digest is
        what it was as long as it keeps this. OSError when it cannot be read."""
        real, now = path.resolve(), time.time()
        found = real.stat()
        return _state(real, found), is_settled(found, now)

    def _known(self, real: Path, state: str) -> str | None:
        query = "SELECT digest FROM files WHERE path = ? AND stat = ?"
        known = self._read(lambda db: db.execute(query, (str(real), state)).fetchone(), None)
        return None if known is None else str(known[0])

    def _remember(self, real: Path, state: str, found: str) -> None:
        row = (str(real), state, found)
        self._write(lambda db: db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", row))


class Verdicts(_Cache):
    """Answers that took long to find: of a case, by its digest, according to a witness, by name and version.

    A verdict is a text; what it says is its reader's business.
    """

    schema = """
        CREATE TABLE IF NOT EXISTS verdicts (subject TEXT, witness TEXT, verdict TEXT,
            PRIMARY KEY (subject, witness)) WITHOUT ROWID;
    """

    def find(self, subject: str) -> dict[str, str]:
        """Every verdict on a case, by witness."""
        return self._read(
            lambda db: dict(
                db.execute("SELECT witness, verdict FROM verdicts WHERE subject = ?", (subject,)).fetchall()
            ),
            {},
        )

    def add(self, subject: str, witness: str, verdict: str) -> None:
        """Remember what a witness says of a case."""
        self._write(
            lambda db: db.execute(
                "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?)", (subject, witness, verdict)
            )
        )


def file_digests() -> FileDigests:
    """The memo shared by all stores of a user, in the folder $MIZARR_CACHE or else ~/.cache/mizarr."""
    return FileDigests(_user_cache() / "digests.sqlite")


def layout_verdicts() -> Verdicts:
    """Which models of unknown family compute what transformers computes, beside the file digests."""
    return Verdicts(_user_cache() / "layouts.sqlite")


def encodings() -> Verdicts:
    """What texts were encoded to, by tokenizers that take long to make; begun afresh when it is large."""
    path = _user_cache() / "encodings.sqlite"
    with suppress(OSError):
        if path.stat().st_size > _MOST_ENCODINGS:
            path.unlink()
    return Verdicts(path)


def _user_cache() -> Path:
    folder = cache_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _state(real: Path, found: os.stat_result) -> str:
    return f"{':'.join(map(str, stamp(found)))}:{_sample(real, found.st_size)}"


def _sample(path: Path, size: int) -> str:
    """Hex digest of blocks spread evenly over a file, its first and its last among them."""
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for i in range(_BLOCKS):
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
