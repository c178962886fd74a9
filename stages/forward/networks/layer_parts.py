"""AltUp, LAuReL and per-layer inputs of Gemma 3n and Gemma 4 (architectures/layer_parts.py).

AltUp: several residual streams; a layer computes one of them, and small matrices update the others.

    predicted_j = x_j + sum_i P_ji x_i          P = W_p tanh(W_r norm(x_a) / D)
    corrected_j = predicted_j + (1 + c_j) (y - predicted_a)          c = W_c tanh(W_r norm(y) / D)

(Baykal et al., Alternating Updates, 2023, algorithm 1, with token-dependent coefficients as in transformers
code.) x are the streams that enter the layer, a is the index of the active one, y the layer's output for
predicted_a. The initial streams are linear maps of the embedding; the final stream is the mean of linear maps
of all streams. Each mapped stream is rescaled to the root mean square of the first.

Axes: [B, token, channel]; several streams are [B, stream, token, D].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architectures.layer_parts import AltUpSpec, LayerInputSpec
from ..hooks.taps import Taps
from .history import STREAM, Carried
from .kernels.functions import evenly
from .kernels.products import product
from .mixers.mixer import merge_heads, split_heads
from .mlp import ACTIVATIONS
from .norms import apply_norm, normalise
from .weights import NormWeights

__all__ = [
    "INPUTS",
    "STREAMS",
    "TABLE_INPUTS",
    "AltUp",
    "Laurel",
    "LayerInput",
    "join_streams",
    "layer_inputs",
    "merged",
    "split_streams",
    "spread",
    "table_inputs",
]

TABLE_INPUTS = "table_inputs"
"""Name among the tensors that layers pass on (`Carried`), before the first layer only: per-layer token
embeddings [B, token, layer * input]."""
INPUTS = "inputs"
"""Name among the tensors that layers pass on (`Carried`): per-layer inputs of all layers [B, token, layer *
input], which are per-layer token embeddings plus a map of the embedding."""
STREAMS = "streams"
"""Name among the tensors that layers pass on (`Carried`): all AltUp streams but the active one, concatenated
along channels, [B, token, (stream - 1) * D]."""
LEAST = 1e-5
"""Lower bound of the mean square of a stream that is rescaled."""


class Laurel:
    """LAuReL of one layer: a low-rank residual connection, added to the stream together with attention."""

    def __init__(self, tensors: Mapping[str, Tensor], eps: float) -> None:
        """tensors: weights by name, "left" [rank, D], "right" [D, rank] and "norm" [D]; eps: epsilon of the
        norm."""
        self._left, self._right, self._norm = tensors["left"], tensors["right"], NormWeights(tensors["norm"])
        self._eps = eps

    def __call__(self, x: Tensor, h: Tensor, layer: int, taps: Taps) -> Tensor:
        """Stream after attention and LAuReL, [B, kept, D]: (x + h + norm(low-rank map of h)) / sqrt(2).

        Arguments:
            x: stream after attention's output has been added, [B, kept, D].
            h: normalised input of attention, [B, kept, D].
            layer: number of the layer.
            taps: captures and interventions of the pass, called at its hook points.
        """
        low = product(product(h, self._left), self._right)
        normed = normalise(low, self._norm, "rms", self._eps, taps, "laurel", layer)
        return (x + taps("laurel_out", layer, h + normed)) / math.sqrt(2)


class LayerInput:
    """The per-layer input of one layer: a vector per token, which is gated by the stream and added to it."""

    def __init__(self, spec: LayerInputSpec, tensors: Mapping[str, Tensor], layer: int, eps: float) -> None:
        """Prepare a layer.

        Arguments:
            spec: size and activation.
            tensors: all weights of the layer, by their names in architectures/layer_parts.py.
            layer: number of the layer.
            eps: epsilon of the norm.
        """
        self._columns = slice(layer * spec.size, (layer + 1) * spec.size)
        self._activation, self._eps = ACTIVATIONS[spec.activation], eps
        self._gate, self._out = tensors["input.gate"], tensors["input.out"]
        self._norm, self._scale = NormWeights(tensors["input.norm"]), tensors.get("altup.scale")

    def __call__(self, x: Tensor, inputs: Tensor, layer: int, taps: Taps) -> Tensor:
        """Output that is added to the stream, [B, kept, D].

        Arguments:
            x: residual stream [B, kept, D].
            inputs: per-layer inputs of all layers, [B, kept, layer * input].
            layer: number of the layer.
            taps: captures and interventions of the pass, called at its hook points.
        """
        layer_input = inputs[..., self._columns]
        if taps.changes(layer, "layer_input_embed"):
            # A copy, because an intervention may write into this view of the inputs of all layers.
            layer_input = layer_input.clone()
        layer_input = taps("layer_input_embed", layer, layer_input)
        scaled = x if self._scale is None else x * self._scale
        gate = taps("layer_input_gate", layer, evenly(self._activation, product(scaled, self._gate)))
        out = product(gate * layer_input, self._out)
        out = normalise(out, self._norm, "rms", self._eps, taps, "layer_input", layer)
        return taps("layer_input_out", layer, out)


def table_inputs(ids: Tensor, table: Tensor, size: int) -> Tensor:
    """Per-layer token embeddings: rows of the table of per-layer inputs, scaled.

    Arguments:
        ids: Token ids, int [B, token]; ids beyond the table use its first row.
        table: The table, [row, layer * input].
        size: Width of one layer's input; rows are scaled by its square root.

    Returns:
        Rows [B, token, layer * input].
    """
    # The factor is rounded to the model's dtype, as that of the embedding is.
    factor = torch.tensor(math.sqrt(size), dtype=table.dtype, device=ids.device)
    return F.embedding(torch.where(ids < len(table), ids, 0), table) * factor


def layer_inputs(x: Tensor, rows: Tensor, weights: Mapping[str, Tensor], eps: float) -> Tensor:
    """Per-layer inputs of all layers, [B, token, layer * input]: mean of scaled table rows and a normalised
    projection of the embedding.

    Arguments:
        x: embeddings that enter the first layer, [B, token, D].
        rows: per-layer token embeddings (`table_inputs`), [B, token, layer * input].
        weights: weights outside of layers, of which "projection" and "norm" are used.
        eps: epsilon of the norm over the input of one layer.
    """
    projected = product(x, weights["projection"]) * x.shape[-1] ** -0.5
    by_layer = projected.unflatten(-1, (-1, len(weights["norm"])))
    normed = apply_norm(by_layer, NormWeights(weights["norm"]), "rms", eps)
    return (normed.flatten(2) + rows) * 2**-0.5


class AltUp:
    """AltUp in one layer: predicts all parallel streams before the layer, and corrects them after it."""

    def __init__(self, spec: AltUpSpec, tensors: Mapping[str, Tensor], eps: float) -> None:
        """Prepare a layer.

        Arguments:
            spec: number of streams, and the index of the one that the layer computes.
            tensors: weights by name: "norm", "router", "predicts", "corrects".
            eps: epsilon of the router's norm.
        """
        self._weights, self._active, self._eps = tensors, spec.active, eps

    def predicted(self, stream: Tensor, inactive: Tensor, layer: int, taps: Taps) -> Tensor:
        """All streams as AltUp predicts them before the layer, which computes the active one.

        Arguments:
            stream: The active stream, [B, token, D].
            inactive: The other streams as they are carried, [B, token, (stream - 1) * D].
            layer: Number of the layer.
            taps: Captures and interventions of the pass, called at its hook points.

        Returns:
            Streams [B, stream, token, D].
        """
        streams = taps("altup_streams", layer, join_streams(stream, inactive, self._active))
        count = streams.shape[1]
        flat = product(self._router_output(streams[:, self._active]), self._weights["predicts"])
        coefficients = flat.unflatten(-1, (count, count)).unsqueeze(-1)
        # Summed entry by entry: a matrix product of so few rows sums in an order that depends on the batch.
        changes = [
            sum(coefficients[:, :, target, source] * streams[:, source] for source in range(count))
            for target in range(count)
        ]
        return taps("altup_predicted", layer, streams + torch.stack(changes, dim=1))

    def corrected(self, predicted: Tensor, output: Tensor, layer: int, taps: Taps) -> Tensor:
        """All streams after the layer: predictions, corrected by the difference that the layer makes.

        Arguments:
            predicted: Output of `predicted`, [B, stream, token, D].
            output: The layer's output for the predicted active stream, [B, token, D].
            layer: Number of the layer.
            taps: Captures and interventions of the pass, called at its hook points.

        Returns:
            Streams [B, stream, token, D].
        """
        coefficients = product(self._router_output(output), self._weights["corrects"]) + 1
        difference = output - predicted[:, self._active]
        streams = predicted + coefficients.transpose(1, 2).unsqueeze(-1) * difference.unsqueeze(1)
        return taps("altup_corrected", layer, streams)

    def _router_output(self, stream: Tensor) -> Tensor:
        """Output of AltUp's router, [B, token, stream], from which coefficients are computed; stream: the
        active one, [B, token, D]."""
        w = self._weights
        # 1 / D and not 1 / sqrt(D): `router_input_scale` of Gemma 3n.
        normed = apply_norm(stream, NormWeights(w["norm"]), "rms", self._eps) * stream.shape[-1] ** -1.0
        return torch.tanh(product(normed, w["router"]).float()).to(stream.dtype)


def join_streams(stream: Tensor, inactive: Tensor, active: int) -> Tensor:
    """All AltUp streams in one tensor, from the two tensors in which layers pass them on.

    Arguments:
        stream: The active stream, [B, token, D].
        inactive: The other streams side by side, [B, token, (stream - 1) * D].
        active: Index of the active stream among all.

    Returns:
        Streams [B, stream, token, D].
    """
    others = split_heads(inactive, stream.shape[-1])
    return torch.cat([others[:, :active], stream.unsqueeze(1), others[:, active:]], dim=1)


def split_streams(streams: Tensor, active: int) -> Carried:
    """AltUp streams [B, stream, token, D] as layers pass them on, by name: the active one as residual stream,
    and the others side by side, [B, token, (stream - 1) * D]. active: index of the active stream."""
    inactive = torch.cat([streams[:, :active], streams[:, active + 1 :]], dim=1)
    # A copy, because interventions may write into the stream.
    return {STREAM: streams[:, active].clone(), STREAMS: merge_heads(inactive)}


def spread(embedded: Tensor, maps: Mapping[str, Tensor], count: int) -> Tensor:
    """Initial streams [B, stream, token, D] from embeddings.

    Arguments:
        embedded: embeddings [B, token, D], which are the first stream.
        maps: matrices of the other streams by name, "in.{i}".
        count: number of streams.
    """
    rms = _root_mean_square(embedded)
    mapped = (_rescaled(product(embedded, maps[f"in.{stream}"]), rms) for stream in range(1, count))
    return torch.stack([embedded, *mapped], dim=1)


def merged(streams: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
    """Input of the final norm [B, token, D]: mean of the AltUp streams after the last layer, all but the
    first mapped and rescaled.

    Arguments:
        streams: Streams after the last layer, [B, stream, token, D].
        maps: Matrices [D, D] of all streams but the first by name, "out.{i}".
    """
    rms, count = _root_mean_square(streams[:, 0]), streams.shape[1]
    mapped = (_rescaled(product(streams[:, i], maps[f"out.{i}"]), rms) for i in range(1, count))
    return torch.stack([streams[:, 0], *mapped]).mean(0)


def _root_mean_square(x: Tensor) -> Tensor:
    """Root mean square of x [B, token, D] over channels, [B, token, 1]."""
    return x.square().mean(-1, keepdim=True) ** 0.5


def _rescaled(x: Tensor, rms: Tensor) -> Tensor:
    """x [B, token, D] scaled to the root mean square `rms` [B, token, 1] over channels."""
    return x * rms / x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
