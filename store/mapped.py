"""Shards mapped lately, so that reading one again opens nothing, and how much of them may lie in memory.

Border: files of a known layout in, rows out; knows no runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from .shards import Array, ShardLayout, let_go, read_shard

MAPPED = 256
"""Shards kept mapped: each map holds a file descriptor, of which a process has 1024 as a rule."""
RESIDENT = 3 << 25
"""Bytes of them that may lie in this process's memory: a scan of any corpus takes no more."""


class MappedShards:
    """Shards of one run; safe for any number of threads."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[Path, tuple[int, Array]] = OrderedDict()
        self._resident: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, path: Path, layout: ShardLayout, rows: int) -> Array:
        """Rows of a shard, read-only: [rows, *tail].

        Raises FileNotFoundError; CorruptEntry for a file cut short, or an index that is not intact.
        """
        # Another inode: the shard was quarantined and written anew since it was mapped.
        inode = path.stat().st_ino
        with self._lock:
            known = self._mapped.get(path)
            if known is None or known[0] != inode:
                known = self._mapped[path] = (inode, read_shard(path, layout, rows))
            self._mapped.move_to_end(path)
            if len(self._mapped) > MAPPED:
                self._resident.pop(self._mapped.popitem(last=False)[0], None)
            self._bound_memory(path, known[1])
        return known[1]

    def _bound_memory(self, path: Path, rows: Array) -> None:
        """Let go of the pages of shards that were not asked for lately, now that this one will be read."""
        self._resident[path] = rows.nbytes
        self._resident.move_to_end(path)
        while sum(self._resident.values()) > RESIDENT and len(self._resident) > 1:
            old, _ = self._resident.popitem(last=False)
            let_go(self._mapped[old][1])
