"""Entries: the stored activations of one run, committed segment by segment.

A run's tokens lie end to end on one axis, cut into segments of equal length. The segment is the unit of
everything: of work, of commit, of resume, of claim, of a Dask task. Its shards are written in place, never
renamed and never changed; a small record then says that they stand, with their digests; when no segment of a
(variable, layer) is missing, its manifest is written, then its key, and only a key makes data visible. Every
step is "create if absent", so a kill at any moment loses at most the segment under way, and any number of
writers converge on the same files.

    data/<ab>/<D>/zarr.json                     the group; attributes say which run, and how it is cut
        resid_post/zarr.json, resid_post/c/…    one array per variable (`shards.py`)
        seg/<n>.<set>.json                      what one pass wrote; <set> says of which arrays
        seg/<n>.claim                           somebody is at it (`claims.py`)
        manifest/<variable>.<layer>.json        all shards of one array with size and digest

Borders: arrays come as numpy, ready; which hook or model made them is told in attributes and never looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from .. import records
from ..arrays import Array
from ..digest import canonical_json, content_digest, digest
from ..errors import REPAIR, CorruptEntry, EntryNotFound, ShapeError, StoreFormatError, nearest
from ..files import Folder, Watched
from ..keys import ActivationKey, RunKey
from ..records import Record
from ..sealed import read_json, sealed
from .archived import plain_measure, recoded
from .claims import TTL, Claim
from .committed import PLAIN, RECORD, Committed, VariableLayer, cell_name, record_name
from .coordinates import BOOKKEEPING, check_metadata, read_selected, write_selected
from .mapped import MappedShards
from .packed import PackedTokens
from .quantised import (
    BLOCK,
    QUANTISED,
    RestoredRows,
    is_scale,
    n_blocks,
    quantise,
    scale_name,
    scale_sizes,
    scaled_name,
)
from .run_sums import how_combined
from .selections import AXIS, Selection, from_canonical
from .shards import CODECS, DTYPES, ShardLayout, ShardRows, Written, array_metadata, write_shards

if TYPE_CHECKING:
    pass

PACKED_AXES = ("token", "pair", "square", "prompt_id", "segment")
"""What an array may have a row for: each token, each pair of tokens, each prompt, each segment (see
`ArraySpec`); or each token of a selection, on an axis of its name."""
CELL_MANIFEST = ("variable", "layer", "content", "files")
"""Fields of the manifest of one array."""
_LATER = ("run_dtype", "over", "combine")
"""Fields of a variable that its description has only where they say something."""
_ABOUT = {"run", "dtype", "segment_tokens", "n_tokens", "n_prompts"}


@dataclass(frozen=True)
class ArraySpec:
    """One variable of a run.

    dims: e.g. ("layer", "token", "hidden"); the packed axis is "token", or "pair" for attention patterns (row
    t of the packed axis owns position(t) + 1 pairs, its lower triangle), or "square" for matrices that are
    not zero above the diagonal (it owns a pair for each token of its prompt), or "prompt_id" for what a
    prompt leaves behind (its last token owns it), "segment" for what is kept of a run as a whole, or the axis
    of a selection. sizes: of the axes after the packed one. layers: of the model, None without layer axis.
    selection: which tokens have rows; None for all. run_dtype: the storage dtype of the run, where that is
    not the array's own, as ids have. over, combine: of how many tokens the rows of segments are, and whether
    they become a "mean", a "sum" or a "max"; None for what has no such rows.
    """

    variable: str
    hook: str
    dims: tuple[str, ...]
    sizes: Mapping[str, int]
    dtype: str
    layers: int | None
    long_name: str = ""
    unit: str = ""
    selection: Selection | None = None
    run_dtype: str | None = None
    over: int | None = None
    combine: str | None = None

    def __post_init__(self) -> None:
        front = ("layer",) if self.layers is not None else ()
        axes = PACKED_AXES if self.selection is None else (self.selection.axis,)
        if (
            self.dims[: len(front)] != front
            or len(self.dims) <= len(front)
            or self.dims[len(front)] not in axes
        ):
            raise ShapeError(
                f"{self.variable}: expected dims to start with {[*front, ' or '.join(axes)]}, "
                f"found {list(self.dims)}"
            )

    @property
    def packed(self) -> str:
        """The packed axis: one of `PACKED_AXES`, or that of the selection."""
        return self.dims[0 if self.layers is None else 1]

    @property
    def tail(self) -> tuple[int, ...]:
        """Sizes after the packed axis."""
        return tuple(self.sizes[dim] for dim in self.dims[self.dims.index(self.packed) + 1 :])

    @property
    def row_bytes(self) -> int:
        """Of one row as it is stored, its scales included."""
        numbers = math.prod(self.tail) * DTYPES[self.dtype].itemsize
        if self.dtype != QUANTISED or not self.tail:
            return numbers
        return numbers + math.prod(self.tail[:-1]) * n_blocks(self.tail[-1]) * DTYPES["float32"].itemsize

    def rows_per_token(self, tokens: PackedTokens) -> float:
        """How many rows a token has in the mean."""
        if self.packed == "segment":  # one of a run, as long as nobody says how it is cut
            return 1 / tokens.n_tokens
        if self.selection is None:
            return tokens.rows_per_token(self.packed)
        return float(self.selection.counts(tokens).sum()) / tokens.n_tokens

    def attributes(self) -> dict[str, Any]:
        """Plain values, as an array's attributes record them."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        selection = told.pop("selection")
        told = {name: value for name, value in told.items() if name not in _LATER or value is not None}
        return told if selection is None else {**told, "selection": selection.canonical()}

    @classmethod
    def from_attributes(cls, told: Mapping[str, Any], selection: Selection | None = None) -> ArraySpec:
        """The spec an array's attributes record."""
        return cls(**{**told, "dims": tuple(told["dims"]), "selection": selection})


def with_scales(arrays: Sequence[ArraySpec]) -> list[ArraySpec]:
    """The arrays that a run of these variables has: those in int8 each with its scales (quantised.py).

    Raises ShapeError for a variable of one number to a row, which would share its scale with none.
    """
    found = []
    for spec in arrays:
        found.append(spec)
        if spec.dtype != QUANTISED:
            continue
        if not spec.tail:
            raise ShapeError(
                f"expected several numbers to a row to store as int8, found {spec.variable!r}, which has "
                "one; store it in another storage dtype"
            )
        dims, sizes = scale_sizes(spec.dims, dict(spec.sizes))
        about = f"scale of {spec.variable}"
        scales = replace(
            spec, variable=scale_name(spec.variable), dims=dims, sizes=sizes, dtype="float32", long_name=about
        )
        found.append(scales)
    return found


def entry_digest(run: RunKey, dtype: str) -> str:
    """D, the name of the folder that holds a run's activations in one storage dtype."""
    return digest("entry", run.request(), dtype)


def entry_path(name: str) -> str:
    """Where the entry with digest `name` lies, relative to the store."""
    return f"data/{name[:2]}/{name}"


class Entry:
    """The stored activations of one run; safe for any number of threads and processes at once."""

    def __init__(
        self,
        folder: Folder,
        run: RunKey,
        dtype: str,
        tokens: PackedTokens,
        segment_tokens: int,
        claim_ttl: float = TTL,
    ) -> None:
        self.folder = folder
        self.run = run
        self.dtype = dtype
        self.tokens = tokens
        self.segment_tokens = segment_tokens
        self.digest = entry_digest(run, dtype)
        self.path = entry_path(self.digest)
        self._claim_ttl = claim_ttl
        self._group_file = Watched(folder, f"{self.path}/zarr.json")
        self._group_seen: bytes | None = None
        self._array_files: dict[str, Watched] = {}
        self._planned: dict[str, tuple[ArraySpec, ShardLayout | None]] = {}
        self._known: dict[str, tuple[bytes, ArraySpec, ShardLayout | None]] = {}
        self._scaled: dict[str, bool] = {}
        self._bounds: dict[str, npt.NDArray[np.int64]] = {}
        self._selections: dict[str, Selection] = {}
        self._committed = Committed(folder, f"{self.path}/seg", len(self.segments))
        self._mapped = MappedShards(folder)

    @classmethod
    def planned(
        cls, folder: Folder, run: RunKey, tokens: PackedTokens, arrays: Sequence[ArraySpec], *,
        segment_tokens: int, claim_ttl: float = TTL,
    ) -> Self:  # fmt: skip
        """The entry that `create` would make where there is none yet; writes nothing.

        What it holds can be laid out and computed while another thread makes the entry; commit only then.
        """
        entry = cls(folder, run, dtype_of(arrays), tokens, segment_tokens, claim_ttl)
        entry._planned = {spec.variable: (spec, entry._plan(spec)) for spec in with_scales(arrays)}
        return entry

    @classmethod
    def create(
        cls, folder: Folder, run: RunKey, tokens: PackedTokens, arrays: Sequence[ArraySpec], *,
        segment_tokens: int, attributes: Mapping[str, Any] | None = None, claim_ttl: float = TTL,
        codec: str = "",
    ) -> Self:  # fmt: skip
        """The entry of a run, made if it is new; arrays it does not have yet are added.

        An entry keeps the segment length it was made with, and an array the codec, whatever is asked later.
        codec: of arrays that are new. Raises ShapeError if arrays mix dtypes, or one was declared otherwise
        before.
        """
        dtype, arrays = dtype_of(arrays), with_scales(arrays)
        path = entry_path(entry_digest(run, dtype))
        entry = cls(folder, run, dtype, tokens, _length(folder, path) or segment_tokens, claim_ttl)
        layouts = [entry._plan(spec, codec) for spec in arrays]  # refuses before anything is written
        if not folder.put_new(f"{path}/zarr.json", entry._group(attributes or {})):
            # The other one's length stands, which may differ from ours if it came first just now.
            entry = cls(folder, run, dtype, tokens, _length(folder, path) or segment_tokens, claim_ttl)
            layouts = [entry._plan(spec, codec) for spec in arrays]
        entry._add(arrays, layouts)
        return entry

    @classmethod
    def load(cls, folder: Folder, path: str, tokens: PackedTokens) -> Self:
        """The entry in a folder (relative to the store); EntryNotFound if there is none."""
        about = _about(folder, path)
        return cls(folder, RunKey.of_request(about["run"]), about["dtype"], tokens, about["segment_tokens"])

    def __repr__(self) -> str:
        return f"Entry({self.digest[:12]}, {self.tokens!r}, {len(self.segments)} segments)"

    def __reduce__(self) -> tuple[type[Entry], tuple[Any, ...]]:
        # Into another process goes what it is, not what it remembers.
        about = (self.folder, self.run, self.dtype, self.tokens, self.segment_tokens, self._claim_ttl)
        return type(self), about

    # -- shape

    @cached_property
    def segments(self) -> list[range]:
        """Token range of each segment: gap-free, equal but for the last."""
        total = self.tokens.n_tokens
        return [
            range(start, min(start + self.segment_tokens, total))
            for start in range(0, total, self.segment_tokens)
        ]

    def bounds(self, axis: str) -> npt.NDArray[np.int64]:
        """Where each segment starts on a packed axis, and where the last ends: int64 [segments + 1]."""
        if axis not in self._bounds and axis == "segment":
            self._bounds[axis] = np.arange(len(self.segments) + 1)
        if axis not in self._bounds:
            starts = np.array([*(segment.start for segment in self.segments), self.tokens.n_tokens], np.int64)
            selection = self._selections.get(axis)
            self._bounds[axis] = (
                self.tokens.starts_on(axis, starts)
                if selection is None
                else selection.starts_on(self.tokens, starts)
            )
        return self._bounds[axis]

    def rows(self, variable: str, n: int) -> int:
        """Rows a segment holds of a variable: its tokens, their pairs, the prompts that end in it, or one."""
        return self._rows(self.spec(variable), n)

    def _rows(self, spec: ArraySpec, n: int) -> int:
        bounds = self.bounds(spec.packed)
        return int(bounds[n + 1] - bounds[n])

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Every variable that has been declared, by name; scales belong to theirs."""
        children = (name for name in self.folder.children(self.path) if name not in BOOKKEEPING)
        names = sorted(name for name in children if not (self.dtype == QUANTISED and is_scale(name)))
        found = {name: self._read_array(name) for name in names}
        return {name: array[1] for name, array in found.items() if array is not None}

    def spec(self, variable: str) -> ArraySpec:
        """How a variable is stored; EntryNotFound names the nearest otherwise."""
        return self._array(variable)[0]

    def layout(self, variable: str) -> ShardLayout:
        """How a variable's shards lie on disk, by its `zarr.json`; StoreFormatError unless they are raw."""
        layout = self._array(variable)[1]
        if layout is None:
            raise StoreFormatError(
                f"{variable} in run {self.digest[:12]} was stored again with other codecs: it can be read, "
                "through zarr, but not added to; capture into a new store"
            )
        return layout

    # -- writing

    def missing(self, wanted: Iterable[VariableLayer]) -> dict[int, list[VariableLayer]]:
        """Segment -> those wanted cells it has not committed, in order; empty when all stand."""
        asked = list(dict.fromkeys(wanted))
        missing = {
            n: [cell for cell in asked if not all(part in held for part in self._parts(cell))]
            for n, held in enumerate(self._committed.segments())
        }
        return {n: cells for n, cells in missing.items() if cells}

    def is_recorded(self, n: int, cells: Collection[VariableLayer]) -> bool:
        """Whether somebody has committed just these cells of a segment: a look, where `missing` lists all."""
        names = sorted(cell_name(part) for cell in cells for part in self._parts(cell))
        if self.folder.size(record_name(self.path, n, names)) is None:
            return False
        return n not in self.missing(cells)

    def write_segment(
        self,
        n: int,
        arrays: Mapping[VariableLayer, Array],
        *,
        threads: int = 2,
        handed_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit whole shards of one segment: all files first, then the record that says they stand.

        arrays: each [rows of the segment, *tail] of the declared dtype, float32 where that is int8, in C
        order; not to be changed before this returns. Whatever stands already stays as it is. threads: that
        digest, and as many that write; one leaves the cores to whoever computes meanwhile. handed_over:
        called when what is left is waiting for the disk. Raises ShapeError before anything is written if an
        array does not fit; StoreFull, ReadOnlyStore.
        """
        self._planned = {}  # from here on what was made counts
        arrays = self._with_scales(n, arrays)
        for (variable, layer), rows in arrays.items():
            self._check_rows(variable, layer, n, rows)

        shards = {}
        for cell, rows in arrays.items():
            layout = self.layout(cell[0])
            shards[layout.path(*cell, n)] = (rows, layout)
        written = write_shards(
            self.folder,
            {f"{self.path}/{name}": shard for name, shard in shards.items()},
            threads=threads,
            handed_over=handed_over,
        )
        plain = {name: self._plain(name, layout) for name, (_, layout) in shards.items() if layout.codec}
        self._put_record(n, arrays, {name: written[f"{self.path}/{name}"] for name in shards}, plain)

    def take_over(self, other: Entry, wanted: Iterable[VariableLayer]) -> int:
        """Commit what another run of the same kind holds of the segments that both begin with; returns the
        tokens of these segments.

        other: same model and interventions, in segments of the same length. Its files get a second name; what
        a segment holds follows from the prompts in it, so it is what would be computed.
        """
        end, taken = self.tokens.shared_start(other.tokens), 0
        if (other.run.model, other.run.hooks, other.dtype) != (self.run.model, self.run.hooks, self.dtype):
            raise ShapeError(
                f"expected a run of the same kind as {self.digest[:12]}, found {other.digest[:12]}"
            )
        for n, cells in self.missing(wanted).items():
            if self.segments[n].stop > end or self.segments[n] not in other.segments[n : n + 1]:
                continue
            files: dict[str, Written] = {}
            plain: dict[str, Written] = {}
            held: list[VariableLayer] = []
            linked: dict[str, str] = {}
            for cell in cells:  # of another layout, or not there: left to be computed
                parts = self._parts(cell)
                if not all(self._is_like(other, part, n) for part in parts):
                    continue
                found: dict[VariableLayer, Written] = {}
                for part in parts:
                    alike = self.layout(part[0]) == other.layout(part[0])
                    written = other._committed.shard(n, part) if alike else self._recode(other, part, n)
                    if written is not None:
                        found[part] = written
                if len(found) < len(parts):
                    continue
                held += parts
                for part, written in found.items():
                    layout = self.layout(part[0])
                    name = layout.path(*part, n)
                    files[name] = written
                    if layout == other.layout(part[0]):
                        linked[f"{self.path}/{name}"] = f"{other.path}/{name}"
                    if layout.codec and (told := other._committed.content(n, part)):
                        plain[name] = told
            if not held:
                continue
            with suppress(FileNotFoundError):  # gc took them meanwhile: the segment is computed
                self.folder.link_all(linked)
                self._put_record(n, held, files, plain)
                taken += len(self.segments[n])
        return taken

    def _is_like(self, other: Entry, part: VariableLayer, n: int) -> bool:
        """Whether another run has a shard of ours, were it not for its codec."""
        if other._committed.shard(n, part) is None:
            return False
        return self.layout(part[0]).plain == other.layout(part[0]).plain

    def _recode(self, other: Entry, part: VariableLayer, n: int) -> Written | None:
        """Put a shard of another run as ours are coded; None where that cannot be vouched for, or is gone."""
        ours, theirs = self.layout(part[0]), other.layout(part[0])
        name = ours.path(*part, n)
        source, target = f"{other.path}/{name}", f"{self.path}/{name}"
        content = self.folder.get(source)
        if content is None or (len(content), content_digest(content)) != other._committed.shard(n, part):
            return None
        made = b"".join(recoded(content, theirs, ours, self.folder.where(source)))
        self.folder.put_new(target, made)
        there = self.folder.get(target) or b""
        held = plain_measure(there, ours, target) if ours.codec else (len(there), content_digest(there))
        return (len(there), content_digest(there)) if held == other._committed.content(n, part) else None

    def claim(self, n: int) -> Claim:
        """A claim on a segment: `with entry.claim(n) as mine:`, or `acquire` … `release` from any thread."""
        return Claim(self.folder, f"{self.path}/seg/{n}.claim", self._claim_ttl)

    def publish(self, wanted: Iterable[VariableLayer]) -> list[Record]:
        """Make complete arrays visible: manifest, then key. Those with a segment missing are left out."""
        asked = dict.fromkeys(part for cell in wanted for part in self._parts(cell))
        held = self._committed.segments()
        whole = [cell for cell in asked if all(cell in segment for segment in held)]
        found, manifests = [], {}
        for cell in whole:
            record, manifest = self._completed(cell, held)
            found.append(record)
            manifests[f"{self.path}/manifest/{cell_name(cell)}.json"] = [manifest]
        self.folder.put_all(manifests)
        made = self.folder.put_all({record.path: [record.to_bytes()] for record in found})
        return [
            record if record.path in made else self.record(*cell) or record
            for cell, record in zip(whole, found, strict=True)
        ]

    # -- reading

    def record(self, variable: str, layer: int | None) -> Record | None:
        """What is published of a cell; None while a segment is missing, or its scales are."""
        found = [self._own_record(*part) for part in self._parts((variable, layer))]
        return found[-1] if all(found) else None

    def _own_record(self, variable: str, layer: int | None) -> Record | None:
        key = self.key(variable, layer).digest
        text = self.folder.get(records.key_path(key))
        return None if text is None else Record.from_bytes(key, text)

    def key(self, variable: str, layer: int | None) -> ActivationKey:
        """The key a cell is published under."""
        return ActivationKey(self.run, variable, layer, self.dtype)

    def published(self) -> list[VariableLayer]:
        """Every cell that is visible, variables by name, layers in order."""
        cells = [
            (name, layer)
            for name, spec in self.specs.items()
            for layer in ([None] if spec.layers is None else range(spec.layers))
        ]
        manifests = {name.rsplit("/", 1)[-1] for name in self.folder.list(f"{self.path}/manifest")}
        return [
            cell
            for cell in cells
            if f"{cell_name(cell)}.json" in manifests and self.record(*cell) is not None
        ]

    def committed(self) -> list[Mapping[VariableLayer, Written]]:
        """Per segment, cell -> size and digest of its shard, as they stand now, published or not."""
        return list(self._committed.segments())

    def content(self, variable: str, layer: int | None) -> str:
        """R of a published cell; EntryNotFound while a segment is missing."""
        record = self.record(variable, layer)
        if record is None:
            raise EntryNotFound(
                f"run {self.digest[:12]} has not all of {cell_name((variable, layer))}; capture it first"
            )
        return record.content

    def segment_digest(self, variable: str, layer: int | None, n: int) -> str:
        """Digest of one committed shard, and its scales; EntryNotFound if it is not committed."""
        digests = []
        for part in self._parts((variable, layer)):
            found = self._committed.content(n, part)
            if found is None:
                raise EntryNotFound(self._absent(*part, n, "committed"))
            digests.append(found[1])
        return digests[0] if len(digests) == 1 else content_digest(canonical_json(digests).encode())

    def values(self, variable: str, layer: int | None, n: int) -> ShardRows | RestoredRows:
        """As `shard`, but what is stored in int8 as the float32 it stands for."""
        if not self._has_scales(variable):
            return self.shard(variable, layer, n)
        return RestoredRows(self.shard(variable, layer, n), self.shard(scale_name(variable), layer, n))

    def shard(self, variable: str, layer: int | None, n: int) -> ShardRows:
        """Rows of one segment, read-only, in the stored dtype, memory-mapped: [rows, *tail].

        Raises EntryNotFound; CorruptEntry for a file cut short, or an index that is not intact, and, when
        rows are taken, for a chunk that is not what its checksum says.
        """
        spec, layout = self._array(variable)
        rows = self._rows(spec, n)
        if layout is None:
            return self._read_through_zarr(variable, layer, n, rows)
        name = f"{self.path}/{layout.path(variable, layer, n)}"
        try:
            return self._mapped.rows(name, layout, rows, self._place(variable, layer, n))
        except FileNotFoundError:
            raise EntryNotFound(self._absent(variable, layer, n, "stored")) from None

    # -- helpers

    def presented(self, variable: str) -> str:
        """The variable that readers see of an array: scales belong to theirs."""
        return scaled_name(variable) if self.dtype == QUANTISED else variable

    def _has_scales(self, variable: str) -> bool:
        """Whether a variable is stored as numbers and scales; in a run of int8 all are but reductions."""
        if self.dtype != QUANTISED or is_scale(variable):
            return False
        if variable not in self._scaled:
            try:
                self._scaled[variable] = self.spec(variable).dtype == QUANTISED
            except EntryNotFound:  # not declared yet: nothing of it is there either way
                return True
        return self._scaled[variable]

    def _parts(self, cell: VariableLayer) -> tuple[VariableLayer, ...]:
        """The stored arrays a cell is made of, itself the last."""
        return ((scale_name(cell[0]), cell[1]), cell) if self._has_scales(cell[0]) else (cell,)

    def _with_scales(self, n: int, arrays: Mapping[VariableLayer, Array]) -> dict[VariableLayer, Array]:
        """What is stored of rows: of those in float32 that int8 stands for, numbers and scales."""
        found = {}
        for cell, rows in arrays.items():
            *scales, numbers = self._parts(cell)
            if scales:
                found[numbers], found[scales[0]] = quantise(rows, self._place(*cell, n))
            else:
                found[cell] = rows
        return found

    def _plain(self, name: str, layout: ShardLayout) -> Written:
        """Size and digest of what a compressed shard that was just written, by whomever, stands for."""
        path = f"{self.path}/{name}"
        content = self.folder.get(path)
        if content is None:
            raise EntryNotFound(f"{self.folder.where(path)}: expected the shard just written, found none")
        return plain_measure(content, layout, self.folder.where(path))

    def _put_record(
        self,
        n: int,
        held: Iterable[VariableLayer],
        files: Mapping[str, Written],
        plain: Mapping[str, Written],
    ) -> None:
        """Say that shards of a segment stand, and what those that are compressed stand for."""
        cells = sorted(cell_name(cell) for cell in held)
        record = dict(zip(RECORD, (n, cells, files), strict=True)) | ({PLAIN: plain} if plain else {})
        self.folder.put_new(record_name(self.path, n, cells), sealed(record))

    def _group(self, attributes: Mapping[str, Any]) -> bytes:
        """The `zarr.json` of the group."""
        about = {
            "run": self.run.request(),
            "dtype": self.dtype,
            "segment_tokens": self.segment_tokens,
            "n_tokens": self.tokens.n_tokens,
            "n_prompts": self.tokens.n_prompts,
        }
        about["check"] = _check_of({**attributes, "mizarr": about})
        group = {"zarr_format": 3, "node_type": "group", "attributes": {**attributes, "mizarr": about}}
        return json.dumps(group, indent=1).encode()

    def _plan(self, spec: ArraySpec, codec: str = "") -> ShardLayout:
        """The layout of a new variable; ShapeError if segments of this length do not allow one."""
        self._know(spec.selection)
        regular = spec.packed == "token"
        most = self.segment_tokens if regular else int(np.diff(self.bounds(spec.packed)).max())
        # The same for all arrays of an axis, whatever their chunks.
        if spec.selection is not None or (self.dtype == QUANTISED and not regular):
            most = 1 << (most - 1).bit_length()
        exact = len(self.segments) > 1 and regular
        layout = ShardLayout.of(spec.dtype, spec.tail, most, spec.layers is not None, exact=exact)
        is_declared = self.folder.get(f"{self.path}/{spec.variable}/zarr.json") is not None
        # What is declared stays as it is.
        return layout if is_declared else self._as_what_stands(spec, replace(layout, codec=codec))

    def _as_what_stands(self, spec: ArraySpec, layout: ShardLayout) -> ShardLayout:
        """The layout that committed shards of a variable have whose `zarr.json` was set aside.

        What has other sizes was written before chunks had checksums; what says what it stands for is
        compressed.
        """
        for n, held in enumerate(self._committed.segments()):
            for cell in held:
                if cell[0] == spec.variable:
                    size, _ = self._committed.content(n, cell) or (0, "")
                    codec = CODECS[0] if self._committed.plain(n, cell) else ""
                    checked = size == layout.file_bytes(self._rows(spec, n))
                    return replace(layout, checked=checked, codec=codec)
        return layout

    def _add(self, arrays: Sequence[ArraySpec], layouts: Sequence[ShardLayout]) -> None:
        """Declare variables, where they are not declared yet."""
        declared: dict[str, ArraySpec] = {}
        files = {}
        for spec, layout in zip(arrays, layouts, strict=True):
            if declared.setdefault(spec.variable, spec) is spec:
                if spec.selection is not None:  # before the array, which means nothing without it
                    slots = layout.rows if len(self.segments) > 1 else int(self.bounds(spec.packed)[-1])
                    write_selected(
                        self.folder, self.path, self.tokens, spec.selection, self.bounds(spec.packed), slots
                    )
                files[f"{self.path}/{spec.variable}/zarr.json"] = [self._metadata(spec, layout)]
        made = self.folder.put_all(files)
        for spec in arrays:
            is_new = f"{self.path}/{spec.variable}/zarr.json" in made
            there = declared[spec.variable] if is_new else self.spec(spec.variable)
            if (there.dims, there.tail, there.dtype, there.layers, there.selection) != (
                spec.dims,
                spec.tail,
                spec.dtype,
                spec.layers,
                spec.selection,
            ):
                raise ShapeError(
                    f"run {self.digest[:12]} already stores {spec.variable} as {there}; expected {spec}"
                )

    def _metadata(self, spec: ArraySpec, layout: ShardLayout) -> bytes:
        """The `zarr.json` of a variable."""
        bounds, dims = self.bounds(spec.packed), spec.dims
        front = () if spec.layers is None else (spec.layers,)
        packed = layout.rows * len(self.segments) if spec.packed == "pair" else int(bounds[-1])
        attributes: dict[str, Any] = {"long_name": spec.long_name, "units": spec.unit}
        attributes["mizarr"] = spec.attributes()
        if spec.dtype == QUANTISED:
            about = f"{spec.variable} * {scale_name(spec.variable)}, each scale for {BLOCK} on the last axis"
            attributes["values"] = about
        if spec.combine is not None:
            attributes["values"] = how_combined(spec.combine, spec.over or 0, spec.dims)
        if spec.packed not in ("token", "segment") and len(self.segments) > 1:
            # For readers without mizarr: pair i of segment n lies at n * shard length + i - pair_bounds[n];
            # what is between means nothing. So do prompts, whose axis with gaps is not that of their labels.
            packed = layout.rows * len(self.segments)
            attributes[f"{spec.packed}_bounds"] = bounds.tolist()
            dims = tuple("prompt_slot" if dim == "prompt_id" else dim for dim in dims)
        return array_metadata(layout, (*front, packed, *spec.tail), dims, attributes)

    def _array(self, variable: str) -> tuple[ArraySpec, ShardLayout | None]:
        """Spec and layout of a variable, as its `zarr.json` has them now, or as it is planned."""
        if variable in self._planned:
            return self._planned[variable]
        self._expect_same_run()
        if variable not in self._array_files:
            self._array_files[variable] = Watched(self.folder, f"{self.path}/{variable}/zarr.json")
        text, known = self._array_files[variable].get(), self._known.get(variable)
        if known is None or known[0] is not text:
            found = self._read_array(variable)
            if text is None or found is None:
                held = self.specs
                near = nearest(variable, held)
                raise EntryNotFound(
                    f"run {self.digest[:12]} has no variable {variable!r}; it has {', '.join(held) or 'none'}"
                    f"{f', nearest is {near!r}' if near else ''}. Capture it first"
                )
            known = self._known[variable] = (text, *found[1:])
        return known[1:]

    def _expect_same_run(self) -> None:
        """Raise EntryNotFound if the run's folder was removed, and made again with other segments, since."""
        text = self._group_file.get()
        if text is self._group_seen:
            return
        # The folder's name digests everything else that decides what rows mean.
        if text is None or (length := _checked_about(self.folder, self.path, text)["segment_tokens"]) != (
            self.segment_tokens
        ):
            found = "no run" if text is None else f"one in segments of {length} tokens"
            raise EntryNotFound(
                f"{self.folder.where(self.path)}: expected run {self.digest[:12]} in segments of "
                f"{self.segment_tokens} tokens, as it was opened, found {found}; open it again"
            )
        self._group_seen = text

    def _read_array(self, variable: str) -> tuple[bytes, ArraySpec, ShardLayout | None] | None:
        text = self.folder.get(f"{self.path}/{variable}/zarr.json")
        if text is None:
            return None
        check_metadata(self.folder, self.path, variable, text)
        try:
            metadata = read_json(text)
            fields = metadata.get("attributes", {}).get("mizarr", {})
        except (ValueError, AttributeError) as error:
            raise CorruptEntry(
                f"{self.folder.where(self.path)}/{variable}/zarr.json: expected the description of an array, "
                f"found {error}; {REPAIR}"
            ) from error
        if "hook" not in fields:
            return None
        told = fields.get("selection")
        selection = None if told is None else self._selection(fields["dims"], told)
        spec = ArraySpec.from_attributes(fields, selection)
        return text, spec, ShardLayout.from_metadata(metadata)

    def _selection(self, dims: Sequence[str], told: Mapping[str, Any]) -> Selection:
        """The selection an array's attributes name; a mask from the tokens stored with its axis."""
        axis = next(dim for dim in dims if dim.startswith(AXIS))
        if axis not in self._selections:
            kept = read_selected(self.folder, self.path, axis) if "mask" in told else None
            try:
                self._know(from_canonical(told, kept))
            except (ValueError, IndexError) as error:
                raise CorruptEntry(
                    f"{self.folder.where(self.path)}/{axis}: expected the tokens that were selected, found "
                    f"others: {error}; {REPAIR}"
                ) from error
        return self._selections[axis]

    def _know(self, selection: Selection | None) -> None:
        if selection is not None:
            self._selections[selection.axis] = selection

    def _read_through_zarr(self, variable: str, layer: int | None, n: int, rows: int) -> ShardRows:
        import zarr

        from ..group.grids import expect_bounded
        from ..group.stored import told_as_damage
        from . import bfloat16  # noqa: F401 - teaches zarr the dtype

        place = f"{self.folder.where(self.path)}/{variable}"
        what = f"{variable} ({self._place(variable, layer, n)})"
        spec = self.spec(variable)
        with told_as_damage(what, place):
            # Its chunks alone count here: of a run a segment is read at a time.
            metadata = read_json(self.folder.get(f"{self.path}/{variable}/zarr.json") or b"")
            expect_bounded({**metadata, "shape": metadata["chunk_grid"]["configuration"]["chunk_shape"]}, 0)
            array: Any = zarr.open_array(self.folder.zarr(f"{self.path}/{variable}"), mode="r")
            length = (array.shards or array.chunks)[0 if layer is None else 1]
            if len(self.segments) > 1 and length != (found := self._plan(spec).rows):
                raise CorruptEntry(
                    f"{place}: expected segments of {found} rows, found chunks of {length}: it was stored "
                    f"again in others, and nothing says where a segment starts; {REPAIR}"
                )
            at = slice(n * length, n * length + rows)
            held: Array = np.asarray(array[at] if layer is None else array[layer, at])
            if held.shape != (rows, *spec.tail):
                raise ValueError(f"rows of shape {list(held.shape)} instead of {[rows, *spec.tail]}")
        return ShardRows(held[None], rows)

    def _check_rows(self, variable: str, layer: int | None, n: int, rows: Array) -> None:
        """Raise ShapeError unless these are the rows of that segment, as declared."""
        spec = self.spec(variable)
        if (spec.layers is None) != (layer is None) or (
            layer is not None and not 0 <= layer < (spec.layers or 0)
        ):
            has = "no layer axis" if spec.layers is None else f"layers 0 to {spec.layers - 1}"
            raise ShapeError(f"{variable} has {has}, found layer {layer}")
        if not 0 <= n < len(self.segments):
            raise ShapeError(f"expected a segment from 0 to {len(self.segments) - 1}, found {n}")
        expected = (self.rows(variable, n), *spec.tail)
        if (
            rows.shape != expected
            or rows.dtype != self.layout(variable).native
            or not rows.flags.c_contiguous
        ):
            order = "" if rows.flags.c_contiguous else ", not contiguous: make it so first"
            raise ShapeError(
                f"segment {n} of {cell_name((variable, layer))}: expected {spec.dtype} of shape "
                f"{list(expected)} in C order, found {rows.dtype} of shape {list(rows.shape)}{order}"
            )

    def _place(self, variable: str, layer: int | None, n: int) -> str:
        return f"segment {n} of {cell_name((variable, layer))} in run {self.digest[:12]}"

    def _absent(self, variable: str, layer: int | None, n: int, what: str) -> str:
        return f"{self._place(variable, layer, n)} is not {what}; capture it first"

    def _completed(
        self, cell: VariableLayer, held: Sequence[Mapping[VariableLayer, Written]]
    ) -> tuple[Record, bytes]:
        """The record and the manifest of a cell whose segments are all committed."""
        variable, layer = cell
        layout = self.layout(variable)
        files = {layout.path(variable, layer, n): segment[cell] for n, segment in enumerate(held)}
        spec, parts = self.spec(variable), self._parts(cell)
        *scales, contents = map(self._committed.contents, parts)
        described = ["shards", spec.dtype, list(spec.tail), contents, *scales]
        content = content_digest(canonical_json(described).encode())
        manifest = dict(zip(CELL_MANIFEST, (variable, layer, content, files), strict=True))
        if layout.codec:
            manifest[PLAIN] = dict(zip(files, contents, strict=True))
        label = cell_name(cell).replace(".", "/")
        key = self.key(variable, layer).digest
        record = Record(key, records.ACTIVATION, self.path, content, records.now(), label)
        return record, sealed(manifest)


def dtype_of(arrays: Sequence[ArraySpec]) -> str:
    """The one storage dtype of the run that arrays are of; ShapeError if there are several, or none."""
    dtypes = sorted({spec.run_dtype or spec.dtype for spec in arrays})
    if len(dtypes) != 1:
        raise ShapeError(
            f"expected the arrays of one entry to share one dtype, found {', '.join(dtypes) or 'no arrays'}"
        )
    return dtypes[0]


def _length(folder: Folder, path: str) -> int | None:
    """The segment length of an entry; None when there is no entry."""
    return (
        int(_about(folder, path)["segment_tokens"]) if folder.get(f"{path}/zarr.json") is not None else None
    )


def _about(folder: Folder, path: str) -> dict[str, Any]:
    """What an entry's group says of it; EntryNotFound if there is none."""
    return dict(group_attributes(folder, path)["mizarr"])


def group_attributes(folder: Folder, path: str) -> dict[str, Any]:
    """The attributes of an entry's group; EntryNotFound if there is none, CorruptEntry if they are others."""
    text = folder.get(f"{path}/zarr.json")
    if text is None:
        raise EntryNotFound(f"{folder.where(path)} holds no stored run; see `mizarr ls`")
    return _checked(folder, path, text)


def _checked_about(folder: Folder, path: str, text: bytes) -> dict[str, Any]:
    return dict(_checked(folder, path, text)["mizarr"])


def _checked(folder: Folder, path: str, text: bytes) -> dict[str, Any]:
    """Attributes in the `zarr.json` of a group; those written before there were checks have none."""
    try:
        attributes: dict[str, Any] = read_json(text)["attributes"]
        about = attributes["mizarr"]
        told = about.get("check")
        run = RunKey.of_request(about["run"])
        sound = set(about) == _ABOUT if told is None else told == _check_of(attributes)
        sound = sound and entry_path(entry_digest(run, about["dtype"])) == path
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise CorruptEntry(
            f"{folder.where(path)}/zarr.json: expected the description of run {path[-64:][:12]} as it was "
            f"written, found another; {REPAIR}"
        )
    return attributes


def _check_of(attributes: Mapping[str, Any]) -> str:
    """`sha256:…` of a group's attributes, but for the check itself."""
    about = {name: value for name, value in attributes["mizarr"].items() if name != "check"}
    return content_digest(canonical_json({**attributes, "mizarr": about}).encode())
