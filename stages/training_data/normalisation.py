"""Statistics of stored states as a cached stage, and normalisation of rows by them.

The summary of a segment is the mean and the mean squared deviation of each dimension. Segments are merged by
the update of Chan, Golub and LeVeque (1983, "Algorithms for Computing the Sample Variance"), in float64,
because residual streams have large values with small variance.

Axes: layer, token, hidden. Needs no model and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...pipeline import Output, stage
from ...store.arrays import Bools
from ...store.errors import ConfigError, EntryNotFound, ShapeError, nearest
from ..corpus.state_cells import as_layers, by_layer, state_rows

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["NORMALISATIONS", "Normalisation", "state_statistics"]

LAYER, DIMENSION = ("layer",), ("layer", "hidden")
DIMS = {"n": LAYER, "mean": DIMENSION, "variance": DIMENSION, "norm": LAYER, "largest_norm": LAYER}
"""Dims of each statistic."""
NORMALISATIONS = ("expected_average_only_in", "centred", "standard")
"""Names of the methods by which rows can be normalised; see `Normalisation.of`."""

Summary = dict[str, npt.NDArray[Any]]
"""Statistics of some rows: n, norm and largest_norm [...]; mean and variance [..., hidden]."""


def _summary(rows: npt.NDArray[np.float32]) -> Summary:
    """Statistics of at least one state [token, hidden]."""
    deviations = rows.astype(np.float64)
    mean, lengths = deviations.mean(axis=0), np.sqrt(np.einsum("th,th->t", deviations, deviations))
    # Two passes in float64: E[x^2] - E[x]^2 would cancel for large means.
    deviations -= mean
    variance = np.einsum("th,th->h", deviations, deviations) / len(deviations)
    summary = {"n": len(deviations), "mean": mean, "variance": variance}
    summary |= {"norm": lengths.mean(), "largest_norm": lengths.max()}
    return {name: np.asarray(value) for name, value in summary.items()}


def _joined(first_summary: Summary, second_summary: Summary) -> Summary:
    """Statistics of two sets of states together, from those of each."""
    count = first_summary["n"] + second_summary["n"]
    # Share of the second set; empty ranges have n = 0, and merge without a division by zero.
    share = second_summary["n"] / np.maximum(count, 1)
    weight = share[..., None]
    variance_within = (1 - weight) * first_summary["variance"] + weight * second_summary["variance"]
    difference = second_summary["mean"] - first_summary["mean"]
    return {
        "n": count,
        "mean": first_summary["mean"] + weight * difference,
        "variance": variance_within + weight * (1 - weight) * difference**2,
        "norm": (1 - share) * first_summary["norm"] + share * second_summary["norm"],
        "largest_norm": np.maximum(first_summary["largest_norm"], second_summary["largest_norm"]),
    }


def _merged(parts: list[xr.Dataset]) -> xr.Dataset:
    """Merge the statistics of consecutive ranges of tokens, as datasets."""
    merged = reduce(_joined, ({name: part[name].values for name in DIMS} for part in parts))
    first_part = parts[0]
    return first_part.assign({name: first_part[name].copy(data=values) for name, values in merged.items()})


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={
        "n": Output(LAYER, "tokens", "number of states"),
        "mean": Output(DIMENSION, "1", "mean over tokens"),
        "variance": Output(DIMENSION, "1", "mean squared deviation from the mean"),
        "norm": Output(LAYER, "1", "mean length of a state"),
        "largest_norm": Output(LAYER, "1", "largest length of a state"),
    },
    cells=("layer", "segment"),
    combine=by_layer(_merged),
    memory=1.0,
)
def state_statistics(states: xr.DataArray, *, skip_positions: int = 0) -> xr.Dataset:
    """Mean and variance of every dimension, and lengths of states, as needed to normalise training data.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.
        skip_positions: Leading positions of each prompt to exclude; the norm of the first state is often ten
            times that of others.

    Returns:
        n int64; mean, variance (divided by n, not n - 1) float64 [layer, hidden]; norm, largest_norm float64
        [layer]. A range without any state left has n = 0 and zeros.
    """
    import xarray as xr

    states = as_layers(states)
    is_kept, width = _is_after_skipped(states, skip_positions), states.sizes["hidden"]
    # Neutral element of the merge: a range in which every token is excluded still has a result.
    nothing: Summary = {name: np.zeros(width if "hidden" in dims else ()) for name, dims in DIMS.items()}
    nothing["n"] = np.zeros((), np.int64)
    layers = []
    for layer in range(states.sizes["layer"]):
        parts = (rows[is_kept[token_range]] for token_range, rows in state_rows(states.isel(layer=layer)))
        layers.append(reduce(_joined, (_summary(rows) for rows in parts if len(rows)), nothing))
    data = {name: (dims, np.stack([layer[name] for layer in layers])) for name, dims in DIMS.items()}
    return xr.Dataset(data, coords={"layer": states["layer"]}, attrs={"skip_positions": skip_positions})


def _is_after_skipped(states: xr.DataArray, skip_positions: int) -> Bools:
    """Whether each token is after the first `skip_positions` positions of its prompt, bool [token]."""
    # Without a skip no coordinate is needed: states of other sources may have none.
    if not skip_positions:
        return np.ones(states.sizes["token"], bool)
    if "position" not in states.coords:
        raise ShapeError(
            "skip_positions needs the position of each state in its prompt, the coordinate 'position', "
            "which these states lack; set skip_positions to 0"
        )
    is_kept: Bools = states["position"].values >= skip_positions
    return is_kept


@dataclass(frozen=True, eq=False)
class Normalisation:
    """Normalises states x [..., hidden] to (x - mean) * scale."""

    mean: npt.NDArray[np.float32]
    """What is subtracted from a state, float32 [] or [hidden]."""
    scale: npt.NDArray[np.float32]
    """Factor that is applied then, float32 [] or [hidden]."""

    @classmethod
    def of(cls, statistics: xr.Dataset, layer: int | None, method: str) -> Normalisation:
        """Normalisation of the states of a layer by their statistics.

        Arguments:
            statistics: Result of `state_statistics`.
            layer: Layer number; None for the only layer.
            method: "expected_average_only_in" scales to an average norm of sqrt(hidden) without centring (the
                name is SAELens's). "centred" gives mean 0 and mean squared entry 1, with one factor for all
                dimensions. "standard" gives mean 0 and variance 1 in every dimension; constant ones become 0.

        Raises:
            ConfigError: Unknown method, or all states are 0.
            EntryNotFound: The statistics lack the layer.
        """
        if method not in NORMALISATIONS:
            near = nearest(method, NORMALISATIONS)
            raise ConfigError(
                f"expected one of {', '.join(NORMALISATIONS)} as the method of normalisation, found "
                f"{method!r}" + (f"; did you mean {near!r}?" if near else "")
            )
        layers = np.atleast_1d(statistics["layer"].values).tolist()
        if layer is not None and layer not in layers:
            raise EntryNotFound(
                f"the statistics lack layer {layer}, they are of layers {layers}; compute them with "
                "state_statistics for that layer"
            )
        layer_statistics = (
            statistics
            if "layer" not in statistics.dims
            else statistics.isel(layer=layers.index(layers[0] if layer is None else layer))
        )
        mean, variance = layer_statistics["mean"].values, layer_statistics["variance"].values
        if method == "expected_average_only_in":
            return cls(np.zeros((), np.float32), _factor(np.sqrt(len(mean)), float(layer_statistics["norm"])))
        if method == "centred":
            return cls(mean.astype(np.float32), _factor(1.0, np.sqrt(variance.mean())))
        spread = np.sqrt(variance)
        # A constant dimension would be scaled to infinity.
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
        return cls(mean.astype(np.float32), scale.astype(np.float32))

    def __call__(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Normalise rows in place and return them."""
        # In place: a batch may be the largest array in memory.
        rows -= self.mean
        rows *= self.scale
        return rows


def _factor(target: float, actual: float) -> npt.NDArray[np.float32]:
    """The factor target / actual as a float32 array; ConfigError if `actual` is 0 or NaN."""
    if not actual > 0:
        raise ConfigError(
            "states cannot be normalised if all of them are equal or 0, as these statistics say; check that "
            "the statistics are of the captured states"
        )
    return np.array(target / actual, np.float32)
