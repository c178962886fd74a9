"""Stored states [layer, token, hidden] as stages cut them: cells of one layer and one range of tokens.

Border: labelled arrays; knows nothing of what is computed on them. Reading goes range by range through
token_blocks.py, so that memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError
from .token_blocks import ahead, read_rows, token_ranges

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["as_layers", "by_layer", "end_to_end", "state_rows", "token_labels"]


def state_rows(states: xr.DataArray) -> Iterator[tuple[slice, Array]]:
    """Ranges of tokens and their states, float32 [token, hidden]."""
    return ahead(
        token_ranges(states, states.sizes["hidden"]),
        lambda here: read_rows(states, here, np.arange(here.stop - here.start)),
    )


def as_layers(states: xr.DataArray) -> xr.DataArray:
    """States as [layer, token, hidden]; a single layer may come without its axis."""
    if "layer" not in states.dims and "layer" in states.coords:
        states = states.expand_dims("layer")
    if set(states.dims) != {"layer", "token", "hidden"}:
        raise ShapeError(
            f"expected states [layer, token, hidden], found {states.dims}; stack prompts into one token "
            "axis, and keep a single layer as a list: isel(layer=[0])"
        )
    return states.transpose("layer", "token", "hidden")


def token_labels(states: xr.DataArray) -> dict[Any, xr.DataArray]:
    """The coordinates of states that still have a meaning once `hidden` is gone."""
    return {name: coord for name, coord in states.coords.items() if "hidden" not in coord.dims}


def by_layer(join: Callable[[list[xr.Dataset]], xr.Dataset]) -> Callable[[Sequence[xr.Dataset]], xr.Dataset]:
    """What joins the segments of one layer, made to join cells of layers and segments."""

    def combine(parts: Sequence[xr.Dataset]) -> xr.Dataset:
        import xarray as xr

        columns: dict[tuple[int, ...], list[xr.Dataset]] = {}
        for part in parts:
            columns.setdefault(tuple(part["layer"].values.tolist()), []).append(part)
        joined = [join(column) for column in columns.values()]
        if len(joined) == 1:
            return joined[0]
        return xr.concat(
            joined, "layer", data_vars="minimal", coords="minimal", compat="override", join="exact"
        )

    return combine


def end_to_end(parts: list[xr.Dataset]) -> xr.Dataset:
    """Results of consecutive token ranges as one."""
    import xarray as xr

    return xr.concat(parts, "token", data_vars="minimal", coords="minimal", compat="override", join="exact")
