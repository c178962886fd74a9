"""`Folder`: the interface between a store and whatever holds its files, a disk or an object store.

All other files of the package name a file by its path relative to the root of the store and exchange bytes;
only the implementations (`local.py`, `objects.py`) know where a store lies.

The commit protocol rests on three guarantees, which every implementation gives: a file appears under its name
complete or not at all; the first writer to create a name wins; a file never changes afterwards.
`tests/contracts/files_contract.py` runs against every implementation.
"""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..digest import Buffer
from ..errors import REPAIR, CorruptEntry, StoreError
from .mapped import Mapped
from .stamps import Stamp, Stat

__all__ = ["DESCRIPTION", "THREADS", "Folder", "ManifestFiles", "checked", "is_below", "free_bytes_at"]

THREADS = 4
"""Number of threads that compute checksums. sha256 releases the GIL, so two threads double the rate; beyond
four the disk is the limit."""

DESCRIPTION = "store.json"
"""The file whose presence makes a folder a store."""

ManifestFiles = dict[str, list[int | str]]
"""Files as a manifest lists them: path relative to the folder -> [size in bytes, "sha256:…"]."""


_UNSAFE = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f\\]")
"""Matches unsafe paths: a component that is empty, "." or "..", a control character or a backslash."""


def is_below(name: str) -> bool:
    """Whether a relative path stays inside its folder and has no control characters or backslashes.

    Judged by its spelling alone: without empty components, "." and "..".

    Arguments:
        name: Components separated by "/", possibly read from a file that somebody else wrote.
    """
    return _UNSAFE.search(name) is None


def checked(name: str) -> str:
    """Return a path within a store unchanged if it is safe; every path is checked so before it is used.

    Arguments:
        name: Components separated by "/", possibly read from a file that somebody else wrote; "" is the root.

    Raises:
        CorruptEntry: The path leaves the store, or has characters that files of a store do not have.
    """
    if name and not is_below(name):
        raise CorruptEntry(
            f"a record of the store names the file {name!r:.80}, which lies outside of the store; {REPAIR}"
        )
    return name


def free_bytes_at(location: Path) -> int:
    """Free bytes for this user on the disk where `location` is, or will be created."""
    return shutil.disk_usage(next(path for path in (location, *location.parents) if path.exists())).free


class Folder(ABC):
    """The files of one store, addressed by path relative to its root. Cheap to pickle for another process.

    Methods that read a file treat a missing one as normal (`None`) unless they say FileNotFoundError. Files
    whose name starts with a dot are temporary.
    """

    read_only: bool
    """Whether every write raises ReadOnlyStore."""
    is_store: bool
    """Whether the folder was opened as a store (`as_store`), so that every write first requires
    `store.json`."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Path, or URL without credentials, of the store, as `open_store` takes it."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Full path or URL of a file, for error messages."""

    @abstractmethod
    def as_store(self) -> Folder:
        """A copy that requires `store.json` to exist before every write (`is_store`)."""

    def require_store(self) -> None:
        """Check that an open store is still at its address.

        Raises:
            StoreError: It was renamed, removed or unmounted since it was opened.
        """
        # Without this check a write would recreate the folder, without the store.json that makes it readable.
        if self.is_store and self.glance(DESCRIPTION) is None:
            raise StoreError(
                f"the store {self.address} has no {DESCRIPTION} any more: it was renamed, removed or "
                "unmounted since it was opened; open it at its new place"
            )

    @property
    @abstractmethod
    def free_bytes(self) -> int | None:
        """Free disk space in bytes for this user; None for buckets, which have no limit."""

    @property
    @abstractmethod
    def index_path(self) -> Path | None:
        """Local path of the store's SQLite index; None if the index is kept in memory."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the epoch, by the clock that sets `Stat.modified` (for a network disk, the
        server's)."""

    # -- reading

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Whole content of a file; None for a missing file."""

    @abstractmethod
    def get_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Read a range of bytes of a file.

        Arguments:
            name: Path of the file.
            start: First byte; a negative one counts from the end.
            stop: End (exclusive); a negative one counts from the end, None is the end of the file.

        Returns:
            Fewer bytes where the file ends earlier; None if it does not exist.
        """

    @abstractmethod
    def stat(self, name: str) -> Stat | None:
        """Size, modification time and stamp of a file; None if it does not exist."""

    def folder_stat(self, folder: str) -> Stat | None:
        """Modification time and stamp of a directory; None in object stores, which have no directories."""
        return None

    def glance(self, name: str) -> Stat | None:
        """Size, modification time and stamp of a file, fast enough for a check before each read.

        In an object store the answer may be two seconds old. None if the file does not exist.
        """
        return self.stat(name)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None for a missing file."""
        stat = self.stat(name)
        return None if stat is None else stat.size

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        """Sizes of several files in bytes; None for files that do not exist.

        Arguments:
            folder: Path of the folder.
            names: Paths of the files, relative to the folder.
        """
        return {name: self.size(f"{folder}/{name}") for name in names}

    @abstractmethod
    def measure(self, name: str) -> tuple[int, str]:
        """Size in bytes and checksum "sha256:…" of a file; FileNotFoundError if it does not exist."""

    @abstractmethod
    def mapped(self, name: str) -> Mapped:
        """Map a file into memory, read-only; FileNotFoundError if it does not exist."""

    @abstractmethod
    def zarr(self, folder: str) -> Any:
        """Path or `zarr.abc.store.Store` by which zarr and xarray can read the group or array in a folder."""

    # -- listing

    @abstractmethod
    def children(self, folder: str) -> Iterator[str]:
        """Names of files and folders directly in `folder`, without temporary ones."""

    @abstractmethod
    def subfolders(self, folder: str) -> Iterator[str]:
        """Names of folders directly in `folder`, without temporary ones."""

    @abstractmethod
    def stamps(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Name and `Stat` of each file directly in `folder`, without temporary ones."""

    @abstractmethod
    def list(self, folder: str) -> Iterator[str]:
        """Paths (relative to the root) of all files below `folder`, without temporary ones."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Path (relative to the root) and `Stat` of all files below `folder`, temporary ones included."""

    # On a local disk, a pipe or folder in the place of a file is not found by listing files.
    def non_files(self, folder: str) -> Iterator[tuple[str, str]]:
        """Find links, pipes, devices and folders below `folder` that are in the place of a file.

        Yields:
            Path relative to the root, and kind in words, such as "a pipe". Nothing in object stores.
        """
        return iter(())

    # -- writing

    def put_new(self, name: str, data: bytes) -> bool:
        """Create a file, durable when this returns.

        Arguments:
            name: Path of the file.
            data: Its content.

        Returns:
            False if the name exists; then nothing changes.
        """
        return bool(self.put_all({name: [data]}))

    @abstractmethod
    def put_all(
        self,
        files: Mapping[str, Sequence[Buffer]],
        *,
        threads: int = 1,
        handed_over: Callable[[], None] = lambda: None,
    ) -> set[str]:
        """Create several files and make them durable together. A name that exists stays as it is.

        A file that describes arrays (`*.json`) appears only after the bytes of the arrays.

        Arguments:
            files: Path -> buffers that are concatenated to the file's content.
            threads: Number of writer threads; more than one only while no computation needs the cores.
            handed_over: Called when all work of the processor is done and only the disk or the network is
                waited for.

        Returns:
            The paths that were created by this call.
        """

    @abstractmethod
    def mark(self, name: str, data: bytes) -> bool:
        """Create a small file that may be lost in a power cut, such as a lease.

        Arguments:
            name: Path of the file.
            data: Its content.

        Returns:
            False if the name exists; then nothing changes.
        """

    @abstractmethod
    def touch(self, name: str) -> None:
        """Set the modification time of a file to now, if it exists; OSError if that fails."""

    @abstractmethod
    def link_all(self, names: Mapping[str, str]) -> set[str]:
        """Give existing files a second name each, as hard links or, in object stores, as copies.

        Arguments:
            names: New path -> existing path. A new path that is taken stays as it is.

        Returns:
            The paths that were created by this call.

        Raises:
            FileNotFoundError: A file to be linked does not exist.
        """

    @abstractmethod
    def build(self, folder: str, fill: Callable[[Path], None]) -> ManifestFiles:
        """Create a folder whose files are written by a library such as zarr, not through this interface.

        Arguments:
            folder: Path of the new folder.
            fill: Called with an empty local folder, which it fills.

        Returns:
            Size and checksum of each file, by path relative to the folder.

        Raises:
            FileExistsError: The folder exists.
        """

    @abstractmethod
    def scratch(self, folder: str) -> Path:
        """Local path for temporary files that belong to `folder`; it need not exist."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename a file, or a folder with its content, if it exists.

        Arguments:
            source: Path of the file or folder.
            target: New path, which must be free.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def remove_tree(self, folder: str) -> None:
        """Remove a folder and its content if it exists; files that cannot be removed are left for `gc`."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[None]:
        """Context manager around a write: refuses a read-only or vanished store, translates I/O errors.

        Raises:
            ReadOnlyStore: The store was opened with mode="r", or the system refuses writes.
            StoreFull: The disk or quota is full.
            StoreError: The store was renamed, removed or unmounted, or the disk lacks hard links.
        """


class Watched:
    """A small file that is read again only when its stamp has changed."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._stamp: Stamp | None = None
        self._text: bytes | None = None

    def get(self) -> bytes | None:
        """Current content, as the same `bytes` object while the file is unchanged; None if it is missing."""
        stat = self._folder.glance(self._name)
        if stat is None:
            self._stamp = self._text = None
            return None
        if self._stamp is None or self._stamp != stat.stamp:
            text = self._folder.get(self._name)
            if text != self._text:
                self._text = text
            # A stamp younger than the clock's tick may hide a second change: then the file is read each time.
            self._stamp = stat.stamp if stat.is_settled else None
        return self._text
