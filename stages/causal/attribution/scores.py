"""Attribution scores from stored activations and gradients of a metric at the same hook points.

Border: labelled arrays; no model, no metric, no torch.

Replacing a corrupted activation by the clean one changes the metric of the corrupted run by about (clean -
corrupted) . gradient (Nanda 2023, "Attribution Patching"; Syed et al. 2023). Summed over what is patched
together, such as a state, a head or a neuron, this estimates the patching grid for the price of one backward
pass. Gradient times activation is the special case with 0 in place of the clean run (Simonyan et al. 2014;
Shrikumar et al. 2017): the estimated loss from zeroing the activation.

No model is run here: a second metric costs its gradients, a second pair of prompts its activations.

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

# Dims of the activations of each form: residual stream, heads, MLP neurons.
STREAM = ("layer", "token", "hidden")
HEADS = ("layer", "token", "head|kv_head", "d_head")
NEURONS = ("layer", "token", "mlp")
_WITHIN = ("hidden", "d_head")
"""Axes over which the products are summed."""
_OUTPUT = {
    "attribution": Output(
        ("layer", "token", "head|kv_head|mlp?"), "as the metric", "first-order effect on the metric"
    )
}


def _forms(name: str, *inputs: str) -> dict[str, Mapping[str, tuple[str, ...] | None]]:
    """Declared input forms of a stage: residual stream, heads, and MLP neurons, each with the same inputs."""
    dims_of = {"": STREAM, "_of_heads": HEADS, "_of_neurons": NEURONS}
    return {f"{name}{suffix}": dict.fromkeys(inputs, dims) for suffix, dims in dims_of.items()}


@stage(
    version=1,
    forms=_forms("patch_attribution", "clean", "corrupted", "gradient"),
    outputs=_OUTPUT,
    cells="layer",
    memory=0.5,
)
def patch_attribution(clean: xr.DataArray, corrupted: xr.DataArray, gradient: xr.DataArray) -> xr.DataArray:
    """Attribution patching: estimated effect on a metric of patching clean activations into a corrupted run.

    Arguments:
        clean: Activations [layer, token, ...] of the clean prompts, concatenated along token.
        corrupted: Activations of the corrupted prompts, same shape, prompts in the same order.
        gradient: Gradient of the metric in the corrupted run, same shape.

    Returns:
        float64 [layer, token], or [layer, token, head] or [layer, token, mlp] if the activation has that
        axis.

    Raises:
        ShapeError: The arrays have different sizes, layers or positions.
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
    """Gradient times activation: the estimated decrease of a metric if the activation were zero.

    Arguments:
        activation: Activations [layer, token, ...].
        gradient: Gradient of the metric in the same run, same shape.

    Returns:
        float64 [layer, token], or [layer, token, head] or [layer, token, mlp] if the activation has that
        axis.

    Raises:
        ShapeError: The arrays have different sizes, layers or positions.
    """
    return _contracted(gradient, {"activation": activation})


def _contracted(gradient: xr.DataArray, activations: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Gradient times the first activation, or times the difference of two, summed over the axes `_WITHIN`."""
    import xarray as xr

    for name, array in activations.items():
        _require_alike(name, array, gradient)
    minuend, *subtrahends = activations.values()
    unit_dims = [str(dim) for dim in gradient.dims if dim not in ("layer", "token", *_WITHIN)]
    dims = ["layer", "token", *unit_dims]
    scores = np.empty([gradient.sizes[dim] for dim in dims])
    width = int(np.prod([gradient.sizes[dim] for dim in gradient.dims if dim not in ("layer", "token")]))
    reads = [
        (layer, tokens)
        for layer in range(gradient.sizes["layer"])
        for tokens in token_ranges(gradient, width)
    ]

    def read_difference(index: tuple[int, slice]) -> Array:
        layer, tokens = index
        rows = np.arange(tokens.stop - tokens.start)
        block = read_rows(minuend, tokens, rows, layer=layer)
        return block - read_rows(subtrahends[0], tokens, rows, layer=layer) if subtrahends else block

    within = tuple(gradient.dims.index(dim) - 1 for dim in _WITHIN if dim in gradient.dims)
    # Read ahead in blocks of tokens: activations of a corpus exceed memory.
    for (layer, tokens), rows in ahead(reads, read_difference):
        gradient_rows = read_rows(gradient, tokens, np.arange(tokens.stop - tokens.start), layer=layer)
        scores[layer, tokens] = np.multiply(rows, gradient_rows, dtype=np.float64).sum(axis=within)
    return xr.DataArray(scores, dims=dims, coords=_labels(gradient, dims), name="attribution")


def _require_alike(name: str, array: xr.DataArray, gradient: xr.DataArray) -> None:
    """Raise ShapeError unless an array and the gradient have equal sizes, layers and positions."""
    for dim in gradient.dims:
        if array.sizes[dim] != gradient.sizes[dim]:
            raise ShapeError(
                f"expected {name} and gradient of equal sizes, found {array.sizes[dim]} and "
                f"{gradient.sizes[dim]} along {dim!r}; capture both of the same layers, of prompts that have "
                "as many tokens"
            )
    for label in ("layer", "position"):
        has_label = label in array.coords and label in gradient.coords
        if has_label and not np.array_equal(array[label].values, gradient[label].values):
            raise ShapeError(
                f"expected {name} and gradient at the same {label}s, found different ones; capture both of "
                "prompts with equal token counts, in the same order"
            )


def _labels(gradient: xr.DataArray, dims: list[str]) -> dict[Any, Any]:
    """Coordinates of the gradient that lie on the remaining dims."""
    return {name: coord for name, coord in gradient.coords.items() if set(coord.dims) <= set(dims)}
