"""Directions of the residual stream along which a logit, or the difference of two, is read.

Border: a readout dataset and token ids; numpy, no model, no torch.

With the divisor of the final norm held fixed, a logit is a dot product: of a part of the stream with the row
of the unembedding, times the weight of the norm, over the divisor. For LayerNorm the direction is centred
instead of the part, which gives the same product. What no part of the stream decides, the biases of norm and
unembedding, is the constant of the direction.

A final soft cap comes after all this and is not linear: shares are of the logit before it.

Token ids: NONE = -1 where there is none, MOST_LIKELY = -2 where the model's own choice is meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError
from .readout import require_linear

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["MOST_LIKELY", "NONE", "Directions"]


NONE, MOST_LIKELY = -1, -2
_TILE = 256


@dataclass(frozen=True, eq=False)
class Directions:
    """One direction per token that has a target.

    rows: float32 [row, hidden], one per distinct token id.  constants: float64 [row].
    target, against: row of each token, NONE for none.
    """

    rows: Array
    constants: Array
    target: Array
    against: Array

    @classmethod
    def of(cls, readout: xr.Dataset, targets: Array, against: Array) -> Directions:
        """Directions of token ids [token] from a readout; only the rows that are needed are read.

        Raises ShapeError for ids outside the vocabulary, and for a second token without a first.
        """
        targets, against = np.asarray(targets, np.int64), np.asarray(against, np.int64)
        if targets.shape != against.shape or targets.ndim != 1:
            raise ShapeError(
                f"expected one id in `against` per target, found {against.shape} for {targets.shape}"
            )
        against = np.where(targets == NONE, NONE, against)
        vocab = readout.sizes["vocab"]
        both = np.stack([targets, against])
        if both.size and (both.min() < NONE or both.max() >= vocab):
            raise ShapeError(
                f"expected token ids from {NONE} to {vocab - 1}, found {both.min()} to {both.max()}"
            )
        # A table over the vocabulary; sorting the ids of a corpus would take longer than the products.
        is_needed = np.zeros(vocab + 1, bool)
        is_needed[both] = True
        ids = np.flatnonzero(is_needed[:vocab])
        place = np.full(vocab + 1, NONE)  # its last entry is that of NONE
        place[ids] = np.arange(len(ids))
        return cls(*_weighted(readout, ids), *place[both])

    def chosen(self, ranges: Iterable[slice]) -> list[tuple[slice, Array]]:
        """Ranges of tokens, and which tokens of each have a target; ranges without one are left out."""
        found = [(here, np.flatnonzero(self.target[here] != NONE)) for here in ranges]
        return [(here, rows) for here, rows in found if len(rows)]

    def along(self, here: slice, chosen: Array, scale: Array) -> Array:
        """Directions of the chosen tokens of a range over their divisor of the final norm, [row, hidden]."""
        target, against = self.target[here][chosen], self.against[here][chosen]
        divisor = np.asarray(scale[here][chosen], np.float32)[:, None]
        is_given = against != NONE
        found = np.empty((len(target), self.rows.shape[1]), np.float32)
        for start in range(0, len(target), _TILE):
            tile = slice(start, start + _TILE)  # stays in the cache from the first step to the last
            out = np.take(self.rows, target[tile], axis=0, out=found[tile], mode="clip")
            if is_given[tile].all():
                out -= self.rows[against[tile]]
            elif is_given[tile].any():
                out[is_given[tile]] -= self.rows[against[tile][is_given[tile]]]
            out /= divisor[tile]
        return found

    def constant(self) -> Array:
        """What biases of norm and unembedding add, float64 [token]; NaN without a target."""
        padded = np.append(self.constants, 0.0)  # row -1: nothing
        return np.where(self.target == NONE, np.nan, padded[self.target] - padded[self.against])


def _weighted(readout: xr.Dataset, ids: Array) -> tuple[Array, Array]:
    """Rows of the unembedding times norm weight and scale, centred for LayerNorm; and their constants."""
    require_linear(readout)
    norm = readout.attrs["norm"]
    if norm not in ("rms", "layer"):
        raise ShapeError(f"expected a readout with norm 'rms' or 'layer', found {norm!r}")
    factor = float(readout.attrs.get("logit_scale", 1.0))
    plain = readout["unembed"].transpose("vocab", "hidden").isel(vocab=ids).values.astype(np.float32)
    constants = np.zeros(len(ids))
    if "norm_bias" in readout:
        constants += plain.astype(np.float64) @ readout["norm_bias"].values.astype(np.float64)
    if "unembed_bias" in readout:
        constants += readout["unembed_bias"].isel(vocab=ids).values
    rows = plain * (readout["norm_weight"].values.astype(np.float32) * np.float32(factor))
    if norm == "layer":
        rows -= rows.mean(axis=1, keepdims=True)
    return rows, constants * factor
