"""Reading attention patterns: who looks where, by layer and by head.

Border: labelled weights, rows queries and columns keys; knows no model and never imports torch.

Effective attention of a recurrence is read like a pattern; what it reads with a negative sign is not in it,
and rows of which little is left sum to less than 1.

A head mean hides what single heads do, and weights are no explanation by themselves (Jain and Wallace 2019,
"Attention is not Explanation"); knockout.py asks what happens when an edge is gone.

Axes: layer, head, query_position (reads), key_position (is read); pair = lower triangle of one prompt's
pattern, row by row, as a store holds it. Weights have no unit; the entropy of a row is in nats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...pipeline import Output, stage
from ...store.errors import PromptError, ShapeError, StageError
from .rows import HEAD, HEAD_AXES

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
"""How far from 1 a row of bfloat16 weights may sum."""
_MAY_BE_LESS = "_effective_attn"
"""End of the names of variables whose rows may sum to less."""


@stage(
    version=2,
    inputs={"pattern": ("layer", HEAD, "pair")},
    outputs={
        "mean_pattern": Output(
            ("layer", "query_position", "key_position"), "1", "attention weight, mean over heads"
        ),
        "from_query": Output(("layer", "head", "key_position"), "1", "weights of the query chosen"),
        "largest": Output(
            ("layer", "query_position", "key_position"), "1", "attention weight, largest of heads"
        ),
        "largest_head": Output(
            ("layer", "query_position", "key_position"), "1", "head of the largest weight"
        ),
        "entropy": Output(("layer", "head", "query_position"), "nats", "entropy of each query's weights"),
    },
    cells="layer",
)
def attention_flow(pattern: xr.DataArray, *, query: int = -1) -> xr.Dataset:
    """One prompt's attention, summed up: mean and largest weight of heads, and by head what one query reads.

    pattern: [layer, head, pair] of one prompt, any float dtype.  query: a position, negative ones from the
    end.  Returns float32, heads as integers, keys after a query 0.
    Raises ShapeError for more than one prompt, PromptError for a position out of range.
    """
    import xarray as xr

    square = unpacked(pattern)
    length = square.sizes["key_position"]
    weights = square.values.astype(np.float64)
    with np.errstate(divide="ignore"):
        logs = np.where(weights > 0, np.log(weights), 0.0)
    found = {
        "mean_pattern": (("layer", "query_position", "key_position"), weights.mean(1)),
        "from_query": (("layer", "head", "key_position"), weights[:, :, _position(query, length)]),
        "largest": (("layer", "query_position", "key_position"), weights.max(1)),
        "entropy": (("layer", "head", "query_position"), -(weights * logs).sum(-1)),
    }
    coords: dict[str, Any] = {"head": np.arange(square.sizes["head"])}
    if "layer" in pattern.coords:
        coords["layer"] = pattern["layer"].values
    told: dict[str, Any] = {name: (dims, x.astype(np.float32)) for name, (dims, x) in found.items()}
    told["largest_head"] = (found["largest"][0], weights.argmax(1).astype(np.int32))
    return xr.Dataset(told, coords)


def unpacked(pattern: xr.DataArray) -> xr.DataArray:
    """The pattern of one prompt as it is thought of, [..., query_position, key_position], from [..., pair];
    heads of any kind are on the axis "head".

    Raises ShapeError if the pairs are not those of one prompt, whose rows sum to 1, or to at most 1 where
    they are what a recurrence amounts to.
    """
    import xarray as xr

    own = {axis: "head" for axis in HEAD_AXES if axis != "head" and axis in pattern.dims}
    packed = pattern.rename(own).transpose(..., "pair")
    pairs = packed.sizes["pair"]
    length = (math.isqrt(8 * pairs + 1) - 1) // 2
    if length * (length + 1) // 2 != pairs:
        raise ShapeError(
            f"expected the pairs of one prompt (1, 3, 6, 10, …), found {pairs}; select one: "
            "dataset.mi.attn(i)"
        )
    values = packed.values
    square = np.zeros((*packed.shape[:-1], length, length), values.dtype)
    rows, columns = np.tril_indices(length)
    square[..., rows, columns] = values
    sums = square.astype(np.float32).sum(-1)
    # Effective attention may sum to less: of what is read, all may be negative, or next to nothing.
    off = np.maximum(sums - 1, 0) if str(packed.name).endswith(_MAY_BE_LESS) else abs(sums - 1)
    if off.max() > _ROUNDING:
        raise ShapeError(
            f"expected rows of weights that sum to 1, found {sums.flat[off.argmax()]:.3g}; are "
            "these the pairs of several prompts? Select one: dataset.mi.attn(i)"
        )
    coords = {name: coord for name, coord in packed.coords.items() if "pair" not in coord.dims}
    return xr.DataArray(square, coords, (*packed.dims[:-1], "query_position", "key_position"), pattern.name)


def head_mean(pattern: xr.DataArray) -> xr.DataArray:
    """The mean over heads of a pattern; a pattern without heads is its own mean."""
    return pattern.mean("head") if "head" in pattern.dims else pattern


def attention_from_position(pattern: xr.DataArray, layer: int, query: int) -> xr.DataArray:
    """Weights a query gives in a layer, mean over heads, [key_position]."""
    here = _layer(pattern, layer)
    return head_mean(here).isel(query_position=_position(query, here.sizes["query_position"]))


def attention_to_position(pattern: xr.DataArray, layer: int, key: int) -> xr.DataArray:
    """Weights a key is given in a layer, mean over heads, [query_position]."""
    here = _layer(pattern, layer)
    return head_mean(here).isel(key_position=_position(key, here.sizes["key_position"]))


def top_attended_positions(
    pattern: xr.DataArray, layer: int, query: int, k: int = 5
) -> list[tuple[int, float]]:
    """The k keys a query looks at most in a layer, mean over heads: (position, weight), largest first, equal
    ones by position."""
    weights: npt.NDArray[Any] = attention_from_position(pattern, layer, query).values
    order = np.argsort(-weights, kind="stable")[:k]
    return [(int(position), float(weights[position])) for position in order]


def peak_layer(pattern: xr.DataArray, query: int, key: int) -> tuple[int, float]:
    """(layer, weight) where a query looks at a key most, mean over heads; the first of equal layers."""
    length = pattern.sizes["query_position"]
    cell = head_mean(pattern).isel(
        query_position=_position(query, length), key_position=_position(key, length)
    )
    best = int(np.argmax(cell.transpose("layer").values))
    layers = pattern["layer"].values if "layer" in pattern.coords else np.arange(cell.size)
    return int(layers[best]), float(cell.values[best])


def _layer(pattern: xr.DataArray, layer: int) -> xr.DataArray:
    held = [int(i) for i in (pattern["layer"].values if "layer" in pattern.coords else range(len(pattern)))]
    if layer not in held:
        raise StageError(f"expected a layer of this pattern ({held[0]}..{held[-1]}), found {layer}")
    return pattern.isel(layer=held.index(layer))


def _position(position: int, length: int) -> int:
    if not -length <= position < length:
        raise PromptError(
            f"expected a position in 0..{length - 1} (or negative, from the end), found {position}"
        )
    return position % length
