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
    """Multi-head latent attention of one layer: keys and values of all heads come from one latent per
    token."""

    def __init__(self, spec: LatentAttentionSpec, tensors: LayerTensors) -> None:
        self.spec, self._mixer, self.weights = spec, spec.summary, strip_prefix(tensors, "latent.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec, w = self.spec, self.weights
        queries = split_heads(self._queries(history.needed(x)), spec.key_size)
        latent_and_shared = (spec.rank, spec.shared_size)
        latent, shared_keys = product(x, w["down"], w.get("down.bias")).split(latent_and_shared, dim=-1)
        compressed = torch.cat([self._normed(latent, "norm"), shared_keys], dim=-1)
        latent, shared_keys = taps("latent_c", layer, compressed).split(latent_and_shared, dim=-1)
        keys_and_values = split_heads(product(latent, w["up"]), spec.own_size + spec.value_size)
        own_keys, values = keys_and_values.split((spec.own_size, spec.value_size), dim=-1)
        # Only the query entries that are multiplied by the shared key entries are rotated.
        unrotated, rotated = queries.split((spec.own_size, spec.shared_size), dim=-1)
        rotated, shared_keys = apply_rope(rotated, shared_keys.unsqueeze(1), spec.rope, history)
        queries = taps("latent_q", layer, torch.cat([unrotated, rotated], dim=-1))
        keys = torch.cat([own_keys, shared_keys.expand(-1, spec.heads, -1, -1)], dim=-1)
        keys, values = taps("latent_k", layer, keys), taps("latent_v", layer, values)
        z = taps("latent_z", layer, history.attend(layer, queries, keys, values, self._mixer))
        return product(merge_heads(z), w["out"], w.get("out.bias"))

    def _queries(self, x: Tensor) -> Tensor:
        """Queries of all heads [B, kept, head * K] from the normalised stream x [B, kept, D], through a
        low-rank latent if the family has one for queries."""
        w = self.weights
        if self.spec.query_rank is not None:
            x = self._normed(product(x, w["q.down"], w.get("q.down.bias")), "q.norm")
        return product(x, w["q"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """x RMS-normalised over its last axis, with the weight called `name`."""
        return apply_norm(x, NormWeights(self.weights[name]), "rms", self.spec.norm_eps)
