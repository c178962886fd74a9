"""Segment records: which shards of a run are committed, with their checksums. Reading only.

A record is written once per pass and segment, after its shards (`entries.py`); a cell is a (variable, layer).
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
"""A cell: one array of a run, by variable and layer; the layer is None without a layer axis."""
PLAIN = "plain"
"""JSON field of segment records and manifests: size and checksum of the uncompressed form of compressed
files. Contents and keys are computed from these, so compressing a run changes neither."""


class Committed:
    """Cached view of all segment records of a run. Safe for any number of threads."""

    def __init__(self, folder: Folder, path: str, n_segments: int) -> None:
        self._folder, self._path, self._n_segments = folder, path, n_segments
        self._records: dict[str, tuple[Stamp | None, _SegmentRecord]] = {}
        self._shards: list[dict[VariableLayer, FileChecksum]] = [{} for _ in range(n_segments)]
        self._plain: list[dict[VariableLayer, FileChecksum]] = [{} for _ in range(n_segments)]
        self._folder_stamp: Stamp | None = None
        self._lock = threading.Lock()

    def segments(self) -> list[dict[VariableLayer, FileChecksum]]:
        """Per segment: cell -> size and checksum of its shard file, as committed now. Do not modify."""
        with self._lock:
            stat = self._folder.folder_stat(self._path)
            # Records are created and removed, never changed, so an unchanged directory means unchanged
            # records.
            if stat is None or self._folder_stamp != stat.stamp:
                self._reload()
                self._folder_stamp = stat.stamp if stat is not None and stat.is_settled else None
            return self._shards

    def shard(self, n: int, cell: VariableLayer) -> FileChecksum | None:
        """Size and checksum of a shard file.

        Arguments:
            n: Number of the segment.
            cell: Variable and layer.

        Returns:
            None while the shard is not committed.
        """
        return self.segments()[n].get(cell)

    def content(self, n: int, cell: VariableLayer) -> FileChecksum | None:
        """Size and checksum of a shard in its uncompressed form; arguments and None as for `shard`."""
        shard = self.segments()[n].get(cell)
        return shard and self._plain[n].get(cell, shard)

    def contents(self, cell: VariableLayer) -> list[FileChecksum]:
        """Uncompressed size and checksum of a cell in each segment; every segment must be committed."""
        segments = self.segments()
        return [self._plain[n].get(cell, shards[cell]) for n, shards in enumerate(segments)]

    def plain(self, n: int, cell: VariableLayer) -> FileChecksum | None:
        """As `content` for a compressed shard, but None for an uncompressed one; arguments as for `shard`."""
        return self._plain[n].get(cell) if self.segments()[n] else None

    def _reload(self) -> None:
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
    """Path of the record that one pass writes for segment `n`.

    Arguments:
        path: Folder of the run.
        n: Number of the segment.
        cells: Sorted names of the cells; their digest allows several passes to add records to one segment.
    """
    return f"{path}/seg/{n}.{digest('cells', list(cells))[:12]}.json"


def cell_name(cell: VariableLayer) -> str:
    """Name of a cell in file names and records, such as "resid_post.3"."""
    variable, layer = cell
    return variable if layer is None else f"{variable}.{layer}"


def _cell(name: str) -> VariableLayer:
    variable, _, layer = name.partition(".")
    return (variable, int(layer)) if layer else (variable, None)


def _by_cell_path(files: Mapping[str, Any]) -> dict[tuple[str, ...], FileChecksum]:
    """Shard files by (variable, layer or segment): the first and third component of their paths, which read
    variable/c/layer/segment/… with a layer axis and variable/c/segment/… without."""
    return {
        tuple(path.split("/", 3)[:3:2]): (int(size), str(checksum))
        for path, (size, checksum) in files.items()
    }


@dataclass(frozen=True)
class _SegmentRecord:
    """Content of a segment record: the shards of one segment that one pass over the model committed."""

    segment: int
    """Number of the segment."""
    cells: Mapping[VariableLayer, FileChecksum]
    """Size and checksum of the shard file of each cell."""
    plain: Mapping[VariableLayer, FileChecksum]
    """Size and checksum of the uncompressed form, for compressed shards only."""

    @classmethod
    def from_bytes(cls, name: str, text: bytes, n_segments: int) -> _SegmentRecord:
        """Parse a record; CorruptEntry if it is damaged."""
        try:
            fields = unsealed(name, text)
            # range() also rejects numbers outside the run and, with TypeError, anything that is no integer.
            segment = range(n_segments)[fields["segment"]]
            places = {
                cell: (cell[0], str(segment if cell[1] is None else cell[1]))
                for cell in map(_cell, fields["cells"])
            }
            files, plain = _by_cell_path(fields["files"]), _by_cell_path(fields[PLAIN])
            cells = {cell: files[place] for cell, place in places.items()}
            return cls(
                segment, cells, {cell: plain[place] for cell, place in places.items() if place in plain}
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CorruptEntry(
                f"{name}: expected a segment record, found an invalid one ({error}); {REPAIR}"
            ) from error
