"""Shards mapped lately, so that reading one again opens nothing, and how much of them may lie in memory.

Border: files of a known layout in, rows out; knows no runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from ..files import Folder, Stamp
from .shards import ShardLayout, ShardRows, read_shard

MAPPED = 256
"""Shards kept mapped: each map holds a file descriptor, of which a process has 1024 as a rule."""
RESIDENT = 3 << 25
"""Bytes of them that may lie in this process's memory: a scan of any corpus takes no more."""


class MappedShards:
    """Shards of one run, with what was checked of them; safe for any number of threads."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._mapped: OrderedDict[str, tuple[Stamp, ShardLayout, ShardRows]] = OrderedDict()
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

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
                known = self._mapped[name] = (stat.stamp, layout, read_shard(mapped, layout, rows, what))
            known[2].remembers = stat.is_settled
            self._mapped.move_to_end(name)
            if len(self._mapped) > MAPPED:
                self._resident.pop(self._mapped.popitem(last=False)[0], None)
            self._bound_memory(name, known[2])
        return known[2]

    def _bound_memory(self, name: str, rows: ShardRows) -> None:
        """Let go of the pages of shards that were not asked for lately, now that this one will be read."""
        self._resident[name] = rows.nbytes
        self._resident.move_to_end(name)
        while sum(self._resident.values()) > RESIDENT and len(self._resident) > 1:
            old, _ = self._resident.popitem(last=False)
            if self._mapped[old][2].is_fetched:
                del self._mapped[old]  # memory is all there is of it, or a file of the cache
            else:
                self._mapped[old][2].let_go()
