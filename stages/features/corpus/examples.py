"""Where in a stored corpus each feature is strongest, and the text around those places.

Border: the ragged arrays of one layer in; never imports torch. Holds a block of the corpus, and k places per
feature.

Order: activation descending, then token ascending, whatever the size of blocks.

Axes: feature; rank, 0 = strongest; window = tokens around a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ....pipeline import Output, stage
from ....store.arrays import Ints
from ....store.errors import DictionaryError
from ...logits.ranking import in_order, ranked
from .candidates import Candidates
from .sparse import BLOCK, blocks

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["contexts", "top_examples"]


@stage(
    version=1,
    inputs={"encoded": None},
    outputs={
        "token": Output(("feature", "rank"), "1", "packed token; -1: none"),
        "value": Output(("feature", "rank"), "1", "activation there; 0: none"),
    },
)
def top_examples(
    encoded: xr.Dataset, *, k: int = 20, features: tuple[int, ...] | None = None, one_per_prompt: bool = True
) -> xr.Dataset:
    """The k tokens at which each feature of a layer is strongest.

    encoded: as a layer's encoding gives it. features: which ones, None for all. one_per_prompt: of a prompt
    only the strongest place counts, so that a text that repeats itself is one example.
    Raises DictionaryError for a feature there is not.
    """
    import xarray as xr

    chosen = _chosen(encoded, features)
    best = _Best(len(chosen), k, encoded["prompt"].values if one_per_prompt else None)
    place = np.full(int(encoded.attrs["n_features"]), -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    for block in blocks(encoded):
        best.add(place[block.feature], block.token, block.value)
    best.rank()
    return xr.Dataset(
        {"token": (("feature", "rank"), best.token), "value": (("feature", "rank"), best.value)},
        coords={"feature": chosen, "rank": np.arange(k), "layer": encoded["layer"]},
    )


class _Best:
    """The k strongest places of each of some features, as far as they have been seen."""

    def __init__(self, size: int, k: int, prompt: Ints | None) -> None:
        self.k, self.prompt = k, prompt
        self.token = np.full((size, k), -1, np.int64)
        self.value = np.zeros((size, k), np.float32)
        self._least = np.full(size + 1, -np.inf, np.float32)  # to enter with; the last one is of row -1
        self._least[-1] = np.inf
        self._waiting = Candidates(self.token.size)

    def add(self, row: Ints, token: Ints, value: npt.NDArray[np.float32]) -> None:
        """Take more places into account, but those of row -1; tokens come in ascending order from call to
        call."""
        # An equal value comes later than what stands, so it loses.
        entering = np.flatnonzero(value > self._least[row])
        if self._waiting.add(row[entering], token[entering], value[entering]):
            self.rank()

    def rank(self) -> None:
        """Rank those that wait; to be called when all have come."""
        if not len(self._waiting):
            return
        row, token, value = self._waiting.taken(self.token, self.value)
        if self.prompt is not None:
            first = self._strongest_of_prompts(row, token, value)
            row, token, value = row[first], token[first], value[first]
        kept, rank = ranked(row, token, value, self.k)
        at = row[kept], rank
        self.token[at], self.value[at] = token[kept], value[kept]
        is_full = self.token[:, -1] >= 0
        self._least[:-1] = np.where(is_full, self.value[:, -1], -np.inf)

    def _strongest_of_prompts(self, row: Ints, token: Ints, value: npt.NDArray[np.float32]) -> Ints:
        """Places of the strongest of each row and prompt, equal ones by token."""
        assert self.prompt is not None
        pair = row * (int(self.prompt.max(initial=0)) + 1) + self.prompt[token]
        order = in_order(pair, -value, token)
        found: Ints = order[np.flatnonzero(np.diff(pair[order], prepend=-1))]
        return found


def contexts(
    examples: xr.Dataset,
    encoded: xr.Dataset,
    *,
    features: Sequence[int] | None = None,
    before: int = 10,
    after: int = 5,
) -> xr.Dataset:
    """The tokens around examples, and the same feature's activation at each of them.

    examples: as `top_examples` gives them for this `encoded` layer. features: which ones, None for all of
    them. before, after: tokens of the same prompt on either side.
    Returns token_id int32 [feature, rank, window], -1 outside the prompt, activation float32 of the same
    dims, and prompt and position [feature, rank] of the example, -1 for none; window counts from -before.
    """
    import xarray as xr

    examples = examples if features is None else examples.sel(feature=list(features))
    at, ids = examples["token"].values, encoded["token_id"].values
    prompt, position = encoded["prompt"].values, encoded["position"].values
    offsets = np.arange(-before, after + 1)
    around = at[..., None] + offsets
    inside = (at >= 0)[..., None] & (around >= 0) & (around < len(ids))
    around = np.where(inside, around, 0)
    inside &= prompt[around] == prompt[np.maximum(at, 0)][..., None]
    wanted = np.broadcast_to(examples["feature"].values[:, None, None], around.shape)
    activation = np.zeros(around.shape, np.float32)
    activation[inside] = _activations(encoded, around[inside], wanted[inside])
    dims = ("feature", "rank", "window")
    return xr.Dataset(
        {
            "token_id": (dims, np.where(inside, ids[around], -1).astype(np.int32)),
            "activation": (dims, activation),
            "prompt": (dims[:2], np.where(at >= 0, prompt[np.maximum(at, 0)], -1)),
            "position": (dims[:2], np.where(at >= 0, position[np.maximum(at, 0)], -1)),
        },
        coords={"feature": examples["feature"], "rank": examples["rank"], "window": offsets},
    )


def _activations(encoded: xr.Dataset, token: Ints, feature: Ints) -> npt.NDArray[np.float32]:
    """Activations of (token, feature) pairs, 0 where not active; the corpus is read block by block."""
    ptr, size = encoded["token_ptr"].values, int(encoded.attrs["n_features"])
    found = np.zeros(len(token), np.float32)
    order = np.argsort(token, kind="stable")
    block = ptr[token[order]] // BLOCK
    for here in np.split(order, np.flatnonzero(np.diff(block)) + 1):
        if not len(here):
            continue
        first, last = int(token[here[0]]), int(token[here[-1]]) + 1
        held = encoded[["feature", "value"]].isel(active=slice(int(ptr[first]), int(ptr[last])))
        owner = np.repeat(np.arange(first, last), np.diff(ptr[first : last + 1]))
        keys = owner * size + held["feature"].values  # ascending, as tokens and their features are
        wanted = token[here] * size + feature[here]
        spot = np.searchsorted(keys, wanted)
        hit = spot < len(keys)
        hit[hit] = keys[spot[hit]] == wanted[hit]
        found[here[hit]] = held["value"].values[spot[hit]]
    return found


def _chosen(encoded: xr.Dataset, features: Sequence[int] | None) -> Ints:
    size = int(encoded.attrs["n_features"])
    if features is None:
        return np.arange(size)
    wrong = [feature for feature in features if not 0 <= feature < size]
    if wrong:
        raise DictionaryError(f"expected features from 0 to {size - 1}, found {wrong[0]}")
    return np.array(sorted(set(features)), np.int64)
