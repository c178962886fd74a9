"""Directions that separate two sets of states, and projections on them.

A difference of means ("contrastive" direction; Rimsky et al. 2024, "Steering Llama 2 via Contrastive
Activation Addition"; Marks and Tegmark 2023, "The Geometry of Truth": mass-mean probing) is the simplest
probe; for truth, Marks and Tegmark found that its direction has larger causal effects than those of logistic
regression. Projections are counted from the midpoint of the two means.

`steering_direction` also has the other usual ones: the first principal component of the differences of
contrast pairs (Zou et al. 2023, "Representation Engineering"), the weights of a logistic regression, and
linear discriminant analysis (Fisher 1936). It is made of one part of the states and judged on the other.

Steering with such a direction: stages/causal/pushes/steered_texts.py and stages/causal/convergence.py.

Axes: layer, side ("positive", "negative"), token, hidden. Needs no model and no torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError, StageError
from ...store.identity import model_of, require_same_model
from ..corpus.state_cells import added, as_layers, by_layer, end_to_end, state_rows, token_labels
from .probe import fit_linear
from .separation import auroc, shrunk

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "METHODS",
    "contrastive_direction",
    "difference_of_means",
    "projection_scores",
    "side_sums",
    "steering_direction",
]


SIDES = ["positive", "negative"]
"""Labels of the `side` axis."""
POSITIVE, NEGATIVE = 1, -1
"""Values that say which side a token belongs to; 0 excludes a token."""
_ZERO_NORM = 1e-10
"""Norm below which a difference of means counts as zero, and has no direction."""
METHODS = ("mean", "pca", "logistic", "lda")
"""Methods that make a direction of two sets of states, see `steering_direction`."""
PENALTY = 0.01
"""Penalty of the logistic regression on squared weights, relative to the mean loss per state; states are
standardised."""


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
    lost = contrast["layer"].values[contrast["norm"].values <= _ZERO_NORM].tolist()
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


@stage(
    version=1,
    inputs={
        "states": ("layer", "token", "hidden"),
        "side": ("token",),
        "pair": ("token",),
        "held_out": ("token",),
    },
    outputs={
        "unit": Output(("layer", "hidden"), "1", "direction towards the positive side, at length 1"),
        "norm": Output(("layer",), "1", "length of the difference of the two means"),
        "auc": Output(
            ("layer",),
            "1",
            "probability that a held-out positive state lies farther along the direction than a held-out "
            "negative one",
        ),
        "n": Output(("part", "side"), "tokens", "states of each side"),
    },
    cells="layer",
    memory=3.0,
)
def steering_direction(
    states: xr.DataArray,
    side: xr.DataArray,
    pair: xr.DataArray,
    held_out: xr.DataArray,
    *,
    method: str = "mean",
) -> xr.Dataset:
    """Direction from the negative to the positive states of each layer, and how it separates held-out ones.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not; the states with a side are in memory one
            layer at a time.
        side: int [token], 1 positive, -1 negative, 0 for tokens to exclude.
        pair: int [token], number of the contrast pair; read by the method "pca" alone.
        held_out: bool or int [token], whether a token is kept out of the direction, to judge it.
        method: "mean", difference of the means; "pca", first principal component of the differences of pairs,
            around zero; "logistic", weights of a logistic regression on standardised states; "lda", the
            difference of the means multiplied by the inverse of the covariance within sides, shrunk towards a
            multiple of the identity (`oracle_shrinkage`); states are not standardised.

    Returns:
        float64 unit [layer, hidden] and norm [layer] of the states that are not held out; auc [layer] of the
        held-out ones, 0.5 is chance, NaN without held-out states of both sides; n int64 [part, side].

    Raises:
        ShapeError: Not one value per token, or another value than 1, -1 and 0 in `side`.
        StageError: The method is unknown; a side has no states; the means are equal; or pairs are incomplete.
        MissingExtra: Logistic regression without scikit-learn.
    """
    import xarray as xr

    if method not in METHODS:
        raise StageError(f"expected a method among {', '.join(METHODS)}, found {method!r}")
    states = as_layers(states)
    sides, out = _sides(states, side), np.asarray(held_out.values).astype(bool)
    if len(out) != len(sides) or len(pair) != len(sides):
        raise ShapeError(
            f"expected pair and held_out with a value for each of the {len(sides)} tokens, found {len(pair)} "
            f"and {len(out)}"
        )
    labelled = np.flatnonzero(sides)
    states, sides, out = states.isel(token=labelled), sides[labelled], out[labelled]
    for value, name in zip((POSITIVE, NEGATIVE), SIDES, strict=True):
        if not (~out & (sides == value)).any():
            raise StageError(
                "a direction needs states of both sides that are not held out, found none on the "
                f"{name} side; label some tokens with side {value} and held_out False"
            )
    fitted, fitted_pair = sides[~out], np.asarray(pair.values)[labelled][~out]
    if method == "pca":
        _require_pairs(fitted, fitted_pair)
    results: dict[str, list[Any]] = {"unit": [], "norm": [], "auc": []}
    for layer in states["layer"].values.tolist():
        rows = states.sel(layer=layer).values.astype(np.float64)
        contrast = rows[~out & (sides == POSITIVE)].mean(0) - rows[~out & (sides == NEGATIVE)].mean(0)
        if (norm := float(np.linalg.norm(contrast))) <= _ZERO_NORM:
            raise StageError(
                f"expected two sides that differ in every layer, found equal means at layer {layer}, which "
                "have no direction; choose other tokens, or leave this layer out"
            )
        direction = _direction(method, rows[~out], fitted, fitted_pair, contrast)
        unit = direction / np.linalg.norm(direction)
        results["unit"].append(unit)
        results["norm"].append(norm)
        results["auc"].append(auroc(rows[out] @ unit, sides[out] == POSITIVE))
    counts = [[int((part & (sides == v)).sum()) for v in (POSITIVE, NEGATIVE)] for part in (~out, out)]
    dims = {"unit": ("layer", "hidden"), "norm": ("layer",), "auc": ("layer",)}
    return xr.Dataset(
        {
            **{name: (dims[name], np.array(values)) for name, values in results.items()},
            "n": (("part", "side"), np.array(counts, np.int64)),
        },
        coords={"layer": states["layer"].values, "side": SIDES, "part": ["fitted", "held out"]},
        attrs=model_of(states),
    )


def _direction(method: str, rows: Array, sides: Array, pair: Array, contrast: Array) -> Array:
    """Direction of one layer, of any length, by one of METHODS.

    Arguments:
        method: Name of the method.
        rows: States, float64 [token, hidden].
        sides: Side of each state, 1 or -1.
        pair: Number of the contrast pair of each state.
        contrast: Difference of the means of the sides [hidden].
    """
    is_positive, direction = sides == POSITIVE, contrast
    if method == "pca":
        positive, negative = (
            rows[members][np.argsort(pair[members])] for members in (is_positive, ~is_positive)
        )
        direction = np.linalg.svd(positive - negative, full_matrices=False)[2][0]
        # A principal component has no sign of its own.
        direction = direction if direction @ contrast >= 0 else -direction
    elif method == "logistic":
        weight, _ = fit_linear(rows, is_positive.astype(np.int64), PENALTY, is_label=True)
        direction = weight[0]
    elif method == "lda":
        within = np.concatenate(
            [rows[members] - rows[members].mean(0) for members in (is_positive, ~is_positive)]
        )
        covariance = within.T @ within / len(within)
        direction = np.linalg.solve(shrunk(covariance, *within.shape), contrast)
    return direction


def _require_pairs(sides: Array, pair: Array) -> None:
    """Raise StageError unless each number in `pair` has one positive and one negative state."""
    positive, negative = (np.sort(pair[sides == value]) for value in (POSITIVE, NEGATIVE))
    numbers = np.unique(pair)
    if not (np.array_equal(positive, numbers) and np.array_equal(negative, numbers)):
        raise StageError(
            "the method 'pca' needs contrast pairs, one positive and one negative state with each number of "
            f"`pair`, found {len(positive)} positive and {len(negative)} negative states with "
            f"{len(numbers)} numbers; number the pairs, or take the method 'mean'"
        )


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
