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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .digest import file_digest
from .errors import ReadOnlyStore, StoreError, StoreFull

_THREADS = 4  # sha256 releases the GIL: two threads digest twice as fast, beyond four the disk is the limit

Files = dict[str, list[int | str]]
"""Manifest part: path relative to the folder -> [size in bytes, "sha256:…"]."""


@dataclass(frozen=True)
class Folder:
    """The folder of a store.  durability: "disk" or "process"."""

    root: Path
    durability: str = "disk"
    read_only: bool = False

    def path(self, name: str) -> Path:
        """Where a name lies on disk."""
        return self.root / name

    def get(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is none."""
        try:
            return self.path(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put_new(self, name: str, data: bytes) -> bool:
        """Create a file with these bytes; False, and nothing changes, when it is there already."""
        with self.writing(name):
            target = self.path(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    if self.durability == "disk":
                        os.fsync(file.fileno())
                os.link(temporary, target)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            self._sync_folder(target.parent)
        return True

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
    return error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
