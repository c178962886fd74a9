"""Strongest examples of each feature in a stored corpus, and the text around them.

Border: the ragged arrays of one layer in; never imports torch. Memory holds a block of the corpus, and k
examples per feature.

Order: activation descending, then token ascending, for any block size.

Axes: feature; rank, 0 = strongest; window = tokens around an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ....pipeline import Output, stage
from ....store.arrays import Bools, Ints
from ....store.errors import DictionaryError
from ...logits.ranking import in_order, ranked
from .candidates import Candidates
from .sparse import BLOCK, blocks, rows_of

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["contexts", "top_examples", "window_tokens"]


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
    """The k corpus tokens with the highest activation of each feature of a layer.

    Arguments:
        encoded: Active features of the layer, from `encode_features`.
        k: Number of examples per feature.
        features: Indices of the features; None for all of the layer.
        one_per_prompt: Whether only the strongest token of each prompt counts, so that repeated text gives
            one example.

    Raises:
        DictionaryError: There is no feature of that index.
    """
    import xarray as xr

    indices = _feature_indices(encoded, features)
    table = _TopK(len(indices), k, encoded["prompt"].values if one_per_prompt else None)
    row_of_feature = rows_of(indices, int(encoded.attrs["n_features"]))
    for block in blocks(encoded):
        table.add(row_of_feature[block.feature], block.token, block.value)
    table.rank()
    return xr.Dataset(
        {"token": (("feature", "rank"), table.token), "value": (("feature", "rank"), table.value)},
        coords={"feature": indices, "rank": np.arange(k), "layer": encoded["layer"]},
    )


class _TopK:
    """Table of the k tokens of largest activation for each row (a feature), updated block by block."""

    def __init__(self, size: int, k: int, prompt: Ints | None) -> None:
        self.k, self.prompt = k, prompt
        self.token = np.full((size, k), -1, np.int64)
        self.value = np.zeros((size, k), np.float32)
        # Value to exceed, by row. Row -1, the last, stands for features that were not requested.
        self._threshold = np.full(size + 1, -np.inf, np.float32)
        self._threshold[-1] = np.inf
        self._candidates = Candidates(self.token.size)

    def add(self, row: Ints, token: Ints, value: npt.NDArray[np.float32]) -> None:
        """Add tokens that may enter the table; tokens must ascend from call to call.

        Arguments:
            row: Row of each candidate [candidate]; candidates of row -1 are ignored.
            token: Token of each candidate [candidate].
            value: Activation of each candidate [candidate].
        """
        # Equal values rank by token; this token comes later than those in the table, so it loses.
        entering = np.flatnonzero(value > self._threshold[row])
        if self._candidates.add(row[entering], token[entering], value[entering]):
            self.rank()

    def rank(self) -> None:
        """Enter the collected candidates into the table; must be called after the last `add`."""
        if not len(self._candidates):
            return
        row, token, value = self._candidates.take_with(self.token, self.value)
        if self.prompt is not None:
            strongest = self._strongest_of_prompts(row, token, value)
            row, token, value = row[strongest], token[strongest], value[strongest]
        order, rank = ranked(row, token, value, self.k)
        at = row[order], rank
        self.token[at], self.value[at] = token[order], value[order]
        # While a table has free places, every value may enter.
        is_full = self.token[:, -1] >= 0
        self._threshold[:-1] = np.where(is_full, self.value[:, -1], -np.inf)

    def _strongest_of_prompts(self, row: Ints, token: Ints, value: npt.NDArray[np.float32]) -> Ints:
        """Index of the strongest candidate of each row and prompt [candidate]; the first token wins ties."""
        assert self.prompt is not None
        # (row, prompt) as one integer, so that one sort groups them.
        pair = row * (int(self.prompt.max(initial=0)) + 1) + self.prompt[token]
        order = in_order(pair, -value, token)
        strongest: Ints = order[np.flatnonzero(np.diff(pair[order], prepend=-1))]
        return strongest


def contexts(
    examples: xr.Dataset,
    encoded: xr.Dataset,
    *,
    features: Sequence[int] | None = None,
    before: int = 10,
    after: int = 5,
) -> xr.Dataset:
    """The tokens around examples, and the feature's activation at each of these tokens.

    Arguments:
        examples: Result of `top_examples` for this layer.
        encoded: Active features of the layer, from `encode_features`.
        features: Indices of the features; None for all in `examples`.
        before: Number of tokens before the example, within the same prompt.
        after: Number of tokens after the example, within the same prompt.

    Returns:
        token_id int32 [feature, rank, window], -1 outside the prompt; activation float32 of the same dims;
        prompt and position [feature, rank] of the example, -1 for none. window counts from -before.
    """
    import xarray as xr

    examples = examples if features is None else examples.sel(feature=list(features))
    at, ids = examples["token"].values, encoded["token_id"].values
    prompt, position = encoded["prompt"].values, encoded["position"].values
    offsets = np.arange(-before, after + 1)
    tokens, is_inside = window_tokens(at, offsets, prompt)
    feature = np.broadcast_to(examples["feature"].values[:, None, None], tokens.shape)
    activation = np.zeros(tokens.shape, np.float32)
    activation[is_inside] = _activations(encoded, tokens[is_inside], feature[is_inside])
    dims = ("feature", "rank", "window")
    return xr.Dataset(
        {
            "token_id": (dims, np.where(is_inside, ids[tokens], -1).astype(np.int32)),
            "activation": (dims, activation),
            "prompt": (dims[:2], np.where(at >= 0, prompt[np.maximum(at, 0)], -1)),
            "position": (dims[:2], np.where(at >= 0, position[np.maximum(at, 0)], -1)),
        },
        coords={"feature": examples["feature"], "rank": examples["rank"], "window": offsets},
    )


def window_tokens(token: Ints, window: Ints, prompt: Ints) -> tuple[Ints, Bools]:
    """(tokens around examples, whether each belongs to the example's prompt), both [..., window].

    Arguments:
        token: Number of each example's token in the corpus [...]; -1 for no example.
        window: Offsets of the tokens from the example [window].
        prompt: Prompt of every token of the corpus [token].
    """
    tokens = token[..., None] + window
    exists = (token >= 0)[..., None] & (tokens >= 0) & (tokens < len(prompt))
    tokens = np.where(exists, tokens, 0)
    exists &= prompt[tokens] == prompt[np.maximum(token, 0)][..., None]
    return tokens, exists


def _activations(encoded: xr.Dataset, token: Ints, feature: Ints) -> npt.NDArray[np.float32]:
    """Activation of each pair of a token and a feature, float32 [pair]; 0 if the feature is not active."""
    ptr, size = encoded["token_ptr"].values, int(encoded.attrs["n_features"])
    activations = np.zeros(len(token), np.float32)
    # Sorted by token, so that each block of the corpus is read once.
    order = np.argsort(token, kind="stable")
    block = ptr[token[order]] // BLOCK
    for pairs in np.split(order, np.flatnonzero(np.diff(block)) + 1):
        if not len(pairs):
            continue
        start, stop = int(token[pairs[0]]), int(token[pairs[-1]]) + 1
        active = encoded[["feature", "value"]].isel(active=slice(int(ptr[start]), int(ptr[stop])))
        owner = np.repeat(np.arange(start, stop), np.diff(ptr[start : stop + 1]))
        keys = owner * size + active["feature"].values  # ascending, as tokens and their features are
        pair_keys = token[pairs] * size + feature[pairs]
        index = np.searchsorted(keys, pair_keys)
        is_found = index < len(keys)
        is_found[is_found] = keys[index[is_found]] == pair_keys[is_found]
        activations[pairs[is_found]] = active["value"].values[index[is_found]]
    return activations


def _feature_indices(encoded: xr.Dataset, features: Sequence[int] | None) -> Ints:
    """Requested feature indices (None: all), ascending, each once; DictionaryError for unknown ones."""
    size = int(encoded.attrs["n_features"])
    if features is None:
        return np.arange(size)
    wrong = [feature for feature in features if not 0 <= feature < size]
    if wrong:
        raise DictionaryError(f"expected feature indices from 0 to {size - 1}, found {wrong[0]}")
    return np.array(sorted(set(features)), np.int64)
