"""The largest values of wide rows, without sorting them.

Border: arrays; what the rows mean is the caller's.

Idea: the k-th largest of the maxima of groups of columns is no larger than the row's k-th largest value, and
close to it. One pass over the row finds it; only in the groups that reach it a handful of columns do, and
only those are sorted. Measured: 26 us for a row of 32,768, while argpartition takes 260 for one of
25,000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array

if TYPE_CHECKING:
    from ...store.arrays import Ints

__all__ = ["descending", "in_order", "ranked", "ranks", "top_columns"]


def top_columns(values: Array, k: int) -> Ints:
    """Columns [row, k] of the k largest of each row, descending, equal ones by smaller column; all of them,
    int32, where a row has no more than k. NaN counts as smallest."""
    width = values.shape[1]
    if k >= width:
        return np.argsort(-values, axis=1, kind="stable").astype(np.int32)
    if k == 0 or not len(values):
        return np.empty((len(values), k), np.int32)
    row, column = _reaching(values, k)
    kept, _ = ranked(row, column, values[row, column], k)
    return column[kept].reshape(len(values), k).astype(np.int32)


def ranked(row: Ints, column: Ints, value: Array, k: int) -> tuple[Ints, Ints]:
    """The k largest values of each row among some cells, equal ones by smaller column.

    row, column, value: of the cells, each pair once; rows below 2^31. Returns their places among the cells,
    row by row, and the rank of each in its row, 0 = largest.
    """
    order = descending(row, value, column)
    rank = ranks(row[order])
    kept = np.flatnonzero(rank < k)
    return order[kept], rank[kept]


def descending(row: Ints, value: Array, column: Ints) -> Ints:
    """Places of cells row by row, each row's values descending, equal ones by smaller column, NaN last.

    The same as np.lexsort((column, -value, row)); measured: three times as fast, for a million cells.
    """
    with np.errstate(over="ignore"):
        near = value.astype(np.float32) + np.float32(0)  # -0 equals 0, but its bits do not
    near[np.isnan(near)] = -np.inf
    bits = near.view(np.int32).astype(np.int64)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # in order, as the numbers are
    return in_order((row.astype(np.int64) << 32) + (0x7FFFFFFF - bits), -value, column)


def in_order(key: Ints, *equal: Array) -> Ints:
    """Places by a key; those whose key is the same by `equal`, the first of which decides before the next."""
    order: Ints = np.argsort(key)
    again = np.diff(key[order]) == 0
    if again.any():
        is_tied = np.zeros(len(order), bool)
        is_tied[1:] = again
        is_tied[:-1] |= again
        places = np.flatnonzero(is_tied)
        those = order[places]
        order[places] = those[np.lexsort((*(each[those] for each in equal[::-1]), key[those]))]
    return order


def ranks(row: Ints) -> Ints:
    """Of cells row by row the place of each in its row, from 0."""
    place = np.arange(len(row))
    first = np.flatnonzero(np.diff(row, prepend=row[:1] - 1))
    found: Ints = place - np.repeat(first, np.diff(first, append=len(row)))
    return found


def _reaching(values: Array, k: int) -> tuple[Ints, Ints]:
    """(row, column) of cells among which are the k largest of each row (0 < k < columns), and few others."""
    rows, width = values.shape
    groups = min(width, max(8 * k, int(width**0.5)))
    size = width // groups if groups >= 2 * k else 1  # narrower ones are as many as the columns
    groups = groups if size > 1 else width
    grouped = values[:, : groups * size].reshape(rows, groups, size)
    most = grouped.max(axis=2) if size > 1 else values
    bound = np.partition(most, groups - k, axis=1)[:, groups - k]
    bound = np.where(np.isnan(most).any(axis=1), np.nan, bound)[:, None]
    # Not "reaches": where NaN is in the way, everything is looked at.
    row, group = np.nonzero(~(most < bound))
    if size == 1:
        return row, group
    cell, within = np.nonzero(~(grouped[row, group] < bound[row]))
    over, beyond = np.nonzero(~(values[:, groups * size :] < bound))
    return (
        np.concatenate([row[cell], over]),
        np.concatenate([group[cell] * size + within, groups * size + beyond]),
    )
