"""Segment records: which shards of a run are committed, with their checksums. Reading only.

A segment is a range of tokens, a shard is the file with one array (variable, layer) of one segment. A record
is written after the shards that were computed together (`entries.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..digest import digest
from ..errors import REPAIR, CorruptEntry
from ..files import Folder, Stamp
from ..sealed import unsealed
from .shards import FileChecksum

VariableLayer = tuple[str, int | None]
"""Identifies one array of a run, a "cell": name of the variable, and layer, None without a layer axis."""
PLAIN = "plain"
"""JSON field of segment records and manifests: size and checksum of the uncompressed form of compressed
files. Contents and keys are computed from these, so compressing a run changes neither."""


class Committed:
    """Which shard files of a run are committed, with their checksums; reads each segment record once.

    Safe for any number of threads.
    """

    def __init__(self, folder: Folder, path: str, n_segments: int) -> None:
        self._folder, self._path, self._n_segments = folder, path, n_segments
        self._records: dict[str, tuple[Stamp | None, _SegmentRecord]] = {}
        self._shards: list[dict[VariableLayer, FileChecksum]] = [{} for _ in range(n_segments)]
        self._plain: list[dict[VariableLayer, FileChecksum]] = [{} for _ in range(n_segments)]
        self._folder_stamp: Stamp | None = None
        self._lock = threading.Lock()

    def segments(self) -> list[dict[VariableLayer, FileChecksum]]:
        """Per segment, the shards committed by now: (variable, layer) -> size and checksum. Do not modify."""
        with self._lock:
            stat = self._folder.folder_stat(self._path)
            # Records are created and removed, never changed, so an unchanged directory means unchanged
            # records.
            if stat is None or self._folder_stamp != stat.stamp:
                self._reload()
                self._folder_stamp = stat.stamp if stat is not None and stat.is_settled else None
            return self._shards

    def shard(self, n: int, cell: VariableLayer) -> FileChecksum | None:
        """Size and checksum of a shard file; None while it is not committed.

        Arguments:
            n: Number of the segment.
            cell: Variable and layer.
        """
        return self.segments()[n].get(cell)

    def content(self, n: int, cell: VariableLayer) -> FileChecksum | None:
        """Size and checksum of a shard in its uncompressed form; None while it is not committed.

        Arguments:
            n: Number of the segment.
            cell: Variable and layer.
        """
        shard = self.segments()[n].get(cell)
        return shard and self._plain[n].get(cell, shard)

    def contents(self, cell: VariableLayer) -> list[FileChecksum]:
        """Uncompressed size and checksum of an array's shard in each segment; all must be committed."""
        segments = self.segments()
        return [self._plain[n].get(cell, shards[cell]) for n, shards in enumerate(segments)]

    def plain(self, n: int, cell: VariableLayer) -> FileChecksum | None:
        """Size and checksum of the uncompressed form of a compressed shard; None for an uncompressed one.

        Arguments:
            n: Number of the segment.
            cell: Variable and layer.
        """
        return self._plain[n].get(cell) if self.segments()[n] else None

    def _reload(self) -> None:
        """List the segment records, parse those that are new or changed, and combine all of them."""
        records = {}
        for name, stat in self._folder.stamps(self._path):
            # The folder is an empty Zarr group (see BOOKKEEPING in coordinates.py), hence the zarr.json.
            if not name.endswith(".json") or name == "zarr.json":
                continue
            cached = self._records.get(name)
            if cached is not None and cached[0] == stat.stamp:
                records[name] = cached
            elif (text := self._folder.get(f"{self._path}/{name}")) is not None:
                record = _SegmentRecord.from_bytes(f"{self._path}/{name}", text, self._n_segments)
                records[name] = stat.stamp if stat.is_settled else None, record
        # Rebuilt from all records, because removed records (quarantine) must disappear as well.
        shards: list[dict[VariableLayer, FileChecksum]] = [{} for _ in range(self._n_segments)]
        plain: list[dict[VariableLayer, FileChecksum]] = [{} for _ in range(self._n_segments)]
        for _, record in records.values():
            shards[record.segment].update(record.cells)
            plain[record.segment].update(record.plain)
        self._records, self._shards, self._plain = records, shards, plain


def record_name(path: str, n: int, cells: Sequence[str]) -> str:
    """Path of the record that commits these arrays of segment `n`.

    Arguments:
        path: Folder of the run.
        n: Number of the segment.
        cells: Sorted names of the arrays, from `cell_name`. The path contains their digest, so that arrays
            captured later get a record of their own.
    """
    return f"{path}/seg/{n}.{digest('cells', list(cells))[:12]}.json"


def cell_name(cell: VariableLayer) -> str:
    """Name of an array (variable, layer) in file names and records, such as "resid_post.3"."""
    variable, layer = cell
    return variable if layer is None else f"{variable}.{layer}"


def _cell(name: str) -> VariableLayer:
    """Variable and layer of a name such as "resid_post.3"; the inverse of `cell_name`."""
    variable, _, layer = name.partition(".")
    return (variable, int(layer)) if layer else (variable, None)


def _by_path_start(files: Mapping[str, Any]) -> dict[tuple[str, str], FileChecksum]:
    """Size and checksum of shard files, by the first and third component of their paths.

    Paths are variable/c/layer/segment/… for arrays with a layer axis, variable/c/segment/… for others.
    """
    by_path_start = {}
    for path, (size, checksum) in files.items():
        variable, _, layer_or_segment = path.split("/", 3)[:3]
        by_path_start[variable, layer_or_segment] = int(size), str(checksum)
    return by_path_start


@dataclass(frozen=True)
class _SegmentRecord:
    """Content of a segment record: shards of one segment that were computed and committed together."""

    segment: int
    """Number of the segment."""
    cells: Mapping[VariableLayer, FileChecksum]
    """Size and checksum of the shard file of each (variable, layer)."""
    plain: Mapping[VariableLayer, FileChecksum]
    """Size and checksum of the uncompressed form of each compressed shard."""

    @classmethod
    def from_bytes(cls, name: str, text: bytes, n_segments: int) -> _SegmentRecord:
        """Parse a record; CorruptEntry if it is damaged."""
        try:
            fields = unsealed(name, text)
            # range() also rejects numbers outside the run and, with TypeError, anything that is no integer.
            segment = range(n_segments)[fields["segment"]]
            path_starts = {
                (variable, layer): (variable, str(segment if layer is None else layer))
                for variable, layer in map(_cell, fields["cells"])
            }
            files, plain_files = _by_path_start(fields["files"]), _by_path_start(fields[PLAIN])
            cells = {cell: files[start] for cell, start in path_starts.items()}
            plain = {cell: plain_files[start] for cell, start in path_starts.items() if start in plain_files}
            return cls(segment, cells, plain)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CorruptEntry(
                f"the segment record {name}, a list of committed files, is invalid ({error}); {REPAIR}"
            ) from error
