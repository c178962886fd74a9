"""Direct logit attribution to single heads and neurons, over corpora of any length.

Border: labelled states, a readout and the weights a layer writes with (component_weights.py); no model, no
torch.

Idea: the share of head h is d . (z_h W_O[h]), with d the direction of the logit over the divisor of the final
norm (logit_directions.py). Read as (W_O[h] d) . z_h it needs no [token, head, hidden]: the direction is
carried back through the output projection once, and what meets it is as wide as z. Neurons likewise:
(W_out[n] . d) times their activation.

Families that normalise what attention and MLPs add (Gemma 2) carry the direction back through that norm too:
times its weight, over its captured divisor, one per layer and token: a form of each stage that reads one
array more.

Axes: layer, token, head, d_head, mlp, rank (0 = largest magnitude), hidden.  Unit: logits, before a soft cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from ..corpus.token_blocks import ahead, read_rows, token_ranges
from .attribution import join_tokens
from .logit_directions import Directions
from .residual import require_post_scale

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["head_attribution", "neuron_attribution"]


_TOLD: dict[str, tuple[str, ...] | None] = {
    "scale": ("token",),
    "targets": ("token",),
    "against": ("token",),
    "readout": None,
    "weights": None,
}
_HEADS: dict[str, tuple[str, ...] | None] = {"z": ("layer", "token", "head", "d_head"), **_TOLD}
_NEURONS: dict[str, tuple[str, ...] | None] = {"post_act": ("layer", "token", "mlp"), **_TOLD}
_POST: dict[str, tuple[str, ...] | None] = {"post_scale": ("layer", "token")}
_HEAD_OUTPUTS = {
    "head_share": Output(("layer", "token", "head"), "logits", "share of each head"),
    "attn_bias_share": Output(("layer", "token"), "logits", "share of the bias of each layer's attention"),
}
_NEURON_OUTPUTS = {
    "neuron_id": Output(("layer", "token", "rank"), "1", "neurons of the largest shares by magnitude"),
    "neuron_share": Output(("layer", "token", "rank"), "logits", "their shares"),
    "neurons_total": Output(("layer", "token"), "logits", "sum over all neurons of the layer"),
    "mlp_bias_share": Output(("layer", "token"), "logits", "share of the bias of each layer's MLP"),
}


@stage(
    version=1,
    forms={"head_attribution": _HEADS, "head_attribution_post_norm": _HEADS | _POST},
    outputs=_HEAD_OUTPUTS,
    cells="segment",
    combine=join_tokens,
    memory=0.5,
)
def head_attribution(
    z: xr.DataArray,
    scale: xr.DataArray,
    targets: xr.DataArray,
    against: xr.DataArray,
    readout: xr.Dataset,
    weights: xr.Dataset,
    post_scale: xr.DataArray | None = None,
) -> xr.Dataset:
    """Share of every head in the logit of each token's target.

    z: [layer, token, head, d_head], lazy or not.  scale, targets, against, readout: as in
    `component_attribution`.  weights: the "attention" dataset.  post_scale: of families that normalise what
    attention adds, the divisor of that norm, `ln1_post_scale` [layer, token].  Over heads, plus
    attn_bias_share, the shares sum to attn_share.  Returns float32, NaN where there is no target.
    Raises ShapeError where the weights have that norm and its divisor is not given.
    """
    import xarray as xr

    n_layers, n_tokens, n_heads = (z.sizes[dim] for dim in ("layer", "token", "head"))
    shares = np.full((n_layers, n_tokens, n_heads), np.nan, np.float32)
    biases = np.full((n_layers, n_tokens), np.nan, np.float32)
    directions = Directions.of(readout, targets.values, against.values)
    through = _Through(weights, "W_O", "b_O", "ln1_post", post_scale, z)
    for layer, at, rows, along, bias in through.walk(directions, scale.values):
        shares[layer, at] = np.einsum("thd,thd->th", rows, along.reshape(rows.shape))
        biases[layer, at] = bias
    dims = ("layer", "token")
    data = {"head_share": ((*dims, "head"), shares), "attn_bias_share": (dims, biases)}
    return xr.Dataset(data, coords=_kept(z))


@stage(
    version=1,
    forms={"neuron_attribution": _NEURONS, "neuron_attribution_post_norm": _NEURONS | _POST},
    outputs=_NEURON_OUTPUTS,
    cells="segment",
    combine=join_tokens,
    memory=0.5,
)
def neuron_attribution(
    post_act: xr.DataArray,
    scale: xr.DataArray,
    targets: xr.DataArray,
    against: xr.DataArray,
    readout: xr.Dataset,
    weights: xr.Dataset,
    post_scale: xr.DataArray | None = None,
    *,
    top_k: int = 10,
) -> xr.Dataset:
    """The neurons of every layer with the largest shares in the logit of each token's target.

    post_act: `mlp_post_act` [layer, token, mlp], lazy or not.  weights: the "mlp" dataset.  post_scale: as in
    `head_attribution`, of the norm after the MLP.  top_k: neurons kept per layer and token, by magnitude;
    their sum over *all* neurons is kept too, and with mlp_bias_share is mlp_share.  Returns float32
    (neuron_id int32, -1 where there is no target), NaN where there is no target.
    """
    import xarray as xr

    n_layers, n_tokens, width = (post_act.sizes[dim] for dim in ("layer", "token", "mlp"))
    kept = min(top_k, width)
    ids = np.full((n_layers, n_tokens, kept), -1, np.int32)
    shares = np.full((n_layers, n_tokens, kept), np.nan, np.float32)
    totals, biases = (np.full((n_layers, n_tokens), np.nan, np.float32) for _ in range(2))
    directions = Directions.of(readout, targets.values, against.values)
    through = _Through(weights, "W_out", "b_out", "ln2_post", post_scale, post_act)
    for layer, at, rows, along, bias in through.walk(directions, scale.values):
        own = np.multiply(along, rows, out=along)
        totals[layer, at] = own.sum(axis=1)
        ids[layer, at] = best = _largest(own, kept)
        shares[layer, at] = np.take_along_axis(own, best, axis=1)
        biases[layer, at] = bias
    dims = ("layer", "token")
    data = {
        "neuron_id": ((*dims, "rank"), ids),
        "neuron_share": ((*dims, "rank"), shares),
        "neurons_total": (dims, totals),
        "mlp_bias_share": (dims, biases),
    }
    return xr.Dataset(data, coords=_kept(post_act))


class _Through:
    """Directions carried back through what a layer writes with."""

    def __init__(
        self,
        weights: xr.Dataset,
        matrix: str,
        bias: str,
        post: str,
        post_scale: xr.DataArray | None,
        states: xr.DataArray,
    ) -> None:
        require_post_scale(weights, post, post_scale)
        layers = states["layer"].values
        held = weights["layer"].values.tolist()
        units = [dim for dim in states.dims if dim not in ("layer", "token")]
        own, theirs = ([array.sizes[dim] for dim in units] for array in (states, weights[matrix]))
        if own != theirs or not set(layers.tolist()) <= set(held):
            raise ShapeError(
                f"expected states of layers {held} and {units} {theirs}, as the weights are, found layers "
                f"{layers.tolist()} and {own}; are they of the same model?"
            )
        self.states, self.weights = states, weights.sel(layer=layers)
        self.matrix, self.bias, self.post, self.post_scale = matrix, bias, post, post_scale
        self.n_layers, self.width = len(layers), int(np.prod(own))

    def walk(
        self, directions: Directions, scale: Array
    ) -> Iterator[tuple[int, Array, Array, Array, Array | float]]:
        """(layer, tokens with a target, their states [row, ...], directions [row, unit], bias share)."""
        width = max(self.width, self.weights.sizes["hidden"])
        ranges = directions.chosen(token_ranges(self.states, width))
        reads = [(layer, here, chosen) for layer in range(self.n_layers) for here, chosen in ranges]
        for (layer, here, chosen), rows in ahead(
            reads, lambda at: read_rows(self.states, at[1], at[2], layer=at[0])
        ):
            if here is ranges[0][0]:
                matrix = self._layer(self.matrix, layer)
                matrix = matrix.reshape(-1, matrix.shape[-1])
            along, bias = self._before_norm(directions.along(here, chosen, scale), layer, here, chosen)
            if self.bias in self.weights:
                bias = bias + along @ self._layer(self.bias, layer)
            yield layer, here.start + chosen, rows, along @ matrix.T, bias

    def _before_norm(
        self, along: Array, layer: int, here: slice, chosen: Array
    ) -> tuple[Array, Array | float]:
        """Directions of the stream as directions of what a norm was given, and the share of its bias."""
        bias: Array | float = 0.0
        if self.post_scale is None:
            return along, bias
        if f"{self.post}_bias" in self.weights:
            bias = along @ self._layer(f"{self.post}_bias", layer)
        along *= self._layer(f"{self.post}_weight", layer)
        if self.weights.attrs["norm"] == "layer":
            along -= along.mean(axis=1, keepdims=True)
        along /= read_rows(self.post_scale, here, chosen, layer=layer)[:, None]
        return along, bias

    def _layer(self, name: str, layer: int) -> Array:
        return self.weights[name].isel(layer=layer).values.astype(np.float32, copy=False)


def _largest(values: Array, k: int) -> Array:
    """Columns of the k largest magnitudes per row, descending, equal ones by smaller column."""
    magnitude = np.abs(values)
    chosen = np.sort(np.argpartition(-magnitude, min(k, values.shape[1] - 1), axis=1)[:, :k], axis=1)
    order = np.argsort(-np.take_along_axis(magnitude, chosen, axis=1), axis=1, kind="stable")
    return np.take_along_axis(chosen, order, axis=1)


def _kept(states: xr.DataArray) -> dict[Any, Any]:
    """Labels of layers and tokens."""
    return {name: c for name, c in states.coords.items() if set(c.dims) <= {"layer", "token"}}
