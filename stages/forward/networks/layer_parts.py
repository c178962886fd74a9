"""LAuReL and per-layer inputs of Gemma 3n and Gemma 4 (architectures/layer_parts.py).

Axes: [B, token, channel].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architectures.layer_parts import LayerInputSpec
from ..hooks.taps import Taps
from .kernels.functions import evenly
from .kernels.products import product
from .mlp import ACTIVATIONS
from .norms import apply_norm, normalise
from .weights import NormWeights

__all__ = ["INPUTS", "TABLE_INPUTS", "Laurel", "LayerInput", "layer_inputs", "table_inputs"]

TABLE_INPUTS = "table_inputs"
"""Name in `Carried` of per-layer token embeddings [B, token, layer * input], before the first layer only."""
INPUTS = "inputs"
"""Name in `Carried` of per-layer inputs [B, token, layer * input]: token embeddings plus a map of the
embedding."""


class Laurel:
    """The low-rank residual connection of one layer."""

    def __init__(self, tensors: Mapping[str, Tensor], eps: float) -> None:
        """tensors: "left", "right" and "norm"; eps: epsilon of its norm."""
        self._left, self._right, self._norm = tensors["left"], tensors["right"], NormWeights(tensors["norm"])
        self._eps = eps

    def __call__(self, x: Tensor, h: Tensor, layer: int, taps: Taps) -> Tensor:
        """Stream x with the connection from attention's input h, each [B, kept, D]."""
        low = product(product(h, self._left), self._right)
        normed = normalise(low, self._norm, "rms", self._eps, taps, "laurel", layer)
        return (x + taps("laurel_out", layer, h + normed)) / math.sqrt(2)


class LayerInput:
    """The per-layer input of one layer."""

    def __init__(self, spec: LayerInputSpec, tensors: Mapping[str, Tensor], layer: int, eps: float) -> None:
        """Prepare a layer.

        Arguments:
            spec: size and activation.
            tensors: all weights of the layer, by their names in architectures/layer_parts.py.
            layer: the layer.
            eps: epsilon of the norm.
        """
        self._columns = slice(layer * spec.size, (layer + 1) * spec.size)
        self._activation, self._eps = ACTIVATIONS[spec.activation], eps
        self._gate, self._out = tensors["input.gate"], tensors["input.out"]
        self._norm, self._scale = NormWeights(tensors["input.norm"]), tensors.get("altup.scale")

    def __call__(self, x: Tensor, inputs: Tensor, layer: int, taps: Taps) -> Tensor:
        """Output [B, kept, D], from the stream x and the inputs of all layers [B, kept, layer * input]."""
        part = inputs[..., self._columns]
        part = taps(
            "layer_input_embed", layer, part.clone() if taps.changes(layer, "layer_input_embed") else part
        )
        read = x if self._scale is None else x * self._scale
        gate = taps("layer_input_gate", layer, evenly(self._activation, product(read, self._gate)))
        out = product(gate * part, self._out)
        out = normalise(out, self._norm, "rms", self._eps, taps, "layer_input", layer)
        return taps("layer_input_out", layer, out)


def table_inputs(ids: Tensor, table: Tensor, size: int) -> Tensor:
    """Scaled rows of the table [row, layer * input] for token ids [B, S]; ids beyond it use the first row.
    size: width of one layer's input."""
    # The factor is rounded to the model's dtype, as that of the embedding is.
    factor = torch.tensor(math.sqrt(size), dtype=table.dtype, device=ids.device)
    return F.embedding(torch.where(ids < len(table), ids, 0), table) * factor


def layer_inputs(x: Tensor, rows: Tensor, weights: Mapping[str, Tensor], eps: float) -> Tensor:
    """Inputs of all layers [B, token, layer * input].

    Arguments:
        x: embeddings that enter the first layer, [B, token, D].
        rows: output of `table_inputs`.
        weights: "projection" and "norm", outside of layers.
        eps: epsilon of the norm, over one layer's input.
    """
    projected = product(x, weights["projection"]) * x.shape[-1] ** -0.5
    by_layer = projected.unflatten(-1, (-1, len(weights["norm"])))
    normed = apply_norm(by_layer, NormWeights(weights["norm"]), "rms", eps)
    return (normed.flatten(2) + rows) * 2**-0.5
