"""Local cache of byte ranges downloaded from object stores, with a quota; anybody may delete the folder.

A cached object is a sparse file of the object's length, with holes where nothing was downloaded yet. There is
no index of what is present: readers verify each chunk by its checksum, so a hole or a damaged file costs one
more request and never a wrong value. The file name is a digest of URL and stamp, so an object that was
deleted and written anew gets another file.

Several processes may share the folder, as all of them write the same bytes to the same ranges. The least
recently used files are evicted first; a process that has one open keeps reading it. Between two evictions a
process may exceed the quota by a sixteenth.
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
"""Environment variable: size of the cache, such as 10GB; 0 disables it. Default: 10 GiB."""
_DEFAULT_QUOTA = 10 << 30
_SCANS_PER_QUOTA = 16  # the cache is scanned after every sixteenth of the quota that was downloaded
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def cache_folder() -> Path:
    """Folder of all caches on this machine: $MIZARR_CACHE, else ~/.cache/mizarr."""
    return Path(os.environ.get("MIZARR_CACHE") or Path.home() / ".cache" / "mizarr")


class ReadCache:
    """Cache of byte ranges downloaded from a bucket, as sparse local copies of its objects.

    Arguments:
        folder: Folder of the copies; created when needed.
        quota: Bytes that all copies may have; 0 keeps nothing beyond the end of the process.
    """

    def __init__(self, folder: Path, quota: int) -> None:
        self._folder, self._quota = folder, quota
        # Bytes downloaded since the last scan; starts at the quota, so that the first use scans what earlier
        # processes have left.
        self._downloaded = quota
        self._lock = threading.Lock()

    @classmethod
    def of_user(cls) -> ReadCache:
        """Open the cache in the user's cache folder. StoreError for an invalid $MIZARR_CACHE_QUOTA."""
        return cls(cache_folder() / "objects", quota())

    def open(self, name: str, stamp: Stamp, size: int) -> int:
        """Open the local copy of an object: what was downloaded earlier, and zeros elsewhere.

        Without a quota, or if the cache folder cannot be written, the file has no name and vanishes with its
        last descriptor.

        Arguments:
            name: URL of the object.
            stamp: Stamp of the object; a new version of the object gets another file.
            size: Bytes of the object.

        Returns:
            Descriptor of a file of `size` bytes, for reading and writing.
        """
        if self._quota:
            with suppress(OSError):
                return self._open_copy(self._path(name, stamp), size)
        # Anonymous: the kernel removes it with the last descriptor, even after a kill.
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
        os.ftruncate(handle, size)
        return handle

    def added(self, nbytes: int) -> None:
        """Count bytes that were downloaded; after each sixteenth of the quota, evict files above the
        quota."""
        # The scan below runs outside the lock: it walks the whole cache and must not stall other downloads.
        with self._lock:
            self._downloaded += nbytes
            if not self._quota or self._downloaded < self._quota / _SCANS_PER_QUOTA:
                return
            self._downloaded = 0
        self._make_room()

    def _open_copy(self, path: Path, size: int) -> int:
        """Open or create a file of the cache with `size` bytes; returns its descriptor."""
        self.added(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: in a shared folder somebody may have put a link to a file that is not ours to write.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        # A file of another length can only be somebody's edit: cut or extend it, and let the checksums
        # decide.
        if os.fstat(handle).st_size != size:
            os.ftruncate(handle, size)
        os.utime(handle)  # mtime is the time of last use: atime is off on many mounts
        return handle

    def _path(self, name: str, stamp: Stamp) -> Path:
        digest = hashlib.sha256(repr((name, stamp)).encode()).hexdigest()
        return self._folder / digest[:2] / digest

    def _make_room(self) -> None:
        """Evict the least recently used files until the rest fits the quota."""
        files = []
        for top, _, names in os.walk(self._folder):
            for name in names:
                with suppress(OSError):
                    stat = (Path(top) / name).stat(follow_symlinks=False)
                    # st_blocks, not st_size: the files are sparse.
                    files.append((stat.st_mtime, stat.st_blocks * 512, Path(top) / name))
        total = sum(nbytes for _, nbytes, _ in files)
        for _, nbytes, path in sorted(files):
            if total <= self._quota:
                return
            with suppress(OSError):
                path.unlink()
            total -= nbytes


def quota() -> int:
    """Size in bytes that the cache of downloads may have, from $MIZARR_CACHE_QUOTA; StoreError if invalid."""
    setting = os.environ.get(QUOTA)
    if not setting:
        return _DEFAULT_QUOTA
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", setting.lower())
    if match is None:
        raise StoreError(
            f"expected a size such as 10GB in the environment variable {QUOTA}, found {setting!r}; set such "
            "a size, or 0 for no cache"
        )
    return int(float(match[1]) * _UNITS[match[2]])
