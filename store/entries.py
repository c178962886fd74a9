"""Entries: the stored activations of one run, committed segment by segment.

A run's tokens lie end to end on one axis, cut into segments of equal length. The segment is the unit of everything: of work, of commit,
of resume, of claim, of a Dask task. Its shards are written in place, never renamed and never changed; a small record then says that
they stand, with their digests; when no segment of a (variable, layer) is missing, its manifest is written, then its key, and only a
key makes data visible. Every step is "create if absent", so a kill at any moment loses at most the segment under way, and any
number of writers converge on the same files.

    data/<ab>/<D>/zarr.json                     the group; attributes say which run, and how it is cut
        resid_post/zarr.json, resid_post/c/…    one array per variable (`shards.py`)
        seg/<n>.<set>.json                      record of the shards one pass wrote; <set> names which (variable, layer)s
        seg/<n>.claim                           somebody is at it (`claims.py`)
        manifest/<variable>.<layer>.json        all shards of one array with size and digest

Borders: arrays come as numpy, ready; which hook or model made them is told in attributes and never looked at.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import records
from .claims import TTL, Claim
from .digest import canonical_json, content_digest, digest
from .errors import CorruptEntry, EntryNotFound, ShapeError, nearest
from .files import Folder
from .keys import ActivationKey, RunKey
from .packed import PackedTokens
from .records import Record
from .shards import Array, ShardLayout, array_metadata, read_shard, write_shard

if TYPE_CHECKING:
    import xarray as xr

Cell = tuple[str, int | None]
"""One array of a run: variable and layer, None where there is no layer axis."""
PACKED_AXES = ("token", "pair")


@dataclass(frozen=True)
class ArraySpec:
    """One variable of a run.

    dims: e.g. ("layer", "token", "hidden"); the packed axis is "token", or "pair" for attention patterns (row t of the packed axis owns
    position(t) + 1 pairs, its lower triangle). sizes: of the axes after the packed one. layers: of the model, None without layer axis.
    """

    variable: str
    hook: str
    dims: tuple[str, ...]
    sizes: Mapping[str, int]
    dtype: str
    layers: int | None
    long_name: str = ""
    unit: str = ""

    def __post_init__(self) -> None:
        front = ("layer",) if self.layers is not None else ()
        if self.dims[: len(front)] != front or len(self.dims) <= len(front) or self.dims[len(front)] not in PACKED_AXES:
            raise ShapeError(f"{self.variable}: expected dims to start with {[*front, 'token or pair']}, found {list(self.dims)}")

    @property
    def packed(self) -> str:
        """The packed axis: "token" or "pair"."""
        return self.dims[0 if self.layers is None else 1]

    @property
    def tail(self) -> tuple[int, ...]:
        """Sizes after the packed axis."""
        return tuple(self.sizes[dim] for dim in self.dims[self.dims.index(self.packed) + 1 :])

    @classmethod
    def from_attributes(cls, fields: Mapping[str, Any]) -> ArraySpec:
        """The spec an array's attributes record."""
        return cls(**{**fields, "dims": tuple(fields["dims"])})


def entry_digest(run: RunKey, dtype: str) -> str:
    """D, the name of the folder that holds a run's activations in one storage dtype."""
    return digest("entry", run.request(), dtype)


def entry_path(name: str) -> str:
    """Where the entry with digest `name` lies, relative to the store."""
    return f"data/{name[:2]}/{name}"


class Entry:
    """The stored activations of one run; safe for any number of threads and processes at once."""

    def __init__(self, folder: Folder, run: RunKey, dtype: str, tokens: PackedTokens, segment_tokens: int, *, claim_ttl: float = TTL) -> None:
        self.folder = folder
        self.run = run
        self.dtype = dtype
        self.tokens = tokens
        self.segment_tokens = segment_tokens
        self.digest = entry_digest(run, dtype)
        self.path = entry_path(self.digest)
        self._claim_ttl = claim_ttl
        self._records: dict[str, dict[str, Any]] = {}
        self._mapped: dict[tuple[str, int | None, int], Array] = {}

    @classmethod
    def create(
        cls, folder: Folder, run: RunKey, tokens: PackedTokens, arrays: Sequence[ArraySpec], *,
        segment_tokens: int, attributes: Mapping[str, Any] | None = None, claim_ttl: float = TTL,
    ) -> Entry:  # fmt: skip
        """The entry of a run, made if it is new; arrays it does not have yet are added.

        An entry keeps the segment length it was made with, whatever is asked later. Raises ShapeError if arrays mix dtypes, or one
        was declared otherwise before.
        """
        dtypes = sorted({spec.dtype for spec in arrays})
        if len(dtypes) != 1:
            raise ShapeError(f"expected the arrays of one entry to share one dtype, found {', '.join(dtypes) or 'no arrays'}")
        path = entry_path(entry_digest(run, dtypes[0]))
        about = {"run": run.request(), "dtype": dtypes[0], "segment_tokens": segment_tokens, "n_tokens": tokens.n_tokens, "n_prompts": tokens.n_prompts}
        group = {"zarr_format": 3, "node_type": "group", "attributes": {**(attributes or {}), "mizarr": about}}
        folder.put_new(f"{path}/zarr.json", json.dumps(group, indent=1).encode())
        entry = cls(folder, run, dtypes[0], tokens, _group(folder, path)["segment_tokens"], claim_ttl=claim_ttl)
        for spec in arrays:
            entry._add(spec)
        return entry

    @classmethod
    def load(cls, folder: Folder, path: str, tokens: PackedTokens) -> Entry:
        """The entry in a folder (relative to the store); EntryNotFound if there is none."""
        about = _group(folder, path)
        run = RunKey(about["run"]["model"], about["run"]["prompt"], about["run"]["hooks"])
        return cls(folder, run, about["dtype"], tokens, about["segment_tokens"])

    def __repr__(self) -> str:
        return f"Entry({self.digest[:12]}, {self.tokens!r}, {len(self.segments)} segments)"

    # -- shape ---------------------------------------------------------------------------------------------------

    @cached_property
    def segments(self) -> list[range]:
        """Token range of each segment: gap-free, equal but for the last."""
        total = self.tokens.n_tokens
        return [range(start, min(start + self.segment_tokens, total)) for start in range(0, total, self.segment_tokens)]

    @cached_property
    def pair_bounds(self) -> npt.NDArray[np.int64]:
        """Where each segment starts on the packed pair axis, int64 [segments + 1]."""
        starts = np.array([*(segment.start for segment in self.segments), self.tokens.n_tokens], np.int64)
        whole = np.concatenate([[0], np.cumsum(self.tokens.row_size * (self.tokens.row_size + 1) // 2)])
        prompt = np.searchsorted(self.tokens.row_start, starts, side="right") - 1
        position = starts - self.tokens.row_start[prompt]
        bounds: npt.NDArray[np.int64] = whole[prompt] + position * (position + 1) // 2
        return bounds

    def rows(self, variable: str, n: int) -> int:
        """Rows a segment holds of a variable: its tokens, or their pairs."""
        if self.spec(variable).packed == "pair":
            return int(self.pair_bounds[n + 1] - self.pair_bounds[n])
        return len(self.segments[n])

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Every variable that has been declared, by name."""
        names = [name.split("/")[-2] for name in self.folder.list(self.path) if name.count("/") == self.path.count("/") + 2 and name.endswith("/zarr.json")]
        found = {name: self._read_spec(name) for name in sorted(names)}
        return {name: spec for name, spec in found.items() if spec is not None}

    def spec(self, variable: str) -> ArraySpec:
        """How a variable is stored; EntryNotFound names the nearest otherwise."""
        held = self._known_specs.get(variable) or self._read_spec(variable)
        if held is None:
            near = nearest(variable, self.specs)
            raise EntryNotFound(f"run {self.digest[:12]} has no variable {variable!r}; it has {', '.join(self.specs) or 'none'}" + (f"; nearest is {near!r}" if near else ""))
        self._known_specs[variable] = held
        return held

    def layout(self, variable: str) -> ShardLayout:
        """How a variable's shards lie on disk."""
        spec = self.spec(variable)
        if variable not in self._layouts:
            most = int(np.diff(self.pair_bounds).max()) if spec.packed == "pair" else self.segment_tokens
            self._layouts[variable] = ShardLayout.of(spec.dtype, spec.tail, most, spec.layers is not None)
        return self._layouts[variable]

    # -- writing -------------------------------------------------------------------------------------------------

    def missing(self, wanted: Iterable[Cell]) -> dict[int, list[Cell]]:
        """Segment -> those wanted cells it has not committed, segments and cells in order; empty when all stand."""
        asked = list(dict.fromkeys(wanted))
        held = self._committed()
        missing = {n: [cell for cell in asked if cell not in held[n]] for n in range(len(self.segments))}
        return {n: cells for n, cells in missing.items() if cells}

    def write_segment(self, n: int, arrays: Mapping[Cell, Array]) -> None:
        """Commit whole shards of one segment.

        arrays: each [rows of the segment, *tail] of the declared dtype, in C order. Whatever stands already stays as it is. Raises
        ShapeError before anything is written if an array does not fit.
        """
        for (variable, layer), rows in arrays.items():
            self._check_cell(variable, layer)
            expected = (self.rows(variable, n), *self.spec(variable).tail)
            if rows.shape != expected:
                raise ShapeError(f"segment {n} of {variable}: expected shape {list(expected)}, found {list(rows.shape)}")
        files = {}
        for (variable, layer), rows in arrays.items():
            layout = self.layout(variable)
            name = layout.path(variable, layer, n)
            files[name] = list(write_shard(self.folder, f"{self.path}/{name}", rows, layout))
        cells = sorted(_cell_name(cell) for cell in arrays)
        record = {"segment": n, "cells": cells, "files": files}
        name = f"{self.path}/seg/{n}.{digest('cells', cells)[:12]}.json"
        self.folder.put_new(name, canonical_json(record).encode())

    def claim(self, n: int) -> Claim:
        """A claim on a segment: `acquire` it before the work, `release` it after the commit."""
        return Claim(self.folder.path(f"{self.path}/seg/{n}.claim"), self._claim_ttl)

    @contextmanager
    def claimed(self, n: int) -> Iterator[bool]:
        """Within: whether this segment is ours to compute."""
        claim = self.claim(n)
        mine = claim.acquire()
        try:
            yield mine
        finally:
            if mine:
                claim.release()

    def publish(self, wanted: Iterable[Cell]) -> list[Record]:
        """Make complete arrays visible: manifest, then key. Those with a segment missing are left out of the answer."""
        asked = list(dict.fromkeys(wanted))
        held = self._committed()
        published = []
        for cell in asked:
            if all(cell in segment for segment in held):
                published.append(self._publish(cell, held))
        return published

    # -- reading -------------------------------------------------------------------------------------------------

    def record(self, variable: str, layer: int | None) -> Record | None:
        """What is published of a cell; None while a segment is missing."""
        key = self.key(variable, layer).digest
        text = self.folder.get(records.key_path(key))
        return None if text is None else Record.from_bytes(key, text)

    def key(self, variable: str, layer: int | None) -> ActivationKey:
        """The key a cell is published under."""
        return ActivationKey(self.run, variable, layer, self.dtype)

    def published(self) -> list[Cell]:
        """Every cell that is visible, variables by name, layers in order."""
        cells = [(name, layer) for name, spec in self.specs.items() for layer in ([None] if spec.layers is None else range(spec.layers))]
        manifests = {name.rsplit("/", 1)[-1] for name in self.folder.list(f"{self.path}/manifest")}
        return [cell for cell in cells if f"{_cell_name(cell)}.json" in manifests and self.record(*cell) is not None]

    def content(self, variable: str, layer: int | None) -> str:
        """R of a published cell; EntryNotFound while a segment is missing."""
        record = self.record(variable, layer)
        if record is None:
            raise EntryNotFound(f"run {self.digest[:12]} has not stored {_cell_name((variable, layer))} completely; capture it first")
        return record.content

    def segment_digest(self, variable: str, layer: int | None, n: int) -> str:
        """Digest of one committed shard; EntryNotFound if it is not committed."""
        found = self._committed()[n].get((variable, layer))
        if found is None:
            raise EntryNotFound(f"segment {n} of {_cell_name((variable, layer))} in run {self.digest[:12]} is not committed; capture it first")
        return found[1]

    def shard(self, variable: str, layer: int | None, n: int) -> Array:
        """Rows of one segment, memory-mapped and read-only, in the stored dtype: [rows, *tail]."""
        place = (variable, layer, n)
        if place not in self._mapped:
            layout = self.layout(variable)
            path = self.folder.path(f"{self.path}/{layout.path(variable, layer, n)}")
            try:
                self._mapped[place] = read_shard(path, layout, self.rows(variable, n))
            except FileNotFoundError:
                raise EntryNotFound(f"segment {n} of {_cell_name((variable, layer))} in run {self.digest[:12]} is not stored; capture it first") from None
        return self._mapped[place]

    def open(self, variables: Sequence[str] | None = None, layers: Sequence[int] | None = None, **options: Any) -> xr.Dataset:
        """The published activations as a labelled lazy dataset (`datasets.open_entry`)."""
        from .datasets import open_entry

        return open_entry(self, variables, layers, **options)

    # -- helpers -------------------------------------------------------------------------------------------------

    @cached_property
    def _known_specs(self) -> dict[str, ArraySpec]:
        return {}

    @cached_property
    def _layouts(self) -> dict[str, ShardLayout]:
        return {}

    def _add(self, spec: ArraySpec) -> None:
        self._known_specs[spec.variable] = spec
        layout = self.layout(spec.variable)
        packed = layout.rows * len(self.segments) if spec.packed == "pair" else self.tokens.n_tokens
        front = () if spec.layers is None else (spec.layers,)
        attributes = {"long_name": spec.long_name, "units": spec.unit, "mizarr": asdict(spec)}
        if spec.packed == "token":
            attributes["coordinates"] = "token_id"
        metadata = array_metadata(layout, (*front, packed, *spec.tail), spec.dims, attributes)
        if self.folder.put_new(f"{self.path}/{spec.variable}/zarr.json", metadata):
            return
        there = self._read_spec(spec.variable)
        if there is None or (there.dims, there.tail, there.dtype, there.layers) != (spec.dims, spec.tail, spec.dtype, spec.layers):
            raise ShapeError(f"run {self.digest[:12]} already stores {spec.variable} as {there}; expected {spec}")

    def _read_spec(self, variable: str) -> ArraySpec | None:
        text = self.folder.get(f"{self.path}/{variable}/zarr.json")
        fields = None if text is None else json.loads(text).get("attributes", {}).get("mizarr")
        return ArraySpec.from_attributes(fields) if fields and "hook" in fields else None

    def _check_cell(self, variable: str, layer: int | None) -> None:
        layers = self.spec(variable).layers
        if (layers is None) != (layer is None) or (layers is not None and layer is not None and not 0 <= layer < layers):
            raise ShapeError(f"{variable} has {'no layer axis' if layers is None else f'layers 0..{layers - 1}'}, found layer {layer}")

    def _committed(self) -> list[dict[Cell, list[Any]]]:
        """Per segment, cell -> [size, digest] of its shard, from the records; records never change, so each is read once."""
        held: list[dict[Cell, list[Any]]] = [{} for _ in self.segments]
        seen = set()
        for name in self.folder.list(f"{self.path}/seg"):
            if not name.endswith(".json") or name.endswith("/zarr.json"):  # zarr.json: an empty group, see coordinates.py
                continue
            seen.add(name)
            if name not in self._records and (text := self.folder.get(name)) is not None:
                self._records[name] = _parse_record(name, text)
        for name in sorted(seen & set(self._records)):
            record = self._records[name]
            for cell, path in record["places"]:
                held[record["segment"]].setdefault(cell, record["files"][path])
        return held

    def _publish(self, cell: Cell, held: Sequence[Mapping[Cell, list[Any]]]) -> Record:
        variable, layer = cell
        layout = self.layout(variable)
        files = {layout.path(variable, layer, n): segment[cell] for n, segment in enumerate(held)}
        spec = self.spec(variable)
        content = content_digest(canonical_json(["shards", spec.dtype, list(spec.tail), list(files.values())]).encode())
        manifest = {"variable": variable, "layer": layer, "content": content, "files": files}
        self.folder.put_new(f"{self.path}/manifest/{_cell_name(cell)}.json", canonical_json(manifest).encode())
        key = self.key(variable, layer).digest
        record = Record(key, records.ACTIVATION, self.path, content, records.now(), _cell_name(cell).replace(".", "/"))
        if self.folder.put_new(record.path, record.to_bytes()):
            return record
        standing = self.record(variable, layer)
        return record if standing is None else standing


def _cell_name(cell: Cell) -> str:
    variable, layer = cell
    return variable if layer is None else f"{variable}.{layer}"


def _cell(name: str) -> Cell:
    variable, _, layer = name.partition(".")
    return (variable, int(layer)) if layer else (variable, None)


def _parse_record(name: str, text: bytes) -> dict[str, Any]:
    """A segment record with its cells matched to their files."""
    try:
        record: dict[str, Any] = json.loads(text)
        by_cell = defaultdict(str)
        for path in record["files"]:
            variable, _, *place = path.split("/")
            by_cell[variable, place[0]] = path
        places = []
        for cell in map(_cell, record["cells"]):
            variable, layer = cell
            places.append((cell, by_cell[variable, str(record["segment"] if layer is None else layer)]))
        record["places"] = places
    except (ValueError, KeyError, IndexError) as error:
        raise CorruptEntry(f"{name} is not a segment record ({error}); delete it, and the segment is computed again") from error
    return record


def _group(folder: Folder, path: str) -> dict[str, Any]:
    text = folder.get(f"{path}/zarr.json")
    about = None if text is None else json.loads(text).get("attributes", {}).get("mizarr")
    if about is None:
        raise EntryNotFound(f"{folder.path(path)} holds no stored run; see `mizarr ls`")
    return dict(about)
