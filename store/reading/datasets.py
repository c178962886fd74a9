"""A stored run as a labelled, lazy `xarray.Dataset`. Reading only.

Opening reads no activations. Each variable is a lazy array over the memory-mapped shards: indexing touches
the pages of the requested rows and converts only those from bfloat16 to float32. With dask, a chunk is one
layer of one segment, which is the unit in which it was written.

Axes:

- layer: layer numbers; layers that were not captured are absent, never filled with NaN. If variables hold
  different layers, the largest set is `layer` and each other variable has its own dimension
  `layer_<variable>`.
- token: all prompts end to end. Variables of a selection are on `token` if no variable with all tokens and no
  larger selection is opened with them, otherwise on `token_<selection>` with labels `token_id_<selection>`
  and so on.
- pair: lower triangle of each prompt's attention pattern, row by row; square: the whole matrix.
- prompt_id: prompts. Also hidden, head, d_head, mlp.
- rank (0 is the largest logit) or `rank_<k>` if several k are opened; feature or `feature_<dictionary>`
  likewise.

Reductions over a whole run have no token axis.
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

from ..arrays import ranges
from ..content import TEXT
from ..errors import EntryNotFound, nearest
from ..files import Folder, Stamp, folder_at
from ..identity import DIGEST, SOURCE
from ..runs.coordinates import ABOUT, pair_starts, read_tokens
from ..runs.entries import PACKED_AXES, ArraySpec, Entry, group_attributes
from ..runs.packed import exclusive_sum
from ..runs.prompt_labels import read_prompt_labels
from ..runs.quantised import QUANTISED, RestoredRows
from ..runs.run_sums import PART, combined
from ..runs.selections import Selection, View
from ..runs.shards import DTYPES, ShardRows
from ..runs.vocabularies import read_vocabulary, register_vocabulary

if TYPE_CHECKING:
    from ..runs.packed import PackedTokens

_DASK_BYTES = 256 << 20  # bytes of all variables above which chunks="auto" returns dask arrays

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
    """Open the published activations of a run as a labelled, lazy dataset.

    Arguments:
        entry: The stored run.
        variables: Names of the variables; None for all that are published.
        layers: Layer numbers, or a mapping from variable to layer numbers; None for all that are published.
        chunks: "segment" for dask arrays with one chunk per layer and segment (range of tokens stored in one
            file); None for lazy indexing without dask, which is faster for single prompts; "auto" uses dask
            above 256 MiB.
        views: Name -> (published variable, selection of tokens): opens some tokens of a variable under a name
            of their own.
        segment: Number of the only segment to open; None for all.

    Raises:
        EntryNotFound: A variable or layer is not published; the message lists those that are.
    """
    opened = _opened_layers(entry, variables, layers, views or {})
    # The stored variable that each opened one is read from, and the selection of its tokens (None: all).
    stored: dict[str, tuple[str, Selection | None]] = {name: (name, None) for name in opened}
    stored |= {name: view for name, view in (views or {}).items() if name in opened}
    # Read from the file rather than from the entry: attributes are verified against their checksum.
    attributes = group_attributes(entry.folder, entry.path)
    specs = {name: _spec(entry, name, *stored[name]) for name in opened}
    axes = _token_axes(specs.values(), entry.tokens)
    coords, data = _token_coordinates(entry.tokens, axes), {}
    model_attribute, source = {DIGEST: entry.run.model}, entry.folder.where(entry.path)
    common_layers = _largest(opened)
    # Axes of ranks and features have their numbers as labels.
    numbered_sizes = {
        dim: size for spec in specs.values() for dim, size in spec.sizes.items() if _kind_of(dim) is not None
    }
    displayed = _displayed_names(numbered_sizes)
    coords |= {
        displayed[dim]: xr.Variable((displayed[dim],), np.arange(size))
        for dim, size in numbered_sizes.items()
    }
    for name, opened_layers in opened.items():
        spec = specs[name]
        dims = [axes[dim][0] if dim in axes else displayed.get(dim, dim) for dim in spec.dims]
        if opened_layers is not None:
            dims[0] = "layer" if opened_layers == common_layers else f"layer_{name}"
            coords[dims[0]] = xr.Variable(dims[:1], np.array(opened_layers, np.int64), ABOUT["layer"])
        if spec.packed == "segment":
            dims = [dim for dim in dims if dim not in ("segment", PART)]
        if spec.packed == "pair":
            coords["pair_start"] = xr.Variable(("prompt_id",), pair_starts(entry.tokens))
        variable, selection = stored[name]
        array = _array(entry, variable, opened_layers, selection)
        attrs = {"long_name": spec.long_name, "units": spec.unit, "hook": spec.hook, "tokens": spec.over}
        attrs_present = {key: value for key, value in (attrs | model_attribute).items() if value}
        data[name] = xr.Variable(dims, indexing.LazilyIndexedArray(array), attrs_present, {SOURCE: source})
    # Imported activations without ids are stored with ids of 0, which must not be shown as tokens.
    if attributes.get("token_ids") == "unknown":
        coords = {name: coord for name, coord in coords.items() if not name.startswith("token_id")}
    for name, values in read_prompt_labels(entry.folder, entry.path).items():
        if name not in coords and name not in data and len(values) == entry.tokens.n_prompts:
            coords[name] = xr.Variable(("prompt_id",), values)
    tokenizer = {"tokenizer": attributes["tokenizer"]} if "tokenizer" in attributes else {}
    dataset = xr.Dataset(data, coords, tokenizer | model_attribute)
    if chunks == "segment" or (chunks == "auto" and sum(v.nbytes for v in data.values()) > _DASK_BYTES):
        dataset = _chunked(dataset, entry, data, axes)
    if segment is not None:
        bounds = {dim: _starts(entry, selection)[segment : segment + 2] for dim, selection in axes.values()}
        dataset = dataset.isel({dim: slice(int(start), int(stop)) for dim, (start, stop) in bounds.items()})
    # In encoding and not in attrs: attrs are digested with results, and a path would make R depend on where
    # the store lies.
    dataset.encoding = {SOURCE: source, "run": entry.digest}
    # Registered, not loaded: most datasets are opened without a look at token strings.
    if tokenizer:
        register_vocabulary(attributes["tokenizer"], _Vocabulary(entry.folder, attributes["tokenizer"]))
    return dataset


def entry_at(source: str) -> Entry:
    """Open the stored run in a folder for reading. Cached, so that all parts of a dataset share memory maps.

    Arguments:
        source: Path or URL of the run's folder.
    """
    folder, path = folder_at(source)
    # The stamps are part of the cache key: the run may have been removed and created again with other
    # segments.
    stats = folder.glance(f"{path}/zarr.json"), folder.folder_stat(f"{path}/coordinates")
    return _entry_at(source, tuple(None if stat is None else stat.stamp for stat in stats))


@lru_cache(maxsize=16)
def _entry_at(source: str, stamps: tuple[Stamp | None, ...]) -> Entry:
    folder, path = folder_at(source)
    return Entry.load(folder, path, read_tokens(folder, path))


def forget_entries() -> None:
    """Drop the stored runs that `entry_at` has cached, for example after files of a run were removed."""
    _entry_at.cache_clear()


class ShardedArray(BackendArray):
    """Lazy array over the shard files of one variable, [layer, token, ...].

    bfloat16 and int8 are read as float32.

    Arguments:
        entry: The stored run.
        variable: Name of the stored array.
        layers: Layer number at each index of the layer axis; None without a layer axis.
    """

    def __init__(self, entry: Entry, variable: str, layers: tuple[int, ...] | None) -> None:
        spec = entry.spec(variable)
        stored = DTYPES[spec.dtype]
        self.entry, self.variable, self.layers = entry, variable, layers
        self.bounds = entry.bounds(spec.packed)
        # numpy reductions fail on ml_dtypes' bfloat16 (mean raises TypeError), so readers get float32.
        is_widened = stored.name in ("bfloat16", QUANTISED)
        self.dtype = np.dtype(np.float32) if is_widened else stored.newbyteorder("=")
        layer_axis = () if layers is None else (len(layers),)
        self.shape = (*layer_axis, int(self.bounds[-1]), *spec.tail)

    def __reduce__(self) -> tuple[Callable[..., ShardedArray], tuple[str, str, tuple[int, ...] | None]]:
        # Pickled as an address: the other process maps the same files instead of receiving their content.
        return _array_at, (self.entry.folder.where(self.entry.path), self.variable, self.layers)

    def __dask_tokenize__(self) -> tuple[object, ...]:
        # Content-addressed, so dask shares work between datasets opened from the same run, and never hashes
        # the data.
        return ("mizarr-shards", self.entry.digest, self.variable, self.layers, self.shape)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Index, ...]) -> npt.NDArray[Any]:
        """Read the elements that `key` selects, given per axis as an integer, slice or index array."""
        if self.layers is None:
            return self._read_layer(None, key)
        layer_key = key[0]
        if isinstance(layer_key, int | np.integer):
            return self._read_layer(self.layers[layer_key], key[1:])
        layers = [self.layers[i] for i in np.arange(len(self.layers))[layer_key]]
        lengths = [_length(k, n) for k, n in zip(key[1:], self.shape[1:], strict=True)]
        out = np.empty((len(layers), *(n for n in lengths if n is not None)), self.dtype)
        for i, layer in enumerate(layers):
            # "...": a view even when a single number is selected
            self._read_layer(layer, key[1:], out[i, ...])
        return out

    def _read_layer(
        self, layer: int | None, key: tuple[Index, ...], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Read selected rows of one layer.

        Arguments:
            layer: Layer number; None without a layer axis.
            key: Rows, and then per axis of a row, the elements to read.
            out: Array to fill; None for a new one.
        """
        rows, tail_key = key[0], key[1:]
        if isinstance(rows, int | np.integer):
            n = int(np.searchsorted(self.bounds, rows, side="right")) - 1
            block = _orthogonal(self._shard(layer, n)[int(rows - self.bounds[n])], tail_key)
            if out is None:
                return np.asarray(block).astype(self.dtype)
            out[...] = block
            return out
        # Strided slices become index arrays; only contiguous ranges have the fast path by blocks.
        if isinstance(rows, slice) and rows.step not in (None, 1):
            rows = np.arange(self.bounds[-1])[rows]
        if out is None:
            axes = self.shape[0 if self.layers is None else 1 :]
            lengths = [_length(k, n) for k, n in zip(key, axes, strict=True)]
            out = np.empty(tuple(n for n in lengths if n is not None), self.dtype)
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(int(self.bounds[-1]))
            self._copy_range(layer, start, stop, tail_key, out)
        else:
            self._gather(layer, rows, tail_key, out)
        return out

    def _copy_range(
        self, layer: int | None, start: int, stop: int, tail_key: tuple[Index, ...], out: npt.NDArray[Any]
    ) -> None:
        """Copy the rows from `start` to `stop` into `out`, segment by segment and chunk by chunk."""
        row = start
        while row < stop:
            n = int(np.searchsorted(self.bounds, row, side="right")) - 1
            end = min(stop, int(self.bounds[n + 1]))
            offset = int(self.bounds[n])
            for position, block in self._shard(layer, n).blocks(row - offset, end - offset):
                target = row - start + position
                out[target : target + len(block)] = _orthogonal(block, (slice(None), *tail_key))
            row = end

    def _gather(
        self, layer: int | None, rows: npt.NDArray[Any], tail_key: tuple[Index, ...], out: npt.NDArray[Any]
    ) -> None:
        """Copy single rows, given by number, into `out`, segment by segment."""
        segment = np.searchsorted(self.bounds, rows, side="right") - 1
        for n in np.unique(segment):
            in_segment = np.flatnonzero(segment == n)
            # Ascending rows read the mapped pages in order, which is 1.5-2x faster.
            in_segment = in_segment[np.argsort(rows[in_segment], kind="stable")]
            block = self._shard(layer, int(n))[rows[in_segment] - self.bounds[n]]
            out[in_segment] = _orthogonal(block, (slice(None), *tail_key))

    def _shard(self, layer: int | None, n: int) -> ShardRows | RestoredRows:
        return self.entry.values(self.variable, layer, n)


class SelectedArray(ShardedArray):
    """Lazy array with some tokens of a variable that is stored for all tokens, [layer, selected token,
    ...]."""

    def __init__(
        self, entry: Entry, variable: str, layers: tuple[int, ...] | None, selection: Selection
    ) -> None:
        super().__init__(entry, variable, layers)
        self.selection, self._selected = selection, selection.indices(entry.tokens)
        front = 0 if layers is None else 1
        self.shape = (*self.shape[:front], len(self._selected), *self.shape[front + 1 :])

    def __reduce__(self) -> tuple[Callable[..., ShardedArray], tuple[Any, ...]]:
        factory, arguments = super().__reduce__()
        return factory, (*arguments, self.selection)

    def __dask_tokenize__(self) -> tuple[object, ...]:
        return (*super().__dask_tokenize__(), self.selection.canonical())

    def _read_layer(
        self, layer: int | None, key: tuple[Index, ...], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        # The base class turns a slice into token indices by the full length of the axis; here it indexes the
        # selection.
        rows = self._selected[key[0]]
        return super()._read_layer(layer, (int(rows) if rows.ndim == 0 else rows, *key[1:]), out)


class RunArray(ShardedArray):
    """Lazy array of a reduction over a whole run (mean, sum, max), [layer, ...]; it is stored per segment and
    combined on reading."""

    def __init__(self, entry: Entry, variable: str, layers: tuple[int, ...] | None) -> None:
        super().__init__(entry, variable, layers)
        self.spec = spec = entry.spec(variable)
        tail = spec.tail[:-1] if spec.dims[-1] == PART else spec.tail
        self.shape = (*self.shape[: 0 if layers is None else 1], *tail)

    def _read(self, key: tuple[Index, ...]) -> npt.NDArray[Any]:
        if self.layers is None:
            return _orthogonal(self._combined(None), key)
        layers = np.array(self.layers)[key[0]]
        if layers.ndim == 0:
            return _orthogonal(self._combined(int(layers)), key[1:])
        values = [_orthogonal(self._combined(int(layer)), key[1:]) for layer in layers]
        return np.stack(values) if values else np.empty((0, *self.shape[1:]), self.dtype)

    def _combined(self, layer: int | None) -> npt.NDArray[Any]:
        """Reduction of one layer, combined over all segments."""
        rows = [self._shard(layer, n)[:] for n in range(len(self.entry.segments))]
        return combined(np.concatenate(rows), self.spec.combine or "", self.spec.over or 0, self.spec.dims)


class TextColumn(BackendArray):
    """Lazy array of the prompts' texts, [prompt_id]."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.dtype = TEXT
        self.shape = (len(texts),)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        indices = np.arange(len(self.texts))[key[0]]
        if indices.ndim == 0:
            return np.array(self.texts[int(indices)], self.dtype)
        return np.array([self.texts[int(i)] for i in indices], self.dtype)


class TokenColumn(BackendArray):
    """Lazy coordinate `prompt` (number of each token's prompt) or `position`, [token], computed on access.

    Arguments:
        tokens: Prompts of the run.
        column: "prompt" or "position".
        selected: Indices of the tokens that are opened; None for all tokens.
    """

    dtype = np.dtype(np.int32)

    def __init__(
        self, tokens: PackedTokens, column: str, selected: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.tokens, self.column, self.selected = tokens, column, selected
        self.shape = (tokens.n_tokens if selected is None else len(selected),)

    def __dask_tokenize__(self) -> tuple[object, ...]:
        return ("mizarr-column", self.column, self.tokens.digest, self.selected)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        compute: Callable[[Any], Any] = (
            self.tokens.prompt_of if self.column == "prompt" else self.tokens.position_of
        )
        return compute(key[0] if self.selected is None else self.selected[key[0]])


def _opened_layers(
    entry: Entry,
    variables: Sequence[str] | None,
    layers: Sequence[int] | Mapping[str, Sequence[int]] | None,
    views: Mapping[str, View],
) -> dict[str, tuple[int, ...] | None]:
    """Variable -> layer numbers to open, None for a variable without a layer axis.

    Arguments:
        entry: See `open_entry`.
        variables: See `open_entry`.
        layers: See `open_entry`.
        views: See `open_entry`.
    """
    published: dict[str, list[int | None]] = {}
    for variable, layer in entry.published():
        published.setdefault(variable, []).append(layer)
    # A view is published where its base variable is.
    published |= {name: published[base] for name, (base, _) in views.items() if base in published}
    names = sorted(published) if variables is None else list(dict.fromkeys(variables))
    requested = layers if isinstance(layers, Mapping) else dict.fromkeys(names, layers)
    return {name: _layers(entry, name, requested.get(name), published) for name in names}


def _layers(
    entry: Entry, name: str, requested: Sequence[int] | None, published: dict[str, list[int | None]]
) -> tuple[int, ...] | None:
    """Layer numbers of a variable to open; None for a variable without a layer axis.

    Arguments:
        entry: The stored run.
        name: Name of the variable.
        requested: Requested layers; None for all.
        published: Published layers of each variable.
    """
    if name not in published:
        near = nearest(name, published)
        raise EntryNotFound(
            f"run {entry.digest[:12]} has no complete variable {name!r}; it has "
            f"{', '.join(published) or 'none yet'}{f', the most similar is {near!r}' if near else ''}; name "
            "one of these, or capture it first"
        )
    available = [layer for layer in published[name] if layer is not None]
    if not available:
        return None
    if absent := [layer for layer in requested or () if layer not in available]:
        raise EntryNotFound(
            f"run {entry.digest[:12]} has variable {name!r} at layers {ranges(available)}, not at layers "
            f"{ranges(absent)}; capture these first, or leave them out"
        )
    return tuple(available if requested is None else map(int, requested))


def _largest(opened: Mapping[str, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The set of layers whose axis is named `layer`: the longest, then the most frequent, then the smallest.

    Arguments:
        opened: Layers of each variable; None without a layer axis.
    """
    frequency = Counter(layers for layers in opened.values() if layers is not None)
    # sorted: among equal candidates the choice must not depend on the order of the variables.
    return max(sorted(frequency), key=lambda layers: (len(layers), frequency[layers]), default=None)


def _kind_of(dim: str) -> str | None:
    """ "rank" or "feature" for a dimension like `rank_10` or `feature_<dictionary>`; None for other
    dimensions."""
    return next((kind for kind in ("rank", "feature") if dim.startswith(f"{kind}_")), None)


def _displayed_names(dims: Iterable[str]) -> dict[str, str]:
    """Names under which rank and feature dimensions are shown: "rank" for `rank_10`, unless there are
    several."""
    kinds = {dim: _kind_of(dim) or dim for dim in dims}
    counts = Counter(kinds.values())
    return {dim: kind if counts[kind] == 1 else dim for dim, kind in kinds.items()}


TokenAxes = Mapping[str, tuple[str, Selection | None]]
"""Stored token axis -> (displayed dimension, its selection); the selection is None for all tokens."""


def _spec(entry: Entry, name: str, variable: str, selection: Selection | None) -> ArraySpec:
    """Description of an opened variable; with a selection, as if the selected tokens were stored as
    `name`."""
    spec = entry.spec(variable)
    if selection is None:
        return spec
    dims = tuple(selection.axis if dim == "token" else dim for dim in spec.dims)
    hook = f"{spec.hook}@{selection.name}"
    return replace(spec, variable=name, hook=hook, dims=dims, selection=selection)


def _array(
    entry: Entry, variable: str, layers: tuple[int, ...] | None, selection: Selection | None
) -> ShardedArray:
    """Lazy array of a stored variable, or of a selection of its tokens."""
    if selection is not None:
        return SelectedArray(entry, variable, layers, selection)
    kind = RunArray if entry.spec(variable).packed == "segment" else ShardedArray
    return kind(entry, variable, layers)


def _token_axes(specs: Iterable[ArraySpec], tokens: PackedTokens) -> TokenAxes:
    """Choose the names under which the token axes of variables are shown; that with most tokens is
    `token`."""
    selections = {spec.packed: spec.selection for spec in specs if spec.selection is not None}
    if len(selections) == 0 or any(spec.packed == "token" for spec in specs):
        return {
            "token": ("token", None),
            **{axis: (axis, selection) for axis, selection in selections.items()},
        }
    sizes = {axis: int(selection.counts(tokens).sum()) for axis, selection in selections.items()}
    largest = max(sorted(sizes), key=lambda axis: sizes[axis])
    return {axis: ("token" if axis == largest else axis, selection) for axis, selection in selections.items()}


def _token_coordinates(tokens: PackedTokens, axes: TokenAxes) -> dict[str, xr.Variable]:
    """Coordinates of a run per token and per prompt: ids, prompt, position, row sizes, offsets, texts."""
    # RangeIndex takes no memory, and selects by label as an integer index does.
    columns: dict[str, tuple[str, Any]] = {"prompt_id": ("prompt_id", pd.RangeIndex(tokens.n_prompts))}
    for dim, selection in axes.values():
        selected = None if selection is None else selection.indices(tokens)
        suffix = dim.removeprefix("token")
        ids = tokens.ids if selected is None else tokens.ids[selected]
        columns[f"token_id{suffix}"] = (dim, ids)
        for name in ("prompt", "position"):
            column = TokenColumn(tokens, name, selected)
            columns[f"{name}{suffix}"] = (dim, indexing.LazilyIndexedArray(column))
        if dim != "token":
            continue
        sizes = tokens.row_size if selection is None else selection.counts(tokens)
        columns["row_start"] = ("prompt_id", exclusive_sum(sizes))
        columns["row_size"] = ("prompt_id", sizes)
        for name in ("char_start", "char_end"):
            if (column_of := getattr(tokens, name)) is not None:
                columns[name] = ("token", column_of if selected is None else column_of[selected])
    if tokens.texts is not None:
        columns["text"] = ("prompt_id", indexing.LazilyIndexedArray(TextColumn(tokens.texts)))
    return {
        name: xr.Variable((dim,), values, ABOUT.get(_label(name), {}))
        for name, (dim, values) in columns.items()
    }


def _label(name: str) -> str:
    """Name of a coordinate without the suffix of a selection, such as `token_id` for `token_id_last`."""
    labels = ("token_id", "prompt_id", "prompt", "position")
    return next((label for label in labels if name.startswith(label)), name)


def _starts(entry: Entry, selection: Selection | None) -> npt.NDArray[np.int64]:
    """First row of each segment on the axis of all or of selected tokens, and the end, int64 [segment +
    1]."""
    bounds = entry.bounds("token")
    return bounds if selection is None else selection.starts_on(entry.tokens, bounds)


def _chunked(dataset: xr.Dataset, entry: Entry, data: dict[str, xr.Variable], axes: TokenAxes) -> xr.Dataset:
    """Convert variables and token labels to dask arrays with one chunk per layer and segment."""
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
    # Without coordinates, as chunking them would turn index coordinates into dask arrays.
    arrays = dataset[list(data)].reset_coords(drop=True)
    big = arrays.chunk({dim: size for dim, size in sizes.items() if dim in arrays.dims})
    return dataset.assign(big.data_vars).assign_coords(columns.chunk({"token": sizes["token"]}).coords)


def _array_at(
    source: str, variable: str, layers: tuple[int, ...] | None, selection: Selection | None = None
) -> ShardedArray:
    """Lazy array of the run in a folder; how a pickled lazy array is restored."""
    return _array(entry_at(source), variable, layers, selection)


class _Vocabulary:
    """Function object that returns a tokenizer's token strings, read from the store on the first call."""

    def __init__(self, folder: Folder, tokenizer: str) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._strings: list[str] | None = None

    def __call__(self) -> list[str] | None:
        if self._strings is None:
            self._strings = read_vocabulary(self._folder, self._tokenizer)
        return self._strings


def _length(key: Index, size: int) -> int | None:
    """Number of elements that `key` selects from an axis; None for an integer, which drops the axis."""
    if isinstance(key, slice):
        return len(range(*key.indices(size)))
    return None if isinstance(key, int | np.integer) else len(key)


def _orthogonal(block: npt.NDArray[Any], key: tuple[Index, ...]) -> npt.NDArray[Any]:
    """Index an array axis by axis, unlike numpy, which combines several index arrays element by element."""
    # From the last axis backwards: an integer drops its axis and would shift the later ones.
    for axis in range(len(key) - 1, -1, -1):
        axis_key = key[axis]
        if not (isinstance(axis_key, slice) and axis_key == slice(None)):
            block = block[(slice(None),) * axis + (axis_key,)]
    return block
