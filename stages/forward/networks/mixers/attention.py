"""Attention as a mixer: networks/attention.py over the layer's own sizes.

Where its heads are gated, the projection of queries has a head's gate behind its query, or gates have one of
their own.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from ...architectures.mixers import AttentionSpec
from ...hooks.taps import Taps
from ..attention import StreamRead, attention
from ..history import History
from ..kernels.functions import evenly
from ..kernels.products import product
from ..relative import Relative
from ..weights import AttentionWeights, parts_of
from .mixer import LayerTensors, split_heads

__all__ = ["GatedAttention", "SelfAttention"]


class SelfAttention:
    """Grouped-query attention of one layer (`PositionMixer`)."""

    def __init__(self, shape: AttentionSpec, tensors: LayerTensors) -> None:
        parts, known = (
            parts_of(_separated(tensors, shape)),
            {field.name for field in fields(AttentionWeights)},
        )
        if shape.rope is not None and shape.has_stored_frequencies:
            shape = replace(shape, rope=replace(shape.rope, frequencies=tensors["frequencies"]))
        self.weights = AttentionWeights(
            **{name: part for name, part in parts.items() if name in known},
            rise_gain=tensors.get("rise.gain"),
        )
        relative = None if shape.relative is None else Relative(shape, self.weights, tensors)
        self.shape, self._how = shape, replace(shape.summary, sinks=tensors.get("sinks"), relative=relative)

    def __call__(
        self, x: Tensor, layer: int, history: History, taps: Taps, source: StreamRead | None = None
    ) -> Tensor:
        """See `PositionMixer`; source: what x is the norm of."""
        return attention(x, self.weights, self.shape, self._how, layer, history, taps, source=source)


def _separated(tensors: LayerTensors, shape: AttentionSpec) -> LayerTensors:
    """The projections of queries, keys and values each by itself."""
    if shape.layout == "separate":
        return tensors
    found = dict(tensors)
    counts = [shape.num_attention_heads, shape.num_kv_heads, shape.num_kv_heads]
    for name in {"qkv", "qkv.bias"} & set(found):
        whole = found.pop(name)
        if shape.layout == "by head":
            grouped = whole.unflatten(0, (counts[1], -1, shape.head_dim))
            queries, keys, values = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            parts = [queries.flatten(0, 2), keys.flatten(0, 1), values.flatten(0, 1)]
        elif shape.layout == "by fourths":
            queries, values, keys = whole.unflatten(0, (4, 3, -1)).unbind(1)
            parts = [x.flatten(0, 1) for x in (queries, keys, values)]
        else:
            parts = list(whole.split([count * shape.head_dim for count in counts]))
        found |= {name.replace("qkv", part): x for part, x in zip("qkv", parts, strict=True)}
    return found


class GatedAttention(SelfAttention):
    """The same with gated heads (`PositionMixer`)."""

    def __init__(self, shape: AttentionSpec, tensors: LayerTensors) -> None:
        found, gate = dict(tensors), "gate_of_heads"
        for name in {"q", "q.bias"} & set(found) if gate not in found else ():
            both = found[name].unflatten(0, (shape.num_attention_heads, 2, shape.head_dim))
            found[name], found[name.replace("q", gate, 1)] = (both[:, i].flatten(0, 1) for i in range(2))
        super().__init__(shape, found)
        self._gate, self._gate_bias = found[gate], found.get(f"{gate}.bias")

    def __call__(
        self, x: Tensor, layer: int, history: History, taps: Taps, source: StreamRead | None = None
    ) -> Tensor:
        """See `PositionMixer`; source: what x is the norm of."""
        gate = evenly(torch.sigmoid, product(history.needed(x), self._gate, self._gate_bias))
        gate = taps("attn_gate", layer, split_heads(gate, self.shape.head_dim))
        return attention(x, self.weights, self.shape, self._how, layer, history, taps, gate, source)
