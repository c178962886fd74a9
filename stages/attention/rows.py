"""Read packed attention patterns in blocks of query rows, with bounded memory.

The lower triangles of all prompts are end to end on the pair axis, row by row. So the rows of any token range
are one slice, across prompt boundaries, and memory use depends neither on number nor on length of prompts.

Axes: pair (query and key of one prompt), head, prompt, token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array
from ...store.errors import PromptError, ShapeError
from ..corpus.token_blocks import read_here

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["HEAD", "HEAD_AXES", "PatternRows", "RowBlock", "by_layer", "head_coords", "layer_numbers"]

HEAD_AXES = ("head", "ssm_head", "linear_head", "mlstm_head")
"""Head axes of all hook points with attention weights or effective attention. A hybrid model has several
kinds of heads in different numbers, so their axes have different names; analyses treat them alike."""
HEAD = "|".join(HEAD_AXES)
"""Head axis in the declaration of a stage's input: any of HEAD_AXES."""

BLOCK = 1 << 22
"""Number of weights of one layer in memory at a time: 16 MiB of float32."""


@dataclass(frozen=True)
class RowBlock:
    """Consecutive query rows of packed patterns, one entry per (query, key) pair."""

    token: Array
    """Token index of the query, [pair]."""
    prompt: Array
    """Prompt index, [pair]."""
    query: Array
    """Position of the query in its prompt, [pair]."""
    key: Array
    """Position of the key, [pair]."""
    weights: Array
    """float32 [pair, head]."""


@dataclass(frozen=True)
class PatternRows:
    """Layout of the query rows of packed patterns."""

    sizes: Array
    """Tokens per prompt, int64 [prompt]."""
    ends: Array
    """End of each query's row on the pair axis, int64 [token]."""

    @classmethod
    def of(cls, row_size: xr.DataArray, pattern: xr.DataArray, first_query: int) -> PatternRows:
        """Compute the layout from tokens per prompt.

        Arguments:
            row_size: Tokens per prompt, int [prompt].
            pattern: Packed pattern, for its number of pairs.
            first_query: First query position that counts.

        Raises:
            PromptError: A prompt is too short to have a query from `first_query` on.
            ShapeError: The pattern has another number of pairs.
        """
        sizes = np.asarray(row_size.values, np.int64)
        needed = max(2, first_query + 1)
        if (short := np.flatnonzero(sizes < needed)).size:
            raise PromptError(
                f"expected prompts of at least {needed} tokens, found {sizes[short[0]]} in prompt "
                f"{short[0]}; leave it out: there is nothing to look back at"
            )
        # The query at position p has p + 1 keys in a lower triangle.
        ends = np.cumsum(_positions(sizes) + 1)
        if pattern.sizes["pair"] != ends[-1]:
            raise ShapeError(
                f"expected {ends[-1]} pairs, the lower triangles of {len(sizes)} prompts, found "
                f"{pattern.sizes['pair']}; are pattern and row_size of the same selection?"
            )
        return cls(sizes, ends)

    @property
    def tokens(self) -> int:
        """Number of tokens, which is the number of query rows."""
        return len(self.ends)

    def blocks(self, pattern: xr.DataArray) -> Iterator[RowBlock]:
        """Yield all rows of one layer's pattern [pair, head], in blocks."""
        starts = np.cumsum(self.sizes) - self.sizes
        for start, stop in self._ranges(pattern):
            rows = np.arange(start, stop)
            prompt = np.searchsorted(starts, rows, side="right") - 1
            keys = rows - starts[prompt] + 1
            begin = int(self.ends[start] - keys[0])
            pair_slice = slice(begin, int(self.ends[stop - 1]))
            # One entry per pair: each query repeated for its keys, and keys counted from 0 in each row.
            token = np.repeat(rows, keys)
            key = np.arange(len(token)) - np.repeat(np.cumsum(keys) - keys, keys)
            query = np.repeat(keys - 1, keys)
            values = pattern.variable.isel(pair=pair_slice).transpose("pair", "head")
            # read_here reads in this thread: one or two chunks gain nothing from a thread pool.
            weights = read_here(values).astype(np.float32, copy=False)
            yield RowBlock(token, np.repeat(prompt, keys), query, key, weights)

    def _ranges(self, pattern: xr.DataArray) -> Iterator[tuple[int, int]]:
        """Yield (first, stop) of the queries per block, of about `BLOCK` weights."""
        # Blocks end at dask chunks where these are smaller: dask reads a whole chunk for any of its rows.
        max_pairs = max(1, BLOCK // pattern.sizes["head"])
        chunks = np.cumsum(pattern.chunksizes.get("pair", (pattern.sizes["pair"],)))
        # First query row after each chunk boundary.
        edges = np.searchsorted(self.ends, chunks, side="left") + 1
        start, read_pairs = 0, 0
        while start < self.tokens:
            stop = int(np.searchsorted(self.ends, read_pairs + max_pairs, side="right"))
            chunk_ends = edges[(edges > start) & (edges <= stop)]
            # At least one query: a row longer than BLOCK weights is a block of its own.
            stop = int(chunk_ends[-1]) if len(chunk_ends) else max(stop, start + 1)
            yield start, stop
            start, read_pairs = stop, int(self.ends[stop - 1])


def by_layer(pattern: xr.DataArray) -> xr.DataArray:
    """Rename the axis `layer_pattern` to `layer`."""
    # A dataset whose variables have different layers names each layer axis after its variable.
    layer_axis = f"layer_{pattern.name}"
    return pattern.rename({layer_axis: "layer"}) if layer_axis in pattern.dims else pattern


def head_coords(pattern: xr.DataArray) -> dict[str, Array]:
    """Coordinates of [layer, head] results for a pattern [layer, pair, head]."""
    return {"layer": layer_numbers(pattern), "head": np.arange(pattern.sizes["head"])}


def layer_numbers(pattern: xr.DataArray) -> Array:
    """Layer number of each row of the layer axis; 0, 1, 2, … for an array without labels."""
    return pattern["layer"].values if "layer" in pattern.coords else np.arange(pattern.sizes["layer"])


def _positions(sizes: Array) -> Array:
    """Position of every token in its prompt, int64 [token]."""
    starts: Array = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.arange(len(starts)) - starts
