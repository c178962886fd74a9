"""Summaries of one prompt's attention patterns, by layer and by head.

The effective attention of a recurrent layer is read like a pattern. Negative contributions count as 0 there,
so that rows may sum to less than 1.

A mean over heads hides what single heads do, and weights alone are no explanation (Jain and Wallace 2019,
"Attention is not Explanation"); knockout.py measures the effect of removing an edge.

Axes: layer, head, query_position (attends), key_position (is attended to); pair = lower triangle of one
prompt's pattern, row by row, as stored. Weights have no unit; entropy in nats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...pipeline import Output, stage
from ...store.errors import PromptError, ShapeError, StageError
from .rows import HEAD, HEAD_AXES, layer_numbers

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "attention_flow",
    "attention_from_position",
    "attention_to_position",
    "head_mean",
    "peak_layer",
    "top_attended_positions",
    "unpacked",
]

_ROUNDING = 0.05
"""Tolerance on the sum of a query's weights: bfloat16 weights sum to 1 only approximately."""
_EFFECTIVE_SUFFIX = "_effective_attn"
"""Suffix of the names of effective attention, of which a query's weights may sum to less than 1."""


@stage(
    version=2,
    inputs={"pattern": ("layer", HEAD, "pair")},
    outputs={
        "mean_pattern": Output(
            ("layer", "query_position", "key_position"), "1", "attention weight, mean over heads"
        ),
        "from_query": Output(("layer", "head", "key_position"), "1", "attention weights of one query"),
        "largest": Output(
            ("layer", "query_position", "key_position"), "1", "largest attention weight of any head"
        ),
        "largest_head": Output(
            ("layer", "query_position", "key_position"), "1", "head with the largest weight"
        ),
        "entropy": Output(("layer", "head", "query_position"), "nats", "entropy of each query's weights"),
    },
    cells="layer",
)
def attention_flow(pattern: xr.DataArray, *, query: int = -1) -> xr.Dataset:
    """Summarise one prompt's attention: mean and maximum over heads, one query's weights by head, entropy.

    Arguments:
        pattern: Attention pattern of one prompt, [layer, head, pair], any float dtype.
        query: Position whose weights are returned by head; negative positions count from the end.

    Returns:
        The declared outputs, float32 (largest_head int32); weights on keys after a query are 0.

    Raises:
        ShapeError: The pairs are those of several prompts.
        PromptError: The position is out of range.
    """
    import xarray as xr

    square = unpacked(pattern)
    length = square.sizes["key_position"]
    weights = square.values.astype(np.float64)
    # np.where evaluates log(0) before it discards it.
    with np.errstate(divide="ignore"):
        logs = np.where(weights > 0, np.log(weights), 0.0)
    summaries = {
        "mean_pattern": (("layer", "query_position", "key_position"), weights.mean(1)),
        "from_query": (("layer", "head", "key_position"), weights[:, :, _position(query, length)]),
        "largest": (("layer", "query_position", "key_position"), weights.max(1)),
        "entropy": (("layer", "head", "query_position"), -(weights * logs).sum(-1)),
    }
    coords: dict[str, Any] = {"head": np.arange(square.sizes["head"])}
    if "layer" in pattern.coords:
        coords["layer"] = pattern["layer"].values
    # Summed in float64 and stored in float32: patterns have at most float32 precision.
    data: dict[str, Any] = {name: (dims, x.astype(np.float32)) for name, (dims, x) in summaries.items()}
    data["largest_head"] = (summaries["largest"][0], weights.argmax(1).astype(np.int32))
    return xr.Dataset(data, coords)


def unpacked(pattern: xr.DataArray) -> xr.DataArray:
    """Unpack the pattern of one prompt, [..., pair] to [..., query_position, key_position].

    The axis of heads is renamed to "head", whatever kind they are.

    Raises:
        ShapeError: Rows do not sum to 1 (effective attention: to at most 1), so that the pairs are not those
            of one prompt.
    """
    import xarray as xr

    renamed_axes = {axis: "head" for axis in HEAD_AXES if axis != "head" and axis in pattern.dims}
    packed = pattern.rename(renamed_axes).transpose(..., "pair")
    pairs = packed.sizes["pair"]
    # Inverse of the triangular number n(n + 1) / 2, exact in integers.
    length = (math.isqrt(8 * pairs + 1) - 1) // 2
    if length * (length + 1) // 2 != pairs:
        raise ShapeError(
            "expected the attention pattern of one prompt, whose number of pairs is 1, 3, 6, 10, …, found "
            f"{pairs} pairs; select one prompt with dataset.mi.attn(i)"
        )
    values = packed.values
    square = np.zeros((*packed.shape[:-1], length, length), values.dtype)
    rows, columns = np.tril_indices(length)
    square[..., rows, columns] = values
    # The number of pairs alone does not tell: 6 pairs are one prompt of 3 tokens or two prompts of 2.
    sums = square.astype(np.float32).sum(-1)
    # Rows of effective attention may sum to less: all contributions may be negative, or nearly zero.
    is_effective = str(packed.name).endswith(_EFFECTIVE_SUFFIX)
    deviation = np.maximum(sums - 1, 0) if is_effective else abs(sums - 1)
    if deviation.max() > _ROUNDING:
        raise ShapeError(
            "expected the attention weights of each query to sum to 1, found a sum of "
            f"{sums.flat[deviation.argmax()]:.3g}, as if the pairs were those of several prompts; select one "
            "prompt with dataset.mi.attn(i)"
        )
    coords = {name: coord for name, coord in packed.coords.items() if "pair" not in coord.dims}
    return xr.DataArray(square, coords, (*packed.dims[:-1], "query_position", "key_position"), pattern.name)


def head_mean(pattern: xr.DataArray) -> xr.DataArray:
    """Mean of a pattern over heads; a pattern without a head axis is returned unchanged."""
    return pattern.mean("head") if "head" in pattern.dims else pattern


def attention_from_position(pattern: xr.DataArray, layer: int, query: int) -> xr.DataArray:
    """Attention weights from a query to all keys in a layer, mean over heads, [key_position].

    Arguments:
        pattern: Result of `unpacked`, or its mean over heads.
        layer: Layer number.
        query: Position; negative ones count from the end.
    """
    layer_pattern = _layer(pattern, layer)
    return head_mean(layer_pattern).isel(
        query_position=_position(query, layer_pattern.sizes["query_position"])
    )


def attention_to_position(pattern: xr.DataArray, layer: int, key: int) -> xr.DataArray:
    """Attention weights from all queries to a key in a layer, mean over heads, [query_position].

    Arguments:
        pattern: Result of `unpacked`, or its mean over heads.
        layer: Layer number.
        key: Position; negative ones count from the end.
    """
    layer_pattern = _layer(pattern, layer)
    return head_mean(layer_pattern).isel(key_position=_position(key, layer_pattern.sizes["key_position"]))


def top_attended_positions(
    pattern: xr.DataArray, layer: int, query: int, k: int = 5
) -> list[tuple[int, float]]:
    """The keys with the largest weight from a query in a layer, mean over heads.

    Arguments:
        pattern: Result of `unpacked`, or its mean over heads.
        layer: Layer number.
        query: Position of the query; negative positions count from the end.
        k: Number of keys.

    Returns:
        (position of the key, weight) of each key in descending order of weight, ties by position.
    """
    weights: npt.NDArray[Any] = attention_from_position(pattern, layer, query).values
    # Stable, so that ties keep the order of positions.
    order = np.argsort(-weights, kind="stable")[:k]
    return [(int(position), float(weights[position])) for position in order]


def peak_layer(pattern: xr.DataArray, query: int, key: int) -> tuple[int, float]:
    """Layer with the largest mean attention over heads from a query to a key.

    Arguments:
        pattern: Result of `unpacked`, or its mean over heads.
        query: Position of the query; negative positions count from the end.
        key: Position of the key; negative positions count from the end.

    Returns:
        (layer number, weight); the first of equal layers.
    """
    length = pattern.sizes["query_position"]
    weight_by_layer = head_mean(pattern).isel(
        query_position=_position(query, length), key_position=_position(key, length)
    )
    best = int(np.argmax(weight_by_layer.transpose("layer").values))
    return int(layer_numbers(pattern)[best]), float(weight_by_layer.values[best])


def _layer(pattern: xr.DataArray, layer: int) -> xr.DataArray:
    """The pattern of one layer, without the layer axis; StageError for a layer that it lacks."""
    layers = layer_numbers(pattern).tolist()
    if layer not in layers:
        raise StageError(
            f"expected a layer of this pattern, from {layers[0]} to {layers[-1]}, found layer {layer}"
        )
    return pattern.isel(layer=layers.index(layer))


def _position(position: int, length: int) -> int:
    """A position counted from 0, for a prompt of `length` tokens; PromptError if it is out of range."""
    if not -length <= position < length:
        raise PromptError(
            f"expected a position in 0..{length - 1}, or a negative one from the end, in a prompt of "
            f"{length} tokens, found {position}"
        )
    return position % length
