"""What was read from object stores, kept on this machine up to a quota: a folder anybody may delete.

Border: names of objects with their stamps in, open files out; what is in them is checked by who reads it,
each chunk by its checksum, so a file that is wrong costs a request and decides nothing.

A file is as long as its object and has holes where nothing was fetched yet. Its name digests which object it
is, stamp included: an object that was deleted and written anew has another. What was used least lately goes
first; who still has a file open keeps reading it. Any number of processes share the folder: bytes of one
range are the same whoever writes them. Between two looks the quota may be exceeded, by a sixteenth of it per
process.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from ..errors import StoreError
from .stamps import Stamp

__all__ = ["QUOTA", "ReadCache", "cache_folder"]

QUOTA = "MIZARR_CACHE_QUOTA"
"""Environment variable: bytes to keep, as 10GB; 0 keeps none. By default 10 GiB."""
_DEFAULT = 10 << 30
_SHARE = 16  # part of the quota that is fetched between two looks at the folder
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def cache_folder() -> Path:
    """Where what is remembered of files lies: $MIZARR_CACHE, else ~/.cache/mizarr."""
    return Path(os.environ.get("MIZARR_CACHE") or Path.home() / ".cache" / "mizarr")


class ReadCache:
    """Parts of objects on this machine. folder: made when it is needed. quota: bytes, 0 for none at all."""

    def __init__(self, folder: Path, quota: int) -> None:
        self._folder, self._quota = folder, quota
        self._fetched = quota  # look before anything is added
        self._lock = threading.Lock()

    @classmethod
    def of_user(cls) -> ReadCache:
        """The one in the user's cache folder. StoreError for a quota that is no size."""
        return cls(cache_folder() / "objects", quota())

    def open(self, name: str, stamp: Stamp, size: int) -> int:
        """A file of `size` bytes, open for reading and writing: with what was fetched before, else all holes.

        Where nothing can be kept it has no name, and goes with its last user.
        """
        if self._quota:
            with suppress(OSError):
                return self._named(self._path(name, stamp), size)
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
        os.ftruncate(handle, size)
        return handle

    def added(self, nbytes: int) -> None:
        """Say that so many bytes were fetched; now and then this makes room."""
        with self._lock:
            self._fetched += nbytes
            if not self._quota or self._fetched < self._quota / _SHARE:
                return
            self._fetched = 0
        self._make_room()

    def _named(self, path: Path, size: int) -> int:
        self.added(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Never through a link that somebody put there.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(handle).st_size != size:
            os.ftruncate(handle, size)
        os.utime(handle)
        return handle

    def _path(self, name: str, stamp: Stamp) -> Path:
        told = hashlib.sha256(repr((name, stamp)).encode()).hexdigest()
        return self._folder / told[:2] / told

    def _make_room(self) -> None:
        """Remove what was used least lately, down to the quota."""
        found = []
        for top, _, names in os.walk(self._folder):
            for name in names:
                with suppress(OSError):
                    stat = (Path(top) / name).stat(follow_symlinks=False)
                    found.append((stat.st_mtime, stat.st_blocks * 512, Path(top) / name))
        held = sum(nbytes for _, nbytes, _ in found)
        for _, nbytes, path in sorted(found):
            if held <= self._quota:
                return
            with suppress(OSError):
                path.unlink()
            held -= nbytes


def quota() -> int:
    """Bytes that $MIZARR_CACHE_QUOTA allows; StoreError for what is no size."""
    told = os.environ.get(QUOTA)
    if not told:
        return _DEFAULT
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", told.lower())
    if found is None:
        raise StoreError(f"expected a size such as 10GB in {QUOTA}, found {told!r}; set it so, or to 0")
    return int(float(found[1]) * _UNITS[found[2]])
