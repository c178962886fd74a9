"""Direct logit attribution to single heads and neurons, over corpora of any length.

Idea: the share of head h is d . (z_h W_O[h]), where d is the direction of the logit over the divisor of the
final norm (logit_directions.py). Computed as (W_O[h] d) . z_h it needs no array [token, head, hidden]: the
direction is mapped back through the output projection once, to the width of z. Neurons likewise: (W_out[n] .
d) times their activation. Needs no model and no torch.

In families that normalise attention and MLP outputs (Gemma 2) the direction is mapped back through that norm
as well: times its weight, over its captured divisor per layer and token. This is a second form of each stage,
with one more input array.

Axes: layer, token, head, d_head, mlp, rank (0 = largest magnitude), hidden. Unit: logits before a soft cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from ..corpus.token_blocks import ahead, read_rows, token_ranges
from .lens import join_tokens
from .logit_directions import Directions
from .residual import require_post_scale

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["head_attribution", "neuron_attribution"]


_CONTEXT: dict[str, tuple[str, ...] | None] = {
    "scale": ("token",),
    "targets": ("token",),
    "against": ("token",),
    "readout": None,
    "weights": None,
}
_HEADS: dict[str, tuple[str, ...] | None] = {"z": ("layer", "token", "head", "d_head"), **_CONTEXT}
_NEURONS: dict[str, tuple[str, ...] | None] = {"post_act": ("layer", "token", "mlp"), **_CONTEXT}
_POST: dict[str, tuple[str, ...] | None] = {"post_scale": ("layer", "token")}
_HEAD_OUTPUTS = {
    "head_share": Output(("layer", "token", "head"), "logits", "share of each head"),
    "attn_bias_share": Output(("layer", "token"), "logits", "share of the bias of each layer's attention"),
}
_NEURON_OUTPUTS = {
    "neuron_id": Output(("layer", "token", "rank"), "1", "neurons of the largest shares by magnitude"),
    "neuron_share": Output(("layer", "token", "rank"), "logits", "shares of these neurons"),
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
    """Share of every attention head in the logit of each token's target.

    The shares of a layer's heads, plus attn_bias_share, sum to attn_share of `component_attribution`.

    Arguments:
        z: Outputs of the heads before the output projection, [layer, token, head, d_head], lazy or not.
        scale: Captured divisor of the final norm, `ln_final_scale` [token].
        targets: Token ids [token]; NONE (-1) for no target.
        against: Token ids [token] whose logit is subtracted; NONE for no contrast.
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.
        weights: The "attention" dataset of component_weights.py.
        post_scale: Divisor of the norm after attention, `ln1_post_scale` [layer, token]; None for a model
            without such a norm.

    Returns:
        Shares in logits, float32, NaN without a target.

    Raises:
        ShapeError: The weights have a norm after attention and `post_scale` is missing.
    """
    import xarray as xr

    n_layers, n_tokens, n_heads = (z.sizes[dim] for dim in ("layer", "token", "head"))
    shares = np.full((n_layers, n_tokens, n_heads), np.nan, np.float32)
    biases = np.full((n_layers, n_tokens), np.nan, np.float32)
    directions = Directions.of(readout, targets.values, against.values)
    backward = _BackwardThroughWeights(weights, "W_O", "b_O", "ln1_post", post_scale, z)
    for layer, tokens, states, head_directions, bias in backward.walk(directions, scale.values):
        shares[layer, tokens] = np.einsum("thd,thd->th", states, head_directions.reshape(states.shape))
        biases[layer, tokens] = bias
    dims = ("layer", "token")
    data = {"head_share": ((*dims, "head"), shares), "attn_bias_share": (dims, biases)}
    return xr.Dataset(data, coords=_layer_and_token_coords(z))


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

    Arguments:
        post_act: Activations of the neurons, `mlp_post_act` [layer, token, mlp], lazy or not.
        scale: Captured divisor of the final norm, `ln_final_scale` [token].
        targets: Token ids [token]; NONE (-1) for no target.
        against: Token ids [token] whose logit is subtracted; NONE for no contrast.
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.
        weights: The "mlp" dataset of component_weights.py.
        post_scale: Divisor of the norm after the MLP, `ln2_post_scale` [layer, token]; None for a model
            without such a norm.
        top_k: Number of neurons per layer and token, by magnitude of their share.

    Returns:
        Shares in logits, float32, NaN without a target; neuron_id int32, -1 without a target. neurons_total
        is the sum over *all* neurons; plus mlp_bias_share it equals mlp_share of `component_attribution`.
    """
    import xarray as xr

    n_layers, n_tokens, width = (post_act.sizes[dim] for dim in ("layer", "token", "mlp"))
    n_neurons = min(top_k, width)
    ids = np.full((n_layers, n_tokens, n_neurons), -1, np.int32)
    shares = np.full((n_layers, n_tokens, n_neurons), np.nan, np.float32)
    totals, biases = (np.full((n_layers, n_tokens), np.nan, np.float32) for _ in range(2))
    directions = Directions.of(readout, targets.values, against.values)
    backward = _BackwardThroughWeights(weights, "W_out", "b_out", "ln2_post", post_scale, post_act)
    for layer, tokens, activations, neuron_directions, bias in backward.walk(directions, scale.values):
        # In place: the largest array of this stage.
        neuron_shares = np.multiply(neuron_directions, activations, out=neuron_directions)
        totals[layer, tokens] = neuron_shares.sum(axis=1)
        ids[layer, tokens] = largest_ids = _columns_of_largest(neuron_shares, n_neurons)
        shares[layer, tokens] = np.take_along_axis(neuron_shares, largest_ids, axis=1)
        biases[layer, tokens] = bias
    dims = ("layer", "token")
    data = {
        "neuron_id": ((*dims, "rank"), ids),
        "neuron_share": ((*dims, "rank"), shares),
        "neurons_total": (dims, totals),
        "mlp_bias_share": (dims, biases),
    }
    return xr.Dataset(data, coords=_layer_and_token_coords(post_act))


class _BackwardThroughWeights:
    """Maps logit directions back through the output weights of each layer, to the inputs of these weights.

    The dot product of such a direction with the state of a head or neuron is its share of the logit.
    """

    def __init__(
        self,
        weights: xr.Dataset,
        matrix: str,
        bias: str,
        post: str,
        post_scale: xr.DataArray | None,
        states: xr.DataArray,
    ) -> None:
        """Check that weights and states fit.

        Arguments:
            weights: A dataset of component_weights.py.
            matrix: Variable of the output matrix: "W_O" or "W_out".
            bias: Variable of the output bias.
            post: Name of the norm after the output: "ln1_post" or "ln2_post".
            post_scale: Divisor of that norm [layer, token]; None for a model without it.
            states: States of the heads or neurons [layer, token, ...].
        """
        require_post_scale(weights, post, post_scale)
        layers = states["layer"].values
        weight_layers = weights["layer"].values.tolist()
        # ["head", "d_head"] or ["mlp"].
        unit_dims = [dim for dim in states.dims if dim not in ("layer", "token")]
        state_sizes, weight_sizes = (
            [array.sizes[dim] for dim in unit_dims] for array in (states, weights[matrix])
        )
        if state_sizes != weight_sizes or not set(layers.tolist()) <= set(weight_layers):
            raise ShapeError(
                f"the weights are for layers {weight_layers} with sizes {weight_sizes} of {unit_dims}, found "
                f"states of layers {layers.tolist()} with sizes {state_sizes}; pass states and weights of "
                "the same model"
            )
        self.states, self.weights = states, weights.sel(layer=layers)
        self.matrix, self.bias, self.post, self.post_scale = matrix, bias, post, post_scale
        self.n_layers, self.width = len(layers), int(np.prod(state_sizes))

    def walk(
        self, directions: Directions, scale: Array
    ) -> Iterator[tuple[int, Array, Array, Array, Array | float]]:
        """Iterate over layers, and within a layer over ranges of tokens.

        Arguments:
            directions: Logit directions of all tokens.
            scale: Divisor of the final norm [token].

        Returns:
            Tuples of (index of the layer, indices of the tokens with a target, their states [row, ...],
            directions at the units [row, unit], share of the bias [row] or 0.0 without a bias).
        """
        # Directions are as wide as hidden, states as wide as units; the larger decides how many tokens fit.
        width = max(self.width, self.weights.sizes["hidden"])
        ranges = directions.chosen(token_ranges(self.states, width))
        reads = [
            (layer, token_range, with_target)
            for layer in range(self.n_layers)
            for token_range, with_target in ranges
        ]
        for (layer, token_range, with_target), rows in ahead(
            reads, lambda request: read_rows(self.states, request[1], request[2], layer=request[0])
        ):
            # The weights of a layer are read once, at its first range: all ranges of a layer follow each
            # other.
            if token_range is ranges[0][0]:
                matrix = self._layer(self.matrix, layer)
                # [head, d_head, hidden] as [unit, hidden], so that heads and neurons take one matrix product.
                matrix = matrix.reshape(-1, matrix.shape[-1])
            direction, bias = self._before_norm(
                directions.along(token_range, with_target, scale), layer, token_range, with_target
            )
            if self.bias in self.weights:
                bias = bias + direction @ self._layer(self.bias, layer)
            yield layer, token_range.start + with_target, rows, direction @ matrix.T, bias

    def _before_norm(
        self, direction: Array, layer: int, token_range: slice, with_target: Array
    ) -> tuple[Array, Array | float]:
        """Directions before the norm after a layer's output, and the share of the norm's bias."""
        bias: Array | float = 0.0
        if self.post_scale is None:
            return direction, bias
        # The norm's bias is added last, so it meets the direction before that is multiplied by the weight.
        if f"{self.post}_bias" in self.weights:
            bias = direction @ self._layer(f"{self.post}_bias", layer)
        direction *= self._layer(f"{self.post}_weight", layer)
        if self.weights.attrs["norm"] == "layer":
            # LayerNorm subtracts the mean of its input; its transpose subtracts the mean of the direction.
            direction -= direction.mean(axis=1, keepdims=True)
        direction /= read_rows(self.post_scale, token_range, with_target, layer=layer)[:, None]
        return direction, bias

    def _layer(self, name: str, layer: int) -> Array:
        """A variable of the weights at one layer (index), float32."""
        return self.weights[name].isel(layer=layer).values.astype(np.float32, copy=False)


def _columns_of_largest(values: Array, k: int) -> Array:
    """Columns of the k largest magnitudes in each row, [row, k], in descending order; ties by smaller
    column."""
    # argpartition leaves ties in any order; sorting columns first makes the stable sort below deterministic.
    magnitude = np.abs(values)
    largest = np.sort(np.argpartition(-magnitude, min(k, values.shape[1] - 1), axis=1)[:, :k], axis=1)
    order = np.argsort(-np.take_along_axis(magnitude, largest, axis=1), axis=1, kind="stable")
    return np.take_along_axis(largest, order, axis=1)


def _layer_and_token_coords(states: xr.DataArray) -> dict[Any, Any]:
    """The coordinates of an array that label its layers and tokens only."""
    return {name: c for name, c in states.coords.items() if set(c.dims) <= {"layer", "token"}}
