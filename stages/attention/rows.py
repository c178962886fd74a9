"""Packed attention patterns, read a block of query rows at a time.

Border: labelled weights as a store holds them, lazy or not, and the length of each prompt; knows nothing of
what is computed on them.

The lower triangles of all prompts lie end to end on the pair axis, row by row, so that the rows of any range
of tokens are one slice of it, whatever prompts they belong to: neither the number of prompts nor the length
of one decides how much is in memory.

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

__all__ = ["HEAD", "HEAD_AXES", "PatternRows", "RowBlock", "by_layer", "head_coords"]

HEAD_AXES = ("head", "ssm_head", "linear_head", "mlstm_head")
"""Axes of hook points that say how much positions read of each other: attention weights, or what recurrences
amount to. A hybrid has several, so they have names of their own; questions about weights are the same."""
HEAD = "|".join(HEAD_AXES)
"""The axis of heads, as an input of a stage."""

BLOCK = 1 << 22
"""Weights of one layer in memory at a time."""


@dataclass(frozen=True)
class RowBlock:
    """Some consecutive query rows of packed patterns: one entry per pair of query and key.

    token: packed index of the query; prompt: its prompt; query, key: positions in the prompt; weights
    float32 [pair, head].
    """

    token: Array
    prompt: Array
    query: Array
    key: Array
    weights: Array


@dataclass(frozen=True)
class PatternRows:
    """Where the query rows of packed patterns lie.

    sizes: int64 [prompt].  ends: int64 [token], end of each query's row on the pair axis.
    """

    sizes: Array
    ends: Array

    @classmethod
    def of(cls, row_size: xr.DataArray, pattern: xr.DataArray, first_query: int) -> PatternRows:
        """From the tokens of each prompt; checked against the patterns and the queries asked for."""
        sizes = np.asarray(row_size.values, np.int64)
        needed = max(2, first_query + 1)
        if (short := np.flatnonzero(sizes < needed)).size:
            raise PromptError(
                f"expected prompts of at least {needed} tokens, found {sizes[short[0]]} in prompt "
                f"{short[0]}; leave it out: there is nothing to look back at"
            )
        ends = np.cumsum(_positions(sizes) + 1)
        if pattern.sizes["pair"] != ends[-1]:
            raise ShapeError(
                f"expected {ends[-1]} pairs, the lower triangles of {len(sizes)} prompts, found "
                f"{pattern.sizes['pair']}; are pattern and row_size of the same selection?"
            )
        return cls(sizes, ends)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together: a query row each."""
        return len(self.ends)

    def blocks(self, pattern: xr.DataArray) -> Iterator[RowBlock]:
        """All rows of one layer's pattern [pair, head], some at a time, in order."""
        starts = np.cumsum(self.sizes) - self.sizes
        for first, stop in self._ranges(pattern):
            rows = np.arange(first, stop)
            prompt = np.searchsorted(starts, rows, side="right") - 1
            keys = rows - starts[prompt] + 1
            begin = int(self.ends[first] - keys[0])
            here = slice(begin, int(self.ends[stop - 1]))
            token = np.repeat(rows, keys)
            key = np.arange(len(token)) - np.repeat(np.cumsum(keys) - keys, keys)
            query = np.repeat(keys - 1, keys)
            part = pattern.variable.isel(pair=here).transpose("pair", "head")
            weights = read_here(part).astype(np.float32, copy=False)
            yield RowBlock(token, np.repeat(prompt, keys), query, key, weights)

    def _ranges(self, pattern: xr.DataArray) -> Iterator[tuple[int, int]]:
        """(first, stop) of the queries read at a time: about `BLOCK` weights, whole chunks where they are not
        larger, as dask reads all of a chunk for any row of it."""
        room = max(1, BLOCK // pattern.sizes["head"])
        chunks = np.cumsum(pattern.chunksizes.get("pair", (pattern.sizes["pair"],)))
        edges = np.searchsorted(self.ends, chunks, side="left") + 1
        first, done = 0, 0
        while first < self.tokens:
            stop = int(np.searchsorted(self.ends, done + room, side="right"))
            whole = edges[(edges > first) & (edges <= stop)]
            stop = int(whole[-1]) if len(whole) else max(stop, first + 1)
            yield first, stop
            first, done = stop, int(self.ends[stop - 1])


def by_layer(pattern: xr.DataArray) -> xr.DataArray:
    """A pattern whose layer axis is named `layer`; where other variables of its dataset hold other layers, it
    has an axis of its own, `layer_pattern`."""
    own = f"layer_{pattern.name}"
    return pattern.rename({own: "layer"}) if own in pattern.dims else pattern


def head_coords(pattern: xr.DataArray) -> dict[str, Array]:
    """Labels of [layer, head] results on a pattern [layer, pair, head]."""
    layers = pattern["layer"].values if "layer" in pattern.coords else np.arange(pattern.sizes["layer"])
    return {"layer": layers, "head": np.arange(pattern.sizes["head"])}


def _positions(sizes: Array) -> Array:
    """Position of every token in its prompt, int64 [token]."""
    starts: Array = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.arange(len(starts)) - starts
