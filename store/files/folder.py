"""What a store asks of the place that keeps its files: the one seam to disks and to object stores.

Border: names relative to the store's root and bytes; what they mean is known elsewhere, and no other file of
the package learns where a store really lies.

The rules on which commit rests, whoever keeps the files: a file appears under its name complete or not at
all, the first to create it wins, and nothing is ever changed. `tests/contracts/files_contract.py` holds every
place to them.
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

__all__ = ["DESCRIPTION", "THREADS", "Folder", "Measured", "checked", "is_below", "room_at"]

THREADS = 4
"""That digest at once: sha256 releases the GIL, two are twice as fast; beyond four the disk is the limit."""

DESCRIPTION = "store.json"
"""The file whose presence makes a folder a store."""

Measured = dict[str, list[int | str]]
"""Manifest part: path relative to the folder -> [size in bytes, "sha256:…"]."""


_UNSAFE = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f\\]")
"""A step of a name that is empty, "." or "..", and characters that no name of a store has."""


def is_below(name: str) -> bool:
    """Whether a name, by its spelling, leads to something below the folder it is relative to.

    name: steps parted by "/", out of a file that somebody else may have written.
    """
    return _UNSAFE.search(name) is None


def checked(name: str) -> str:
    """A name, which may have been read from somebody's file, before it becomes a place: below the root of its
    store, and nowhere else. The one way from names to places, on disks and in buckets.

    name: steps parted by "/"; "" for the root itself.
    Raises CorruptEntry for a name that leads elsewhere, or has characters that names of a store do not have.
    """
    if name and not is_below(name):
        raise CorruptEntry(f"expected a name below the folder of a store, found {name!r:.80}; {REPAIR}")
    return name


def room_at(place: Path) -> int:
    """Bytes the file system of a place has left for this user; the place need not exist yet."""
    return shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free


class Folder(ABC):
    """The files of a store, by name. Cheap to send to another process.

    read_only: refuses every write with ReadOnlyStore.
    is_store: opened as a store (`as_store`), whose `store.json` has to stay where it was.
    """

    read_only: bool
    is_store: bool

    @property
    @abstractmethod
    def address(self) -> str:
        """What people call it, and what `open_store` takes: a path, or a URL without credentials."""

    @abstractmethod
    def where(self, name: str) -> str:
        """A file or folder, as an error names it."""

    @abstractmethod
    def as_store(self) -> Folder:
        """The same folder, for whoever found its `store.json`: from now on it takes writes only with it."""

    def require_there(self) -> None:
        """Raise StoreError where a store was renamed, removed or unmounted since it was opened.

        Whatever was written then would lie in a folder that nobody can open.
        """
        if self.is_store and self.glance(DESCRIPTION) is None:
            raise StoreError(
                f"expected the store {self.address}, found no {DESCRIPTION} there any more: it was renamed, "
                "removed or unmounted since it was opened; open it where it is now"
            )

    @property
    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes there is room for; None where nobody says."""

    @property
    @abstractmethod
    def index_path(self) -> Path | None:
        """Where the index of this store lies on this machine; None for in memory."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the epoch, by the clock that `Stat.modified` is told by."""

    # -- reading

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is none."""

    @abstractmethod
    def get_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Bytes of a file from `start` to `stop`, None for its end; a negative `start` counts from the end.

        Fewer where the file ends before; None when there is none.
        """

    @abstractmethod
    def stat(self, name: str) -> Stat | None:
        """What is known of a file without reading it; None when there is none."""

    def folder_stat(self, folder: str) -> Stat | None:
        """What is known of a folder itself; None where there are names only, and folders are none."""
        return None

    def glance(self, name: str) -> Stat | None:
        """`stat`, for what is looked at before every read; may be seconds old where a look is a request."""
        return self.stat(name)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        stat = self.stat(name)
        return None if stat is None else stat.size

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        """Bytes of files below a folder, by name relative to it; None for those that are not there."""
        return {name: self.size(f"{folder}/{name}") for name in names}

    @abstractmethod
    def measure(self, name: str) -> tuple[int, str]:
        """Size in bytes and "sha256:…" of a file; FileNotFoundError when there is none."""

    @abstractmethod
    def mapped(self, name: str) -> Mapped:
        """A file as memory; FileNotFoundError when there is none."""

    @abstractmethod
    def zarr(self, folder: str) -> Any:
        """What zarr and xarray open to read a group or an array: a path, or a `zarr.abc.store.Store`."""

    # -- what is there

    @abstractmethod
    def children(self, folder: str) -> Iterator[str]:
        """Names of what lies directly in a folder, without the folder's; temporary ones left out."""

    @abstractmethod
    def subfolders(self, folder: str) -> Iterator[str]:
        """Names of the folders directly in a folder, without the folder's; temporary ones left out."""

    @abstractmethod
    def stamps(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Names of the files directly in a folder, each with what is known of it; temporary ones left out."""

    @abstractmethod
    def list(self, folder: str) -> Iterator[str]:
        """Names of all files below a folder, relative to the root; temporary ones (leading dot) left out."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """All files below a folder, temporary ones as well, relative to the root."""

    def strangers(self, folder: str) -> Iterator[tuple[str, str]]:
        """What lies below a folder where files should, and is none: names, each with what it is.

        Nothing where there are names only.
        """
        return iter(())

    # -- writing

    def put_new(self, name: str, data: bytes) -> bool:
        """Create a file with these bytes; False, and nothing changes, when it is there already."""
        return bool(self.put_all({name: [data]}))

    @abstractmethod
    def put_all(
        self,
        files: Mapping[str, Sequence[Buffer]],
        *,
        threads: int = 1,
        handed_over: Callable[[], None] = lambda: None,
    ) -> set[str]:
        """Create files of these parts, each laid end to end; returns the new names, the others stay.

        The bytes of arrays are there before a file that describes them (`*.json`) appears.
        threads: that write side by side; more than one only where nobody computes meanwhile. handed_over:
        called when what is left is waiting for others.
        """

    @abstractmethod
    def mark(self, name: str, data: bytes) -> bool:
        """Create a small file that need not outlive a power cut; False when it is there already."""

    @abstractmethod
    def touch(self, name: str) -> None:
        """Make now the time a file was modified, if it is there; OSError where that fails."""

    @abstractmethod
    def link_all(self, names: Mapping[str, str]) -> set[str]:
        """Give files a further name each, new -> old; returns the new names, those taken stay as they are.

        FileNotFoundError when an old one is gone.
        """

    @abstractmethod
    def build(self, folder: str, fill: Callable[[Path], None]) -> Measured:
        """A new folder, filled by what writes to a real one; returns size and digest of each of its files.

        fill: called with an empty folder on this machine. FileExistsError when the folder is not new.
        """

    @abstractmethod
    def scratch(self, folder: str) -> Path:
        """Where on this machine files may lie that are of use to a folder for a while; it need not exist."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Give a file, or a folder with all in it, another name, if it is there."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file if it is there."""

    @abstractmethod
    def remove_tree(self, folder: str) -> None:
        """Remove a folder and all below it, if it is there; what cannot be removed stays for gc."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[None]:
        """Around a write: refuses a store that is read-only or gone, and tells failures as store errors."""


class Watched:
    """One small file of a folder, read again only when it may have changed."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._stamp: Stamp | None = None
        self._text: bytes | None = None

    def get(self) -> bytes | None:
        """Its bytes as they are now, the same object as long as they are the same; None when it is gone."""
        stat = self._folder.glance(self._name)
        if stat is None:
            self._stamp = self._text = None
            return None
        if self._stamp is None or self._stamp != stat.stamp:
            text = self._folder.get(self._name)
            if text != self._text:
                self._text = text
            self._stamp = stat.stamp if stat.is_settled else None
        return self._text
