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
    """Mixture of attention heads of one layer: each token's queries come from its top-k experts."""

    def __init__(self, spec: RoutedAttentionSpec, tensors: LayerTensors) -> None:
        self.spec, self._mixer, self.weights = spec, spec.summary, strip_prefix(tensors, "moa.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec, w, needed = self.spec, self.weights, history.needed(x)
        scores = taps("moa_router_logits", layer, product(needed, w["router"]).float())
        top_scores, experts = scores.topk(spec.chosen, dim=-1)
        expert_weights = taps("moa_weights", layer, top_scores.softmax(-1).to(x.dtype))
        experts = experts.flatten(0, 1)
        inputs = needed.flatten(0, 1).unsqueeze(1).expand(-1, spec.chosen, -1)
        q = self._map_by_expert(inputs, experts, w["q"]).unflatten(0, needed.shape[:2]).flatten(2)
        k, v = (split_heads(part, spec.head_dim) for part in product(x, w["kv"]).chunk(2, dim=-1))
        q = taps("q", layer, split_heads(q, spec.head_dim))
        k, v = taps("k", layer, k), taps("v", layer, v)
        q, k = apply_rope(q, k, spec.rope, history)
        q, k = taps("rot_q", layer, q), taps("rot_k", layer, k)
        # Query heads are ordered by slot, so heads that share a key head are not adjacent as in GQA.
        keys, values = (part.repeat(1, spec.chosen, 1, 1) for part in (k, v))
        z = taps("moa_z", layer, history.attend(layer, q, keys, values, self._mixer))
        z_by_slot = merge_heads(z).flatten(0, 1).unflatten(-1, (spec.chosen, -1))
        expert_out = self._map_by_expert(z_by_slot, experts, w["out"]).unflatten(0, needed.shape[:2])
        out: Tensor = (expert_out * expert_weights[..., None]).sum(2) + w["out.bias"]
        return out

    def _map_by_expert(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Each row of x times the matrix of the expert in its slot, [n, s, out].

        Arguments:
            x: rows of each token, one per slot, [n, s, in].
            experts: number of the expert in each slot, [n, s].
            weights: matrix of each expert, [expert, out, in].
        """
        out = x.new_zeros(*x.shape[:2], weights.shape[1])
        for expert in experts.unique().tolist():
            token, slot = (experts == expert).nonzero(as_tuple=True)
            rows, n_rows = x[token, slot], len(token)
            if n_rows < FEW_ROWS <= len(experts):
                # Products of few rows sum in another order; padding keeps a token's bits in every batch.
                rows = F.pad(rows, (0, 0, 0, FEW_ROWS - n_rows))
            out = torch.index_put(out, (token, slot), product(rows, weights[expert])[:n_rows])
        return out
