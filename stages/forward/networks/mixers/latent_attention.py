"""Attention whose keys and values are made of one narrow latent.

    c, s = W_down u      k_h = (W_k,h norm(c), s)      v_h = W_v,h norm(c)

(DeepSeek-V2, 2024, section 2.1; Kimi Linear, 2025, section 4, which tells no positions.) The part s of keys
is one for all heads; it turns, and as much of each query, where there are positions. The rest is attention
with a head of keys for each of queries.

Axes: as in mixer.py; K keys of a head, wider than its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...architectures.mixers import LatentAttentionSpec
from ...hooks.taps import Taps
from ..attention import apply_rope
from ..history import History
from ..kernels.products import product
from ..norms import apply_norm
from ..weights import NormWeights
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix

__all__ = ["LatentAttention"]


class LatentAttention:
    """The latent attention of one layer (`PositionMixer`)."""

    def __init__(self, shape: LatentAttentionSpec, tensors: LayerTensors) -> None:
        self.shape, self._how, self.weights = shape, shape.summary, strip_prefix(tensors, "latent.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """See `PositionMixer`."""
        s, w = self.shape, self.weights
        queries = split_heads(self._asked(history.needed(x)), s.key_size)
        latent, shared = product(x, w["down"], w.get("down.bias")).split((s.rank, s.shared_size), dim=-1)
        latent = torch.cat([self._normed(latent, "norm"), shared], dim=-1)
        latent, shared = taps("latent_c", layer, latent).split((s.rank, s.shared_size), dim=-1)
        up = split_heads(product(latent, w["up"]), s.own_size + s.value_size)
        keys, values = up.split((s.own_size, s.value_size), dim=-1)
        own_part, asked = queries.split((s.own_size, s.shared_size), dim=-1)
        asked, shared = apply_rope(asked, shared.unsqueeze(1), s.rope, history)
        queries = taps("latent_q", layer, torch.cat([own_part, asked], dim=-1))
        keys = torch.cat([keys, shared.expand(-1, s.heads, -1, -1)], dim=-1)
        keys, values = taps("latent_k", layer, keys), taps("latent_v", layer, values)
        z = taps("latent_z", layer, history.attend(layer, queries, keys, values, self._how))
        return product(merge_heads(z), w["out"], w.get("out.bias"))

    def _asked(self, x: Tensor) -> Tensor:
        """Queries of all heads, by way of a latent of their own where they have one."""
        w = self.weights
        if self.shape.query_rank is not None:
            x = self._normed(product(x, w["q.down"], w.get("q.down.bias")), "q.norm")
        return product(x, w["q"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return apply_norm(x, NormWeights(self.weights[name]), "rms", self.shape.norm_eps)
