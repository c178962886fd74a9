"""Multi-head latent attention (MLA): keys and values are computed from a low-dimensional latent.

    c, s = W_down u      k_h = (W_k,h norm(c), s)      v_h = W_v,h norm(c)

(DeepSeek-V2, 2024, section 2.1; Kimi Linear, 2025, section 4, without position embeddings.) All heads share
the part s of their keys. RoPE is applied to s and to as many entries of each query. The rest is attention
with one key head per query head.

Axes: as in mixer.py; K width of a head's keys, which differs from that of its values.
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
        self.shape, self._mixer, self.weights = shape, shape.summary, strip_prefix(tensors, "latent.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        s, w = self.shape, self.weights
        queries = split_heads(self._queries(history.needed(x)), s.key_size)
        latent, shared = product(x, w["down"], w.get("down.bias")).split((s.rank, s.shared_size), dim=-1)
        latent = torch.cat([self._normed(latent, "norm"), shared], dim=-1)
        latent, shared = taps("latent_c", layer, latent).split((s.rank, s.shared_size), dim=-1)
        up = split_heads(product(latent, w["up"]), s.own_size + s.value_size)
        keys, values = up.split((s.own_size, s.value_size), dim=-1)
        # Only the entries that meet the shared part of keys are rotated.
        plain, rotated = queries.split((s.own_size, s.shared_size), dim=-1)
        rotated, shared = apply_rope(rotated, shared.unsqueeze(1), s.rope, history)
        queries = taps("latent_q", layer, torch.cat([plain, rotated], dim=-1))
        keys = torch.cat([keys, shared.expand(-1, s.heads, -1, -1)], dim=-1)
        keys, values = taps("latent_k", layer, keys), taps("latent_v", layer, values)
        z = taps("latent_z", layer, history.attend(layer, queries, keys, values, self._mixer))
        return product(merge_heads(z), w["out"], w.get("out.bias"))

    def _queries(self, x: Tensor) -> Tensor:
        """Queries of all heads [B, kept, head * K], through a latent of their own if the family has one."""
        w = self.weights
        if self.shape.query_rank is not None:
            x = self._normed(product(x, w["q.down"], w.get("q.down.bias")), "q.norm")
        return product(x, w["q"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return apply_norm(x, NormWeights(self.weights[name]), "rms", self.shape.norm_eps)
