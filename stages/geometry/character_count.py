"""How a model represents the number of characters since the start of the line: mean states and their
geometry.

Idea (Gurnee et al. 2025, "When Models Manipulate Manifolds", transformer-circuits.pub/2025/linebreaks):
average the residual stream over all tokens that start c characters into their line. The means lie on a curve
that winds through a few dimensions, so the cosine between the means of c and c + d falls and rises again as d
grows ("ringing").

Two controls: the same with counts shuffled among tokens, where the curve must vanish; and least squares
scored on held-out prompts, with expectation 0 if the states do not encode the count.

Axes: count (coordinate = characters, 1 to max_count), offset (difference of two counts), component, hidden;
counts ("true" or "shuffled", to which a read-out was fitted). Needs no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from ..corpus.state_cells import added, by_layer
from .components import stack_layers
from .pca import pca, project_to_pcs
from .row_moments import Moments, row_blocks

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["add_sums", "count_geometry", "count_sums", "decodability", "ringing"]


COUNTS = ["true", "shuffled"]
"""Labels of the `counts` axis: the true character counts, and the control with counts shuffled among
tokens."""
MAX_OFFSET = 50
"""Upper limit on the offsets of `ringing`, in characters."""


add_sums = by_layer(partial(added, names=("total", "n")))
"""Add the sums of all segments, per layer."""


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden"), "count": ("token",)},
    outputs={
        "total": Output(("layer", "counts", "count", "hidden"), "1", "sum of the states at each count"),
        "n": Output(("count",), "tokens", "tokens at each count"),
    },
    cells=("layer", "segment"),
    combine=add_sums,
)
def count_sums(
    states: xr.DataArray, count: xr.DataArray, *, max_count: int, shuffle_seed: int = 0
) -> xr.Dataset:
    """Sum of the states, and number of tokens, at each character count: the cacheable summary of one segment.

    Arguments:
        states: [layer?, token, hidden], any float dtype, lazy or not.
        count: Characters since the start of the line, int [token]; tokens with a count outside of 1 to
            max_count are ignored.
        max_count: Largest count.
        shuffle_seed: Seed of the control, which shuffles the counts of the segment among its tokens.

    Returns:
        total float64 [layer?, counts, count, hidden]; n int64 [count], the same for true and shuffled counts.
    """
    import xarray as xr

    true_counts = _labels_of_tokens(states, count)
    in_range = _in_range(true_counts, max_count)
    shuffled_counts = shuffled(true_counts, max_count, shuffle_seed)
    # Count 0 marks tokens to leave out.
    labellings = [np.where(in_range, counts, 0) for counts in (true_counts, shuffled_counts)]
    n = np.bincount(true_counts[in_range], minlength=max_count + 1)[1:]
    lead = ("layer",) if "layer" in states.dims else ()
    if lead:
        layers = range(states.sizes["layer"])
        total = np.stack([_sums_by_count(states.isel(layer=i), labellings, max_count) for i in layers])
    else:
        total = _sums_by_count(states, labellings, max_count)
    coords: dict[str, Any] = {"counts": COUNTS, "count": np.arange(1, max_count + 1)}
    if "layer" in states.coords:
        coords["layer"] = states["layer"]
    return xr.Dataset(
        {"total": ((*lead, "counts", "count", "hidden"), total), "n": ("count", n.astype(np.int64))},
        coords=coords,
    )


@stage(
    version=1,
    inputs={"sums": None},
    outputs={
        "mean": Output(("layer", "count", "hidden"), "1", "mean state at each count"),
        "n": Output(("count",), "tokens", "tokens at each count"),
        "components": Output(("layer", "component", "hidden"), "1", "principal components of the means"),
        "explained_variance_ratio": Output(("layer", "component"), "1", "share of the variance of the means"),
        "projection": Output(("layer", "count", "component"), "1", "means along the components"),
        "cosine": Output(("layer", "count", "other_count"), "1", "cosine between means"),
        "ringing": Output(("layer", "offset"), "1", "mean cosine of means by distance in characters"),
    },
)
def count_geometry(
    sums: xr.Dataset,
    *,
    counts: str = "true",
    n_components: int = 6,
    min_count: int = 1,
    min_tokens: int = 1,
    centre: bool = True,
) -> xr.Dataset:
    """Geometry of the mean states at each character count: principal components, projections, cosines.

    Arguments:
        sums: Result of `count_sums`, possibly added over segments.
        counts: "true", or "shuffled" for the control.
        n_components: Number of components.
        min_count: Smallest count to use; leaves out the first positions of a line (candle-mi: pca_n_omit).
        min_tokens: Fewest tokens of a count; counts with fewer are left out.
        centre: Whether to subtract the mean of the means before projections and cosines. Without it all
            cosines are near 1, because states share a large offset (as in candle-mi). The components are the
            same either way.

    Returns:
        Per layer, float64, every count with equal weight: mean [count, hidden], n [count]; components
        [component, hidden]; explained_variance_ratio [component]; projection [count, component]; cosine
        [count, other_count]; ringing [offset], see `ringing`.

    Raises:
        ShapeError: Not more than n_components counts remain.
    """
    import xarray as xr

    # A count without tokens has no mean.
    keep = (sums["n"] >= max(min_tokens, 1)) & (sums["count"] >= min_count)
    sums = sums.sel(counts=counts, drop=True).isel(count=np.flatnonzero(keep.values))
    if sums.sizes["count"] <= n_components:
        raise ShapeError(
            f"{n_components} principal components need the mean states of more than {n_components} character "
            f"counts, found {sums.sizes['count']} counts with enough tokens; pass more text, longer lines, a "
            "smaller n_components or a smaller min_tokens"
        )
    # Each count has the same weight, although small counts, which lines of any width have, have more tokens.
    mean = sums["total"] / sums["n"]
    fitted = pca(mean, n_components=n_components)
    vectors = mean - fitted["mean"] if centre else mean
    cosine = _cosines(vectors)
    return xr.Dataset(
        {
            "mean": mean.transpose(..., "count", "hidden"),
            "n": sums["n"],
            "components": fitted["components"],
            "explained_variance_ratio": fitted["explained_variance_ratio"],
            "projection": project_to_pcs(mean, fitted, centre=centre),
            "cosine": cosine,
            "ringing": ringing(cosine),
        },
        attrs={"centred": int(centre)},
    )


def ringing(cosine: xr.DataArray) -> xr.DataArray:
    """Mean cosine between mean states whose counts differ by `offset` characters, [layer?, offset].

    It is 1 at offset 0. Offsets are below MAX_OFFSET; an offset without any pair of counts is left out.

    Arguments:
        cosine: Cosines between the mean states of two counts, [layer?, count, other_count].
    """
    import xarray as xr

    counts = cosine["count"].values
    distance = np.abs(counts[:, None] - counts[None, :])
    offsets = [d for d in range(min(MAX_OFFSET, int(distance.max()) + 1)) if (distance == d).any()]
    values = cosine.transpose("count", "other_count", ...).values
    means = np.stack([values[distance == d].mean(axis=0) for d in offsets], axis=-1)
    lead = [str(dim) for dim in cosine.dims if dim not in ("count", "other_count")]
    coords: dict[str, Any] = {
        "offset": offsets,
        **{name: cosine[name] for name in lead if name in cosine.coords},
    }
    return xr.DataArray(means, dims=(*lead, "offset"), coords=coords, name="ringing")


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden"), "count": ("token",), "prompt": ("token",)},
    outputs={"r2": Output(("layer", "counts"), "1", "R2 of the count on held-out prompts")},
    cells="layer",
)
def decodability(
    states: xr.DataArray,
    count: xr.DataArray,
    prompt: xr.DataArray,
    *,
    max_count: int,
    ridge: float = 1e-4,
    shuffle_seed: int = 0,
) -> xr.Dataset:
    """R2 of a linear read-out of the character count from the states, by two-fold cross-validation over
    prompts.

    Fitted on even prompts and scored on odd ones, then the other way round; r2 is the mean of both, so that
    chance level is 0 or below for any width.

    Arguments:
        states: [layer?, token, hidden].
        count: int [token], characters.
        prompt: int [token], prompt of each token.
        max_count: Largest count; other tokens are ignored.
        ridge: Penalty relative to the mean variance of the states; keeps rank-deficient problems solvable.
        shuffle_seed: Seed of the control, which shuffles counts within each half.

    Returns:
        r2 [layer?, counts]; NaN if a half has only one count.
    """
    import xarray as xr

    if "layer" in states.dims:
        parameters = {"max_count": max_count, "ridge": ridge, "shuffle_seed": shuffle_seed}
        return stack_layers(
            decodability(states.isel(layer=i), count, prompt, **parameters)
            for i in range(states.sizes["layer"])
        )
    counts, half = _labels_of_tokens(states, count), _labels_of_tokens(states, prompt) % 2
    in_range = _in_range(counts, max_count)
    targets = np.stack([counts, np.zeros_like(counts)], axis=1).astype(np.float64)
    for fold in (0, 1):
        # Shuffled within each half, so that both halves keep their distribution of counts.
        in_half = half == fold
        targets[in_half, 1] = shuffled(counts[in_half], max_count, shuffle_seed + fold)
    fits = [_fold_moments(states, targets, in_range & (half == fold)) for fold in (0, 1)]
    if None in fits:
        scores = np.full(2, np.nan)
    else:
        even, odd = fits
        assert even is not None
        assert odd is not None
        scores = (_held_out_r2(even, odd, ridge) + _held_out_r2(odd, even, ridge)) / 2
    coords: dict[str, Any] = {"counts": COUNTS}
    if "layer" in states.coords:
        coords["layer"] = states["layer"]
    return xr.Dataset({"r2": ("counts", scores)}, coords=coords)


def shuffled(counts: Array, max_count: int, seed: int) -> Array:
    """A copy of counts, permuted among the tokens with a count from 1 to max_count; other counts unchanged.

    Arguments:
        counts: Count of each token, int [token].
        max_count: Largest count.
        seed: Seed of the permutation.
    """
    out = counts.copy()
    in_range = _in_range(counts, max_count)
    out[in_range] = np.random.default_rng(seed).permutation(counts[in_range])
    return out


def _in_range(counts: Array, max_count: int) -> Array:
    """Whether each count is from 1 to max_count, bool [token]."""
    return (counts >= 1) & (counts <= max_count)


def _labels_of_tokens(states: xr.DataArray, labels: xr.DataArray) -> Array:
    """Counts or prompts of the tokens as int64 [token]; ShapeError unless there is one for each state."""
    if states.dims[-2:] != ("token", "hidden") or labels.dims != ("token",):
        raise ShapeError(
            "expected states [layer?, token, hidden] and one count or prompt per token, [token]; found "
            f"states {states.dims} and labels {labels.dims}"
        )
    if states.sizes["token"] != labels.sizes["token"]:
        raise ShapeError(
            f"expected a count or prompt for each of the {states.sizes['token']} tokens of the states, found "
            f"{labels.sizes['token']}"
        )
    return np.asarray(labels.values, np.int64)


def _sums_by_count(states: xr.DataArray, labellings: Sequence[Array], max_count: int) -> Array:
    """Sums of the states at each count from 1 to max_count, float64 [labelling, count, hidden].

    Arguments:
        states: [token, hidden].
        labellings: Count of each token, int [token], in several versions; 0 marks tokens to leave out.
        max_count: Largest count.
    """
    total = np.zeros((len(labellings), max_count, states.sizes["hidden"]))
    start = 0
    for block in row_blocks(states):
        for out, counts in zip(total, labellings, strict=True):
            block_counts = counts[start : start + len(block)]
            order = np.argsort(block_counts, kind="stable")
            order = order[np.searchsorted(block_counts[order], 1) :]
            if len(order):
                values, group_starts = np.unique(block_counts[order], return_index=True)
                # Sorted rows of one count are contiguous, so that one reduceat adds each group in float64.
                out[values - 1] += np.add.reduceat(block[order].astype(np.float64), group_starts, axis=0)
        start += len(block)
    return total


def _cosines(vectors: xr.DataArray) -> xr.DataArray:
    """Cosine between the vectors of every two counts, [layer?, count, other_count]; 0 with a zero vector."""
    import xarray as xr

    length = (vectors**2).sum("hidden") ** 0.5
    unit = vectors / length.where(length > 0, 1.0)
    cosine: xr.DataArray = xr.dot(unit, unit.rename(count="other_count"), dim="hidden")
    # Rounding takes the cosine of a vector with itself beyond 1.
    return cosine.clip(-1.0, 1.0).transpose(..., "count", "other_count")


def _fold_moments(states: xr.DataArray, targets: Array, selected: Array) -> Moments | None:
    """Moments of the columns [state, true count, shuffled count] over selected tokens, for least squares.

    None if the selected tokens all have the same count.
    """
    if len(np.unique(targets[selected, 0])) < 2:
        return None

    def blocks() -> Any:
        start = 0
        for block in row_blocks(states):
            rows_in_block = np.flatnonzero(selected[start : start + len(block)])
            if len(rows_in_block):
                rows = np.empty((len(rows_in_block), block.shape[1] + 2), np.float32)
                rows[:, :-2] = block[rows_in_block]
                rows[:, -2:] = targets[start + rows_in_block]
                yield rows
            start += len(block)

    return Moments.of(blocks())


def _held_out_r2(fit: Moments, test: Moments, ridge: float) -> Array:
    """R2 on one half of the tokens of ridge regressions of the counts fitted on the other half, [counts].

    Arguments:
        fit: Moments of the half that is fitted, see `_fold_moments`.
        test: Moments of the half that is predicted.
        ridge: Penalty, relative to the mean variance of the states.
    """
    hidden = len(fit.mean) - 2
    xx, xy = fit.scatter[:hidden, :hidden], fit.scatter[:hidden, hidden:]
    # tiny keeps the system solvable for states that are all 0.
    penalty = ridge * max(float(np.trace(xx)) / hidden, np.finfo(np.float64).tiny)
    weights = np.linalg.solve(xx + penalty * np.eye(hidden), xy)
    # Residual of y on test = (y - mean_y) - w'(x - mean_x) + shift, shift from the means of the two halves.
    shift = (test.mean - fit.mean)[hidden:] - weights.T @ (test.mean - fit.mean)[:hidden]
    # Sums over the test half: of (y - mean_y)^2, of (y - mean_y) w'(x - mean_x), and of (w'(x - mean_x))^2.
    yy = np.diag(test.scatter)[hidden:]
    y_times_fitted = np.sum(weights * test.scatter[:hidden, hidden:], axis=0)
    fitted_squared = np.sum(weights * (test.scatter[:hidden, :hidden] @ weights), axis=0)
    return np.asarray(1 - (yy - 2 * y_times_fitted + fitted_squared + test.n * shift**2) / yy)
