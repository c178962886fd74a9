"""The files of a store, by name: created once and whole, listed, removed; failures told as store errors.

Border: names relative to the store's root and bytes; what they mean is known elsewhere.

A file appears under its name complete or not at all, and the first to create it wins: written to a temporary
name in the same folder, then linked, which fails if the name is taken (`open("x")` would show half a file,
and `rename` would replace another process's). With durability "disk" a file is synced before it gets its
name, so a name never outlives its bytes in a power cut; "process" leaves that to the kernel.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .digest import Buffer, file_digest
from .errors import ReadOnlyStore, StoreError, StoreFull

_THREADS = 4  # sha256 releases the GIL: two threads digest twice as fast, beyond four the disk is the limit
_SYNCS = 8  # at once: a disk groups them
_REMEMBERED = 20_000  # folders
_AT_ONCE = 64  # parts per call; every system takes that many

Files = dict[str, list[int | str]]
"""Manifest part: path relative to the folder -> [size in bytes, "sha256:…"]."""


@dataclass(frozen=True)
class Folder:
    """The folder of a store.  durability: "disk" or "process"."""

    root: Path
    durability: str = "disk"
    read_only: bool = False
    # Folders whose own names are known to last; only saves time.
    _settled: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

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

    def put_new(self, name: str, data: bytes) -> bool:
        """Create a file with these bytes; False, and nothing changes, when it is there already."""
        return self.create(name, [data])

    def create(self, name: str, parts: Sequence[Buffer], *, sync_folder: bool = True) -> bool:
        """Create a file of these parts, end to end; False, and nothing changes, when it is there already.

        sync_folder=False leaves the name itself unsynced until `sync_folders`, for many files at once.
        """
        with self.writing(name):
            target = self.path(name)
            if target.exists():
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
            try:
                _write(temporary, parts, sync=self.durability == "disk")
                os.link(temporary, target)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            if sync_folder:
                self.sync_folders([name])
        return True

    def sync_folders(self, names: Collection[str]) -> None:
        """Make the names of these files last: sync the folders they lie in, and those new folders lie in."""
        if self.durability != "disk" or not names:
            return
        changed, settled = {str(Path(name).parent) for name in names}, set()
        for name in names:
            for folder in map(str, Path(name).parents):
                if folder in self._settled or folder == ".":
                    break
                changed.add(str(Path(folder).parent))
                settled.add(folder)
        # A sync waits for the disk; those that wait together are served together.
        with ThreadPoolExecutor(min(_SYNCS, len(changed))) as pool:
            list(pool.map(self._sync_folder, (self.root / folder for folder in changed)))
        if len(self._settled) > _REMEMBERED:
            self._settled.clear()
        self._settled.update(settled)

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

        with self.writing(folder), ThreadPoolExecutor(_THREADS) as pool:
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


def _write(path: Path, parts: Sequence[Buffer], *, sync: bool) -> None:
    """A new file of these parts, in as few calls as the kernel allows (it takes at most 2 GiB at a time)."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        waiting = [memoryview(part) for part in parts if len(part)]
        while waiting:
            written = os.writev(handle, waiting[:_AT_ONCE])
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
