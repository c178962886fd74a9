"""Directions in the residual stream whose dot product with a state is a logit, or a difference of two logits.

With the divisor of the final norm held fixed, a logit is a dot product of a part of the stream and the
token's row of the unembedding, times the norm weight, over the divisor. For LayerNorm the direction is
centred instead of the part, which gives the same product. The biases of norm and unembedding, which depend on
no part, are the constant of the direction. A final soft cap comes after all this and is not linear: shares
refer to the logit before it.

Token ids: NONE = -1 for no token, MOST_LIKELY = -2 for the model's own prediction.
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
"""Token ids that stand for no token, and for the token that the model predicts."""
_TILE = 256
"""Number of tokens whose directions are gathered at a time."""


@dataclass(frozen=True, eq=False)
class Directions:
    """Logit directions for the target of each token of some prompts, and the constants that biases add."""

    rows: Array
    """Direction of each distinct token id that is a target or contrast, float32 [row, hidden]."""
    constants: Array
    """What the biases of final norm and unembedding add to the logit of each row, float64 [row]."""
    target: Array
    """Index into `rows` of each token's target, [token]; NONE for no target."""
    against: Array
    """Index into `rows` of the token whose logit is subtracted, [token]; NONE for no contrast."""

    @classmethod
    def of(cls, readout: xr.Dataset, targets: Array, against: Array) -> Directions:
        """Compute the directions of token ids; reads only their rows of the unembedding.

        Arguments:
            readout: Final norm and unembedding of the model, see stages/logits/readout.py.
            targets: Token ids [token]; NONE for no target.
            against: Token ids [token] whose logit is subtracted; NONE for no contrast.

        Raises:
            ShapeError: An id is outside the vocabulary, or shapes differ.
        """
        targets, against = np.asarray(targets, np.int64), np.asarray(against, np.int64)
        if targets.shape != against.shape or targets.ndim != 1:
            raise ShapeError(
                "expected targets and against to hold one token id per token each, found arrays of shape "
                f"{targets.shape} and {against.shape}"
            )
        against = np.where(targets == NONE, NONE, against)
        vocab = readout.sizes["vocab"]
        both = np.stack([targets, against])
        if both.size and (both.min() < NONE or both.max() >= vocab):
            raise ShapeError(
                f"expected token ids from {NONE} (none) to {vocab - 1}, the last one of the vocabulary, "
                f"found {both.min()} to {both.max()}"
            )
        # A table over the vocabulary: sorting the ids of a corpus would take longer than the products below.
        is_needed = np.zeros(vocab + 1, bool)
        is_needed[both] = True
        ids = np.flatnonzero(is_needed[:vocab])
        # One entry more: index NONE (-1) reads the last one, which stays NONE.
        row_of_id = np.full(vocab + 1, NONE)
        row_of_id[ids] = np.arange(len(ids))
        return cls(*_directions_and_constants(readout, ids), *row_of_id[both])

    def chosen(self, ranges: Iterable[slice]) -> list[tuple[slice, Array]]:
        """Token ranges, each with the indices (within the range) of its tokens that have a target.

        Ranges without such a token are left out.
        """
        selected = [(token_range, np.flatnonzero(self.target[token_range] != NONE)) for token_range in ranges]
        return [(token_range, rows) for token_range, rows in selected if len(rows)]

    def along(self, token_range: slice, tokens: Array, scale: Array) -> Array:
        """Directions of selected tokens of a range, divided by the final norm's divisor.

        Arguments:
            token_range: Range of tokens.
            tokens: Indices within the range of tokens with a target.
            scale: Divisor of the final norm [token].

        Returns:
            float32 [row, hidden]; the caller may modify it.
        """
        target, against = self.target[token_range][tokens], self.against[token_range][tokens]
        divisor = np.asarray(scale[token_range][tokens], np.float32)[:, None]
        has_contrast = against != NONE
        directions = np.empty((len(target), self.rows.shape[1]), np.float32)
        for start in range(0, len(target), _TILE):
            # Small enough to stay in the CPU cache for all steps below.
            tile = slice(start, start + _TILE)
            # mode="clip" avoids a bounds check with a temporary copy; the ids were checked in `of`.
            out = np.take(self.rows, target[tile], axis=0, out=directions[tile], mode="clip")
            if has_contrast[tile].all():
                out -= self.rows[against[tile]]
            elif has_contrast[tile].any():
                out[has_contrast[tile]] -= self.rows[against[tile][has_contrast[tile]]]
            out /= divisor[tile]
        return directions

    def constant(self) -> Array:
        """Contribution of the biases of norm and unembedding, float64 [token]; NaN without a target."""
        # Index NONE (-1) reads the zero at the end.
        padded = np.append(self.constants, 0.0)
        return np.where(self.target == NONE, np.nan, padded[self.target] - padded[self.against])


def _directions_and_constants(readout: xr.Dataset, ids: Array) -> tuple[Array, Array]:
    """The fields `rows` and `constants` of `Directions` for some token ids.

    A direction is a row of the unembedding times the norm weight, centred for LayerNorm.
    """
    require_linear(readout)
    norm = readout.attrs["norm"]
    if norm not in ("rms", "layer"):
        raise ShapeError(f"expected the norm of a readout to be 'rms' or 'layer', found {norm!r}")
    unembed = readout["unembed"].transpose("vocab", "hidden").isel(vocab=ids).values.astype(np.float32)
    constants = np.zeros(len(ids))
    if "norm_bias" in readout:
        # The norm's bias is added after its weight was applied: it meets the unembedding without that weight.
        constants += unembed.astype(np.float64) @ readout["norm_bias"].values.astype(np.float64)
    if "unembed_bias" in readout:
        constants += readout["unembed_bias"].isel(vocab=ids).values
    rows = unembed * (readout["norm_weight"].values.astype(np.float32))
    if norm == "layer":
        # Centring the direction equals centring the state: (x - mean(x)) . d = x . (d - mean(d)).
        rows -= rows.mean(axis=1, keepdims=True)
    return rows, constants
