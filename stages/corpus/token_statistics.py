"""Norm, mean, spread and kurtosis of every stored state, and outlier dimensions of the residual stream.

Residual streams have a few dimensions of very large magnitude, in most tokens and most layers (Kovaleva et
al. 2021, "BERT Busters"). Dettmers et al. 2022, "LLM.int8()", section 4.1, call a dimension an outlier if its
magnitude is at least 6 in at least 6 % of the tokens, in at least 25 % of the layers. That threshold has the
unit of activations and fits the models it was chosen on; a second criterion is scale-free: the mean of the
dimension lies at least 3 standard deviations from the mean over dimensions (Luo, Kulmizev, Mao 2021,
"Positional Artefacts Propagate Through Masked Language Model Embeddings").

Counts, sums and maxima per dimension are enough for both, and add up over segments of a corpus.

Border: numpy on labelled states; knows no model and never imports torch.

Axes: layer, token, hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.errors import ShapeError
from .state_cells import added, as_layers, by_layer, end_to_end, state_rows, token_labels

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["dimension_sums", "outlier_dimensions", "token_statistics"]


TOKEN = ("layer", "token")
DIMENSION = ("layer", "hidden")
MAGNITUDE, TOKEN_SHARE, LAYER_SHARE = 6.0, 0.06, 0.25
"""Criterion of Dettmers et al. 2022 for outliers: smallest magnitude, share of tokens, share of layers."""
Z = 3.0
"""Smallest |z-score| of an outlier dimension, as in Luo et al. 2021."""


def _joined_segments(parts: list[xr.Dataset]) -> xr.Dataset:
    """Result of `dimension_sums` for one layer from those of its segments: sums added, maxima compared."""
    largest = np.max([part["largest"].values for part in parts], axis=0)
    sums = added(parts, ("n", "total", "squares", "above"))
    return sums.assign(largest=sums["largest"].copy(data=largest))


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={
        "norm": Output(TOKEN, "1", "norm of the state"),
        "mean": Output(TOKEN, "1", "mean over dimensions"),
        "std": Output(TOKEN, "1", "standard deviation over dimensions"),
        "kurtosis": Output(TOKEN, "1", "kurtosis over dimensions (3 for normal values)"),
    },
    cells=("layer", "segment"),
    combine=by_layer(end_to_end),
    memory=1.0,
)
def token_statistics(states: xr.DataArray) -> xr.Dataset:
    """Norm, mean, standard deviation and kurtosis of every state over its dimensions.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.

    Returns:
        float32 [layer, token], with the coordinates of the tokens. std divides by n, not n - 1. kurtosis is
        not the excess: 3 for normal values, about `hidden` if a single dimension is not zero, NaN for a state
        whose dimensions are all equal.
    """
    import xarray as xr

    states = as_layers(states)
    shape = (states.sizes["layer"], states.sizes["token"])
    moments = {name: np.empty(shape, np.float32) for name in ("norm", "mean", "std", "kurtosis")}
    for layer in range(shape[0]):
        for tokens, rows in state_rows(states.isel(layer=layer)):
            # float64: in float32, the fourth power of an outlier rounds away the other entries.
            block = rows.astype(np.float64)
            mean = block.mean(axis=1, keepdims=True)
            moments["norm"][layer, tokens] = np.sqrt(np.einsum("th,th->t", block, block))
            moments["mean"][layer, tokens] = mean[:, 0]
            # In place: one float64 block in memory instead of three.
            block -= mean
            np.square(block, out=block)
            variance = block.mean(axis=1)
            fourth_moment = np.einsum("th,th->t", block, block) / block.shape[1]
            moments["std"][layer, tokens] = np.sqrt(variance)
            with np.errstate(invalid="ignore"):
                # NaN for states whose entries are all equal.
                squared_variance = np.where(variance > 0, variance, np.nan) ** 2
                moments["kurtosis"][layer, tokens] = fourth_moment / squared_variance
    return xr.Dataset(
        {name: (TOKEN, values) for name, values in moments.items()}, coords=token_labels(states)
    )


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={
        "n": Output(("layer",), "tokens", "number of states"),
        "total": Output(DIMENSION, "1", "sum over tokens"),
        "squares": Output(DIMENSION, "1", "sum of squares over tokens"),
        "above": Output(DIMENSION, "tokens", "tokens in which the magnitude reaches the threshold"),
        "largest": Output(DIMENSION, "1", "largest magnitude"),
    },
    cells=("layer", "segment"),
    combine=by_layer(_joined_segments),
    memory=1.0,
)
def dimension_sums(states: xr.DataArray, *, magnitude: float = MAGNITUDE) -> xr.Dataset:
    """Sums over tokens for each dimension, from which `outlier_dimensions` finds outliers.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.
        magnitude: Smallest magnitude of an outlier, in the unit of the activations.

    Returns:
        n int64 [layer]; total, squares float64, above int64, largest float32 [layer, hidden].
    """
    import xarray as xr

    states = as_layers(states)
    shape = (states.sizes["layer"], states.sizes["hidden"])
    total, squares, above = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    largest = np.zeros(shape, np.float32)
    for layer in range(shape[0]):
        for _, rows in state_rows(states.isel(layer=layer)):
            total[layer] += rows.sum(axis=0, dtype=np.float64)
            size = np.abs(rows)
            above[layer] += (size >= magnitude).sum(axis=0)
            largest[layer] = np.maximum(largest[layer], size.max(axis=0))
            # float64: float32 sums over a corpus lose the last digits of most terms.
            squares[layer] += np.einsum("th,th->h", rows, rows, dtype=np.float64)
    sums = {"total": total, "squares": squares, "above": above, "largest": largest}
    data: dict[str, Any] = {name: (DIMENSION, values) for name, values in sums.items()}
    data["n"] = ("layer", np.full(shape[0], states.sizes["token"], np.int64))
    return xr.Dataset(data, coords={"layer": states["layer"]}, attrs={"magnitude": float(magnitude)})


@stage(
    version=1,
    inputs={"sums": None},
    outputs={
        "share": Output(DIMENSION, "1", "share of tokens in which the magnitude reaches the threshold"),
        "layer_share": Output(("hidden",), "1", "share of layers with enough such tokens"),
        "is_outlier": Output(("hidden",), "1", "outlier by the criterion of Dettmers et al."),
        "z_score": Output(DIMENSION, "1", "z-score of the dimension's mean among all dimensions"),
        "is_far": Output(DIMENSION, "1", "outlier of its layer by z-score"),
        "mean": Output(DIMENSION, "1", "mean over tokens"),
        "root_mean_square": Output(DIMENSION, "1", "root mean square over tokens"),
        "largest": Output(DIMENSION, "1", "largest magnitude"),
    },
)
def outlier_dimensions(
    sums: xr.Dataset,
    *,
    token_share: float = TOKEN_SHARE,
    layer_share: float = LAYER_SHARE,
    z: float = Z,
) -> xr.Dataset:
    """Which dimensions of the residual stream are outliers, by magnitude and by z-score.

    Arguments:
        sums: Result of `dimension_sums`, whose magnitude threshold applies.
        token_share: Smallest share of a layer's tokens in which an outlier reaches that magnitude.
        layer_share: Smallest share of layers in which an outlier does so.
        z: Smallest |z-score| of an outlier by the second criterion.

    Returns:
        share, z_score, mean, root_mean_square float64, largest float32, is_far bool [layer, hidden];
        layer_share float64 and is_outlier bool [hidden]. If all dimensions have the same mean, z-scores are
        0.

    Raises:
        ShapeError: A layer has no token.
    """
    import xarray as xr

    n = sums["n"].values[:, None]
    if (n == 0).any():
        raise ShapeError(
            "expected states of at least one token in every layer to find outlier dimensions, found none; "
            "select some tokens"
        )
    mean = sums["total"].transpose(*DIMENSION).values / n
    share = sums["above"].transpose(*DIMENSION).values / n
    layers = (share >= token_share).mean(axis=0)
    spread = mean.std(axis=1, keepdims=True)
    # Without spread the numerator is 0 as well: a z-score of 0, not NaN.
    score = (mean - mean.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1)
    return xr.Dataset(
        {
            "share": (DIMENSION, share),
            "layer_share": ("hidden", layers),
            "is_outlier": ("hidden", layers >= layer_share),
            "z_score": (DIMENSION, score),
            "is_far": (DIMENSION, np.abs(score) >= z),
            "mean": (DIMENSION, mean),
            "root_mean_square": (DIMENSION, np.sqrt(sums["squares"].transpose(*DIMENSION).values / n)),
            "largest": sums["largest"].transpose(*DIMENSION),
        },
        coords={"layer": sums["layer"]},
        attrs=dict(sums.attrs),
    )
