"""Shards mapped lately, so that reading one again opens nothing, and how much of them may lie in memory.

A map holds a file descriptor, and a process has so many of them, however many runs it reads. So one line
tells which shards of all runs were read least lately, and their maps are let go of; rows in hand stay.

Border: files of a known layout in, rows out; knows no runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextlib import suppress
from weakref import ref

from ..files import Folder, Stamp
from .archived import read_archived
from .shards import ShardLayout, ShardRows, read_shard

MAPPED = 4096
"""Shards that this process keeps mapped at most; systems allow some ten thousand maps."""
SHARE = 4
"""One in so many of the files this process may have open: 256 of the usual 1024."""
RESIDENT = 3 << 25
"""Bytes of a run's shards that may lie in this process's memory: a scan of any corpus takes no more."""


class MappedShards:
    """Shards of one run, with what was checked of them; safe for any number of threads."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._mapped: dict[str, tuple[Stamp, ShardLayout, ShardRows]] = {}
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._resident_bytes = 0
        self._lock = threading.Lock()
        self._me = _LINE.join(self)

    def rows(self, name: str, layout: ShardLayout, rows: int, what: str) -> ShardRows:
        """Rows of a shard, read-only: [rows, *tail]. what: these rows, as an error names them.

        Raises FileNotFoundError; CorruptEntry for a file cut short, or an index that is not intact.
        """
        stat = self._folder.glance(name)
        if stat is None:
            raise FileNotFoundError(name)
        # Another stamp: quarantined and written anew, or changed in place, since it was mapped.
        with self._lock:
            known = self._mapped.get(name)
            if known is None or known[0] != stat.stamp or known[1] != layout or len(known[2]) != rows:
                mapped = self._folder.mapped(name)
                read = read_archived if layout.codec else read_shard
                known = self._mapped[name] = (stat.stamp, layout, read(mapped, layout, rows, what))
            known[2].remembers = stat.is_settled
            self._bound_memory(name, known[2])
            too_many = _LINE.used(self._me, name)
        # Without a lock of one's own, as that of another run is taken.
        for run, old in too_many:
            if (shards := run()) is not None:
                shards.forget(old)
        return known[2]

    def forget(self, name: str) -> None:
        """Let go of a map, if it is held; who has rows of it keeps them."""
        with self._lock:
            self._mapped.pop(name, None)
            self._resident_bytes -= self._resident.pop(name, 0)

    def _bound_memory(self, name: str, rows: ShardRows) -> None:
        """Let go of the pages of shards that were not asked for lately, now that this one will be read."""
        self._resident_bytes += rows.nbytes - self._resident.pop(name, 0)
        self._resident[name] = rows.nbytes
        while self._resident_bytes > RESIDENT and len(self._resident) > 1:
            old, nbytes = self._resident.popitem(last=False)
            self._resident_bytes -= nbytes
            if self._mapped[old][2].is_fetched:
                del self._mapped[old]  # memory is all there is of it, or a file of the cache
                _LINE.left(self._me, old)
            else:
                self._mapped[old][2].let_go()


class _Line:
    """Shards of all runs that are mapped, those read least lately in front. Takes no lock but its own."""

    def __init__(self) -> None:
        self._line: OrderedDict[tuple[ref[MappedShards], str], None] = OrderedDict()
        self._gone: deque[ref[MappedShards]] = deque()
        self._lock = threading.Lock()

    def join(self, shards: MappedShards) -> ref[MappedShards]:
        """What stands for a run here, without keeping it alive; with a run its maps go."""
        return ref(shards, self._gone.append)  # at any moment: whoever holds the lock may be told of it

    def used(self, run: ref[MappedShards], name: str) -> list[tuple[ref[MappedShards], str]]:
        """A shard goes to the end; returns those at the front that are too many, and stand here no more."""
        with self._lock:
            while self._gone:
                gone = self._gone.popleft()
                for place in [place for place in self._line if place[0] is gone]:
                    del self._line[place]
            self._line[run, name] = None
            self._line.move_to_end((run, name))
            return [self._line.popitem(last=False)[0] for _ in range(len(self._line) - most_mapped())]

    def left(self, run: ref[MappedShards], name: str) -> None:
        """A shard is mapped no more."""
        with self._lock:
            self._line.pop((run, name), None)


def most_mapped() -> int:
    """Shards this process may keep mapped, by how many files it may have open now."""
    with suppress(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            return max(1, min(MAPPED, files // SHARE))
    return MAPPED


_LINE = _Line()
