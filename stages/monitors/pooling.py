"""Pooling: one state per prompt from the states of its tokens.

"last": the state of the last token. "mean": the mean over tokens. "max": the largest value of each
coordinate.

Axes: layer, token, prompt, hidden. Needs no model and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ConfigError, PromptError, ShapeError
from ...store.identity import model_of
from ..corpus.state_cells import as_layers, state_rows

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["POOLINGS", "pooled_states"]

POOLINGS = ("last", "mean", "max")
"""Names of the poolings over the tokens of a prompt."""


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden"), "prompt": ("token",)},
    outputs={"state": Output(("layer", "prompt", "hidden"), "1", "pooled state of each prompt")},
    cells="layer",
    memory=1.0,
)
def pooled_states(states: xr.DataArray, prompt: xr.DataArray, *, pooling: str) -> xr.Dataset:
    """State of each prompt, pooled over its tokens.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy; read block by block.
        prompt: int [token], prompt of each token, ascending from 0 without gaps, as prompts are packed.
        pooling: one of POOLINGS.

    Returns:
        state float32 [layer, prompt, hidden]; means are summed in float64. Attributes of the
        array: the model, "point" (the captured array) and "pooling".

    Raises:
        ConfigError: An unknown pooling.
        ShapeError: Not one prompt per token.
        PromptError: A prompt without tokens, or prompts out of order.
    """
    import xarray as xr

    if pooling not in POOLINGS:
        raise ConfigError(f"expected a pooling among {', '.join(POOLINGS)}, found {pooling!r}")
    states, owner = as_layers(states), np.asarray(prompt.values)
    if len(owner) != states.sizes["token"]:
        raise ShapeError(f"expected a prompt for each of {states.sizes['token']} tokens, found {len(owner)}")
    if not len(owner) or owner[0] != 0 or not np.isin(np.diff(owner), (0, 1)).all():
        raise PromptError(
            "expected packed prompts, whose numbers start at 0 and rise by 1, found others; pass "
            "tokens.prompt_of(slice(None))"
        )
    pooled = np.stack([_pooled(states.isel(layer=i), owner, pooling) for i in range(states.sizes["layer"])])
    # Of the array: what a node passes on has no attributes of its dataset.
    attributes = model_of(states) | {
        "point": "" if states.name is None else str(states.name),
        "pooling": pooling,
    }
    return xr.Dataset(
        {"state": (("layer", "prompt", "hidden"), pooled, attributes)},
        coords={"layer": states["layer"], "prompt": np.arange(pooled.shape[1])},
        attrs=model_of(states),
    )


def _pooled(states: xr.DataArray, owner: Array, pooling: str) -> Array:
    """Pooled states of one layer, float32 [prompt, hidden]; states: [token, hidden], owner: their prompts."""
    size = np.bincount(owner)
    result = np.zeros((len(size), states.sizes["hidden"]), np.float64 if pooling == "mean" else np.float32)
    if pooling == "max":
        result -= np.inf
    last = np.cumsum(size) - 1
    for tokens, rows in state_rows(states):
        prompt_of_row = owner[tokens]
        prompts, starts = np.unique(prompt_of_row, return_index=True)
        # A prompt may end in a later block, so blocks are combined.
        if pooling == "mean":
            result[prompts] += np.add.reduceat(rows.astype(np.float64), starts, axis=0)
        elif pooling == "max":
            result[prompts] = np.maximum(result[prompts], np.maximum.reduceat(rows, starts, axis=0))
        else:
            ends = last[prompts]
            is_complete = ends < tokens.stop
            result[prompts[is_complete]] = rows[ends[is_complete] - tokens.start]
    if pooling == "mean":
        result /= size[:, None]
    return result.astype(np.float32, copy=False)
