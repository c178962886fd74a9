"""Stored activations of one run (`Entry`), committed segment by segment.

The tokens of all prompts lie end to end on one axis, cut into segments of equal length. A segment is the unit
of work, commit, resume, claim and Dask task. The commit protocol:

1. The shards of a segment are written under their final names, never renamed and never changed.
2. A small segment record then lists them with their checksums.
3. When no segment of a cell (variable, layer) is missing, its manifest is written, then its key. Only the key
   makes data visible to readers.

Every step is "create if absent": a kill at any moment loses at most the segment under way, and any number of
writers converge on the same files.

    data/<ab>/<digest>/zarr.json                the group; attributes identify the run and the segment length
        resid_post/zarr.json, resid_post/c/…    one array per variable (`shards.py`)
        seg/<n>.<set>.json                      segment record; <set> is a digest of the cells it commits
        seg/<n>.claim                           lease of the worker that computes segment n (`claims.py`)
        manifest/<variable>.<layer>.json        all shards of one cell with size and checksum
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .. import records
from ..arrays import Array
from ..digest import canonical_json, content_digest, digest
from ..errors import REPAIR, CorruptEntry, EntryNotFound, ShapeError, nearest
from ..files import Folder, Watched
from ..keys import ActivationKey, RunKey
from ..records import Record
from ..sealed import read_json, sealed
from .archived import plain_measure, recoded
from .claims import TTL, SegmentClaim
from .committed import PLAIN, Committed, VariableLayer, cell_name, record_name
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
from .shards import CODECS, DTYPES, FileChecksum, ShardLayout, ShardRows, file_checksum, write_shards
from .zarr_metadata import group_metadata

PACKED_AXES = ("token", "pair", "square", "prompt_id", "segment")
"""Packed axes, on which the rows of all prompts lie end to end: a row per token, per pair of tokens (lower
triangle or square), per prompt or per segment (see `ArraySpec.dims`). An array of selected tokens has an axis
of its own instead."""


@dataclass(frozen=True)
class ArraySpec:
    """Description of one stored variable (array) of a run: axes, dtype, unit, hook point."""

    variable: str
    """Name of the array, e.g. "resid_post"."""
    hook: str
    """Hook point it was captured from, with "{}" for the layer, e.g. "blocks.{}.hook_resid_post"."""
    dims: tuple[str, ...]
    """Dimension names, e.g. ("layer", "token", "hidden"). First, or second after "layer", comes the packed
    axis, on which the rows of all prompts lie end to end:

    - "token": a row per token;
    - "pair": attention patterns; the token at position t owns t + 1 rows, its part of the lower triangle;
    - "square": attention matrices that are not zero above the diagonal; a token owns a row per token of its
      prompt;
    - "prompt_id": states after a prompt; owned by the prompt's last token;
    - "segment": reductions over the run, a row per segment (range of tokens computed at once);
    - the axis of a selection of tokens, such as "token_last".
    """
    sizes: Mapping[str, int]
    """Size of each axis after the packed one, by dimension name."""
    dtype: str
    """Stored dtype, such as "float32"."""
    layers: int | None
    """Number of layers of the model; None if the array has no layer axis."""
    long_name: str = ""
    """Description of the values."""
    unit: str = ""
    """Unit of the values; "1" for dimensionless ones."""
    selection: Selection | None = None
    """Rule that selects the tokens with rows; None for all tokens."""
    run_dtype: str | None = None
    """Storage dtype of the run, set for arrays whose `dtype` differs from it (token ids); else None."""
    over: int | None = None
    """For reductions: number of tokens that the rows of all segments cover; None for other arrays."""
    combine: str | None = None
    """For reductions: how the rows of segments are combined, "mean", "sum" or "max"; None for other
    arrays."""

    def __post_init__(self) -> None:
        front = ("layer",) if self.layers is not None else ()
        packed_axes = PACKED_AXES if self.selection is None else (self.selection.axis,)
        packed_axis = self.dims[len(front) : len(front) + 1]
        if self.dims[: len(front)] != front or not set(packed_axis) & set(packed_axes):
            raise ShapeError(
                f"{self.variable}: expected dims to start with {[*front, ' or '.join(packed_axes)]}, "
                f"found {list(self.dims)}"
            )

    @property
    def packed(self) -> str:
        """Name of the axis on which the rows of all prompts lie end to end, such as "token"; see `dims`."""
        return self.dims[0 if self.layers is None else 1]

    @property
    def tail(self) -> tuple[int, ...]:
        """Shape of one row, such as (hidden,) for one token's activations."""
        return tuple(self.sizes[dim] for dim in self.dims[self.dims.index(self.packed) + 1 :])

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row, including its int8 scales."""
        numbers = math.prod(self.tail) * DTYPES[self.dtype].itemsize
        # Reductions in an int8 run have no scales.
        if self.dtype != QUANTISED or not self.tail:
            return numbers
        return numbers + math.prod(self.tail[:-1]) * n_blocks(self.tail[-1]) * DTYPES["float32"].itemsize

    def rows_per_token(self, tokens: PackedTokens) -> float:
        """Mean number of rows per token of these prompts."""
        if self.packed == "segment":  # counted as one segment, because the segment length is not known here
            return 1 / tokens.n_tokens
        if self.selection is None:
            return tokens.rows_per_token(self.packed)
        return float(self.selection.counts(tokens).sum()) / tokens.n_tokens

    def attributes(self) -> dict[str, Any]:
        """Fields as JSON values, as they are stored in the attributes of the array."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "selection": self.selection and self.selection.canonical()}

    @classmethod
    def from_attributes(cls, fields: Mapping[str, Any], selection: Selection | None = None) -> ArraySpec:
        """Parse the description of an array from its attributes.

        Arguments:
            fields: Fields as `attributes` returned them.
            selection: The parsed selection of tokens; None if all tokens have rows.
        """
        return cls(**{**fields, "dims": tuple(fields["dims"]), "selection": selection})


def with_scales(arrays: Sequence[ArraySpec]) -> list[ArraySpec]:
    """Add the scale array of each variable that is stored as int8, one scale per 64 numbers.

    Raises:
        ShapeError: An int8 variable has one number per row, which would need a scale of its own.
    """
    extended = []
    for spec in arrays:
        extended.append(spec)
        if spec.dtype != QUANTISED:
            continue
        if not spec.tail:
            raise ShapeError(
                f"variable {spec.variable!r} has one number per row, which int8 storage cannot hold; choose "
                "another storage dtype (--storage-dtype), such as float32"
            )
        dims, sizes = scale_sizes(spec.dims, dict(spec.sizes))
        long_name = f"scale of {spec.variable}"
        scales = replace(
            spec,
            variable=scale_name(spec.variable),
            dims=dims,
            sizes=sizes,
            dtype="float32",
            long_name=long_name,
        )
        extended.append(scales)
    return extended


def entry_digest(run: RunKey, dtype: str) -> str:
    """Digest that names the folder of a run's stored activations, 64 hex digits.

    Arguments:
        run: Key of the run.
        dtype: Storage dtype, as a run may be stored in several.
    """
    return digest("entry", run.request(), dtype)


def entry_path(name: str) -> str:
    """Path, relative to the store, of the folder of the run with this digest (from `entry_digest`)."""
    return f"data/{name[:2]}/{name}"


class Entry:
    """Stored activations of one run, that is of one model over some prompts, in one storage dtype.

    Safe for any number of threads and processes.
    """

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
        # Caches are keyed by the bytes of these files, so that a run that was removed and created again is
        # noticed.
        self._group_file = Watched(folder, f"{self.path}/zarr.json")
        self._verified_group: bytes | None = None
        self._array_files: dict[str, Watched] = {}
        self._plans: dict[str, tuple[ArraySpec, ShardLayout]] = {}
        self._parsed: dict[str, tuple[bytes, ArraySpec, ShardLayout]] = {}
        self._is_scaled: dict[str, bool] = {}
        self._axis_bounds: dict[str, npt.NDArray[np.int64]] = {}
        self._selections: dict[str, Selection] = {}
        self._committed = Committed(folder, f"{self.path}/seg", len(self.segments))
        self._mapped = MappedShards(folder)

    @classmethod
    def planned(
        cls, folder: Folder, run: RunKey, tokens: PackedTokens, arrays: Sequence[ArraySpec], *,
        segment_tokens: int, claim_ttl: float = TTL,
    ) -> Self:  # fmt: skip
        """Describe the run that `create` would create; writes nothing.

        So a run can be planned, and its segments computed while another thread runs `create`; they may be
        written only afterwards.

        Arguments:
            folder: See `create`.
            run: See `create`.
            tokens: See `create`.
            arrays: See `create`.
            segment_tokens: See `create`.
            claim_ttl: See `create`.
        """
        entry = cls(folder, run, dtype_of(arrays), tokens, segment_tokens, claim_ttl)
        entry._plans = {spec.variable: (spec, entry._plan(spec)) for spec in with_scales(arrays)}
        return entry

    @classmethod
    def create(
        cls, folder: Folder, run: RunKey, tokens: PackedTokens, arrays: Sequence[ArraySpec], *,
        segment_tokens: int, attributes: Mapping[str, Any] | None = None, claim_ttl: float = TTL,
        codec: str = "",
    ) -> Self:  # fmt: skip
        """Open the folder of a run for writing; create it if it is new, and declare arrays that it lacks.

        An existing run keeps its segment length, and an existing array its codec, whatever the arguments
        say.

        Arguments:
            folder: The store's files.
            run: Key of the run.
            tokens: Prompts of the run.
            arrays: Variables to declare, all of one storage dtype.
            segment_tokens: Tokens per segment of a new run (a segment is computed and committed at once).
            attributes: Further attributes of a new run's Zarr group; None for none.
            claim_ttl: Seconds after which a worker's claim of a segment expires unless it is renewed.
            codec: Compression of arrays that are new, "zstd", or "" for none.

        Raises:
            ShapeError: The dtypes differ, or an array was declared differently before.
        """
        dtype, arrays = dtype_of(arrays), with_scales(arrays)
        path = entry_path(entry_digest(run, dtype))
        entry = cls(folder, run, dtype, tokens, _segment_length(folder, path) or segment_tokens, claim_ttl)
        layouts = [entry._plan(spec, codec) for spec in arrays]  # raises before anything is written
        if not folder.put_new(f"{path}/zarr.json", entry._group_metadata(attributes or {})):
            # Another process was first, maybe just now: its segment length counts.
            entry = cls(
                folder, run, dtype, tokens, _segment_length(folder, path) or segment_tokens, claim_ttl
            )
            layouts = [entry._plan(spec, codec) for spec in arrays]
        entry._declare(arrays, layouts)
        return entry

    @classmethod
    def load(cls, folder: Folder, path: str, tokens: PackedTokens) -> Self:
        """Open the stored run in a folder.

        Arguments:
            folder: The store's files.
            path: Folder of the run.
            tokens: Prompts of the run, as `coordinates.read_tokens` returns them.

        Raises:
            EntryNotFound: There is no run in the folder.
        """
        fields = group_attributes(folder, path)["mizarr"]
        return cls(
            folder, RunKey.of_request(fields["run"]), fields["dtype"], tokens, fields["segment_tokens"]
        )

    def __repr__(self) -> str:
        return f"Entry({self.digest[:12]}, {self.tokens!r}, {len(self.segments)} segments)"

    def __reduce__(self) -> tuple[type[Entry], tuple[Any, ...]]:
        # Caches are not pickled; the other process builds its own.
        arguments = (self.folder, self.run, self.dtype, self.tokens, self.segment_tokens, self._claim_ttl)
        return type(self), arguments

    # -- shape

    @cached_property
    def segments(self) -> list[range]:
        """Token range of each segment, without gaps; all of equal length except the last."""
        total = self.tokens.n_tokens
        return [
            range(start, min(start + self.segment_tokens, total))
            for start in range(0, total, self.segment_tokens)
        ]

    def bounds(self, axis: str) -> npt.NDArray[np.int64]:
        """First row of each segment on an axis such as "token" or "pair", and the end, int64 [segment +
        1]."""
        if axis not in self._axis_bounds:
            tokens = np.array([*(segment.start for segment in self.segments), self.tokens.n_tokens], np.int64)
            if axis == "segment":
                bounds = np.arange(len(tokens))
            elif (selection := self._selections.get(axis)) is not None:
                bounds = selection.starts_on(self.tokens, tokens)
            else:
                bounds = self.tokens.starts_on(axis, tokens)
            self._axis_bounds[axis] = bounds
        return self._axis_bounds[axis]

    def rows(self, variable: str, n: int) -> int:
        """Number of rows that a variable has in a segment.

        Arguments:
            variable: Name of the variable.
            n: Number of the segment.
        """
        return self._n_rows(self.spec(variable), n)

    def _n_rows(self, spec: ArraySpec, n: int) -> int:
        bounds = self.bounds(spec.packed)
        return int(bounds[n + 1] - bounds[n])

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Description of each declared variable by name, without the scale arrays of int8 variables."""
        children = (name for name in self.folder.children(self.path) if name not in BOOKKEEPING)
        names = sorted(name for name in children if not (self.dtype == QUANTISED and is_scale(name)))
        arrays = {name: self._read_array(name) for name in names}
        return {name: array[0] for name, array in arrays.items() if array is not None}

    def spec(self, variable: str) -> ArraySpec:
        """Description of a variable; EntryNotFound, with the most similar name, for an undeclared
        variable."""
        return self._array(variable)[0]

    def layout(self, variable: str) -> ShardLayout:
        """Layout of a variable's shard files (dtype, chunk size, compression), read from its `zarr.json`."""
        return self._array(variable)[1]

    # -- writing

    def missing(self, cells: Iterable[VariableLayer]) -> dict[int, list[VariableLayer]]:
        """Which of some arrays (variable, layer) each segment still lacks.

        Returns:
            Segment number -> arrays that are not committed; segments without any are left out.
        """
        requested = list(dict.fromkeys(cells))
        missing = {}
        for n, committed in enumerate(self._committed.segments()):
            missing_cells = [
                cell for cell in requested if not committed.keys() >= set(self._stored_parts(cell))
            ]
            if missing_cells:
                missing[n] = missing_cells
        return missing

    def is_recorded(self, n: int, cells: Collection[VariableLayer]) -> bool:
        """Whether these arrays of a segment were committed together, by a single record.

        Faster than `missing`, because it usually looks at one file only.

        Arguments:
            n: Number of the segment.
            cells: Variable and layer of each array.
        """
        names = sorted(cell_name(part) for cell in cells for part in self._stored_parts(cell))
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
        """Commit the shards of one segment: first all files, then the record that lists them.

        Shards that exist stay as they are.

        Arguments:
            n: Number of the segment.
            arrays: (variable, layer) -> rows [rows of the segment, ...] in C order, in the declared dtype
                (float32 if that is int8). They must not change before this returns.
            threads: Number of threads that compute checksums, and again as many that write. One leaves the
                cores to a computation that runs meanwhile.
            handed_over: Called when all work of the processor is done and only the disk is waited for.

        Raises:
            ShapeError: An array does not fit; nothing is written.
            StoreFull: The disk or quota is full.
            ReadOnlyStore: The store cannot be written.
        """
        self._plans = {}  # the files exist now, and they are the authority
        # Quantised here, by the writer: capture buffers hold float32.
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
        # Read back rather than taken from memory: if another writer was first, its file is the one that
        # counts.
        plain = {
            name: self._plain_checksum(name, layout) for name, (_, layout) in shards.items() if layout.codec
        }
        self._put_record(n, arrays, {name: written[f"{self.path}/{name}"] for name in shards}, plain)

    def take_over(self, other: Entry, cells: Iterable[VariableLayer]) -> int:
        """Reuse shards of another run that begins with the same prompts, instead of computing them again.

        The content of a segment follows from its prompts, so the shards of equal segments are equal. They are
        hard-linked, or recoded if the codecs differ. So a corpus grows without a second forward pass.

        Arguments:
            other: Stored run with the same model, interventions, dtype and segment length.
            cells: Variable and layer of each array to commit.

        Returns:
            Number of tokens in the segments that were committed.

        Raises:
            ShapeError: The other run has another model, interventions or dtype.
        """
        end, n_tokens = self.tokens.shared_start(other.tokens), 0
        # Token ids are compared by shared_start, so only these parts of the key must be equal.
        if (other.run.model, other.run.hooks, other.dtype) != (self.run.model, self.run.hooks, self.dtype):
            raise ShapeError(
                f"cannot reuse shards of run {other.digest[:12]} for run {self.digest[:12]}: they differ in "
                "model, interventions or dtype"
            )
        for n, missing_cells in self.missing(cells).items():
            # A segment is shared only if all of its prompts are, and if it has the same token range.
            if self.segments[n].stop > end or self.segments[n] not in other.segments[n : n + 1]:
                continue
            checksums: dict[VariableLayer, FileChecksum] = {}
            for cell in missing_cells:
                checksums |= self._shared_shards(other, cell, n)
            if checksums:
                with suppress(FileNotFoundError):  # gc removed the source meanwhile: the segment is computed
                    self._commit_shared(other, n, checksums)
                    n_tokens += len(self.segments[n])
        return n_tokens

    def _commit_shared(self, other: Entry, n: int, checksums: Mapping[VariableLayer, FileChecksum]) -> None:
        """Link shards of another run that are not recoded, and write the record of all.

        Arguments:
            other: The other run.
            n: Number of the segment.
            checksums: (variable, layer) -> size and checksum of our shard, from `_shared_shards`.
        """
        layouts = {part: self.layout(part[0]) for part in checksums}
        names = {part: layout.path(*part, n) for part, layout in layouts.items()}
        sources_by_target = {
            f"{self.path}/{names[part]}": f"{other.path}/{names[part]}"
            for part, layout in layouts.items()
            if layout == other.layout(part[0])
        }
        plain = {
            names[part]: content
            for part, layout in layouts.items()
            if layout.codec and (content := other._committed.content(n, part))
        }
        self.folder.link_all(sources_by_target)
        files = {names[part]: checksum for part, checksum in checksums.items()}
        self._put_record(n, checksums, files, plain)

    def _shared_shards(self, other: Entry, cell: VariableLayer, n: int) -> dict[VariableLayer, FileChecksum]:
        """Future checksums of an array's shards in a segment, if the shards of another run are reused.

        Shards of another codec are recoded here; the others are linked later.

        Arguments:
            other: The other run.
            cell: Variable and layer of the array; the scales of int8 are included.
            n: Number of the segment.

        Returns:
            Empty if the other run lacks a shard or has another layout: the array is then computed.
        """
        stored = {part: other._committed.shard(n, part) for part in self._stored_parts(cell)}
        # In this order: `layout` raises for a variable that the other run has never declared.
        if None in stored.values():
            return {}
        if any(self.layout(name).plain != other.layout(name).plain for name, _ in stored):
            return {}
        checksums = {}
        for part, checksum in stored.items():
            is_same_layout = self.layout(part[0]) == other.layout(part[0])
            own_checksum = checksum if is_same_layout else self._recode(other, part, n)
            if own_checksum is None:
                return {}
            checksums[part] = own_checksum
        return checksums

    def _recode(self, other: Entry, part: VariableLayer, n: int) -> FileChecksum | None:
        """Write a shard of another run with our codec.

        Returns:
            Size and checksum of the new file; None if the other run's file is missing or damaged.
        """
        layout, source_layout = self.layout(part[0]), other.layout(part[0])
        name = layout.path(*part, n)
        source, target = f"{other.path}/{name}", f"{self.path}/{name}"
        content = self.folder.get(source)
        # A damaged source must not spread into this run under a new, matching checksum.
        if content is None or file_checksum(content) != other._committed.shard(n, part):
            return None
        recoded_shard = b"".join(recoded(content, source_layout, layout, self.folder.where(source)))
        self.folder.put_new(target, recoded_shard)
        stored = self.folder.get(target) or b""
        is_equal = plain_measure(stored, layout, target) == other._committed.content(n, part)
        return file_checksum(stored) if is_equal else None

    def claim(self, n: int) -> SegmentClaim:
        """Lease by which workers agree who computes segment `n`: `with entry.claim(n) as acquired:`."""
        return SegmentClaim(self.folder, f"{self.path}/seg/{n}.claim", self._claim_ttl)

    def publish(self, cells: Iterable[VariableLayer]) -> list[Record]:
        """Make complete arrays visible to readers: write their manifests, then their key files.

        Arguments:
            cells: Variable and layer of each array; those with a missing segment are skipped.

        Returns:
            Records of the complete arrays, including the scales of int8 arrays.
        """
        requested = dict.fromkeys(part for cell in cells for part in self._stored_parts(cell))
        segments = self._committed.segments()
        complete = [cell for cell in requested if all(cell in segment for segment in segments)]
        new_records, manifests = [], {}
        for cell in complete:
            record, manifest = self._completed(cell, segments)
            new_records.append(record)
            manifests[f"{self.path}/manifest/{cell_name(cell)}.json"] = [manifest]
        # Manifests before keys: `verify` treats a key without a manifest as damage.
        self.folder.put_all(manifests)
        created = self.folder.put_all({record.path: [record.to_bytes()] for record in new_records})
        return [
            # Another process may have published meanwhile; its record is the valid one.
            record if record.path in created else self.record(*cell) or record
            for cell, record in zip(complete, new_records, strict=True)
        ]

    # -- reading

    def record(self, variable: str, layer: int | None) -> Record | None:
        """Record of a published array; None while a segment of it, or of its int8 scales, is missing.

        Arguments:
            variable: Name of the variable.
            layer: Layer number; None without a layer axis.
        """
        part_records = [self._array_record(*part) for part in self._stored_parts((variable, layer))]
        return part_records[-1] if all(part_records) else None

    def _array_record(self, variable: str, layer: int | None) -> Record | None:
        key = self.key(variable, layer).digest
        text = self.folder.get(records.key_path(key))
        return None if text is None else Record.from_bytes(key, text)

    def key(self, variable: str, layer: int | None) -> ActivationKey:
        """Key under which an array is published.

        Arguments:
            variable: Name of the variable.
            layer: Layer number; None without a layer axis.
        """
        return ActivationKey(self.run, variable, layer, self.dtype)

    def published(self) -> list[VariableLayer]:
        """(variable, layer) of all published arrays, sorted."""
        cells = [
            (name, layer)
            for name, spec in self.specs.items()
            for layer in ([None] if spec.layers is None else range(spec.layers))
        ]
        # One listing of the manifest folder avoids a look at every key of every layer.
        manifests = {name.rsplit("/", 1)[-1] for name in self.folder.list(f"{self.path}/manifest")}
        return [
            cell
            for cell in cells
            if f"{cell_name(cell)}.json" in manifests and self.record(*cell) is not None
        ]

    def committed(self) -> list[Mapping[VariableLayer, FileChecksum]]:
        """Per segment, its committed shards: (variable, layer) -> size and checksum, published or not."""
        return list(self._committed.segments())

    def content(self, variable: str, layer: int | None) -> str:
        """Content digest "sha256:…" of a published array.

        Arguments:
            variable: Name of the variable.
            layer: Layer number; None without a layer axis.

        Raises:
            EntryNotFound: The array is not published.
        """
        record = self.record(variable, layer)
        if record is None:
            raise EntryNotFound(
                f"{cell_name((variable, layer))} of run {self.digest[:12]} is not stored, or not completely; "
                "capture it first"
            )
        return record.content

    def segment_digest(self, variable: str, layer: int | None, n: int) -> str:
        """Content digest "sha256:…" of one segment of an array, including the scales of int8.

        Arguments:
            variable: Name of the variable.
            layer: Layer number; None without a layer axis.
            n: Number of the segment.

        Raises:
            EntryNotFound: The segment is not committed.
        """
        digests = []
        for part in self._stored_parts((variable, layer)):
            checksum = self._committed.content(n, part)
            if checksum is None:
                raise EntryNotFound(self._missing_message(*part, n, "committed"))
            # Numbers and scales of int8 mean nothing without each other, so the digest covers both.
            digests.append(checksum[1])
        return digests[0] if len(digests) == 1 else content_digest(canonical_json(digests).encode())

    def values(self, variable: str, layer: int | None, n: int) -> ShardRows | RestoredRows:
        """Rows of one segment of an array, [rows, ...], read-only; int8 is dequantised to float32.

        Arguments:
            variable: Name of the variable.
            layer: Layer number; None without a layer axis.
            n: Number of the segment.

        Raises:
            EntryNotFound: The segment is not stored.
            CorruptEntry: See `shard`.
        """
        if not self._has_scales(variable):
            return self.shard(variable, layer, n)
        return RestoredRows(self.shard(variable, layer, n), self.shard(scale_name(variable), layer, n))

    def shard(self, variable: str, layer: int | None, n: int) -> ShardRows:
        """Rows of one segment in the stored dtype, [rows, ...], memory-mapped and read-only.

        Arguments:
            variable: Name of the stored array.
            layer: Layer number; None without a layer axis.
            n: Number of the segment.

        Raises:
            EntryNotFound: The segment is not stored.
            CorruptEntry: The file is cut short or its index is damaged; later, on access to rows, also if the
                checksum of a chunk does not match.
        """
        spec, layout = self._array(variable)
        rows = self._n_rows(spec, n)
        name = f"{self.path}/{layout.path(variable, layer, n)}"
        try:
            return self._mapped.rows(name, layout, rows, self._describe(variable, layer, n))
        except FileNotFoundError:
            raise EntryNotFound(self._missing_message(variable, layer, n, "stored")) from None

    # -- helpers

    def presented(self, variable: str) -> str:
        """Name of the variable that a stored array belongs to: the int8 variable for an array of its scales,
        else the name itself."""
        return scaled_name(variable) if self.dtype == QUANTISED else variable

    def _has_scales(self, variable: str) -> bool:
        """Whether a variable is stored as int8 with scales; in an int8 run all are, except reductions."""
        # The suffix is reserved in int8 runs only; elsewhere a variable may end in it.
        if self.dtype != QUANTISED or is_scale(variable):
            return False
        if variable not in self._is_scaled:
            try:
                self._is_scaled[variable] = self.spec(variable).dtype == QUANTISED
            except EntryNotFound:  # not declared yet, so there is no shard under either answer
                return True
        return self._is_scaled[variable]

    def _stored_parts(self, cell: VariableLayer) -> tuple[VariableLayer, ...]:
        """(variable, layer) of each stored array behind an array: the scales of an int8 array, then the array
        itself."""
        return ((scale_name(cell[0]), cell[1]), cell) if self._has_scales(cell[0]) else (cell,)

    def _with_scales(self, n: int, arrays: Mapping[VariableLayer, Array]) -> dict[VariableLayer, Array]:
        """Quantise the float32 rows of int8 variables to numbers and scales, as arrays of their own."""
        stored = {}
        for cell, rows in arrays.items():
            *scales, numbers = self._stored_parts(cell)
            if scales:
                stored[numbers], stored[scales[0]] = quantise(rows, self._describe(*cell, n))
            else:
                stored[cell] = rows
        return stored

    def _plain_checksum(self, name: str, layout: ShardLayout) -> FileChecksum:
        """Size and checksum of the uncompressed form of a compressed shard, read back from its file."""
        path = f"{self.path}/{name}"
        content = self.folder.get(path)
        if content is None:
            raise EntryNotFound(
                f"the file {self.folder.where(path)} was removed while its segment was written; run the "
                "capture again"
            )
        return plain_measure(content, layout, self.folder.where(path))

    def _put_record(
        self,
        n: int,
        shard_cells: Iterable[VariableLayer],
        files: Mapping[str, FileChecksum],
        plain: Mapping[str, FileChecksum],
    ) -> None:
        """Write the record that commits shards of a segment, whose files exist already.

        Arguments:
            n: Number of the segment.
            shard_cells: (variable, layer) of each shard.
            files: Path in the run's folder -> size and checksum of the file.
            plain: The same of the uncompressed form, for compressed files only.
        """
        cells = sorted(cell_name(cell) for cell in shard_cells)
        record = {"segment": n, "cells": cells, "files": files, PLAIN: plain}
        self.folder.put_new(record_name(self.path, n, cells), sealed(record))

    def _group_metadata(self, attributes: Mapping[str, Any]) -> bytes:
        """Content of the `zarr.json` of the run's group, which identifies the run; ends in a checksum
        field."""
        fields = {
            "run": self.run.request(),
            "dtype": self.dtype,
            "segment_tokens": self.segment_tokens,
            "n_tokens": self.tokens.n_tokens,
            "n_prompts": self.tokens.n_prompts,
        }
        fields["check"] = _attributes_digest({**attributes, "mizarr": fields})
        return group_metadata({**attributes, "mizarr": fields})

    def _plan(self, spec: ArraySpec, codec: str = "") -> ShardLayout:
        """Choose the shard layout of a new variable; ShapeError if the segment length allows none."""
        self._register(spec.selection)
        # On the token axis all segments have equally many rows. On other axes (pairs, prompts, selections)
        # they vary, and shards are as long as the longest.
        is_regular = spec.packed == "token"
        shard_rows = self.segment_tokens if is_regular else int(np.diff(self.bounds(spec.packed)).max())
        # Rounded up so that arrays that share an axis have the same shard length, whatever their chunk sizes.
        if spec.selection is not None or (self.dtype == QUANTISED and not is_regular):
            shard_rows = 1 << (shard_rows - 1).bit_length()
        exact = len(self.segments) > 1 and is_regular
        layout = ShardLayout.of(spec.dtype, spec.tail, shard_rows, spec.layers is not None, exact=exact)
        is_declared = self.folder.get(f"{self.path}/{spec.variable}/zarr.json") is not None
        # A declared array keeps its codec; `_declare` compares the rest.
        return layout if is_declared else self._with_committed_codec(spec, replace(layout, codec=codec))

    def _with_committed_codec(self, spec: ArraySpec, layout: ShardLayout) -> ShardLayout:
        """The layout with the codec of shards that exist already, as after quarantine of a `zarr.json`."""
        for n, shards in enumerate(self._committed.segments()):
            for cell in shards:
                if cell[0] == spec.variable:
                    # Segment records have the checksum of the uncompressed form for compressed shards only.
                    return replace(layout, codec=CODECS[0] if self._committed.plain(n, cell) else "")
        return layout

    def _declare(self, arrays: Sequence[ArraySpec], layouts: Sequence[ShardLayout]) -> None:
        """Write the `zarr.json` of variables that are not declared yet; ShapeError on a contradiction."""
        declared: dict[str, ArraySpec] = {}
        files = {}
        for spec, layout in zip(arrays, layouts, strict=True):
            # A variable may be listed twice; it is declared once.
            if declared.setdefault(spec.variable, spec) is spec:
                if spec.selection is not None:  # its token list first: the array has no meaning without it
                    slots = layout.rows if len(self.segments) > 1 else int(self.bounds(spec.packed)[-1])
                    write_selected(
                        self.folder, self.path, self.tokens, spec.selection, self.bounds(spec.packed), slots
                    )
                files[f"{self.path}/{spec.variable}/zarr.json"] = [self._metadata(spec, layout)]
        created = self.folder.put_all(files)
        for spec in arrays:
            is_new = f"{self.path}/{spec.variable}/zarr.json" in created
            stored = declared[spec.variable] if is_new else self.spec(spec.variable)
            compared = ("dims", "tail", "dtype", "layers", "selection")
            if any(getattr(stored, name) != getattr(spec, name) for name in compared):
                raise ShapeError(
                    f"run {self.digest[:12]} already stores variable {spec.variable!r} as {stored}, which "
                    f"differs from the requested {spec}; capture it under another name, or in another store"
                )

    def _metadata(self, spec: ArraySpec, layout: ShardLayout) -> bytes:
        """Content of the `zarr.json` of a variable: shape, dimension names and attributes."""
        bounds, dims = self.bounds(spec.packed), spec.dims
        front = () if spec.layers is None else (spec.layers,)
        packed_length = layout.rows * len(self.segments) if spec.packed == "pair" else int(bounds[-1])
        attributes: dict[str, Any] = {"long_name": spec.long_name, "units": spec.unit}
        attributes["mizarr"] = spec.attributes()
        if spec.dtype == QUANTISED:
            formula = (
                f"{spec.variable} * {scale_name(spec.variable)}, each scale for {BLOCK} on the last axis"
            )
            attributes["values"] = formula
        if spec.combine is not None:
            attributes["values"] = how_combined(spec.combine, spec.over or 0, spec.dims)
        if spec.packed not in ("token", "segment") and len(self.segments) > 1:
            # Zarr's grid is regular, so the rows of a segment start at the start of its shard and the axis
            # has gaps. For readers without mizarr: row i of segment n lies at n * shard length + i -
            # pair_bounds[n]. The prompt axis with gaps gets a name of its own, as one dimension cannot have
            # two lengths.
            packed_length = layout.rows * len(self.segments)
            attributes[f"{spec.packed}_bounds"] = bounds.tolist()
            dims = tuple("prompt_slot" if dim == "prompt_id" else dim for dim in dims)
        return layout.metadata((*front, packed_length, *spec.tail), dims, attributes)

    def _array(self, variable: str) -> tuple[ArraySpec, ShardLayout]:
        """Description and layout of a variable, from its current `zarr.json` or from `planned`."""
        if variable in self._plans:
            return self._plans[variable]
        self._require_same_run()
        if variable not in self._array_files:
            self._array_files[variable] = Watched(self.folder, f"{self.path}/{variable}/zarr.json")
        text, cached = self._array_files[variable].get(), self._parsed.get(variable)
        if cached is None or cached[0] is not text:
            parsed = self._read_array(variable)
            if text is None or parsed is None:
                specs = self.specs
                near = nearest(variable, specs)
                raise EntryNotFound(
                    f"run {self.digest[:12]} has no variable {variable!r}; it has "
                    f"{', '.join(specs) or 'none'}{f', the most similar is {near!r}' if near else ''}; name "
                    "one of these, or capture it first"
                )
            cached = self._parsed[variable] = (text, *parsed)
        return cached[1:]

    def _require_same_run(self) -> None:
        """Raise EntryNotFound if the run was removed, or removed and created again with other segments."""
        text = self._group_file.get()
        # Identity, not equality: `Watched` returns the same object until the file changes.
        if text is self._verified_group:
            return
        # The folder's name is a digest of the run and dtype; only the segment length is not part of it.
        length = (
            None
            if text is None
            else _verified_attributes(self.folder, self.path, text)["mizarr"]["segment_tokens"]
        )
        if length != self.segment_tokens:
            change = "removed" if text is None else f"created again in segments of {length} tokens"
            raise EntryNotFound(
                f"run {self.digest[:12]} in {self.folder.where(self.path)} was {change} after it had been "
                f"opened in segments of {self.segment_tokens} tokens; open it again"
            )
        self._verified_group = text

    def _read_array(self, variable: str) -> tuple[ArraySpec, ShardLayout] | None:
        """Parse a variable's `zarr.json`; None if it is missing or describes a coordinate."""
        text = self.folder.get(f"{self.path}/{variable}/zarr.json")
        if text is None:
            return None
        check_metadata(self.folder, self.path, variable, text)
        where = f"{self.folder.where(self.path)}/{variable}/zarr.json"
        try:
            metadata = read_json(text)
            fields = metadata.get("attributes", {}).get("mizarr", {})
        except (ValueError, AttributeError) as error:
            raise CorruptEntry(
                f"{where}: expected the JSON description of a Zarr array, found {error}; {REPAIR}"
            ) from error
        if "hook" not in fields:
            return None
        layout = ShardLayout.from_metadata(metadata)
        if layout is None:
            raise CorruptEntry(
                f"{where}: this array was rewritten with other codecs or chunks by another program; {REPAIR}"
            )
        canonical = fields.get("selection")
        selection = None if canonical is None else self._selection(fields["dims"], canonical)
        return ArraySpec.from_attributes(fields, selection), layout

    def _selection(self, dims: Sequence[str], canonical: Mapping[str, Any]) -> Selection:
        """Parse an array's selection of tokens; that of a mask needs the tokens stored with its axis.

        Arguments:
            dims: Dimension names of the array.
            canonical: The selection, from the attributes of the array.
        """
        axis = next(dim for dim in dims if dim.startswith(AXIS))
        if axis not in self._selections:
            token_indices = read_selected(self.folder, self.path, axis) if "mask" in canonical else None
            try:
                self._register(from_canonical(canonical, token_indices))
            except (ValueError, IndexError) as error:
                raise CorruptEntry(
                    f"{self.folder.where(self.path)}/{axis}: the stored tokens are not those that were "
                    f"selected ({error}); {REPAIR}"
                ) from error
        return self._selections[axis]

    def _register(self, selection: Selection | None) -> None:
        """Remember a selection by the name of its axis, for `bounds`."""
        if selection is not None:
            self._selections[selection.axis] = selection

    def _check_rows(self, variable: str, layer: int | None, n: int, rows: Array) -> None:
        """Raise ShapeError unless the rows have the declared shape, dtype and order of that segment."""
        spec = self.spec(variable)
        layers = [None] if spec.layers is None else range(spec.layers)
        if layer not in layers:
            layers_text = "no layer axis" if spec.layers is None else f"layers 0 to {spec.layers - 1}"
            raise ShapeError(f"cannot store layer {layer} of variable {variable!r}, which has {layers_text}")
        if not 0 <= n < len(self.segments):
            raise ShapeError(
                f"cannot store segment {n} of run {self.digest[:12]}, which has segments 0 to "
                f"{len(self.segments) - 1}"
            )
        expected = (self.rows(variable, n), *spec.tail)
        has_form = rows.shape == expected and rows.dtype == self.layout(variable).native
        if not has_form or not rows.flags.c_contiguous:
            order = "" if rows.flags.c_contiguous else ", not contiguous: use np.ascontiguousarray"
            raise ShapeError(
                f"segment {n} of {cell_name((variable, layer))}: expected {spec.dtype} of shape "
                f"{list(expected)} in C order, found {rows.dtype} of shape {list(rows.shape)}{order}"
            )

    def _describe(self, variable: str, layer: int | None, n: int) -> str:
        """Name of a shard in messages, such as "segment 0 of resid_post.3 in run 35be…"."""
        return f"segment {n} of {cell_name((variable, layer))} in run {self.digest[:12]}"

    def _missing_message(self, variable: str, layer: int | None, n: int, state: str) -> str:
        return f"{self._describe(variable, layer, n)} is not {state}; capture it first"

    def _completed(
        self, cell: VariableLayer, segments: Sequence[Mapping[VariableLayer, FileChecksum]]
    ) -> tuple[Record, bytes]:
        """Record and manifest of an array (variable, layer) whose segments are all committed.

        Arguments:
            cell: Variable and layer.
            segments: Per segment, (variable, layer) -> size and checksum of each committed shard.
        """
        variable, layer = cell
        layout = self.layout(variable)
        files = {layout.path(variable, layer, n): segment[cell] for n, segment in enumerate(segments)}
        spec, parts = self.spec(variable), self._stored_parts(cell)
        *scale_checksums, checksums = map(self._committed.contents, parts)
        # The content digest covers dtype, shape of a row and uncompressed checksums, but neither compression
        # nor the paths of the files.
        digested = ["shards", spec.dtype, list(spec.tail), checksums, *scale_checksums]
        content = content_digest(canonical_json(digested).encode())
        plain = dict(zip(files, checksums, strict=True)) if layout.codec else {}
        manifest = {"variable": variable, "layer": layer, "content": content, "files": files, PLAIN: plain}
        label = cell_name(cell).replace(".", "/")
        key = self.key(variable, layer).digest
        record = Record(key, records.ACTIVATION, self.path, content, records.now(), label)
        return record, sealed(manifest)


def dtype_of(arrays: Sequence[ArraySpec]) -> str:
    """Common storage dtype of the arrays of a run; ShapeError if there are several, or no arrays."""
    dtypes = sorted({spec.run_dtype or spec.dtype for spec in arrays})
    if len(dtypes) != 1:
        raise ShapeError(
            "expected arrays of one storage dtype to store as one run, found "
            f"{', '.join(dtypes) or 'no arrays'}"
        )
    return dtypes[0]


def _segment_length(folder: Folder, path: str) -> int | None:
    """Tokens per segment of a stored run; None if there is no run in the folder."""
    if folder.get(f"{path}/zarr.json") is None:
        return None
    return int(group_attributes(folder, path)["mizarr"]["segment_tokens"])


def group_attributes(folder: Folder, path: str) -> dict[str, Any]:
    """Read the attributes of a run's Zarr group, which identify the run, after verifying them.

    Arguments:
        folder: The store's files.
        path: Folder of the run.

    Returns:
        Attributes; "mizarr" has the fields run, dtype, segment_tokens, n_tokens and n_prompts.

    Raises:
        EntryNotFound: There is no run in the folder.
        CorruptEntry: The attributes were changed.
    """
    text = folder.get(f"{path}/zarr.json")
    if text is None:
        raise EntryNotFound(
            f"there is no stored run in {folder.where(path)}; `mizarr ls` lists the runs of a store"
        )
    return _verified_attributes(folder, path, text)


def _verified_attributes(folder: Folder, path: str, text: bytes) -> dict[str, Any]:
    """Parse and verify the `zarr.json` of a run's group; CorruptEntry if it was changed."""
    try:
        attributes: dict[str, Any] = read_json(text)["attributes"]
        fields = attributes["mizarr"]
        run = RunKey.of_request(fields["run"])
        is_unchanged = fields["check"] == _attributes_digest(attributes)
        # The folder name is a digest of the key, so attributes copied from another run are detected.
        is_unchanged = is_unchanged and entry_path(entry_digest(run, fields["dtype"])) == path
    except (ValueError, KeyError, TypeError, AttributeError):
        is_unchanged = False
    if not is_unchanged:
        raise CorruptEntry(
            f"{folder.where(path)}/zarr.json, which describes run {path[-64:][:12]}, was changed after it "
            f"had been written; {REPAIR}"
        )
    return attributes


def _attributes_digest(attributes: Mapping[str, Any]) -> str:
    """Checksum of the attributes of a run's group, without the field "check" that holds it."""
    fields = {name: value for name, value in attributes["mizarr"].items() if name != "check"}
    return content_digest(canonical_json({**attributes, "mizarr": fields}).encode())
