"""`LocalFolder`: the files of a store in a directory of this machine (or a network disk).

A file is written under a temporary name in the target directory and then hard-linked to its name. `link`
fails if the name is taken, so the first writer wins, and a name never shows half a file. (`open("x")` would
show half a file; `rename` would replace the file of another process.)

With durability "disk" a file is synced before it gets its name, so after a power cut no name refers to
missing bytes; "process" leaves syncing to the kernel. Files that belong together are synced together, so that
the disk is waited for about once. One thread does this by default, because more would take cores from a
computation that runs meanwhile; callers without one may ask for more, and `handed_over` tells them when only
the disk is waited for.
"""

from __future__ import annotations

import errno
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
from .folder import THREADS, Folder, ManifestFiles, checked, free_bytes_at, is_below
from .mapped import Mapped, map_file
from .stamps import Stat

__all__ = ["LocalFolder", "as_store_error"]

_MOST_CACHED = 20_000  # folders kept in each of the two caches of a LocalFolder
# The limits below bound memory, open descriptors and lost work; none of them changes what is written.
_EARLY_WRITEBACK_BYTES = 1 << 20  # a smaller file gains nothing from writeback before its fsync
_WRITEV_BUFFERS = 64  # buffers per writev; every system takes that many
_MOST_OPEN = 128  # files open at once, well below the usual limit of 1024 descriptors
_MOST_UNNAMED_BYTES = 1 << 28  # written before their files are named; this much work a crash can lose
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a pipe that has no writer would block forever
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_LINK = "a link, which is not followed"
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Error codes that count as a missing file; ELOOP is a circle of links."""
_NO_FILE = (errno.ENXIO, errno.EIO)
"""Error codes of opening a socket, and of reading an unreadable device."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: _LINK,
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# A directory with such a name blocks the writer of the file: creating it reports "exists", reading it
# "missing", and a run would compute that segment for ever. `verify` reports these.
_NAMED_AS_FILES = (".json", ".claim")


@dataclass(frozen=True)
class LocalFolder(Folder):
    """The files of a store below one directory.

    A link is never followed inside a store: it would lead to files outside. The root itself may be a link.
    """

    root: Path
    """Absolute path of the store."""
    durability: str = "disk"
    """With "disk" files survive a power cut, with "process" only the death of this process."""
    read_only: bool = False
    """Whether every write raises ReadOnlyStore."""
    is_store: bool = field(default=False, compare=False)
    """Whether the directory was opened as a store, so that every write first requires `store.json`."""
    _folders: set[str] = field(default_factory=set, init=False, compare=False, repr=False)
    """Cache: directories known not to be links."""
    _settled: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache: directories whose own names are synced already, with their inodes."""

    @property
    def address(self) -> str:
        """Path of the store's directory as a text, as `open_store` takes it."""
        return str(self.root)

    def where(self, name: str) -> str:
        """Full path of a file, for error messages."""
        return f"{self.root}/{name}" if name else str(self.root)

    def path(self, name: str) -> Path:
        """Path of a file on disk. CorruptEntry for an unsafe name, or a file behind a symbolic link."""
        return Path(self._path_text(name))

    def _path_text(self, name: str) -> str:
        """`path` as a string, which is several times faster than a Path and needed for every read."""
        folder = checked(name).rpartition("/")[0]
        if folder and folder not in self._folders:
            self._require_folders(folder)
        return f"{self.root}/{name}" if name else str(self.root)

    def _require_folders(self, folder: str) -> None:
        """Check that no directory on the path to a file is a symbolic link; CorruptEntry otherwise."""
        above = ""
        for step in folder.split("/"):
            above = f"{above}/{step}" if above else step
            if os.path.islink(f"{self.root}/{above}"):  # noqa: PTH114 - of every folder that is read
                raise self._corrupt(above, _LINK)
        if len(self._folders) > _MOST_CACHED:
            self._folders.clear()
        # Only directories that exist are cached: a name that is free now may become a link.
        if os.path.isdir(f"{self.root}/{folder}"):  # noqa: PTH112 - hot path, as above
            self._folders.add(folder)

    def as_store(self) -> LocalFolder:
        """A copy that requires `store.json` before every write."""
        return replace(self, is_store=True)

    @property
    def index_path(self) -> Path:
        """Path of the store's SQLite index: `index.sqlite` in its directory."""
        return self.root / "index.sqlite"

    def now(self) -> float:
        """Seconds since the epoch, by the clock that sets modification times of files in this store.

        On a network disk that is the server's clock, which is read from the modification time of a new file.
        Where nothing may be written, it is the clock of this machine.
        """
        if not self.read_only:
            probe = self.path(f"leases/.clock-{secrets.token_hex(4)}")
            with suppress(OSError):
                self.require_store()
                try:
                    probe.parent.mkdir(exist_ok=True)
                    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                    return probe.stat().st_mtime
                finally:
                    probe.unlink(missing_ok=True)
        return time.time()

    def get(self, name: str) -> bytes | None:
        """Whole content of a file; None for a missing file."""
        try:
            with self._reading(name) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def get_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Read the bytes from `start` to `stop` of a file, negative ones from the end; None if it is
        missing."""
        try:
            with self._reading(name) as file:
                size = os.fstat(file.fileno()).st_size
                begin, end, _ = slice(start, stop).indices(size)
                file.seek(begin)
                return file.read(max(0, end - begin))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stat(self, name: str) -> Stat | None:
        """Size, modification time and stamp of a file or directory; None for a missing one."""
        status = self._status(name)
        return None if status is None else Stat.of(status)

    def _status(self, name: str) -> os.stat_result | None:
        """Result of `os.stat`, not following links; None for a missing file or directory."""
        try:
            return os.stat(self._path_text(name), follow_symlinks=False)  # noqa: PTH116 - asked for at every read
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._read_error(name, error) from error

    def folder_stat(self, folder: str) -> Stat | None:
        """Size, modification time and stamp of a directory; None for a missing one."""
        return self.stat(folder)

    def size(self, name: str) -> int | None:
        """Size in bytes; None for a missing file. CorruptEntry if it is no regular file."""
        if (status := self._status(name)) is None:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise self._irregular(name, status)
        return status.st_size

    def measure(self, name: str) -> tuple[int, str]:
        """Size in bytes and checksum "sha256:…" of a file; FileNotFoundError for a missing file."""
        with self._reading(name) as file:
            return os.fstat(file.fileno()).st_size, open_file_digest(file)

    def mapped(self, name: str) -> Mapped:
        """Memory map of a file; FileNotFoundError for a missing one."""
        with self._reading(name) as file:
            size = os.fstat(file.fileno()).st_size
            return Mapped(map_file(file.fileno(), size), size, self.where(name))

    @contextmanager
    def _reading(self, name: str) -> Iterator[FileIO]:
        """Context manager: open a file for reading; CorruptEntry if it is a link, folder, pipe or device."""
        try:
            # Path.open costs half of the time in which a capture run reads ten thousand records.
            with open(self._path_text(name), "rb", buffering=0, opener=_open_nonblocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise self._irregular(name, status)
                yield file
        except (StoreError, FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise self._read_error(name, error) from error

    def _irregular(self, name: str, status: os.stat_result) -> CorruptEntry:
        """Error for something else in the place of a regular file."""
        return self._corrupt(name, _KINDS.get(stat.S_IFMT(status.st_mode), "something else"))

    def _corrupt(self, name: str, kind: str) -> CorruptEntry:
        """Error for something else in the place of a regular file, `kind` in words."""
        return CorruptEntry(f"{self.where(name)}: expected a file, found {kind}; move it away, or {REPAIR}")

    def _read_error(self, name: str, error: OSError) -> OSError:
        """Translate a system error of reading a file to a StoreError; other errors are returned unchanged."""
        if error.errno == errno.ELOOP:
            return self._corrupt(name, _LINK)
        if isinstance(error, IsADirectoryError):
            return self._corrupt(name, "a folder")
        if error.errno in _NO_FILE:
            return self._corrupt(name, f"something that cannot be read ({error.strerror})")
        if isinstance(error, PermissionError):
            return StoreError(
                f"{self.where(name)}: this user may not read the file ({error.strerror}); ask its owner to "
                "allow it (chmod a+r)"
            )
        return error

    def zarr(self, folder: str) -> Path:
        """Path of a Zarr group or array, for zarr and xarray to open."""
        return self.path(folder)

    def put_all(
        self,
        files: Mapping[str, Sequence[Buffer]],
        *,
        threads: int = 1,
        handed_over: Callable[[], None] = lambda: None,
    ) -> set[str]:
        """Create several files and make them durable together; a name that exists stays as it is.

        Files are written in batches. In each batch all bytes are on disk before the first name appears; names
        appear in the order of `files`, and are durable when this returns.

        Arguments:
            files: Path -> buffers that are concatenated to the file's content.
            threads: Number of writer threads; more than one only while no computation needs the cores.
            handed_over: Called when all work of the processor is done and only the disk is waited for.

        Returns:
            The paths that were created by this call.
        """
        created: set[str] = set()
        # A run of small files in one batch shares one journal commit; the batch limits bound what a crash can
        # lose.
        batches = list(_batches(files))
        for batch in batches:
            with self.writing(next(iter(batch))):
                created.update(
                    self._put_batch(batch, threads, handed_over if batch is batches[-1] else lambda: None)
                )
        self._sync_parents(created)
        return created

    def _put_batch(
        self, files: Mapping[str, Sequence[Buffer]], threads: int, handed_over: Callable[[], None]
    ) -> list[str]:
        """Write one batch of files; returns the paths that were created. Arguments as for `put_all`."""
        # Only saves work: the link below decides, also if another writer creates a name from here on.
        names = [name for name in files if not self.path(name).exists()]
        with ExitStack() as stack:
            temporaries = {name: stack.enter_context(self._temporary(name)) for name in names}

            def write(name: str) -> int:
                handle = _write_new(temporaries[name], files[name])
                stack.callback(os.close, handle)
                if self.durability == "disk":
                    _start_writing(handle)
                return handle

            # Not even a pool of one thread: it would take its turns from a computation that runs meanwhile.
            if threads > 1:
                with ThreadPoolExecutor(threads) as pool:
                    handles = list(pool.map(write, names))
            else:
                handles = [write(name) for name in names]
            handed_over()
            if self.durability == "disk":
                # ext4 commits one journal for all files: the first fsync waits, the rest return at once.
                for handle in handles:
                    os.fsync(handle)
            return [name for name in names if _link_new(temporaries[name], self.path(name))]

    def link_all(self, names: Mapping[str, str]) -> set[str]:
        """Give existing files a second name each (new path -> existing path), as hard links.

        Returns:
            The new paths; one that was taken stays as it is.
        """
        created: set[str] = set()
        for name, existing in names.items():
            with self.writing(name):
                target = self.path(name)
                self._make_folder(target.parent)
                if _link_new(self.path(existing), target):
                    created.add(name)
        self._sync_parents(created)
        return created

    @property
    def free_bytes(self) -> int:
        """Free disk space in bytes for this user."""
        return free_bytes_at(self.root)

    def stamps(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Name and `Stat` of each file directly in `folder`, without temporary ones."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as entries:
            for entry in entries:
                if _is_shown(entry.name) and (status := self._stat_of(f"{folder}/{entry.name}", entry)):
                    yield entry.name, status

    def children(self, folder: str) -> Iterator[str]:
        """Names of files and directories directly in `folder`, without temporary ones."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as entries:
            yield from (entry.name for entry in entries if _is_shown(entry.name))

    def subfolders(self, folder: str) -> Iterator[str]:
        """Names of directories directly in `folder`, without temporary ones."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as entries:
            yield from (
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and _is_shown(entry.name)
            )

    def list(self, folder: str) -> Iterator[str]:
        """Paths of all files below `folder`, relative to the root, without temporary ones."""
        for top, _, files in os.walk(self.path(folder), onerror=self._walk_error):
            base = Path(top).relative_to(self.root)
            yield from (name for file in files if _is_shown(file) and is_below(name := str(base / file)))

    def walk(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Path and `Stat` of all files below `folder`, temporary ones included."""
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as entries:
            for entry in entries:
                # The scan yields entries one by one instead of a list, because a large run has 16,000 shards
                # per layer.
                name = f"{folder}/{entry.name}" if folder else entry.name
                if not is_below(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self.walk(name)
                elif (status := self._stat_of(name, entry)) is not None:
                    yield name, status

    def non_files(self, folder: str) -> Iterator[tuple[str, str]]:
        """Find links, pipes, sockets, devices, and directories with the name of a file, below `folder`.

        Yields:
            Path relative to the root, and kind in words, such as "a pipe".
        """
        with suppress(FileNotFoundError, NotADirectoryError), self._scanned(folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}"
                if not _is_shown(entry.name) or entry.is_file(follow_symlinks=False):
                    continue
                if (kind := _kind(entry)) is not None:
                    yield name, kind
                elif entry.is_dir(follow_symlinks=False):
                    yield from self.non_files(name)

    def mark(self, name: str, data: bytes) -> bool:
        """Create a small file that may be lost in a power cut, such as a lease; False if the name is
        taken."""
        with self.writing(name):
            path = self.path(name)
            self._make_folder(path.parent)
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                # A dangling link reads as "missing" and creates as "taken": waiters would never end.
                if path.is_symlink():
                    path.unlink(missing_ok=True)
                return False
            try:
                os.write(handle, data)
            finally:
                os.close(handle)
        return True

    def touch(self, name: str) -> None:
        """Set the modification time of a file to now, if it exists; OSError if that fails."""
        with suppress(FileNotFoundError):
            os.utime(self.path(name))

    def build(self, folder: str, fill: Callable[[Path], None]) -> ManifestFiles:
        """Create a directory, let `fill` write files into it, then sync and digest them.

        Arguments:
            folder: Path of the new directory.
            fill: Called with the full path of the new directory.

        Returns:
            Size and checksum of each file, by path relative to the directory.

        Raises:
            FileExistsError: The directory exists.
        """
        with self.writing(folder):
            path = self.path(folder)
            self._make_folder(path.parent)
            path.mkdir()
            fill(path)
            return self._sync_and_measure(path)

    def _sync_and_measure(self, top: Path) -> ManifestFiles:
        """Sync all files below a folder; returns path relative to it -> [size in bytes, "sha256:…"]."""
        paths = sorted(path for path in top.rglob("*") if path.is_file())

        def sync_and_measure(path: Path) -> list[int | str]:
            if self.durability == "disk":
                _sync(path)
            return [path.stat().st_size, file_digest(path)]

        names = [str(path.relative_to(top)) for path in paths]
        with ThreadPoolExecutor(min(THREADS, max(1, len(paths)))) as pool:
            files = dict(zip(names, pool.map(sync_and_measure, paths), strict=True))
        # A file's name lives in its directory, so a synced file can vanish in a power cut unless that is
        # synced, too.
        for folder in {path.parent for path in paths} | {top, top.parent}:
            self._sync_folder(folder)
        return files

    def scratch(self, folder: str) -> Path:
        """Path for temporary files that belong to `folder`: the folder itself.

        Names of temporary files begin with a dot, so that garbage collection removes them.
        """
        return self.path(folder)

    def move(self, source: str, target: str) -> None:
        """Rename a file, or a directory with its content, if it exists; the target must be free."""
        if os.path.lexists(self.path(source)):
            with self.writing(source):
                self._make_folder(self.path(target).parent)
                self.path(source).rename(self.path(target))

    def delete(self, name: str) -> None:
        """Remove a file if it exists; a directory stays."""
        path = self.path(name)
        with self.writing(name):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)

    def remove_tree(self, folder: str) -> None:
        """Remove a directory tree if it exists; files that cannot be removed are left for `gc`."""
        if self.read_only:
            return
        self._settled.clear()
        self._folders.clear()
        path = self.path(folder)
        # The random suffix lets two processes that remove the same folder both succeed.
        dying = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        # Renamed before it is emptied, so that a writer that comes back meanwhile starts with an empty folder
        # instead of adding files to one that is being removed.
        with suppress(OSError):
            path.rename(dying)
        # On NFS a file that a reader has open leaves a placeholder, so the folder cannot go now; gc removes
        # it later.
        shutil.rmtree(dying if dying.exists() else path, ignore_errors=True)

    @contextmanager
    def _scanned(self, folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Context manager: the entries of a directory, as `os.scandir` yields them."""
        try:
            with os.scandir(self.path(folder)) as entries:
                yield entries
        except PermissionError as error:
            raise self._read_error(folder, error) from error

    def _walk_error(self, error: OSError) -> None:
        """Error handler of os.walk: ignores directories that vanished, raises a store error for the rest."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise self._read_error(str(Path(error.filename).relative_to(self.root)), error) from error

    def _stat_of(self, name: str, item: os.DirEntry[str]) -> Stat | None:
        """Metadata of a directory entry; None if it vanished since it was listed."""
        try:
            return Stat.of(item.stat(follow_symlinks=False))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._read_error(name, error) from error

    def _make_folder(self, folder: Path) -> None:
        """Create a directory and its parents below the root.

        The root of a store is never created again (FileNotFoundError): a store that was renamed meanwhile
        would get a twin without `store.json`.
        """
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            if folder == self.root and self.is_store:
                raise
            if folder == self.root:
                folder.mkdir(parents=True, exist_ok=True)
                return
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Context manager around a write: refuses a read-only or vanished store, translates I/O errors."""
        if self.read_only:
            raise ReadOnlyStore(
                f"cannot write {name}: the store {self.root} was opened with mode='r'; open it with mode='a'"
            )
        self.require_store()
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                self.require_store()  # the clearer error, if the store was moved during the write
            raise as_store_error(error, self.root, name) from error

    def _sync_parents(self, names: Collection[str]) -> None:
        """Make the names of new files durable: sync their directories, and the parents of new directories."""
        # Fsync of a directory costs a disk flush even if nothing in it changed, so directories known to be
        # durable are skipped.
        if self.durability != "disk" or not names:
            return
        changed, settled = {str(Path(name).parent) for name in names}, {}
        for name in names:
            for folder in map(str, Path(name).parents):
                if folder == ".":
                    break
                # The inode is compared because a directory may have been removed and created again.
                inode = self.path(folder).stat().st_ino
                if self._settled.get(folder) == inode:
                    break
                changed.add(str(Path(folder).parent))
                settled[folder] = inode
        # One journal commit covers all directories, so syncing them one by one costs about one wait.
        for folder in sorted(changed):
            self._sync_folder(self.root / folder)
        if len(self._settled) > _MOST_CACHED:
            self._settled.clear()
        self._settled.update(settled)

    @contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        """Context manager: a temporary path in the directory of the file `name`, removed at the end."""
        target = self.path(name)
        self._make_folder(target.parent)
        # Same directory, because `link` does not cross file systems. PID and random part: no two writers
        # share a name.
        temporary = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            yield temporary
        finally:
            try:
                temporary.unlink(missing_ok=True)
            except BaseException:  # a second Ctrl-C during the cleanup
                temporary.unlink(missing_ok=True)
                raise

    def _sync_folder(self, path: Path) -> None:
        if self.durability == "disk":
            with suppress(OSError):  # some network file systems refuse fsync of a directory
                _sync(path)


def as_store_error(error: OSError, root: Path, name: str) -> OSError:
    """Translate a system error of writing a file to a StoreError; other errors are returned unchanged.

    Arguments:
        error: Error of the system.
        root: Folder of the store.
        name: Path of the file that was written, relative to it.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"no space left in {root} while writing {name}, and what was committed stays; free some space "
            "(`mizarr gc`) and run the command again, which resumes"
        )
    if error.errno == errno.EFBIG:
        return StoreFull(
            f"the file {name} in {root} exceeds the largest size allowed there (`ulimit -f`, or the file "
            "system), and what was committed stays; raise that limit and run the command again, which resumes"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnlyStore(
            f"cannot write {name} in {root} ({error.strerror}); open the store with mode='r' to read only"
        )
    # EMLINK: ext4 allows 65,000 links to one file, which many runs with a common start may reach.
    if error.errno in (errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
        return StoreError(
            f"cannot write {name} in {root} ({error.strerror}), because its file system lacks hard links; "
            "put the store on another file system"
        )
    return error


def _is_shown(name: str) -> bool:
    """Whether a directory entry belongs to the store, by its name.

    Names with a leading dot are temporary. Names with control characters or a backslash were not written by a
    store.
    """
    return not name.startswith(".") and is_below(name)


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_WAIT | _NO_LINK)


def _write_new(path: Path, parts: Sequence[Buffer]) -> int:
    """Create a file from buffers and return its descriptor."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        # writev takes the shard's parts from where they are, so that rows, checksums and index are never
        # joined in memory.
        remaining = [memoryview(part) for part in parts if len(part)]
        while remaining:
            # writev may write less than asked, at most 2 GiB.
            written = os.writev(handle, remaining[:_WRITEV_BUFFERS])
            while remaining and written >= len(remaining[0]):
                written -= len(remaining.pop(0))
            if written:
                remaining[0] = remaining[0][written:]
    except BaseException:
        os.close(handle)
        raise
    return handle


def _link_new(temporary: Path, target: Path) -> bool:
    """Give a complete temporary file its final name; False if the name is taken."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        # "Taken" by a link would make the caller measure a file outside the store.
        if target.is_symlink():
            raise CorruptEntry(
                f"{target}: expected a file, found {_LINK}; move it away, or {REPAIR}"
            ) from None
        return False
    return True


def _kind(item: os.DirEntry[str]) -> str | None:
    """Type of a directory entry in words, such as "a pipe"; None for a regular file or an ordinary folder."""
    try:
        mode = item.stat(follow_symlinks=False).st_mode
    except OSError:
        return "something that was removed meanwhile"
    if stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and not item.name.endswith(_NAMED_AS_FILES)):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _start_writing(handle: int) -> None:
    """Start writeback of a large file now, so that the later fsync finds less to write.

    POSIX_FADV_DONTNEED starts writeback of dirty pages on Linux; sync_file_range is not in Python's os
    module.
    """
    if hasattr(os, "posix_fadvise") and os.fstat(handle).st_size >= _EARLY_WRITEBACK_BYTES:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _batches(files: Mapping[str, Sequence[Buffer]]) -> Iterator[Mapping[str, Sequence[Buffer]]]:
    """Yield the files (path -> buffers) in batches of at most 128 files and 256 MiB, or one larger file."""
    batch: dict[str, Sequence[Buffer]] = {}
    batch_bytes = 0
    for name, parts in files.items():
        size = sum(memoryview(part).nbytes for part in parts)
        if batch and (len(batch) == _MOST_OPEN or batch_bytes + size > _MOST_UNNAMED_BYTES):
            yield batch
            batch, batch_bytes = {}, 0
        batch[name] = parts
        batch_bytes += size
    if batch:
        yield batch


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
