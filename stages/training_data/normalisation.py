"""Statistics of stored states as a cached stage, and rows scaled by them.

Border: numpy on labelled states; knows no model and never imports torch.

A segment's summary is a mean and the mean squared deviation from it, of each dimension, which are joined
segment by segment (Chan, Golub and LeVeque 1983) in float64: states of a residual stream are large where
their variance is small.

Axes: layer, token, hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...pipeline import Output, stage
from ...store.errors import ConfigError, EntryNotFound, ShapeError, nearest
from ..corpus.state_cells import as_layers, by_layer, state_rows

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["NORMALISATIONS", "Normalisation", "state_statistics"]

LAYER, DIMENSION = ("layer",), ("layer", "hidden")
DIMS = {"n": LAYER, "mean": DIMENSION, "variance": DIMENSION, "norm": LAYER, "largest_norm": LAYER}
NORMALISATIONS = ("expected_average_only_in", "centred", "standard")


Summary = dict[str, npt.NDArray[Any]]
"""n, norm, largest_norm [...]; mean, variance [..., hidden]."""


def _summary(rows: npt.NDArray[np.float32]) -> Summary:
    """Of rows [token, hidden], at least one."""
    wide = rows.astype(np.float64)
    mean, lengths = wide.mean(axis=0), np.sqrt(np.einsum("th,th->t", wide, wide))
    wide -= mean
    variance = np.einsum("th,th->h", wide, wide) / len(wide)
    found = {"n": len(wide), "mean": mean, "variance": variance}
    found |= {"norm": lengths.mean(), "largest_norm": lengths.max()}
    return {name: np.asarray(value) for name, value in found.items()}


def _joined(one: Summary, other: Summary) -> Summary:
    """Of the rows of both."""
    count = one["n"] + other["n"]
    share = other["n"] / np.maximum(count, 1)
    wide = share[..., None]
    spread = (1 - wide) * one["variance"] + wide * other["variance"]
    apart = other["mean"] - one["mean"]
    return {
        "n": count,
        "mean": one["mean"] + wide * apart,
        "variance": spread + wide * (1 - wide) * apart**2,
        "norm": (1 - share) * one["norm"] + share * other["norm"],
        "largest_norm": np.maximum(one["largest_norm"], other["largest_norm"]),
    }


def _together(parts: list[xr.Dataset]) -> xr.Dataset:
    """Statistics of all tokens from those of ranges of them."""
    found = reduce(_joined, ({name: part[name].values for name in DIMS} for part in parts))
    first = parts[0]
    return first.assign({name: first[name].copy(data=values) for name, values in found.items()})


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={
        "n": Output(LAYER, "tokens", "number of states"),
        "mean": Output(DIMENSION, "1", "mean over tokens"),
        "variance": Output(DIMENSION, "1", "mean squared distance from the mean"),
        "norm": Output(LAYER, "1", "mean length of a state"),
        "largest_norm": Output(LAYER, "1", "largest length of a state"),
    },
    cells=("layer", "segment"),
    combine=by_layer(_together),
    memory=1.0,
)
def state_statistics(states: xr.DataArray, *, skip_positions: int = 0) -> xr.Dataset:
    """Mean and variance of every dimension, and lengths of states: what normalising training data takes.

    states: [layer, token, hidden], any float dtype, lazy or not.  skip_positions: first positions of each
    prompt that count nowhere (their states are often ten times as long as others).
    Returns n int64; mean, variance (no n - 1) float64 [layer, hidden]; norm, largest_norm float64 [layer]. A
    range in which nothing is left has n = 0 and zeros.
    """
    import xarray as xr

    states = as_layers(states)
    kept, width = _behind(states, skip_positions), states.sizes["hidden"]
    nothing: Summary = {name: np.zeros(width if "hidden" in dims else ()) for name, dims in DIMS.items()}
    nothing["n"] = np.zeros((), np.int64)
    layers = []
    for layer in range(states.sizes["layer"]):
        parts = (rows[kept[here]] for here, rows in state_rows(states.isel(layer=layer)))
        layers.append(reduce(_joined, (_summary(rows) for rows in parts if len(rows)), nothing))
    data = {name: (dims, np.stack([layer[name] for layer in layers])) for name, dims in DIMS.items()}
    return xr.Dataset(data, coords={"layer": states["layer"]}, attrs={"skip_positions": skip_positions})


def _behind(states: xr.DataArray, skip_positions: int) -> npt.NDArray[np.bool_]:
    """Which tokens count, bool [token]."""
    if not skip_positions:
        return np.ones(states.sizes["token"], bool)
    if "position" not in states.coords:
        raise ShapeError(
            "expected a coordinate 'position' beside the states, found none; or leave skip_positions at 0"
        )
    found: npt.NDArray[np.bool_] = states["position"].values >= skip_positions
    return found


@dataclass(frozen=True, eq=False)
class Normalisation:
    """(x - mean) * scale for rows [..., hidden]; both float32, a number or [hidden]."""

    mean: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]

    @classmethod
    def of(cls, statistics: xr.Dataset, layer: int | None, how: str) -> Normalisation:
        """What `how` makes of the rows of a layer (None: of the only one).

        expected_average_only_in: lengths are sqrt(hidden) on average, as SAELens names it; nothing is
        centred. centred: mean 0 and mean squared entry 1, one factor for all dimensions. standard: mean 0 and
        variance 1 of every dimension; one that never changes is left at 0.
        Raises ConfigError for an unknown name or states that are all 0, EntryNotFound for another layer.
        """
        if how not in NORMALISATIONS:
            near = nearest(how, NORMALISATIONS)
            raise ConfigError(
                f"expected a normalisation among {', '.join(NORMALISATIONS)}, found {how!r}"
                + (f"; nearest is {near!r}" if near else "")
            )
        held = np.atleast_1d(statistics["layer"].values).tolist()
        if layer is not None and layer not in held:
            raise EntryNotFound(f"expected statistics of layer {layer}, found those of {held}; compute them")
        at = (
            statistics
            if "layer" not in statistics.dims
            else statistics.isel(layer=held.index(held[0] if layer is None else layer))
        )
        mean, variance = at["mean"].values, at["variance"].values
        if how == "expected_average_only_in":
            return cls(np.zeros((), np.float32), _over(np.sqrt(len(mean)), float(at["norm"])))
        if how == "centred":
            return cls(mean.astype(np.float32), _over(1.0, np.sqrt(variance.mean())))
        spread = np.sqrt(variance)
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
        return cls(mean.astype(np.float32), scale.astype(np.float32))

    def __call__(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """These rows, changed in place."""
        rows -= self.mean
        rows *= self.scale
        return rows


def _over(wanted: float, found: float) -> npt.NDArray[np.float32]:
    if not found > 0:
        raise ConfigError(
            "expected states that differ from each other and from 0, found none to scale by; "
            "are they captured?"
        )
    return np.array(wanted / found, np.float32)
