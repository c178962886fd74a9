"""Whether a file is still the one that was seen: what a system says of it, without its bytes.

Border: numbers and times; what they say is their reader's business.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

_SETTLED = 2.0  # seconds; the coarsest clock of a file system ticks that slowly

Stamp = tuple[int | str | None, ...]
"""As long as a file keeps its stamp, it is as it was: on a disk device, inode, size, mtime and ctime in
nanoseconds, elsewhere what a server answers for (its ETag)."""


class Stat(NamedTuple):
    """What is known of a file without reading it.

    modified: seconds since the epoch, by the clock of whoever keeps the file (`Folder.now`). is_settled:
    whether the next change would show in the stamp.
    """

    size: int
    modified: float
    stamp: Stamp
    is_settled: bool

    @classmethod
    def of(cls, stat: os.stat_result) -> Stat:
        """What the system says of a file on a disk."""
        return cls(stat.st_size, stat.st_mtime, stamp(stat), is_settled(stat))


def stamp(stat: os.stat_result) -> Stamp:
    """What a file must keep to be taken for unchanged; see also `is_settled`."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def is_settled(stat: os.stat_result, now: float | None = None) -> bool:
    """Whether the next change of the file would show in its stamp: the clock has ticked since the last one.

    now: when `stat` was taken, seconds since the epoch, by default this moment. A file from the future, by a
    clock that was set back, never is.
    """
    taken = time.time() if now is None else now
    return taken - max(stat.st_mtime, stat.st_ctime) > _SETTLED
