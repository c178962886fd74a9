"""Mixture of attention heads: each token is routed to a few experts with own query and output projections.

    q_s = W_q,e(s) u      out = sum_s g_s W_o,e(s) z_s + b      g = softmax of the largest scores

(Zhang et al., Mixture of Attention Heads, 2022, section 3.) All experts share keys and values. The heads of a
token's s-th expert are its slot s, so the same head can belong to different experts at different tokens.

Axes: as in mixer.py; n = tokens of all prompts whose output is needed, s = slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.mixers import RoutedAttentionSpec
from ...hooks.taps import Taps
from ..attention import apply_rope
from ..history import History
from ..kernels import FEW_ROWS
from ..kernels.products import product
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix

__all__ = ["RoutedAttention"]


class RoutedAttention:
    """The mixture of attention of one layer (`PositionMixer`)."""

    def __init__(self, spec: RoutedAttentionSpec, tensors: LayerTensors) -> None:
        self.spec, self._mixer, self.weights = spec, spec.summary, strip_prefix(tensors, "moa.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec, w, needed = self.spec, self.weights, history.needed(x)
        scores = taps("moa_router_logits", layer, product(needed, w["router"]).float())
        top, experts = scores.topk(spec.chosen, dim=-1)
        share = taps("moa_weights", layer, top.softmax(-1).to(x.dtype))
        slots = needed.flatten(0, 1).unsqueeze(1).expand(-1, spec.chosen, -1)
        q = self._by_expert(slots, experts.flatten(0, 1), w["q"]).unflatten(0, needed.shape[:2]).flatten(2)
        k, v = (split_heads(part, spec.head_dim) for part in product(x, w["kv"]).chunk(2, dim=-1))
        q = taps("q", layer, split_heads(q, spec.head_dim))
        k, v = taps("k", layer, k), taps("v", layer, v)
        q, k = apply_rope(q, k, spec.rope, history)
        q, k = taps("rot_q", layer, q), taps("rot_k", layer, k)
        # Query heads are ordered by slot, so heads that share a key head are not adjacent as in GQA.
        keys, values = (part.repeat(1, spec.chosen, 1, 1) for part in (k, v))
        z = taps("moa_z", layer, history.attend(layer, q, keys, values, self._mixer))
        read = merge_heads(z).flatten(0, 1).unflatten(-1, (spec.chosen, -1))
        written = self._by_expert(read, experts.flatten(0, 1), w["out"]).unflatten(0, needed.shape[:2])
        out: Tensor = (written * share[..., None]).sum(2) + w["out.bias"]
        return out

    def _by_expert(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [n, s, in] times the matrix of each slot's expert [n, s], of weights [expert, out, in]: [n, s,
        out]."""
        out = x.new_zeros(*x.shape[:2], weights.shape[1])
        for expert in experts.unique().tolist():
            token, slot = (experts == expert).nonzero(as_tuple=True)
            rows, count = x[token, slot], len(token)
            if count < FEW_ROWS <= len(experts):
                # Products of few rows sum in another order; padding keeps a token's bits in every batch.
                rows = F.pad(rows, (0, 0, 0, FEW_ROWS - count))
            out = torch.index_put(out, (token, slot), product(rows, weights[expert])[:count])
        return out
