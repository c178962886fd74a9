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
    """Grouped-query self-attention of one layer, with or without gates of the heads' outputs."""

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
    """The layer's tensors by name, with the projection to gates separated from that to queries, if one matrix
    holds both."""
    separated = dict(tensors)
    if not spec.gates_in_queries:
        return separated
    for name in {"q", "q.bias"} & set(separated):
        # Rows of each head: its query, then its gate.
        rows = separated[name].unflatten(0, (spec.num_attention_heads, 2, spec.head_dim))
        separated[name] = rows[:, 0].flatten(0, 1)
        separated[name.replace("q", _GATES, 1)] = rows[:, 1].flatten(0, 1)
    return separated


def _separated(tensors: LayerTensors, spec: AttentionSpec) -> LayerTensors:
    """The layer's tensors by name, with a fused projection "qkv" split into "q", "k" and "v" (weights and
    biases)."""
    if spec.layout == "separate":
        return tensors
    separated = dict(tensors)
    for name in {"qkv", "qkv.bias"} & set(separated):
        fused = separated.pop(name)
        if spec.layout == "by head":
            # For each key head: its queries, its key, its value.
            grouped = fused.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
            queries = grouped[:, :-2].flatten(0, 2)
            keys, values = grouped[:, -2].flatten(0, 1), grouped[:, -1].flatten(0, 1)
        elif spec.layout == "by fourths":
            # For each quarter of the heads: queries, values, keys (CodeGen).
            queries, values, keys = (x.flatten(0, 1) for x in fused.unflatten(0, (4, 3, -1)).unbind(1))
        else:
            head_counts = (spec.num_attention_heads, spec.num_kv_heads, spec.num_kv_heads)
            queries, keys, values = fused.split([count * spec.head_dim for count in head_counts])
        for part, rows in (("q", queries), ("k", keys), ("v", values)):
            separated[name.replace("qkv", part)] = rows
    return separated
