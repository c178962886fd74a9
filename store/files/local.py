"""The files of a store in a folder of this machine: created once and whole, mapped, listed, removed.

Border: that of `folder.py`; this is the one file that knows where on a disk a store lies.

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
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..digest import Buffer, file_digest
from ..errors import REPAIR, CorruptEntry, ReadOnlyStore, StoreError, StoreFull
from .folder import THREADS, Folder, Measured, room_at
from .mapped import Mapped
from .stamps import Stat

__all__ = ["LocalFolder", "as_store_error"]

_REMEMBERED = 20_000  # folders
_WORTH_AN_EARLY_START = 1 << 20  # bytes; the sync of smaller files is all the disk's work there is
_AT_ONCE = 64  # parts per call; every system takes that many
_OPEN = 128  # files open at once
_UNNAMED = 1 << 28  # bytes of files that wait for their names together


@dataclass(frozen=True)
class LocalFolder(Folder):
    """The folder of a store.  durability: "disk" or "process"."""

    root: Path
    durability: str = "disk"
    read_only: bool = False
    # Folders whose own names are known to last, with their inodes; only saves time.
    _settled: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def address(self) -> str:
        """The folder's path, as people write it."""
        return str(self.root)

    def where(self, name: str) -> str:
        """The path of a name."""
        return f"{self.root}/{name}" if name else str(self.root)

    def path(self, name: str) -> Path:
        """Where a name lies on disk."""
        return self.root / name

    @property
    def index_path(self) -> Path:
        """Beside what it tells of."""
        return self.root / "index.sqlite"

    def now(self) -> float:
        """This machine's clock."""
        return time.time()

    def get(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is none."""
        try:
            # Not through Path: half of the time in which a harvest reads ten thousand records.
            with open(f"{self.root}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise self._is_a_folder(name) from None

    def get_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Bytes of a file from `start` to `stop`, as a slice takes them; None when there is none."""
        try:
            with self.path(name).open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                first, last, _ = slice(start, stop).indices(end)
                file.seek(first)
                return file.read(max(0, last - first))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise self._is_a_folder(name) from None

    def stat(self, name: str) -> Stat | None:
        """What the system says of a file, or of a folder; None when there is none."""
        try:
            return Stat.of(os.stat(f"{self.root}/{name}"))  # noqa: PTH116 - asked for at every read
        except (FileNotFoundError, NotADirectoryError):
            return None

    def folder_stat(self, folder: str) -> Stat | None:
        """What the system says of a folder."""
        return self.stat(folder)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            return os.stat(f"{self.root}/{name}").st_size  # noqa: PTH116 - of every file of a result
        except (FileNotFoundError, NotADirectoryError):
            return None

    def measure(self, name: str) -> tuple[int, str]:
        """Size in bytes and "sha256:…" of a file; FileNotFoundError when there is none."""
        path = self.path(name)
        return path.stat().st_size, file_digest(path)

    def mapped(self, name: str) -> Mapped:
        """A file as memory; FileNotFoundError when there is none."""
        try:
            with self.path(name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # An empty file cannot be mapped; a byte that is not read stands for it.
                held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else mmap.mmap(-1, 1)
        except IsADirectoryError:
            raise self._is_a_folder(name) from None
        return Mapped(held, size, self.where(name))

    def _is_a_folder(self, name: str) -> CorruptEntry:
        return CorruptEntry(f"{self.where(name)}: expected a file, found a folder; {REPAIR}")

    def zarr(self, folder: str) -> Path:
        """The path of a group or an array."""
        return self.path(folder)

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
        return room_at(self.root)

    def stamps(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Names of what lies directly in a folder, each with what the system says of it."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path(folder)) as found:
            for item in found:
                if not item.name.startswith("."):
                    with suppress(FileNotFoundError):
                        yield item.name, Stat.of(item.stat())

    def children(self, folder: str) -> Iterator[str]:
        """Names of what lies directly in a folder, without the folder's; temporary ones left out."""
        try:
            with os.scandir(self.path(folder)) as found:
                yield from (item.name for item in found if not item.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return

    def subfolders(self, folder: str) -> Iterator[str]:
        """Names of the folders directly in a folder, without the folder's; temporary ones left out."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path(folder)) as found:
            yield from (item.name for item in found if item.is_dir() and not item.name.startswith("."))

    def list(self, folder: str) -> Iterator[str]:
        """Names of all files below a folder, relative to the root; temporary ones (leading dot) left out."""
        for top, _, files in os.walk(self.path(folder)):
            base = Path(top).relative_to(self.root)
            yield from (str(base / file) for file in files if not file.startswith("."))

    def walk(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """All files below a folder, temporary ones as well, relative to the root."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path(folder)) as found:
            for item in found:
                name = f"{folder}/{item.name}" if folder else item.name
                if item.is_dir(follow_symlinks=False):
                    yield from self.walk(name)
                else:
                    with suppress(FileNotFoundError):
                        yield name, Stat.of(item.stat())

    def mark(self, name: str, data: bytes) -> bool:
        """Create a small file that need not outlive a power cut; False when it is there already."""
        with self.writing(name):
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                return False
            try:
                os.write(handle, data)
            finally:
                os.close(handle)
        return True

    def touch(self, name: str) -> None:
        """Make now the time a file was modified, if it is there; OSError where that fails."""
        with suppress(FileNotFoundError):
            os.utime(self.path(name))

    def build(self, folder: str, fill: Callable[[Path], None]) -> Measured:
        """A new folder, filled by what writes to a real one; returns size and digest of each of its files."""
        with self.writing(folder):
            path = self.path(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            fill(path)
            return self._settled_files(path)

    def _settled_files(self, top: Path) -> Measured:
        """Sync all files below a folder and digest them."""
        paths = sorted(path for path in top.rglob("*") if path.is_file())

        def one(path: Path) -> list[int | str]:
            if self.durability == "disk":
                _sync(path)
            return [path.stat().st_size, file_digest(path)]

        with ThreadPoolExecutor(min(THREADS, max(1, len(paths)))) as pool:
            found = dict(
                zip((str(path.relative_to(top)) for path in paths), pool.map(one, paths), strict=True)
            )
        for inner in {path.parent for path in paths} | {top, top.parent}:
            self._sync_folder(inner)
        return found

    def scratch(self, folder: str) -> Path:
        """See `Folder`: in the folder itself, where hidden names are taken for leftovers."""
        return self.path(folder)

    def move(self, source: str, target: str) -> None:
        """Give a file, or a folder with all in it, another name, if it is there."""
        if self.path(source).exists():
            with self.writing(source):
                self.path(target).parent.mkdir(parents=True, exist_ok=True)
                self.path(source).rename(self.path(target))

    def delete(self, name: str) -> None:
        """Remove a file if it is there."""
        with self.writing(name):
            self.path(name).unlink(missing_ok=True)

    def remove_tree(self, folder: str) -> None:
        """Remove a folder and all below it, if it is there; what cannot be removed stays for gc."""
        if self.read_only:
            return
        self._settled.clear()
        path = self.path(folder)
        dying = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        # Out of its place at once, so that a writer that comes back meanwhile begins a folder of its own.
        with suppress(OSError):
            path.rename(dying)
        shutil.rmtree(dying if dying.exists() else path, ignore_errors=True)

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


def as_store_error(error: OSError, root: Path, name: str) -> OSError:
    """The store's word for what the system said while `name` was written; other errors as they are."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"no space left in {root} while writing {name}; what was committed stays. Free some space "
            "(mizarr gc) and run again: it resumes"
        )
    if error.errno == errno.EFBIG:
        return StoreFull(
            f"{name} in {root} is larger than a file may be here (ulimit -f, or the file system); what was "
            "committed stays. Raise that limit and run again: it resumes"
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
