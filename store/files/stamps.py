"""Stamps: file metadata that shows, without a look at the content, whether a file has changed.

The same idea as the cached stat data of git's index, with the same race ("racy git"): see `is_settled`.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

# FAT keeps times in steps of two seconds, the coarsest clock of any file system that a store may lie on.
_SETTLED_SECONDS = 2.0

Stamp = tuple[int | str | None, ...]
"""Equal stamps mean equal content. On a disk: device, inode, size, mtime and ctime in nanoseconds; in an
object store: ETag, size and modification time."""


class Stat(NamedTuple):
    """File metadata, read without opening the file."""

    size: int
    """Size in bytes."""
    modified: float
    """Modification time in seconds since the epoch, by the clock of `Folder.now`."""
    stamp: Stamp
    """Value that changes whenever the content of the file changes, if `is_settled`."""
    is_settled: bool
    """Whether the next change of the file is certain to change its stamp."""

    @classmethod
    def of(cls, stat: os.stat_result) -> Stat:
        """Convert the result of `os.stat` for a file on a disk."""
        return cls(stat.st_size, stat.st_mtime, stamp(stat), is_settled(stat))


def stamp(stat: os.stat_result) -> Stamp:
    """Value that changes with the content of a file on a disk: device, inode, size and times.

    Two changes within one tick of the clock may give one stamp; `is_settled` rules that out.
    """
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def is_settled(stat: os.stat_result, now: float | None = None) -> bool:
    """Whether a file's last change is so long ago that its next change is certain to change its stamp.

    Arguments:
        stat: Metadata of the file.
        now: When `stat` was taken, seconds since the epoch; by default this moment.

    Returns:
        False also for a file from the future, as left by a clock that was set back.
    """
    observed = time.time() if now is None else now
    return observed - max(stat.st_mtime, stat.st_ctime) > _SETTLED_SECONDS
