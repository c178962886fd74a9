"""`ds.mi`: prompts, tokens and attention patterns out of a packed dataset.

Border: labels only; works on any dataset with the packed layout - opened by us, by plain `xr.open_zarr`, or
returned by a stage that kept the token axis. Only `numpy` needs to know where the shards lie.

Axes in: token (packed), pair (packed lower triangles), prompt_id. Axes out: position; query_position,
key_position; prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from .errors import EntryNotFound, PromptError, ShapeError, nearest

Rows = Sequence[int] | npt.NDArray[np.integer[Any]]

_vocabularies: dict[str, Callable[[], Sequence[str] | None]] = {}


def register_vocabulary(tokenizer: str, load: Callable[[], Sequence[str] | None]) -> None:
    """Say how to get the token strings of a tokenizer (by digest); called when they are first shown."""
    _vocabularies[tokenizer] = load


@xr.register_dataset_accessor("mi")  # type: ignore[no-untyped-call]
class PackedAccessor:
    """Ways into a dataset whose prompts lie end to end on the `token` axis."""

    def __init__(self, dataset: xr.Dataset) -> None:
        self._ds = dataset

    def prompt(self, i: int) -> xr.Dataset:
        """Prompt `i` alone: [layer, position, …], lazy, with `token_string` where the vocabulary is known.

        Patterns stay packed as [layer, pair, head]; see `attn`.
        """
        start, size = self._row(i)
        picked: dict[str, Any] = {"token": slice(start, start + size), "prompt_id": i}
        if "pair" in self._ds.dims:
            picked["pair"] = self._pairs(i, size)
        part = self._ds.drop_vars(["position", "prompt"], errors="ignore").isel(picked)
        part = part.drop_vars(["row_start", "row_size", "pair_start"], errors="ignore").rename(
            token="position"
        )
        part = part.assign_coords(position=np.arange(size, dtype=np.int32))
        strings = self._strings(part["token_id"].values) if "token_id" in part else None
        return part if strings is None else part.assign_coords(token_string=("position", strings))

    def prompts(self, rows: Rows) -> xr.Dataset:
        """The given prompts, in the given order, packed anew; lazy. `prompt_id` keeps their numbers."""
        rows = np.asarray(rows, np.int64)
        starts, sizes = self._starts[rows], self._sizes[rows]
        picked = {"prompt_id": rows, "token": _ranges(starts, sizes)}
        fresh = {"row_start": _exclusive_sum(sizes)}
        if "pair" in self._ds.dims:
            pairs = sizes * (sizes + 1) // 2
            picked["pair"] = _ranges(self._ds["pair_start"].values[rows], pairs)
            fresh["pair_start"] = _exclusive_sum(pairs)
        part = self._ds.drop_vars("prompt", errors="ignore").isel(picked)
        changed = {name: part[name].copy(data=values) for name, values in fresh.items()}
        if "prompt" in self._ds.coords:
            numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            changed["prompt"] = xr.DataArray(numbers, dims="token", attrs=self._ds["prompt"].attrs)
        return part.assign_coords(changed)

    def tokens(self, indices: Rows) -> xr.Dataset:
        """The given packed tokens of every variable on the token axis, in memory: [layer, token, …].

        Goes to the mapped shards even where the dataset is chunked: a scattered row costs a page, not a
        chunk.
        """
        return self._on_token(self._unchunked).isel(token=np.asarray(indices)).load()

    def pad(self, max_len: int | None = None, *, cut: bool = False, fill: float = np.nan) -> xr.Dataset:
        """All prompts as a block in memory, [prompt, position] in place of token, and `mask`, True = a token.

        max_len: length of the position axis, by default that of the longest prompt; ShapeError when a prompt
        is longer, unless `cut` keeps its first max_len tokens.  fill: value of the padding; the default, NaN,
        is skipped by reductions and cannot pass for a zero.
        """
        longest = int(self._sizes.max())
        max_len = longest if max_len is None else max_len
        if longest > max_len and not cut:
            raise ShapeError(
                f"expected prompts of at most max_len={max_len} tokens, the longest has {longest}; "
                f"pass max_len={longest}, or cut=True to drop what is beyond"
            )
        position = np.arange(max_len, dtype=np.int32)
        mask = xr.DataArray(position < self._sizes[:, None], dims=("prompt", "position"))
        at = (self._starts[:, None] + position).clip(max=self._starts[:, None] + self._sizes[:, None] - 1)
        block = self._on_token(self._unchunked).drop_vars(["prompt", "position"], errors="ignore")
        block = block.isel(token=xr.DataArray(at, dims=("prompt", "position"))).load()
        return block.where(mask, fill).assign_coords(position=position, mask=mask)

    def attn(self, i: int, variable: str = "pattern") -> xr.DataArray:
        """Attention pattern of prompt `i`: [layer, head, query_position, key_position], in memory.

        Row = attending position, column = attended position; 0 above the diagonal.
        """
        packed = self._variable(variable)
        _, size = self._row(i)
        packed = packed.isel(pair=self._pairs(i, size)).transpose(..., "pair")
        square = np.zeros((*packed.shape[:-1], size, size), packed.dtype)
        rows, columns = np.tril_indices(size)
        square[..., rows, columns] = packed.values
        dims = (*packed.dims[:-1], "query_position", "key_position")
        coords = {name: coord for name, coord in packed.coords.items() if set(coord.dims) <= set(dims[:-2])}
        return xr.DataArray(square, coords, dims, name=variable, attrs=packed.attrs)

    def numpy(self, variable: str, layer: int | None, segment: int) -> npt.NDArray[Any]:
        """One shard as it lies on disk: a read-only memory map [tokens of the segment, …], nothing is copied.

        bfloat16 comes as ml_dtypes.bfloat16. For torch: `torch.from_numpy(a)`, or for bfloat16
        `torch.from_numpy(a.view("u2")).view(torch.bfloat16)`; both share the mapped pages (torch warns that
        they must not be written).
        """
        shard: npt.NDArray[Any] = self._entry.shard(variable, layer, segment)
        return shard

    @cached_property
    def _sizes(self) -> npt.NDArray[np.int64]:
        if "row_size" not in self._ds.variables or "token" not in self._ds.dims:
            raise ShapeError(
                "expected a packed dataset (dimension 'token', variable 'row_size'), found dimensions "
                f"{', '.join(map(str, self._ds.dims)) or 'none'}; .mi is for runs before they are reduced"
            )
        sizes = self._ds["row_size"].values.astype(np.int64)
        held = self._ds.sizes["token"]
        if sizes.ndim != 1 or int(sizes.sum()) != held:
            raise ShapeError(
                f"row sizes sum to {int(sizes.sum())}, but the token axis has {held}: it was cut. "
                "Select whole prompts with ds.mi.prompts([...]), or use .mi before .isel(token=...)"
            )
        return sizes

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return _exclusive_sum(self._sizes)

    def _row(self, i: int) -> tuple[int, int]:
        if not -len(self._sizes) <= i < len(self._sizes):
            raise PromptError(f"expected a prompt index below {len(self._sizes)}, found {i}")
        return int(self._starts[i]), int(self._sizes[i])

    def _pairs(self, i: int, size: int) -> slice:
        first = int(self._ds["pair_start"].values[i])
        return slice(first, first + size * (size + 1) // 2)

    def _variable(self, name: str) -> xr.DataArray:
        if name not in self._ds.data_vars:
            held = [str(n) for n in self._ds.data_vars]
            raise EntryNotFound(
                f"no variable {name!r}; the dataset holds {', '.join(held) or 'none'}, nearest is "
                f"{nearest(name, held)!r}. Capture it first, or name another"
            )
        return self._ds[name]

    def _on_token(self, dataset: xr.Dataset) -> xr.Dataset:
        names = [name for name, variable in dataset.data_vars.items() if "token" in variable.dims]
        return dataset[names].drop_vars(["row_start", "row_size", "pair_start"], errors="ignore")

    def _strings(self, ids: npt.NDArray[np.integer[Any]]) -> list[str] | None:
        load = _vocabularies.get(self._ds.attrs.get("tokenizer", ""))
        vocabulary = load() if load is not None else None
        if vocabulary is None:
            return None
        return [vocabulary[t] if t < len(vocabulary) else f"<{t}>" for t in ids.tolist()]

    @property
    def _entry(self) -> Any:
        source = self._ds.encoding.get("source")
        if source is None:
            raise EntryNotFound(
                "this dataset does not say which stored run it is; open it with store.entry(digest).open()"
            )
        from .datasets import entry_at

        return entry_at(Path(source))

    @property
    def _unchunked(self) -> xr.Dataset:
        """The same, straight over the shards where variables still are the stored ones seen through dask."""
        ds = self._ds
        if not ds.chunks or "source" not in ds.encoding:
            return ds
        held = self._entry.specs
        direct = {name: self._direct(ds[name]) for name in ds.data_vars if name in held and ds[name].chunks}
        return ds.assign({name: array for name, array in direct.items() if array is not None})

    def _direct(self, array: xr.DataArray) -> xr.Variable | None:
        """The variable as opened without dask; None when the dask array is not the stored one itself.

        Told by its name, which digests what it is made of: a changed array keeps the source of its dataset.
        """
        layers = array["layer"].values.tolist() if "layer" in array.dims else None
        try:
            seen, plain = (
                self._entry.open([str(array.name)], layers, chunks=chunks)[array.name]
                for chunks in ("segment", None)
            )
        except EntryNotFound:
            return None
        if seen.dims != array.dims or seen.data.name != array.data.name:
            return None
        variable: xr.Variable = plain.variable
        return variable


def _ranges(starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start[0] … start[0]+size[0]-1, start[1] …, as one array."""
    return np.repeat(starts - _exclusive_sum(sizes), sizes) + np.arange(int(sizes.sum()))


def _exclusive_sum(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    sums = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], out=sums[1:])
    return sums
