"""Contrastive directions: difference of the mean states of two sets of tokens, and projections on it.

A difference of means ("contrastive" direction; Rimsky et al. 2024, "Steering Llama 2 via Contrastive
Activation Addition"; Marks and Tegmark 2023, "The Geometry of Truth": mass-mean probing) is the simplest
probe, and the one whose direction best matches the effect of interventions. Projections are counted from the
midpoint of the two means.

Steering with such a direction: stages/causal/convergence.py, which uses the same arithmetic.

Axes: layer, side ("positive", "negative"), token, hidden. Needs no model and no torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError, StageError
from ...store.identity import model_of, require_same_model
from ..corpus.state_cells import added, as_layers, by_layer, end_to_end, state_rows, token_labels

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["contrastive_direction", "difference_of_means", "projection_scores", "side_sums"]


SIDES = ["positive", "negative"]
"""Labels of the `side` axis."""
POSITIVE, NEGATIVE = 1, -1
"""Values that say which side a token belongs to; 0 excludes a token."""
_NONE = 1e-10
"""Norm below which a difference of means counts as zero, and has no direction."""


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden"), "side": ("token",)},
    outputs={
        "total": Output(("layer", "side", "hidden"), "1", "sum of the states of each side"),
        "n": Output(("side",), "tokens", "tokens of each side"),
    },
    cells=("layer", "segment"),
    combine=by_layer(partial(added, names=("total", "n"))),
    memory=1.0,
)
def side_sums(states: xr.DataArray, side: xr.DataArray) -> xr.Dataset:
    """Sums of the states of two sets of tokens: the cacheable summary of one segment.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.
        side: int [token], 1 positive, -1 negative, 0 for tokens to exclude.

    Returns:
        total float64 [layer, side, hidden], n int64 [side].

    Raises:
        ShapeError: Another value than 1, -1 and 0 in `side`, or not one value per token.
    """
    import xarray as xr

    states = as_layers(states)
    labels = _sides(states, side)
    total = np.zeros((states.sizes["layer"], 2, states.sizes["hidden"]))
    for layer in range(states.sizes["layer"]):
        for token_range, rows in state_rows(states.isel(layer=layer)):
            for side_index, value in enumerate((POSITIVE, NEGATIVE)):
                # float64 sums, so that the order of segments changes only their last bits.
                total[layer, side_index] += rows[labels[token_range] == value].sum(axis=0, dtype=np.float64)
    # The same for every layer, so without a layer axis.
    n = [int((labels == value).sum()) for value in (POSITIVE, NEGATIVE)]
    return xr.Dataset(
        {"total": (("layer", "side", "hidden"), total), "n": ("side", np.array(n, np.int64))},
        coords={"layer": states["layer"], "side": SIDES},
        attrs=model_of(states),
    )


@stage(
    version=1,
    inputs={"sums": None},
    outputs={
        "direction": Output(("layer", "hidden"), "1", "positive mean - negative mean"),
        "unit": Output(("layer", "hidden"), "1", "the direction at length 1"),
        "norm": Output(("layer",), "1", "length of the difference of the means"),
        "mean": Output(("layer", "side", "hidden"), "1", "mean state of each side"),
        "n": Output(("side",), "tokens", "tokens of each side"),
    },
)
def contrastive_direction(sums: xr.Dataset) -> xr.Dataset:
    """Direction from the negative to the positive mean state, per layer.

    Arguments:
        sums: Result of `side_sums`, possibly added over segments.

    Returns:
        float64 direction, unit [layer, hidden], norm [layer], mean [layer, side, hidden]; n int64 [side].

    Raises:
        StageError: A side has no tokens, or both means are equal, which leaves no direction.
    """
    empty = [str(side) for side, n in zip(sums["side"].values, sums["n"].values, strict=True) if n == 0]
    if empty:
        raise StageError(
            "a contrastive direction needs tokens on the positive and on the negative side, found none on "
            f"the {empty[0]} side; label some tokens with {POSITIVE if empty[0] == 'positive' else NEGATIVE}"
        )
    mean = (sums["total"] / sums["n"]).transpose("layer", "side", "hidden")
    contrast = difference_of_means(mean)
    lost = contrast["layer"].values[contrast["norm"].values <= _NONE].tolist()
    if lost:
        raise StageError(
            f"expected two sides that differ in every layer, found a difference of 0 at layers {lost}, which "
            "has no direction; choose other tokens, or leave these layers out"
        )
    result = contrast.assign(unit=contrast["direction"] / contrast["norm"], mean=mean, n=sums["n"])
    return result.assign_attrs(model_of(sums))


def difference_of_means(mean: xr.DataArray) -> xr.Dataset:
    """direction [layer, hidden] from the negative to the positive mean, and its norm [layer].

    Arguments:
        mean: [layer, side, hidden], in any order of dimensions.
    """
    import xarray as xr

    direction = mean.sel(side="positive", drop=True) - mean.sel(side="negative", drop=True)
    norm = xr.apply_ufunc(np.linalg.norm, direction, input_core_dims=[["hidden"]], kwargs={"axis": -1})
    return xr.Dataset({"direction": direction.transpose("layer", "hidden"), "norm": norm})


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden"), "contrast": None},
    outputs={"score": Output(("layer", "token"), "1", "distance along the direction from the midpoint")},
    cells=("layer", "segment"),
    combine=by_layer(end_to_end),
    memory=1.0,
)
def projection_scores(states: xr.DataArray, contrast: xr.Dataset) -> xr.Dataset:
    """Projection of each state on a contrastive direction: positive on the side of the positive set.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.
        contrast: Result of `contrastive_direction`, for at least the layers of the states.

    Returns:
        score float32 [layer, token] = (state - midpoint of the two means) . unit, in the unit of the
        activations: half the norm at the positive mean, minus half of it at the negative one.

    Raises:
        ShapeError: The contrast lacks a layer, or has another width.
        StageError: The states are of another model.
    """
    import xarray as xr

    require_same_model(states=states, contrast=contrast)
    states = as_layers(states)
    layers = states["layer"].values
    # Layers are matched by number, not by index.
    unknown = [int(layer) for layer in layers if layer not in contrast["layer"].values]
    if unknown or states.sizes["hidden"] != contrast.sizes["hidden"]:
        raise ShapeError(
            f"the contrastive direction is for layers {contrast['layer'].values.tolist()} of width "
            f"{contrast.sizes['hidden']}, found states of layers {layers.tolist()} and width "
            f"{states.sizes['hidden']}; pass states of these layers of the same model"
        )
    score = np.empty((len(layers), states.sizes["token"]), np.float32)
    for number, layer in enumerate(layers):
        layer_contrast = contrast.sel(layer=layer)
        unit = layer_contrast["unit"].values
        # Both means project to the same distance from the midpoint, so 0 is the threshold between the sides.
        midpoint = layer_contrast["mean"].mean("side").values @ unit
        for token_range, rows in state_rows(states.isel(layer=number)):
            score[number, token_range] = rows @ unit - midpoint
    return xr.Dataset({"score": (("layer", "token"), score)}, coords=token_labels(states))


def _sides(states: xr.DataArray, side: xr.DataArray) -> Array:
    """Side of each token, int [token]; ShapeError unless there is one of 1, -1 and 0 for each state."""
    labels = np.asarray(side.values)
    if side.dims != ("token",) or len(labels) != states.sizes["token"]:
        raise ShapeError(
            f"expected a side for each of the {states.sizes['token']} tokens, [token], found an array "
            f"{side.dims} of shape {labels.shape}"
        )
    if unknown := sorted({int(label) for label in np.unique(labels)} - {POSITIVE, 0, NEGATIVE}):
        raise ShapeError(
            "expected the side of each token to be 1 (positive), -1 (negative) or 0 (left out), found "
            f"{unknown[0]}"
        )
    return labels
