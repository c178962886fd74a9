"""Cache of memory-mapped shards, with limits on open maps and on resident memory.

A map holds a file descriptor (before Python 3.13 there is no way round it), and the limit on descriptors is
one per process, while a harvest has more shards than that and a comparison reads many runs. So one LRU order
covers the shards of all runs. Memory is limited per run instead: with a common limit, two runs read in turns
from a bucket would evict each other's chunks and download everything twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextlib import suppress
from weakref import ref

from ..files import Folder, Stamp
from .archived import read_archived
from .shards import ShardLayout, ShardRows, read_shard

MAX_MAPPED = 4096
"""Upper limit on mapped shards in this process; the kernel's limit on maps is some ten thousand."""
SHARE = 4
"""Mapped shards use at most this fraction (1/4) of the file descriptors: 256 of the usual 1024."""
RESIDENT = 3 << 25
"""Bytes of one run's shards that may be resident in memory, so that scanning a corpus needs no more."""


class MappedShards:
    """Cache of the memory-mapped shard files of one run. Safe for any number of threads."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._mapped: dict[str, tuple[Stamp, ShardLayout, ShardRows]] = {}
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._resident_bytes = 0
        self._lock = threading.Lock()
        self._handle = _LRU.register(self)

    def rows(self, name: str, layout: ShardLayout, rows: int, label: str) -> ShardRows:
        """Open the rows of a shard file, [rows, ...], read-only; from the cache if the file is unchanged.

        Arguments:
            name: Path of the shard file.
            layout: Layout of the file.
            rows: Number of valid rows; the rest of the shard is padding.
            label: Names these rows in error messages.

        Raises:
            FileNotFoundError: There is no such file.
            CorruptEntry: The file is cut short or its index is damaged.
        """
        stat = self._folder.glance(name)
        if stat is None:
            raise FileNotFoundError(name)
        # A new stamp: the shard was quarantined and written again, or changed in place, since it was mapped.
        with self._lock:
            stamp, cached_layout, shard_rows = self._mapped.get(name, (None, None, None))
            if shard_rows is None or (stamp, cached_layout, len(shard_rows)) != (stat.stamp, layout, rows):
                read = read_archived if layout.codec else read_shard
                shard_rows = read(self._folder.mapped(name), layout, rows, label)
                self._mapped[name] = (stat.stamp, layout, shard_rows)
            shard_rows.checks_once = stat.is_settled
            self._bound_memory(name, shard_rows)
            evicted = _LRU.mark_used(self._handle, name)
        # Outside our lock: `forget` takes the lock of another run, which may be waiting for ours.
        for run, evicted_name in evicted:
            if (shards := run()) is not None:
                shards.forget(evicted_name)
        return shard_rows

    def forget(self, name: str) -> None:
        """Drop a shard file from the cache; it stays mapped while a caller still holds its rows."""
        with self._lock:
            self._mapped.pop(name, None)
            self._resident_bytes -= self._resident.pop(name, 0)

    def _bound_memory(self, name: str, rows: ShardRows) -> None:
        """Release pages of the least recently used shards, to make room for one that will be read now."""
        # Counted as if a shard were read completely; the true residency is not worth a system call per
        # access.
        self._resident_bytes += rows.nbytes - self._resident.pop(name, 0)
        self._resident[name] = rows.nbytes
        while self._resident_bytes > RESIDENT and len(self._resident) > 1:
            oldest, nbytes = self._resident.popitem(last=False)
            self._resident_bytes -= nbytes
            if self._mapped[oldest][2].is_fetched:
                # A downloaded shard: dropping the map frees its memory or cache file
                del self._mapped[oldest]
                _LRU.remove(self._handle, oldest)
            else:
                self._mapped[oldest][2].release_pages()


class _MappedOrder:
    """Mapped shard files of all runs, least recently used first. Takes no lock but its own, so it cannot
    deadlock."""

    def __init__(self) -> None:
        self._order: OrderedDict[tuple[ref[MappedShards], str], None] = OrderedDict()
        self._collected: deque[ref[MappedShards]] = deque()
        self._lock = threading.Lock()

    def register(self, shards: MappedShards) -> ref[MappedShards]:
        """Register the shards of a run; returns a weak reference to them, so that they are freed with the
        run."""
        # The callback may run at any moment, even while this thread holds the lock: it only appends to a
        # deque.
        return ref(shards, self._collected.append)

    def mark_used(self, run: ref[MappedShards], name: str) -> list[tuple[ref[MappedShards], str]]:
        """Mark a shard as most recently used; remove and return the oldest shards that exceed the limit."""
        with self._lock:
            while self._collected:
                collected = self._collected.popleft()
                for entry in [entry for entry in self._order if entry[0] is collected]:
                    del self._order[entry]
            self._order[run, name] = None
            self._order.move_to_end((run, name))
            return [self._order.popitem(last=False)[0] for _ in range(len(self._order) - max_mapped())]

    def remove(self, run: ref[MappedShards], name: str) -> None:
        """Take a shard file out of the LRU order, after its mapping was dropped.

        Arguments:
            run: Reference that `register` returned.
            name: Path of the shard file.
        """
        with self._lock:
            self._order.pop((run, name), None)


def max_mapped() -> int:
    """How many shard files this process may map at once: a quarter of the files it may open, at most 4096."""
    with suppress(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            return max(1, min(MAX_MAPPED, files // SHARE))
    return MAX_MAPPED


# One per process, as the limit on descriptors is.
_LRU = _MappedOrder()
