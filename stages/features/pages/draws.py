"""Draws that depend on what is drawn from, never on the order in which it is seen.

A token has a number made of its prompt's ids and its position, so that the same corpus in another order, cut
into other segments, or read in other blocks gives the same draw; a prompt that is there twice is drawn once.

Border: arrays of 64-bit numbers; no generator, no seed of the process. The mixing is that of SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ....store.arrays import Array, Ints
from ....store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Numbers", "feature_numbers", "mixed", "token_numbers"]

Numbers = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
LABELS = ("prompt", "position", "token_id")
"""What must be known of each token."""


def mixed(numbers: Array) -> Numbers:
    """Numbers that look drawn, one for each: uint64."""
    found = np.asarray(numbers).astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found ^= found >> np.uint64(shift)
        found *= np.uint64(factor)
    found ^= found >> np.uint64(31)
    return found


def token_numbers(encoded: xr.Dataset, seed: int = 0) -> Numbers:
    """A number for every token of an encoded layer: uint64 [token].

    The same for tokens at one position of prompts with the same ids. Raises ShapeError where tokens are not
    labelled, or their ids not known.
    """
    missing = [name for name in LABELS if name not in encoded.coords]
    if missing:
        raise ShapeError(
            f"expected {', '.join(LABELS)} of every token, found no {', '.join(missing)}; capture the corpus "
            "from token ids or texts, and encode that"
        )
    prompt, position, ids = (encoded[name].values for name in LABELS)
    if not len(prompt):
        return np.empty(0, np.uint64)
    at = position.astype(np.uint64) * _STEP
    starts = np.flatnonzero(np.diff(prompt, prepend=prompt[0] - 1))
    sums = np.add.reduceat(mixed(mixed(ids.astype(np.int64)) + at), starts)  # wraps, as it should
    own = np.repeat(sums, np.diff([*starts, len(prompt)]))
    return mixed(own + at + np.uint64(seed) * np.uint64(0xD1342543DE82EF95))


def feature_numbers(features: Ints) -> Numbers:
    """A number for every feature, to be combined with those of tokens."""
    return mixed(features.astype(np.uint64) + _STEP)
