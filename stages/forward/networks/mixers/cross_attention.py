"""Cross-attention of decoder layers: queries from the stream, keys and values from the encoder's output."""

from __future__ import annotations

from torch import Tensor

from ...architectures.pairs.spec import CrossAttentionSpec
from ...hooks.taps import Taps
from ..attention import linear
from ..history import History
from ..weights import parts_of
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix

__all__ = ["CrossAttention"]


class CrossAttention:
    """Cross-attention of one layer."""

    def __init__(self, spec: CrossAttentionSpec, tensors: LayerTensors) -> None:
        self._maps = parts_of(strip_prefix(tensors, "cross."))
        self._head_dim, self._mixer = spec.attention.head_dim, spec.summary

    def __call__(self, x: Tensor, memory: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Output that is added to the stream, [B, kept, D].

        Arguments:
            x: normalised stream [B, kept, D].
            memory: the encoder's normalised output [B, token, D].
            layer: the layer.
            history: mixes the positions.
            taps: hook points of the pass.
        """
        memory = memory.clone() if taps.changes(layer, "cross_memory") else memory
        memory = taps("cross_memory", layer, memory)
        q, k, v = (
            taps(f"cross_{part}", layer, split_heads(linear(read, self._maps[part]), self._head_dim))
            for part, read in (("q", x), ("k", memory), ("v", memory))
        )
        z = taps("cross_z", layer, history.attend(layer, q, k, v, self._mixer))
        return linear(merge_heads(z), self._maps["o"])
