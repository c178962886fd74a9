"""What stands of a run, segment by segment: records of the shards that passes wrote.

Border: reads records; who writes them, and when, is `entries.py`'s.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import CorruptEntry
from .files import Folder
from .shards import Written

Cell = tuple[str, int | None]
"""One array of a run: variable and layer, None where there is no layer axis."""


class Committed:
    """The records in one folder, each read once, as they never change; safe for any number of threads."""

    def __init__(self, folder: Folder, path: str, n_segments: int) -> None:
        self._folder, self._path, self._n_segments = folder, path, n_segments
        self._records: dict[str, _SegmentRecord] = {}
        self._held: list[dict[Cell, Written]] = [{} for _ in range(n_segments)]
        self._lock = threading.Lock()

    def segments(self) -> list[dict[Cell, Written]]:
        """Per segment, cell -> size and digest of its shard, as they stand now."""
        # zarr.json: the folder is an empty group for Zarr's sake (coordinates.py).
        names = {
            name
            for name in self._folder.children(self._path)
            if name.endswith(".json") and name != "zarr.json"
        }
        with self._lock:
            if not names >= self._records.keys():  # quarantined
                self._records = {name: record for name, record in self._records.items() if name in names}
                self._held = [{} for _ in range(self._n_segments)]
                for record in self._records.values():
                    self._held[record.segment].update(record.cells)
            for name in names - self._records.keys():
                if (text := self._folder.get(f"{self._path}/{name}")) is not None:
                    record = self._records[name] = _SegmentRecord.from_bytes(
                        f"{self._path}/{name}", text, self._n_segments
                    )
                    self._held[record.segment].update(record.cells)
            return self._held

    def shard(self, n: int, cell: Cell) -> Written | None:
        """Size and digest of one shard; None while it is not committed."""
        return self._held[n].get(cell) or self.segments()[n].get(cell)


def cell_name(cell: Cell) -> str:
    """As files and records name it: "resid_post.3"."""
    variable, layer = cell
    return variable if layer is None else f"{variable}.{layer}"


def _cell(name: str) -> Cell:
    variable, _, layer = name.partition(".")
    return (variable, int(layer)) if layer else (variable, None)


@dataclass(frozen=True)
class _SegmentRecord:
    """What one pass committed of one segment."""

    segment: int
    cells: Mapping[Cell, Written]

    @classmethod
    def from_bytes(cls, name: str, text: bytes, n_segments: int) -> _SegmentRecord:
        """The record in a file; CorruptEntry if it is not one."""
        try:
            fields = json.loads(text)
            segment = range(n_segments)[fields["segment"]]
            paths = {path: (int(size), str(digest)) for path, (size, digest) in fields["files"].items()}
            # A path reads variable/c/layer/segment/…, or variable/c/segment/… where there is no layer axis.
            by_place = {tuple(path.split("/", 3)[:3:2]): found for path, found in paths.items()}
            cells = {}
            for variable, layer in map(_cell, fields["cells"]):
                cells[variable, layer] = by_place[variable, str(segment if layer is None else layer)]
            return cls(segment, cells)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CorruptEntry(
                f"{name} is not a segment record ({error}); delete it, and the segment is computed again"
            ) from error
