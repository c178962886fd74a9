"""What stands of a run, segment by segment: records of the shards that passes wrote.

Border: reads records; who writes them, and when, is `entries.py`'s.
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
from .shards import Written

VariableLayer = tuple[str, int | None]
"""One array of a run: variable and layer, None where there is no layer axis."""
PLAIN = "plain"
"""Field of a segment record, and of a manifest: of files that are compressed, size and digest of what they
stand for."""


class Committed:
    """The records in one folder, each read again when its file is another; safe for any number of threads."""

    def __init__(self, folder: Folder, path: str, n_segments: int) -> None:
        self._folder, self._path, self._n_segments = folder, path, n_segments
        self._records: dict[str, tuple[Stamp | None, _SegmentRecord]] = {}
        self._held: list[dict[VariableLayer, Written]] = [{} for _ in range(n_segments)]
        self._plain: list[dict[VariableLayer, Written]] = [{} for _ in range(n_segments)]
        self._seen: Stamp | None = None
        self._lock = threading.Lock()

    def segments(self) -> list[dict[VariableLayer, Written]]:
        """Per segment, cell -> size and digest of its shard, as they stand now; not to be changed."""
        with self._lock:
            stat = self._folder.folder_stat(self._path)
            # Records come and go by name, and are not changed: while the folder is as it was, so are they.
            if stat is None or self._seen != stat.stamp:
                self._look_again()
                self._seen = stat.stamp if stat is not None and stat.is_settled else None
            return self._held

    def shard(self, n: int, cell: VariableLayer) -> Written | None:
        """Size and digest of one shard; None while it is not committed."""
        return self.segments()[n].get(cell)

    def content(self, n: int, cell: VariableLayer) -> Written | None:
        """Size and digest of one shard as it is without a codec, which is what contents are made of; None
        while it is not committed."""
        there = self.segments()[n].get(cell)
        return there and self._plain[n].get(cell, there)

    def contents(self, cell: VariableLayer) -> list[Written]:
        """As `content`, of each segment, all of which are committed."""
        held = self.segments()
        return [self._plain[n].get(cell, shards[cell]) for n, shards in enumerate(held)]

    def plain(self, n: int, cell: VariableLayer) -> Written | None:
        """Size and digest of what one compressed shard stands for; None of any other."""
        return self._plain[n].get(cell) if self.segments()[n] else None

    def _look_again(self) -> None:
        records = {}
        for name, stat in self._folder.stamps(self._path):
            # zarr.json: the folder is an empty group for Zarr's sake (coordinates.py).
            if not name.endswith(".json") or name == "zarr.json":
                continue
            known = self._records.get(name)
            if known is not None and known[0] == stat.stamp:
                records[name] = known
            elif (text := self._folder.get(f"{self._path}/{name}")) is not None:
                record = _SegmentRecord.from_bytes(f"{self._path}/{name}", text, self._n_segments)
                records[name] = stat.stamp if stat.is_settled else None, record
        held: list[dict[VariableLayer, Written]] = [{} for _ in range(self._n_segments)]
        plain: list[dict[VariableLayer, Written]] = [{} for _ in range(self._n_segments)]
        for _, record in records.values():
            held[record.segment].update(record.cells)
            plain[record.segment].update(record.plain)
        self._records, self._held, self._plain = records, held, plain


def record_name(path: str, n: int, cells: Sequence[str]) -> str:
    """Where the record of what a pass wrote of segment n lies. cells: their names, in order."""
    return f"{path}/seg/{n}.{digest('cells', list(cells))[:12]}.json"


def cell_name(cell: VariableLayer) -> str:
    """As files and records name it: "resid_post.3"."""
    variable, layer = cell
    return variable if layer is None else f"{variable}.{layer}"


def _cell(name: str) -> VariableLayer:
    variable, _, layer = name.partition(".")
    return (variable, int(layer)) if layer else (variable, None)


def _by_place(files: Mapping[str, Any]) -> dict[tuple[str, ...], Written]:
    """Files by variable and layer: a path reads variable/c/layer/segment/…, or variable/c/segment/… where
    there is no layer axis."""
    return {tuple(path.split("/", 3)[:3:2]): (int(size), str(told)) for path, (size, told) in files.items()}


@dataclass(frozen=True)
class _SegmentRecord:
    """What one pass committed of one segment."""

    segment: int
    cells: Mapping[VariableLayer, Written]
    plain: Mapping[VariableLayer, Written]
    """Of those that are compressed: what they stand for."""

    @classmethod
    def from_bytes(cls, name: str, text: bytes, n_segments: int) -> _SegmentRecord:
        """The record in a file; CorruptEntry if it is not one."""
        try:
            fields = unsealed(name, text)
            segment = range(n_segments)[fields["segment"]]
            places = {
                cell: (cell[0], str(segment if cell[1] is None else cell[1]))
                for cell in map(_cell, fields["cells"])
            }
            files, plain = _by_place(fields["files"]), _by_place(fields[PLAIN])
            cells = {cell: files[place] for cell, place in places.items()}
            return cls(segment, cells, {cell: plain[at] for cell, at in places.items() if at in plain})
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CorruptEntry(
                f"{name}: expected a segment record, found one that is none ({error}); {REPAIR}"
            ) from error
