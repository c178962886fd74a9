"""Self-attention as a mixer: networks/attention.py with the sizes and weights of one layer.

In gated attention, gates come from the rows after each head's queries in the query projection, or from a
separate projection.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from ...architectures.mixers import AttentionSpec
from ...hooks.taps import Taps
from ..attention import StreamRead, attention
from ..history import Carried, History
from ..kernels.functions import evenly
from ..kernels.products import product
from ..relative import Relative
from ..weights import AttentionWeights, parts_of
from .mixer import LayerTensors, split_heads

__all__ = ["SelfAttention"]

_GATES = "gate_of_heads"
"""Name of the projection to the gates of heads."""


class SelfAttention:
    """Grouped-query attention of one layer (`PositionMixer`), with or without gates of the heads' outputs."""

    def __init__(self, spec: AttentionSpec, tensors: LayerTensors) -> None:
        tensors = _with_gates(tensors, spec) if spec.is_gated else tensors
        parts = parts_of(_separated(tensors, spec))
        names = {field.name for field in fields(AttentionWeights)}
        if spec.rope is not None and spec.has_stored_frequencies:
            spec = replace(spec, rope=replace(spec.rope, frequencies=tensors["frequencies"]))
        self.weights = AttentionWeights(
            **{name: part for name, part in parts.items() if name in names},
            rise_gain=tensors.get("rise.gain"),
        )
        relative = None if spec.relative is None else Relative(spec, self.weights, tensors)
        self.spec, self._mixer = spec, replace(spec.summary, sinks=tensors.get("sinks"), relative=relative)
        self._gate, self._gate_bias = tensors.get(_GATES), tensors.get(f"{_GATES}.bias")

    def __call__(
        self,
        x: Tensor,
        layer: int,
        history: History,
        taps: Taps,
        source: StreamRead | None = None,
        beside: Carried | None = None,
    ) -> Tensor:
        """See `PositionMixer`; source: the stream before the norm; beside: keys and values that layers share
        (`attention`)."""
        gate = None
        if self._gate is not None:
            gate = evenly(torch.sigmoid, product(history.needed(x), self._gate, self._gate_bias))
            gate = taps("attn_gate", layer, split_heads(gate, self.spec.head_dim))
        return attention(x, self.weights, self.spec, self._mixer, layer, history, taps, gate, source, beside)


def _with_gates(tensors: LayerTensors, spec: AttentionSpec) -> LayerTensors:
    """The layer's tensors with the gates separated from the queries, if one projection holds both."""
    split = dict(tensors)
    for name in {"q", "q.bias"} & set(split) if spec.gates_in_queries else ():
        # Rows of each head: its query, then its gate.
        rows = split[name].unflatten(0, (spec.num_attention_heads, 2, spec.head_dim))
        split[name], split[name.replace("q", _GATES, 1)] = (rows[:, i].flatten(0, 1) for i in range(2))
    return split


def _separated(tensors: LayerTensors, spec: AttentionSpec) -> LayerTensors:
    """The layer's tensors with a fused qkv projection split into "q", "k" and "v"."""
    if spec.layout == "separate":
        return tensors
    split = dict(tensors)
    counts = [spec.num_attention_heads, spec.num_kv_heads, spec.num_kv_heads]
    for name in {"qkv", "qkv.bias"} & set(split):
        whole = split.pop(name)
        if spec.layout == "by head":
            grouped = whole.unflatten(0, (counts[1], -1, spec.head_dim))
            queries, keys, values = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            parts = [queries.flatten(0, 2), keys.flatten(0, 1), values.flatten(0, 1)]
        elif spec.layout == "by fourths":
            queries, values, keys = whole.unflatten(0, (4, 3, -1)).unbind(1)
            parts = [x.flatten(0, 1) for x in (queries, keys, values)]
        else:
            parts = list(whole.split([count * spec.head_dim for count in counts]))
        split |= {name.replace("qkv", part): x for part, x in zip("qkv", parts, strict=True)}
    return split
