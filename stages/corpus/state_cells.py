"""Helpers of stages over states [layer, token, hidden]: check axes, read in token ranges, join cells.

Such stages are cut into cells of one layer and one segment of tokens. States are read range by range through
token_blocks.py, so memory does not grow with the corpus.

Border: labelled arrays; independent of the statistic that a stage computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError
from .token_blocks import ahead, read_rows, token_ranges

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["added", "as_layers", "by_layer", "end_to_end", "state_rows", "token_labels"]


def state_rows(states: xr.DataArray) -> Iterator[tuple[slice, Array]]:
    """Yield (token range, float32 states [token, hidden]) of one layer, block by block along the tokens."""
    return ahead(
        token_ranges(states, states.sizes["hidden"]),
        lambda tokens: read_rows(states, tokens, np.arange(tokens.stop - tokens.start)),
    )


def as_layers(states: xr.DataArray) -> xr.DataArray:
    """States with axes in the order [layer, token, hidden]; one selected layer becomes an axis of length 1.

    Raises:
        ShapeError: The states have other axes.
    """
    # isel(layer=0) drops the axis, but leaves the layer as a scalar coordinate.
    if "layer" not in states.dims and "layer" in states.coords:
        states = states.expand_dims("layer")
    if set(states.dims) != {"layer", "token", "hidden"}:
        raise ShapeError(
            "expected states with the dimensions layer, token and hidden, found "
            f"{', '.join(map(str, states.dims))}; stack prompts into one token axis, and select a single "
            "layer as a list: isel(layer=[0])"
        )
    return states.transpose("layer", "token", "hidden")


def token_labels(states: xr.DataArray) -> dict[Any, xr.DataArray]:
    """State coordinates independent of `hidden`, for results reduced over `hidden`."""
    return {name: coord for name, coord in states.coords.items() if "hidden" not in coord.dims}


def by_layer(join: Callable[[list[xr.Dataset]], xr.Dataset]) -> Callable[[Iterable[xr.Dataset]], xr.Dataset]:
    """Function that joins the results of cells of one layer and one segment of tokens, over both.

    Arguments:
        join: Function that joins the results of one layer's segments, given in order.
    """

    def combine(parts: Iterable[xr.Dataset]) -> xr.Dataset:
        import xarray as xr

        parts_by_layer: dict[tuple[int, ...], list[xr.Dataset]] = {}
        for part in parts:
            layers = np.atleast_1d(part["layer"].values).tolist() if "layer" in part else ()
            parts_by_layer.setdefault(tuple(layers), []).append(part)
        joined = [join(segments) for segments in parts_by_layer.values()]
        if len(joined) == 1:
            return joined[0]
        # xarray's defaults compare all coordinates of all parts, which reads lazy token labels.
        return xr.concat(
            joined, "layer", data_vars="minimal", coords="minimal", compat="override", join="exact"
        )

    return combine


def end_to_end(parts: list[xr.Dataset]) -> xr.Dataset:
    """Concatenate the results of consecutive segments along `token`."""
    import xarray as xr

    return xr.concat(parts, "token", data_vars="minimal", coords="minimal", compat="override", join="exact")


def added(parts: list[xr.Dataset], names: Iterable[str]) -> xr.Dataset:
    """One layer's result from its segments, for variables that are sums over tokens.

    Arguments:
        parts: Results of the segments.
        names: Variables to add up; the other variables are taken from the first segment.
    """
    sums = {name: parts[0][name].copy(data=sum(part[name].values for part in parts)) for name in names}
    return parts[0].assign(sums)
