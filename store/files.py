"""The files of a store, by name: created once and whole, listed, removed; failures told as store errors.

Border: names relative to the store's root and bytes; what they mean is known elsewhere.

A file appears under its name complete or not at all, and the first to create it wins: written to a temporary
name in the same folder, then linked, which fails if the name is taken (`open("x")` would show half a file,
and `rename` would replace another process's). With durability "disk" a file is synced before it gets its
name, so a name never outlives its bytes in a power cut; "process" leaves that to the kernel. Files that
belong together are synced together: the disk then waits about once for all of them, without threads, which
would take their turns from whoever computes meanwhile. Where nobody does, several may write; and who takes
turns with a computation is told when only the disk is waited for.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .digest import Buffer, file_digest
from .errors import ReadOnlyStore, StoreError, StoreFull

THREADS = 4
"""That digest at once: sha256 releases the GIL, two are twice as fast; beyond four the disk is the limit."""
_REMEMBERED = 20_000  # folders
_WORTH_AN_EARLY_START = 1 << 20  # bytes; the sync of smaller files is all the disk's work there is
_AT_ONCE = 64  # parts per call; every system takes that many
_OPEN = 128  # files open at once
_UNNAMED = 1 << 28  # bytes of files that wait for their names together
_SETTLED = 2.0  # seconds; the coarsest clock of a file system ticks that slowly

Files = dict[str, list[int | str]]
"""Manifest part: path relative to the folder -> [size in bytes, "sha256:…"]."""
Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, mtime and ctime in nanoseconds: as long as a file keeps its stamp, it is as it was."""


@dataclass(frozen=True)
class Folder:
    """The folder of a store.  durability: "disk" or "process"."""

    root: Path
    durability: str = "disk"
    read_only: bool = False
    # Folders whose own names are known to last, with their inodes; only saves time.
    _settled: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)

    def path(self, name: str) -> Path:
        """Where a name lies on disk."""
        return self.root / name

    def get(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is none."""
        try:
            # Not through Path: half of the time in which a harvest reads ten thousand records.
            with open(f"{self.root}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            return os.stat(f"{self.root}/{name}").st_size  # noqa: PTH116 - of every file of a result
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put_new(self, name: str, data: bytes) -> bool:
        """Create a file with these bytes; False, and nothing changes, when it is there already."""
        return bool(self.put_all({name: [data]}))

    def put_all(
        self,
        files: Mapping[str, Sequence[Buffer]],
        *,
        threads: int = 1,
        handed_over: Callable[[], None] = lambda: None,
    ) -> set[str]:
        """Create files of these parts, each laid end to end; returns the new names, the others stay.

        Files are taken in turns of some: of each turn all bytes are on disk before the first name appears.
        Names appear in order, and last when this returns.
        threads: that write side by side; more than one only where nobody computes meanwhile. handed_over:
        called when the system has all bytes, and what is left is waiting for the disk.
        """
        made: set[str] = set()
        turns = list(_turns(files))
        for some in turns:
            with self.writing(next(iter(some))):
                made.update(self._put_turn(some, threads, handed_over if some is turns[-1] else lambda: None))
        self._sync_names(made)
        return made

    def _put_turn(
        self, files: Mapping[str, Sequence[Buffer]], threads: int, handed_over: Callable[[], None]
    ) -> list[str]:
        names = [name for name in files if not self.path(name).exists()]
        with ExitStack() as stack:
            waiting = {name: stack.enter_context(self._temporary(name)) for name in names}

            def write(name: str) -> int:
                handle = _written(waiting[name], files[name])
                stack.callback(os.close, handle)
                if self.durability == "disk":
                    _start_writing(handle)
                return handle

            if threads > 1:
                with ThreadPoolExecutor(threads) as pool:
                    handles = list(pool.map(write, names))
            else:
                handles = [write(name) for name in names]
            handed_over()
            if self.durability == "disk":
                # Whichever sync is first commits all of them.
                for handle in handles:
                    os.fsync(handle)
            return [name for name in names if _linked(waiting[name], self.path(name))]

    def link_all(self, names: Mapping[str, str]) -> set[str]:
        """Give files a further name each, new -> old; returns the new names, those taken stay as they are."""
        made: set[str] = set()
        for name, old in names.items():
            with self.writing(name):
                target = self.path(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                if _linked(self.path(old), target):
                    made.add(name)
        self._sync_names(made)
        return made

    @property
    def free_bytes(self) -> int:
        """Bytes the file system has left for this user."""
        return shutil.disk_usage(next(path for path in (self.root, *self.root.parents) if path.exists())).free

    def stamps(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Names of what lies directly in a folder, each with what the system says of it."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path(folder)) as found:
            for item in found:
                if not item.name.startswith("."):
                    with suppress(FileNotFoundError):
                        yield item.name, item.stat()

    def children(self, folder: str) -> Iterator[str]:
        """Names of what lies directly in a folder, without the folder's; temporary ones left out."""
        try:
            with os.scandir(self.path(folder)) as found:
                yield from (item.name for item in found if not item.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return

    def make_folder(self, name: str) -> Path:
        """Create a folder that must be new, and those above it."""
        with self.writing(name):
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        return path

    def list(self, folder: str) -> Iterator[str]:
        """Names of all files below a folder, relative to the root; temporary ones (leading dot) left out."""
        for top, _, files in os.walk(self.path(folder)):
            base = Path(top).relative_to(self.root)
            yield from (str(base / file) for file in files if not file.startswith("."))

    def settle(self, folder: str) -> Files:
        """Sync all files below a folder and digest them: path relative to the folder -> [size, digest]."""
        top = self.path(folder)
        paths = sorted(path for path in top.rglob("*") if path.is_file())

        def one(path: Path) -> list[int | str]:
            if self.durability == "disk":
                _sync(path)
            return [path.stat().st_size, file_digest(path)]

        with self.writing(folder), ThreadPoolExecutor(THREADS) as pool:
            found = dict(
                zip((str(path.relative_to(top)) for path in paths), pool.map(one, paths), strict=True)
            )
            for inner in {path.parent for path in paths} | {top, top.parent}:
                self._sync_folder(inner)
        return found

    def delete(self, name: str) -> None:
        """Remove a file if it is there."""
        with self.writing(name):
            self.path(name).unlink(missing_ok=True)

    def remove_tree(self, folder: str) -> None:
        """Remove a folder and all below it, if it is there; what cannot be removed stays for gc."""
        if not self.read_only:
            self._settled.clear()
            shutil.rmtree(self.path(folder), ignore_errors=True)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Around a write: refuses a read-only store, and tells a full disk by its name."""
        if self.read_only:
            raise ReadOnlyStore(
                f"cannot write {name}: {self.root} was opened with mode='r'; open it with mode='a'"
            )
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise as_store_error(error, self.root, name) from error

    def _sync_names(self, names: Collection[str]) -> None:
        """Make the names of these files last: sync the folders they lie in, and those new folders lie in."""
        if self.durability != "disk" or not names:
            return
        changed, settled = {str(Path(name).parent) for name in names}, {}
        for name in names:
            for folder in map(str, Path(name).parents):
                if folder == ".":
                    break
                inode = self.path(folder).stat().st_ino  # another one: removed and made again meanwhile
                if self._settled.get(folder) == inode:
                    break
                changed.add(str(Path(folder).parent))
                settled[folder] = inode
        # The first one's commit takes the others along.
        for folder in sorted(changed):
            self._sync_folder(self.root / folder)
        if len(self._settled) > _REMEMBERED:
            self._settled.clear()
        self._settled.update(settled)

    @contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        """A hidden name beside this one, for as long as it is written; its folder exists."""
        target = self.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _sync_folder(self, path: Path) -> None:
        if self.durability == "disk":
            with suppress(OSError):  # some file systems cannot sync folders
                _sync(path)


class Watched:
    """One small file of a folder, read again only when it may have changed."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._stamp: Stamp | None = None
        self._text: bytes | None = None

    def get(self) -> bytes | None:
        """Its bytes as they are now, the same object as long as they are the same; None when it is gone."""
        try:
            stat = os.stat(f"{self._folder.root}/{self._name}")  # noqa: PTH116 - asked for at every read
        except (FileNotFoundError, NotADirectoryError):
            self._stamp = self._text = None
            return None
        if self._stamp is None or self._stamp != stamp(stat):
            text = self._folder.get(self._name)
            if text != self._text:
                self._text = text
            self._stamp = stamp(stat) if is_settled(stat) else None
        return self._text


def stamp(stat: os.stat_result) -> Stamp:
    """What a file must keep to be taken for unchanged; see also `is_settled`."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def is_settled(stat: os.stat_result, now: float | None = None) -> bool:
    """Whether the next change of the file would show in its stamp: the clock has ticked since the last one.

    now: when `stat` was taken, seconds since the epoch, by default this moment. A file from the future, by a
    clock that was set back, never is.
    """
    taken = time.time() if now is None else now
    return taken - max(stat.st_mtime, stat.st_ctime) > _SETTLED


def as_store_error(error: OSError, root: Path, name: str) -> OSError:
    """The store's word for what the system said while `name` was written; other errors as they are."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"no space left in {root} while writing {name}; what was committed stays. Free some space "
            "(mizarr gc) and run again: it resumes"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnlyStore(
            f"cannot write {name} in {root}: {error.strerror}. Open it with mode='r' to read"
        )
    if error.errno in (errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
        return StoreError(
            f"cannot write {name} in {root}: {error.strerror}. A store needs a file system with hard links; "
            "put it on another one"
        )
    return error


def _written(path: Path, parts: Sequence[Buffer]) -> int:
    """A new file of these parts, open; in as few calls as the kernel allows (of at most 2 GiB)."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        waiting = [memoryview(part) for part in parts if len(part)]
        while waiting:
            written = os.writev(handle, waiting[:_AT_ONCE])
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
    except BaseException:
        os.close(handle)
        raise
    return handle


def _linked(temporary: Path, target: Path) -> bool:
    """Give a whole file its name; False when the name is taken."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    return True


def _start_writing(handle: int) -> None:
    """Have the disk take what was written while more is prepared; a sync then waits for less."""
    if hasattr(os, "posix_fadvise") and os.fstat(handle).st_size >= _WORTH_AN_EARLY_START:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _turns(files: Mapping[str, Sequence[Buffer]]) -> Iterator[Mapping[str, Sequence[Buffer]]]:
    """Files in order, by as many as may be open, and as many bytes as may be lost, at once."""
    some: dict[str, Sequence[Buffer]] = {}
    nbytes = 0
    for name, parts in files.items():
        size = sum(memoryview(part).nbytes for part in parts)
        if some and (len(some) == _OPEN or nbytes + size > _UNNAMED):
            yield some
            some, nbytes = {}, 0
        some[name] = parts
        nbytes += size
    if some:
        yield some


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
