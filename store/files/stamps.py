"""Stamps: file metadata that shows, without a look at the content, whether a file has changed.

The same idea as the cached stat data of git's index, with the same race ("racy git"): see `is_settled`.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

# FAT keeps times in steps of two seconds, the coarsest clock of any file system that a store may lie on.
_SETTLED = 2.0

Stamp = tuple[int | str | None, ...]
"""Equal stamps mean equal content. On a disk: device, inode, size, mtime and ctime in nanoseconds; in an
object store: ETag, size and modification time."""


class Stat(NamedTuple):
    """File metadata, read without opening the file."""

    size: int
    """Bytes."""
    modified: float
    """Modification time in seconds since the epoch, by the clock of `Folder.now`."""
    stamp: Stamp
    """Changes whenever the content changes, if `is_settled`."""
    is_settled: bool
    """Whether the next change of the file is certain to change its stamp."""

    @classmethod
    def of(cls, stat: os.stat_result) -> Stat:
        """Convert the result of `os.stat`."""
        return cls(stat.st_size, stat.st_mtime, stamp(stat), is_settled(stat))


def stamp(stat: os.stat_result) -> Stamp:
    """Stamp of a file on a disk; only `is_settled` makes it safe to rely on."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def is_settled(stat: os.stat_result, now: float | None = None) -> bool:
    """Whether the next change of the file is certain to change its stamp, as the clock has ticked since the
    last.

    Arguments:
        stat: Metadata of the file.
        now: When `stat` was taken, seconds since the epoch; by default this moment.

    Returns:
        False also for a file from the future, as left by a clock that was set back.
    """
    observed = time.time() if now is None else now
    return observed - max(stat.st_mtime, stat.st_ctime) > _SETTLED
