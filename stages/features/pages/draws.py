"""Random draws that depend only on content, never on the order in which tokens are read.

Each token gets a number computed from its prompt's ids and its position. The same corpus in another order,
with other segments or in other blocks, gives the same draw; a repeated prompt is drawn once.

Border: arrays of 64-bit numbers; no generator, no global seed. The mixing function is that of SplitMix64
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

# Increment of SplitMix64: 2^64 divided by the golden ratio, odd.
_STEP = np.uint64(0x9E3779B97F4A7C15)
LABELS = ("prompt", "position", "token_id")
"""Coordinates required for every token."""


def mixed(numbers: Array) -> Numbers:
    """A pseudorandom uint64 for each number, the same for equal numbers (the hash of SplitMix64)."""
    mixture = np.asarray(numbers).astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixture ^= mixture >> np.uint64(shift)
        mixture *= np.uint64(factor)
    mixture ^= mixture >> np.uint64(31)
    return mixture


def token_numbers(encoded: xr.Dataset, seed: int = 0) -> Numbers:
    """A pseudorandom number for every token of an encoded layer: uint64 [token].

    Equal for tokens at the same position of prompts with the same ids.

    Arguments:
        encoded: Active features of a layer, from `encode_features`.
        seed: Seed of the numbers.

    Raises:
        ShapeError: Coordinates of tokens are missing.
    """
    missing = [name for name in LABELS if name not in encoded.coords]
    if missing:
        raise ShapeError(
            f"expected the coordinates {', '.join(LABELS)} of the tokens, found no {', '.join(missing)}; "
            "capture the corpus from token ids or texts, and encode it again"
        )
    prompt, position, ids = (encoded[name].values for name in LABELS)
    # prompt[0] below needs a token.
    if not len(prompt):
        return np.empty(0, np.uint64)
    position_terms = position.astype(np.uint64) * _STEP
    # Start of each prompt; `prepend` makes the first token a start.
    starts = np.flatnonzero(np.diff(prompt, prepend=prompt[0] - 1))
    # A hash of each prompt: the sum over its tokens of a hash of id and position. uint64 wraps around.
    sums = np.add.reduceat(mixed(mixed(ids.astype(np.int64)) + position_terms), starts)
    prompt_sums = np.repeat(sums, np.diff([*starts, len(prompt)]))
    return mixed(prompt_sums + position_terms + np.uint64(seed) * np.uint64(0xD1342543DE82EF95))


def feature_numbers(features: Ints) -> Numbers:
    """A pseudorandom number for every feature, uint64 [feature], to be combined with a token's by xor."""
    return mixed(features.astype(np.uint64) + _STEP)
