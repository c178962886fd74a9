"""First-order effects from what is stored: activations, and gradients of a metric at the same hook points.

Border: labelled arrays; knows no model and no metric, never imports torch.

Idea (Nanda 2023, "Attribution Patching"; Syed et al. 2023): a metric of the corrupted run moves, when an
activation there becomes that of the clean run, by about (clean - corrupted) . gradient. Summed over what is
patched together - a state, a head, a neuron - that is an estimate of the patching grid at the price of one
pass back. Gradient times activation is the same with nothing in place of the clean run (Simonyan et al. 2014;
Shrikumar et al. 2017): what the activation would lose if it were zero.

Nothing is computed by a model here: a second metric costs its gradients, a second pair nothing else.

Axes: layer, token, then head, d_head, mlp or hidden. Unit: that of the metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array
from ....store.errors import ShapeError
from ...corpus.token_blocks import ahead, read_rows, token_ranges

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["gradient_attribution", "patch_attribution"]

STREAM = ("layer", "token", "hidden")
HEADS = ("layer", "token", "head|kv_head", "d_head")
NEURONS = ("layer", "token", "mlp")
_WITHIN = ("hidden", "d_head")
"""Axes a cause is not cut along: what lies on them is summed."""
_OUTPUT = {
    "attribution": Output(
        ("layer", "token", "head|kv_head|mlp?"), "as the metric", "first-order effect on the metric"
    )
}


def _forms(name: str, *inputs: str) -> dict[str, Mapping[str, tuple[str, ...] | None]]:
    """A form for the stream, one for heads and one for neurons, of the same inputs."""
    places = {"": STREAM, "_of_heads": HEADS, "_of_neurons": NEURONS}
    return {f"{name}{of}": dict.fromkeys(inputs, dims) for of, dims in places.items()}


@stage(
    version=1,
    forms=_forms("patch_attribution", "clean", "corrupted", "gradient"),
    outputs=_OUTPUT,
    cells="layer",
    memory=0.5,
)
def patch_attribution(clean: xr.DataArray, corrupted: xr.DataArray, gradient: xr.DataArray) -> xr.DataArray:
    """Estimate of what each place of the clean run does when it is put into the corrupted run.

    clean, corrupted: activations [layer, token, ...], the prompts of both end to end, as many tokens each and
    in the same order. gradient: of the metric, in the corrupted run. Returns float64 [layer, token], and
    [head] or [mlp] behind. Raises ShapeError for arrays that do not belong together.
    """
    return _contracted(gradient, {"clean": clean, "corrupted": corrupted})


@stage(
    version=1,
    forms=_forms("gradient_attribution", "activation", "gradient"),
    outputs=_OUTPUT,
    cells="layer",
    memory=0.5,
)
def gradient_attribution(activation: xr.DataArray, gradient: xr.DataArray) -> xr.DataArray:
    """Gradient times activation: what a metric has of each place, to first order.

    activation: [layer, token, ...]; gradient: of the metric, in the same run. Returns float64 [layer, token],
    and [head] or [mlp] behind. Raises ShapeError for arrays that do not belong together.
    """
    return _contracted(gradient, {"activation": activation})


def _contracted(gradient: xr.DataArray, held: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """gradient . (the first held, less the second), summed within a cause."""
    import xarray as xr

    for name, array in held.items():
        _require_alike(name, array, gradient)
    one, *others = held.values()
    units = [str(dim) for dim in gradient.dims if dim not in ("layer", "token", *_WITHIN)]
    dims = ["layer", "token", *units]
    found = np.empty([gradient.sizes[dim] for dim in dims])
    width = int(np.prod([gradient.sizes[dim] for dim in gradient.dims if dim not in ("layer", "token")]))
    reads = [
        (layer, here) for layer in range(gradient.sizes["layer"]) for here in token_ranges(gradient, width)
    ]

    def moved(at: tuple[int, slice]) -> Array:
        layer, here = at
        rows = np.arange(here.stop - here.start)
        first = read_rows(one, here, rows, layer=layer)
        return first - read_rows(others[0], here, rows, layer=layer) if others else first

    within = tuple(gradient.dims.index(dim) - 1 for dim in _WITHIN if dim in gradient.dims)
    for (layer, here), rows in ahead(reads, moved):
        slope = read_rows(gradient, here, np.arange(here.stop - here.start), layer=layer)
        found[layer, here] = np.multiply(rows, slope, dtype=np.float64).sum(axis=within)
    return xr.DataArray(found, dims=dims, coords=_labels(gradient, dims), name="attribution")


def _require_alike(name: str, array: xr.DataArray, gradient: xr.DataArray) -> None:
    for dim in gradient.dims:
        if array.sizes[dim] != gradient.sizes[dim]:
            raise ShapeError(
                f"expected {name} and gradient of equal sizes, found {array.sizes[dim]} and "
                f"{gradient.sizes[dim]} along {dim!r}; capture both of the same layers, of prompts that have "
                "as many tokens"
            )
    for label in ("layer", "position"):
        is_told = label in array.coords and label in gradient.coords
        if is_told and not np.array_equal(array[label].values, gradient[label].values):
            raise ShapeError(
                f"expected {name} and gradient at the same {label}s, found others; their prompts, one after "
                "the other, must have as many tokens each"
            )


def _labels(gradient: xr.DataArray, dims: list[str]) -> dict[Any, Any]:
    """Labels of what is left."""
    return {name: coord for name, coord in gradient.coords.items() if set(coord.dims) <= set(dims)}
