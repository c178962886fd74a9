"""Read packed attention patterns in blocks of query rows, with bounded memory.

Causal patterns are stored packed: the lower triangles of all prompts are joined on the pair axis, query by
query. So the weights of any range of queries are one slice, across prompt boundaries, and memory use depends
neither on number nor on length of prompts.

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
    """Index of the query among the tokens of all prompts, [pair]."""
    prompt: Array
    """Index of the prompt, [pair]."""
    query: Array
    """Position of the query in its prompt, [pair]."""
    key: Array
    """Position of the key in the same prompt, [pair]."""
    weights: Array
    """Attention weights, float32 [pair, head]."""


@dataclass(frozen=True)
class PatternRows:
    """Where the weights of each query are in packed patterns."""

    sizes: Array
    """Number of tokens of each prompt, int64 [prompt]."""
    ends: Array
    """For each query, the end (exclusive) of its (query, key) pairs on the pair axis, int64 [token]."""

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
                f"an analysis of attention needs prompts of at least {needed} tokens, found "
                f"{sizes[short[0]]} in prompt {short[0]}; leave this prompt out"
            )
        # The query at position p has p + 1 keys in a lower triangle.
        ends = np.cumsum(_positions(sizes) + 1)
        if pattern.sizes["pair"] != ends[-1]:
            raise ShapeError(
                f"prompts of these {len(sizes)} lengths have {ends[-1]} (query, key) pairs, found a pattern "
                f"with {pattern.sizes['pair']}; pass pattern and row_size of the same prompts"
            )
        return cls(sizes, ends)

    @property
    def tokens(self) -> int:
        """Number of tokens, which is the number of query rows."""
        return len(self.ends)

    def blocks(self, pattern: xr.DataArray) -> Iterator[RowBlock]:
        """Yield the weights of all queries of one layer's pattern [pair, head], in blocks of queries."""
        prompt_starts = np.cumsum(self.sizes) - self.sizes
        for start, stop in self._query_ranges(pattern):
            queries = np.arange(start, stop)
            prompt = np.searchsorted(prompt_starts, queries, side="right") - 1
            # A query attends to itself and all earlier positions.
            n_keys = queries - prompt_starts[prompt] + 1
            pair_slice = slice(int(self.ends[start] - n_keys[0]), int(self.ends[stop - 1]))
            # One entry per pair: each query repeated for its keys, and keys counted from 0 for each query.
            token = np.repeat(queries, n_keys)
            key = np.arange(len(token)) - np.repeat(np.cumsum(n_keys) - n_keys, n_keys)
            query = np.repeat(n_keys - 1, n_keys)
            values = pattern.variable.isel(pair=pair_slice).transpose("pair", "head")
            # read_here reads in this thread: one or two chunks gain nothing from a thread pool.
            weights = read_here(values).astype(np.float32, copy=False)
            yield RowBlock(token, np.repeat(prompt, n_keys), query, key, weights)

    def _query_ranges(self, pattern: xr.DataArray) -> Iterator[tuple[int, int]]:
        """Yield (first, stop) of the queries of each block, which has about `BLOCK` weights."""
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
    """The pattern with its layer axis named "layer".

    In a dataset whose variables have different layers, each layer axis is named after its variable:
    "layer_pattern".
    """
    layer_axis = f"layer_{pattern.name}"
    return pattern.rename({layer_axis: "layer"}) if layer_axis in pattern.dims else pattern


def head_coords(pattern: xr.DataArray) -> dict[str, Array]:
    """Coordinates of [layer, head] results for a pattern [layer, pair, head]."""
    return {"layer": layer_numbers(pattern), "head": np.arange(pattern.sizes["head"])}


def layer_numbers(pattern: xr.DataArray) -> Array:
    """Layer number of each index of the layer axis, [layer]; 0, 1, 2, … for an array without labels."""
    return pattern["layer"].values if "layer" in pattern.coords else np.arange(pattern.sizes["layer"])


def _positions(sizes: Array) -> Array:
    """Position of every token in its prompt, int64 [token]."""
    starts: Array = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.arange(len(starts)) - starts
