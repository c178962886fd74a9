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
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path

from ..digest import Buffer, file_digest, open_file_digest
from ..errors import REPAIR, CorruptEntry, ReadOnlyStore, StoreError, StoreFull
from .folder import THREADS, Folder, Measured, checked, is_below, room_at
from .mapped import Mapped
from .stamps import Stat

__all__ = ["LocalFolder", "as_store_error"]

_REMEMBERED = 20_000  # folders
_WORTH_AN_EARLY_START = 1 << 20  # bytes; the sync of smaller files is all the disk's work there is
_AT_ONCE = 64  # parts per call; every system takes that many
_OPEN = 128  # files open at once
_UNNAMED = 1 << 28  # bytes of files that wait for their names together
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would else keep who opens it
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_LINK = "a link, which is not followed"
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What the system says of what is not there; of links in a circle as well."""
_NO_FILE = (errno.ENXIO, errno.EIO)
"""What it says of a socket, and of what cannot be read."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: _LINK,
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NAMED_AS_FILES = (".json", ".claim")


@dataclass(frozen=True)
class LocalFolder(Folder):
    """The folder of a store.  durability: "disk" or "process"."""

    root: Path
    durability: str = "disk"
    read_only: bool = False
    is_store: bool = field(default=False, compare=False)
    # Folders that were seen to be no links; only saves time.
    _folders: set[str] = field(default_factory=set, init=False, compare=False, repr=False)
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
        """Where a name lies on disk. Raises CorruptEntry as `checked`, and for a name behind a link."""
        return Path(self._place(name))

    def _place(self, name: str) -> str:
        """The path of a name. Folders of a store are folders: a link in the place of one would lead to files
        that are none of it, so none is followed; the root may be behind one."""
        folder = checked(name).rpartition("/")[0]
        if folder and folder not in self._folders:
            self._require_folders(folder)
        return f"{self.root}/{name}" if name else str(self.root)

    def _require_folders(self, folder: str) -> None:
        """Raise CorruptEntry where one of the folders above a name is a link."""
        above = ""
        for step in folder.split("/"):
            above = f"{above}/{step}" if above else step
            if os.path.islink(f"{self.root}/{above}"):  # noqa: PTH114 - of every folder that is read
                raise self._not_a_file(above, _LINK)
        if len(self._folders) > _REMEMBERED:
            self._folders.clear()
        if os.path.isdir(f"{self.root}/{folder}"):  # noqa: PTH112 - one that comes later may be a link
            self._folders.add(folder)

    def as_store(self) -> LocalFolder:
        """See `Folder`."""
        return replace(self, is_store=True)

    @property
    def index_path(self) -> Path:
        """Beside what it tells of."""
        return self.root / "index.sqlite"

    def now(self) -> float:
        """The clock of whoever stamps files here, which of a network disk is another machine's: read off one
        that was just made. This machine's where none may be."""
        if not self.read_only:
            probe = self.path(f"leases/.clock-{secrets.token_hex(4)}")
            with suppress(OSError):
                self.require_there()
                try:
                    probe.parent.mkdir(exist_ok=True)
                    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                    return probe.stat().st_mtime
                finally:
                    probe.unlink(missing_ok=True)
        return time.time()

    def get(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is none."""
        try:
            with self._reading(name) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def get_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Bytes of a file from `start` to `stop`, as a slice takes them; None when there is none."""
        try:
            with self._reading(name) as file:
                end = os.fstat(file.fileno()).st_size
                first, last, _ = slice(start, stop).indices(end)
                file.seek(first)
                return file.read(max(0, last - first))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stat(self, name: str) -> Stat | None:
        """What the system says of a file, or of a folder; None when there is none."""
        try:
            return Stat.of(os.stat(self._place(name), follow_symlinks=False))  # noqa: PTH116 - asked for at every read
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._refused(name, error) from error

    def folder_stat(self, folder: str) -> Stat | None:
        """What the system says of a folder."""
        return self.stat(folder)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            found = os.stat(self._place(name), follow_symlinks=False)  # noqa: PTH116 - of every file of a result
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._refused(name, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise self._no_file(name, found)
        return found.st_size

    def measure(self, name: str) -> tuple[int, str]:
        """Size in bytes and "sha256:…" of a file; FileNotFoundError when there is none."""
        with self._reading(name) as file:
            return os.fstat(file.fileno()).st_size, open_file_digest(file)

    def mapped(self, name: str) -> Mapped:
        """A file as memory; FileNotFoundError when there is none."""
        with self._reading(name) as file:
            size = os.fstat(file.fileno()).st_size
            # An empty file cannot be mapped; a byte that is not read stands for it.
            held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else mmap.mmap(-1, 1)
        return Mapped(held, size, self.where(name))

    @contextmanager
    def _reading(self, name: str) -> Iterator[FileIO]:
        """A file, open; FileNotFoundError, and CorruptEntry for what is none, without waiting for it."""
        try:
            # Not through Path: half of the time in which a harvest reads ten thousand records.
            with open(self._place(name), "rb", buffering=0, opener=_unwaiting) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise self._no_file(name, found)
                yield file
        except (StoreError, FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise self._refused(name, error) from error

    def _no_file(self, name: str, found: os.stat_result) -> CorruptEntry:
        return self._not_a_file(name, _KINDS.get(stat.S_IFMT(found.st_mode), "something else"))

    def _not_a_file(self, name: str, found: str) -> CorruptEntry:
        return CorruptEntry(
            f"{self.where(name)}: expected a file, found {found}; move that away, or {REPAIR}"
        )

    def _refused(self, name: str, error: OSError) -> OSError:
        """The store's word for what the system said while `name` was read; other errors as they are."""
        if error.errno == errno.ELOOP:
            return self._not_a_file(name, _LINK)
        if isinstance(error, IsADirectoryError):
            return self._not_a_file(name, "a folder")
        if error.errno in _NO_FILE:
            return self._not_a_file(name, f"what cannot be read ({error.strerror})")
        if isinstance(error, PermissionError):
            return StoreError(
                f"{self.where(name)}: expected a file that this user may read, found {error.strerror!r}; "
                "have its owner allow it (chmod)"
            )
        return error

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
                self._make(target.parent)
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
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as found:
            for item in found:
                if _is_shown(item.name) and (known := self._stat_of(f"{folder}/{item.name}", item)):
                    yield item.name, known

    def children(self, folder: str) -> Iterator[str]:
        """Names of what lies directly in a folder, without the folder's; temporary ones left out."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as found:
            yield from (item.name for item in found if _is_shown(item.name))

    def subfolders(self, folder: str) -> Iterator[str]:
        """Names of the folders directly in a folder, without the folder's; temporary ones left out."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as found:
            yield from (
                item.name for item in found if item.is_dir(follow_symlinks=False) and _is_shown(item.name)
            )

    def list(self, folder: str) -> Iterator[str]:
        """Names of all files below a folder, relative to the root; temporary ones (leading dot) left out."""
        for top, _, files in os.walk(self.path(folder), onerror=self._told):
            base = Path(top).relative_to(self.root)
            yield from (name for file in files if _is_shown(file) and is_below(name := str(base / file)))

    def walk(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """All files below a folder, temporary ones as well, relative to the root."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as found:
            for item in found:
                name = f"{folder}/{item.name}" if folder else item.name
                if not is_below(item.name):
                    continue
                if item.is_dir(follow_symlinks=False):
                    yield from self.walk(name)
                elif (known := self._stat_of(name, item)) is not None:
                    yield name, known

    def strangers(self, folder: str) -> Iterator[tuple[str, str]]:
        """See `Folder`: links that lead nowhere, pipes and the like, and folders named as files."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as found:
            for item in found:
                name = f"{folder}/{item.name}"
                if not _is_shown(item.name) or item.is_file(follow_symlinks=False):
                    continue
                if (what := _kind(item)) is not None:
                    yield name, what
                elif item.is_dir(follow_symlinks=False):
                    yield from self.strangers(name)

    def mark(self, name: str, data: bytes) -> bool:
        """Create a small file that need not outlive a power cut; False when it is there already."""
        with self.writing(name):
            path = self.path(name)
            self._make(path.parent)
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                if path.is_symlink():  # or whoever waits for it waits for ever
                    path.unlink(missing_ok=True)
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
            self._make(path.parent)
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
        if os.path.lexists(self.path(source)):
            with self.writing(source):
                self._make(self.path(target).parent)
                self.path(source).rename(self.path(target))

    def delete(self, name: str) -> None:
        """Remove a file if it is there; a folder stays."""
        path = self.path(name)
        with self.writing(name):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)

    def remove_tree(self, folder: str) -> None:
        """Remove a folder and all below it, if it is there; what cannot be removed stays for gc."""
        if self.read_only:
            return
        self._settled.clear()
        self._folders.clear()
        path = self.path(folder)
        dying = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        # Out of its place at once, so that a writer that comes back meanwhile begins a folder of its own.
        with suppress(OSError):
            path.rename(dying)
        shutil.rmtree(dying if dying.exists() else path, ignore_errors=True)

    @contextmanager
    def _scanned(self, folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """What lies directly in a folder."""
        try:
            with os.scandir(self.path(folder)) as found:
                yield found
        except PermissionError as error:
            raise self._refused(folder, error) from error

    def _told(self, error: OSError) -> None:
        """Of a folder that cannot be listed; one that is none, or went meanwhile, has nothing in it."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise self._refused(str(Path(error.filename).relative_to(self.root)), error) from error

    def _stat_of(self, name: str, item: os.DirEntry[str]) -> Stat | None:
        """What the system says of a file that was listed; None of one that went, and of a link to nothing."""
        try:
            return Stat.of(item.stat(follow_symlinks=False))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._refused(name, error) from error

    def _make(self, folder: Path) -> None:
        """Make a folder below the root, and those above it; FileNotFoundError where the root of a store went
        meanwhile, which is not made again."""
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            if folder == self.root and self.is_store:
                raise
            if folder == self.root:
                folder.mkdir(parents=True, exist_ok=True)
                return
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Around a write: refuses a store that is read-only or gone, and tells a full disk by its name."""
        if self.read_only:
            raise ReadOnlyStore(
                f"cannot write {name}: {self.root} was opened with mode='r'; open it with mode='a'"
            )
        self.require_there()
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                self.require_there()  # or it went while this was written
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
        self._make(target.parent)
        temporary = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            yield temporary
        finally:
            try:
                temporary.unlink(missing_ok=True)
            except BaseException:  # interrupted
                temporary.unlink(missing_ok=True)
                raise

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


def _is_shown(name: str) -> bool:
    """Whether a file or folder of this name counts: hidden ones are temporary, and names that no store has
    (control characters, a backslash) are somebody's, which cannot be asked for."""
    return not name.startswith(".") and is_below(name)


def _unwaiting(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_WAIT | _NO_LINK)


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
        if target.is_symlink():
            raise CorruptEntry(
                f"{target}: expected a file, found {_LINK}; move that away, or {REPAIR}"
            ) from None
        return False
    return True


def _kind(item: os.DirEntry[str]) -> str | None:
    """What something is that is neither file nor folder, or a folder named as a file; None for others."""
    try:
        found = item.stat(follow_symlinks=False).st_mode
    except OSError:
        return "what went meanwhile"
    if stat.S_ISREG(found) or (stat.S_ISDIR(found) and not item.name.endswith(_NAMED_AS_FILES)):
        return None
    return _KINDS.get(stat.S_IFMT(found), "something else")


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
