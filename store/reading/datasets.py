"""A stored run as a labelled, lazy xarray dataset.

Border: shards in, labels out; the entry says which shards exist and maps them into memory, nothing here
writes.

Opening reads no activation. Each variable is a thin array over the memory-mapped shards: an indexing
operation touches the pages of the rows it asks for and decodes bfloat16 to float32 for those only. Given to
dask, a chunk is one layer of one segment, the unit in which it was written.

Axes: layer (real indices; layers that were not captured are absent), token (all prompts end to end), hidden,
head, d_head, mlp; pair = lower triangle of each prompt's attention pattern, row by row; square = all of it,
of models whose positions see later ones; prompt_id = prompts.
When variables hold different layers, those of the largest set share `layer` and each other variable has its
own dimension `layer_<variable>`: an absent layer is never filled with NaN. Likewise tokens: variables of a
selection lie on `token`, labelled as such, where none with all tokens is opened beside them and no larger
selection; otherwise on `token_<selection>`, labelled by `token_id_<selection>` and so on. The k largest
logits lie on `rank`, 0 the largest, or on `rank_<k>` where several k are opened; figures of features likewise
on `feature`, or `feature_<dictionary>`. What is kept of a run as a whole has no axis of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from ..errors import EntryNotFound, nearest
from ..files import Folder, Stamp, folder_at
from ..identity import DIGEST, SOURCE
from ..runs.coordinates import ABOUT, pair_starts, read_tokens
from ..runs.entries import PACKED_AXES, ArraySpec, Entry, group_attributes
from ..runs.prompt_labels import read_prompt_labels
from ..runs.quantised import QUANTISED, RestoredRows
from ..runs.run_sums import PART, combined
from ..runs.selections import Selection, View
from ..runs.shards import DTYPES, ShardRows
from ..runs.vocabularies import read_vocabulary, register_vocabulary
from .selection import ranges

if TYPE_CHECKING:
    from ..runs.packed import PackedTokens

_LAZY = 256 << 20  # bytes of presented data above which variables come chunked by default

Index = int | np.integer[Any] | slice | npt.NDArray[np.integer[Any]]
Chunks = Literal["auto", "segment"] | None


def open_entry(
    entry: Entry,
    variables: Sequence[str] | None = None,
    layers: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    chunks: Chunks = "auto",
    views: Mapping[str, View] | None = None,
    segment: int | None = None,
) -> xr.Dataset:
    """The published activations of a run, labelled and lazy.

    variables: names, by default all that are published.  layers: real indices, by default all that are; by
    variable where they differ.
    chunks: "segment" for dask, one chunk per layer and segment; None for plain lazy indexing, which is
    quicker on single prompts; "auto" chunks what is larger than 256 MiB. views: name -> the published
    variable it shows some tokens of. segment: only the tokens of this one.
    Raises EntryNotFound, with what is there, for a variable or layer that is not published.
    """
    held: dict[str, list[int | None]] = {}
    for variable, layer in entry.published():
        held.setdefault(variable, []).append(layer)
    views = views or {}
    held |= {name: held[base] for name, (base, _) in views.items() if base in held}
    names = sorted(held) if variables is None else list(dict.fromkeys(variables))
    asked = layers if isinstance(layers, Mapping) else dict.fromkeys(names, layers)
    picked = {name: _layers(entry, name, asked.get(name), held) for name in names}
    about = group_attributes(entry.folder, entry.path)
    specs = {name: _spec(entry, name, views.get(name)) for name in picked}
    axes = _token_axes(specs.values(), entry.tokens)
    coords, data = _token_coordinates(entry.tokens, axes), {}
    whose, source = {DIGEST: entry.run.model}, entry.folder.where(entry.path)
    shared = _largest({found for found in picked.values() if found is not None}, picked)
    numbered = {
        dim: size for spec in specs.values() for dim, size in spec.sizes.items() if _kind_of(dim) is not None
    }
    called = _called(numbered)
    coords |= {called[dim]: xr.Variable((called[dim],), np.arange(size)) for dim, size in numbered.items()}
    for name, found in picked.items():
        spec = specs[name]
        dims = [axes[dim][0] if dim in axes else called.get(dim, dim) for dim in spec.dims]
        if found is not None:
            dims[0] = "layer" if found == shared else f"layer_{name}"
            coords[dims[0]] = xr.Variable(dims[:1], np.array(found, np.int64), ABOUT["layer"])
        if spec.packed == "segment":
            dims = [dim for dim in dims if dim not in ("segment", PART)]
        if spec.packed == "pair":
            coords["pair_start"] = xr.Variable(("prompt_id",), pair_starts(entry.tokens))
        array = _view(entry, views[name], found) if name in views else _array(entry, name, found)
        attrs = {"long_name": spec.long_name, "units": spec.unit, "hook": spec.hook, "tokens": spec.over}
        told = {key: value for key, value in (attrs | whose).items() if value}
        data[name] = xr.Variable(dims, indexing.LazilyIndexedArray(array), told, {SOURCE: source})
    if about.get("token_ids") == "unknown":
        coords = {name: coord for name, coord in coords.items() if not name.startswith("token_id")}
    for name, values in read_prompt_labels(entry.folder, entry.path).items():
        if name not in coords and name not in data and len(values) == entry.tokens.n_prompts:
            coords[name] = xr.Variable(("prompt_id",), values)
    tokenizer = {"tokenizer": about["tokenizer"]} if "tokenizer" in about else {}
    dataset = xr.Dataset(data, coords, tokenizer | whose)
    if chunks == "segment" or (chunks == "auto" and sum(v.nbytes for v in data.values()) > _LAZY):
        dataset = _chunked(dataset, entry, data, axes)
    if segment is not None:
        bounds = {dim: _starts(entry, selection)[segment : segment + 2] for dim, selection in axes.values()}
        dataset = dataset.isel({dim: slice(*map(int, found)) for dim, found in bounds.items()})
    dataset.encoding = {SOURCE: source, "run": entry.digest}
    if tokenizer:
        register_vocabulary(about["tokenizer"], _Vocabulary(entry.folder, about["tokenizer"]))
    return dataset


def entry_at(source: str) -> Entry:
    """The entry in a folder, for reading; kept open, so that pieces of one dataset share its shards.

    source: as `Folder.where` says it.
    """
    folder, path = folder_at(source)
    # Another stamp: the run was removed and made anew since, perhaps in other segments or with other labels.
    found = folder.glance(f"{path}/zarr.json"), folder.folder_stat(f"{path}/coordinates")
    return _entry_at(source, tuple(None if stat is None else stat.stamp for stat in found))


@lru_cache(maxsize=16)
def _entry_at(source: str, stamps: tuple[Stamp | None, ...]) -> Entry:
    folder, path = folder_at(source)
    return Entry.load(folder, path, read_tokens(folder, path))


def forget_entries() -> None:
    """Close the entries that `entry_at` keeps open."""
    _entry_at.cache_clear()


class ShardedArray(BackendArray):
    """One variable of one entry, [layer,] packed axis, rest…, read from its memory-mapped shards on demand.

    layers: real index of each place on the layer axis; None when the variable has no layer axis.
    bfloat16 and int8 are presented as float32, other dtypes as stored.
    """

    def __init__(self, entry: Entry, variable: str, layers: tuple[int, ...] | None) -> None:
        spec = entry.spec(variable)
        stored = DTYPES[spec.dtype]
        self.entry, self.variable, self.layers = entry, variable, layers
        self.bounds = entry.bounds(spec.packed)
        is_widened = stored.name in ("bfloat16", QUANTISED)
        self.dtype = np.dtype(np.float32) if is_widened else stored.newbyteorder("=")
        front = () if layers is None else (len(layers),)
        self.shape = (*front, int(self.bounds[-1]), *spec.tail)

    def __reduce__(self) -> tuple[Callable[..., ShardedArray], tuple[str, str, tuple[int, ...] | None]]:
        # Addresses travel, not arrays: another process maps the same files.
        return _array_at, (self.entry.folder.where(self.entry.path), self.variable, self.layers)

    def __dask_tokenize__(self) -> tuple[object, ...]:
        return ("mizarr-shards", self.entry.digest, self.variable, self.layers, self.shape)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Index, ...]) -> npt.NDArray[Any]:
        if self.layers is None:
            return self._read_layer(None, key)
        at = key[0]
        if isinstance(at, int | np.integer):
            return self._read_layer(self.layers[at], key[1:])
        layers = [self.layers[i] for i in np.arange(len(self.layers))[at]]
        lengths = [_length(k, n) for k, n in zip(key[1:], self.shape[1:], strict=True)]
        out = np.empty((len(layers), *(n for n in lengths if n is not None)), self.dtype)
        for i, layer in enumerate(layers):
            self._read_layer(layer, key[1:], out[i, ...])  # "...": a view even of a single number
        return out

    def _read_layer(
        self, layer: int | None, key: tuple[Index, ...], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        rows, rest = key[0], key[1:]
        if isinstance(rows, int | np.integer):
            n = int(np.searchsorted(self.bounds, rows, side="right")) - 1
            block = _orthogonal(self._shard(layer, n)[int(rows - self.bounds[n])], rest)
            if out is None:
                return np.asarray(block).astype(self.dtype)
            out[...] = block
            return out
        if isinstance(rows, slice) and rows.step not in (None, 1):
            rows = np.arange(self.bounds[-1])[rows]
        if out is None:
            axes = self.shape[0 if self.layers is None else 1 :]
            lengths = [_length(k, n) for k, n in zip(key, axes, strict=True)]
            out = np.empty(tuple(n for n in lengths if n is not None), self.dtype)
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(int(self.bounds[-1]))
            self._copy_range(layer, start, stop, rest, out)
        else:
            self._gather(layer, rows, rest, out)
        return out

    def _copy_range(
        self, layer: int | None, start: int, stop: int, rest: tuple[Index, ...], out: npt.NDArray[Any]
    ) -> None:
        done = start
        while done < stop:
            n = int(np.searchsorted(self.bounds, done, side="right")) - 1
            upto = min(stop, int(self.bounds[n + 1]))
            first = int(self.bounds[n])
            for at, block in self._shard(layer, n).blocks(done - first, upto - first):
                to = done - start + at
                out[to : to + len(block)] = _orthogonal(block, (slice(None), *rest))
            done = upto

    def _gather(
        self, layer: int | None, rows: npt.NDArray[Any], rest: tuple[Index, ...], out: npt.NDArray[Any]
    ) -> None:
        segment = np.searchsorted(self.bounds, rows, side="right") - 1
        for n in np.unique(segment):
            where = np.flatnonzero(segment == n)
            # Sorted rows walk the mapped pages forward: 1.5-2x faster than jumping about.
            where = where[np.argsort(rows[where], kind="stable")]
            block = self._shard(layer, int(n))[rows[where] - self.bounds[n]]
            out[where] = _orthogonal(block, (slice(None), *rest))

    def _shard(self, layer: int | None, n: int) -> ShardRows | RestoredRows:
        return self.entry.values(self.variable, layer, n)


class SelectedArray(ShardedArray):
    """Some tokens of a variable that has all of them: what a selection of it would store."""

    def __init__(
        self, entry: Entry, variable: str, layers: tuple[int, ...] | None, selection: Selection
    ) -> None:
        super().__init__(entry, variable, layers)
        self.selection, self._kept = selection, selection.kept(entry.tokens)
        front = 0 if layers is None else 1
        self.shape = (*self.shape[:front], len(self._kept), *self.shape[front + 1 :])

    def __reduce__(self) -> tuple[Callable[..., ShardedArray], tuple[Any, ...]]:
        made, about = super().__reduce__()
        return made, (*about, self.selection)

    def __dask_tokenize__(self) -> tuple[object, ...]:
        return (*super().__dask_tokenize__(), self.selection.canonical())

    def _read_layer(
        self, layer: int | None, key: tuple[Index, ...], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        # Whoever asks for a range may have been given rows by the base, whose shape is of all tokens.
        rows = self._kept[key[0]]
        return super()._read_layer(layer, (int(rows) if rows.ndim == 0 else rows, *key[1:]), out)


class RunArray(ShardedArray):
    """A variable of a run as a whole, [layer,] rest…: what its segments hold, put together."""

    def __init__(self, entry: Entry, variable: str, layers: tuple[int, ...] | None) -> None:
        super().__init__(entry, variable, layers)
        self.spec = spec = entry.spec(variable)
        tail = spec.tail[:-1] if spec.dims[-1] == PART else spec.tail
        self.shape = (*self.shape[: 0 if layers is None else 1], *tail)

    def _read(self, key: tuple[Index, ...]) -> npt.NDArray[Any]:
        if self.layers is None:
            return _orthogonal(self._of_layer(None), key)
        chosen = np.array(self.layers)[key[0]]
        if chosen.ndim == 0:
            return _orthogonal(self._of_layer(int(chosen)), key[1:])
        found = [_orthogonal(self._of_layer(int(layer)), key[1:]) for layer in chosen]
        return np.stack(found) if found else np.empty((0, *self.shape[1:]), self.dtype)

    def _of_layer(self, layer: int | None) -> npt.NDArray[Any]:
        rows = [self._shard(layer, n)[:] for n in range(len(self.entry.segments))]
        return combined(np.concatenate(rows), self.spec.combine or "", self.spec.over or 0, self.spec.dims)


class TextColumn(BackendArray):
    """The texts of the prompts, [prompt_id], read when they are asked for."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.dtype = np.dtypes.StringDType()
        self.shape = (len(texts),)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        at = np.arange(len(self.texts))[key[0]]
        if at.ndim == 0:
            return np.array(self.texts[int(at)], self.dtype)
        return np.array([self.texts[int(i)] for i in at], self.dtype)


class TokenColumn(BackendArray):
    """A column [token] computed from the row starts for the slice that is asked for: prompt or position.
    kept: the tokens it has places for; None for all."""

    dtype = np.dtype(np.int32)

    def __init__(self, tokens: PackedTokens, column: str, kept: npt.NDArray[np.int64] | None = None) -> None:
        self.tokens, self.column, self.kept = tokens, column, kept
        self.shape = (tokens.n_tokens if kept is None else len(kept),)

    def __dask_tokenize__(self) -> tuple[object, ...]:
        return ("mizarr-column", self.column, self.tokens.digest, self.kept)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        of: Callable[[Any], Any] = (
            self.tokens.prompt_of if self.column == "prompt" else self.tokens.position_of
        )
        return of(key[0] if self.kept is None else self.kept[key[0]])


def _layers(
    entry: Entry, name: str, wanted: Sequence[int] | None, held: dict[str, list[int | None]]
) -> tuple[int, ...] | None:
    """The layers of a variable to open, None when it has no layer axis."""
    if name not in held:
        raise EntryNotFound(
            f"run {entry.digest[:12]} has not published {name!r}; it has {', '.join(held) or 'nothing yet'}"
            f"{f', nearest is {near!r}' if (near := nearest(name, held)) else ''}. Capture it first"
        )
    there = [layer for layer in held[name] if layer is not None]
    if not there:
        return None
    if absent := [layer for layer in wanted or () if layer not in there]:
        raise EntryNotFound(
            f"run {entry.digest[:12]} has {name!r} at layers {ranges(there)}, not at {ranges(absent)}; "
            "capture those first, or leave them out"
        )
    return tuple(there if wanted is None else map(int, wanted))


def _largest(sets: set[tuple[int, ...]], picked: dict[str, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The set of layers that gets the name `layer`: the longest, then the most common, then the first."""
    common = Counter(picked.values())
    return max(sorted(sets), key=lambda found: (len(found), common[found]), default=None)


def _kind_of(dim: str) -> str | None:
    """ "rank" or "feature" of an axis whose stored name says which ranks, or whose features."""
    return next((kind for kind in ("rank", "feature") if dim.startswith(f"{kind}_")), None)


def _called(numbered: Iterable[str]) -> dict[str, str]:
    """How such axes are shown: by their kind, where there are not several of it."""
    kinds = {dim: _kind_of(dim) or dim for dim in numbered}
    several = Counter(kinds.values())
    return {dim: kind if several[kind] == 1 else dim for dim, kind in kinds.items()}


TokenAxes = Mapping[str, tuple[str, Selection | None]]
"""Packed axes of tokens -> the dimension they are shown as, and which tokens they have; None for all."""


def _spec(entry: Entry, name: str, view: View | None) -> ArraySpec:
    if view is None:
        return entry.spec(name)
    base, selection = view
    spec = entry.spec(base)
    dims = tuple(selection.axis if dim == "token" else dim for dim in spec.dims)
    hook = f"{spec.hook}@{selection.name}"
    return replace(spec, variable=name, hook=hook, dims=dims, selection=selection)


def _array(entry: Entry, name: str, layers: tuple[int, ...] | None) -> ShardedArray:
    kind = RunArray if entry.spec(name).packed == "segment" else ShardedArray
    return kind(entry, name, layers)


def _view(entry: Entry, view: View, layers: tuple[int, ...] | None) -> SelectedArray:
    return SelectedArray(entry, view[0], layers, view[1])


def _token_axes(specs: Iterable[ArraySpec], tokens: PackedTokens) -> TokenAxes:
    """How the token axes of some variables are called: the largest is `token`."""
    selections = {spec.packed: spec.selection for spec in specs if spec.selection is not None}
    if len(selections) == 0 or any(spec.packed == "token" for spec in specs):
        return {"token": ("token", None), **{axis: (axis, each) for axis, each in selections.items()}}
    sizes = {axis: int(each.counts(tokens).sum()) for axis, each in selections.items()}
    largest = max(sorted(sizes), key=lambda axis: sizes[axis])
    return {axis: ("token" if axis == largest else axis, each) for axis, each in selections.items()}


def _token_coordinates(tokens: PackedTokens, axes: TokenAxes) -> dict[str, xr.Variable]:
    """Labels per token and per prompt; those that can be computed are, when they are asked for."""
    columns: dict[str, tuple[str, Any]] = {"prompt_id": ("prompt_id", pd.RangeIndex(tokens.n_prompts))}
    for dim, selection in axes.values():
        kept = None if selection is None else selection.kept(tokens)
        end = dim.removeprefix("token")
        ids = tokens.ids if kept is None else tokens.ids[kept]
        columns[f"token_id{end}"] = (dim, ids)
        for name in ("prompt", "position"):
            column = TokenColumn(tokens, name, kept)
            columns[f"{name}{end}"] = (dim, indexing.LazilyIndexedArray(column))
        if dim != "token":
            continue
        sizes = tokens.row_size if selection is None else selection.counts(tokens)
        columns["row_start"] = ("prompt_id", np.cumsum(sizes) - sizes)
        columns["row_size"] = ("prompt_id", sizes)
        for name in ("char_start", "char_end"):
            if (column_of := getattr(tokens, name)) is not None:
                columns[name] = ("token", column_of if kept is None else column_of[kept])
    if tokens.texts is not None:
        columns["text"] = ("prompt_id", indexing.LazilyIndexedArray(TextColumn(tokens.texts)))
    return {
        name: xr.Variable((dim,), values, ABOUT.get(_label(name), {}))
        for name, (dim, values) in columns.items()
    }


def _label(name: str) -> str:
    """A label as it is called of all tokens."""
    known = ("token_id", "prompt_id", "prompt", "position")
    return next((label for label in known if name.startswith(label)), name)


def _starts(entry: Entry, selection: Selection | None) -> npt.NDArray[np.int64]:
    """Where each segment starts on an axis of tokens, and its end."""
    every = entry.bounds("token")
    return every if selection is None else selection.starts_on(entry.tokens, every)


def _chunked(dataset: xr.Dataset, entry: Entry, data: dict[str, xr.Variable], axes: TokenAxes) -> xr.Dataset:
    """Variables as dask arrays, one chunk per layer and segment; labels per token likewise."""
    sizes: dict[Any, Any] = {
        dim: tuple(int(n) for n in np.diff(_starts(entry, selection)) if n)
        for dim, selection in axes.values()
    }
    for dim in dataset.dims:
        if dim not in sizes and str(dim) in PACKED_AXES:
            sizes[dim] = tuple(int(n) for n in np.diff(entry.bounds(str(dim))) if n)
        elif str(dim).startswith("layer"):
            sizes[dim] = 1
    columns = dataset[[name for name in dataset.coords if dataset[name].dims == ("token",)]]
    arrays = dataset[list(data)].reset_coords(drop=True)
    big = arrays.chunk({dim: size for dim, size in sizes.items() if dim in arrays.dims})
    return dataset.assign(big.data_vars).assign_coords(columns.chunk({"token": sizes["token"]}).coords)


def _array_at(
    source: str, variable: str, layers: tuple[int, ...] | None, selection: Selection | None = None
) -> ShardedArray:
    entry = entry_at(source)
    if selection is None:
        return _array(entry, variable, layers)
    return SelectedArray(entry, variable, layers, selection)


class _Vocabulary:
    """The token strings of a tokenizer, read from the store when first asked for."""

    def __init__(self, folder: Folder, tokenizer: str) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._strings: list[str] | None = None

    def __call__(self) -> list[str] | None:
        if self._strings is None:
            self._strings = read_vocabulary(self._folder, self._tokenizer)
        return self._strings


def _length(key: Index, size: int) -> int | None:
    """How many entries `key` selects from an axis; None for a single index, which drops the axis."""
    if isinstance(key, slice):
        return len(range(*key.indices(size)))
    return None if isinstance(key, int | np.integer) else len(key)


def _orthogonal(block: npt.NDArray[Any], key: tuple[Index, ...]) -> npt.NDArray[Any]:
    """`block` indexed axis by axis (each array selects along its own axis, unlike numpy's joint indexing)."""
    for axis in range(len(key) - 1, -1, -1):
        at = key[axis]
        if not (isinstance(at, slice) and at == slice(None)):
            block = block[(slice(None),) * axis + (at,)]
    return block
