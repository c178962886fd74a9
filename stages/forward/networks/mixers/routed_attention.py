"""A mixture of attention: tokens are sent to a few experts, which make queries and write what these read.

    q_s = W_q,e(s) u      out = sum_s g_s W_o,e(s) z_s + b      g = softmax of the largest scores

(Zhang et al., Mixture of Attention Heads, 2022, section 3.) Keys and values are those of all experts. Heads
of the s-th expert of a token are its s-th slot, so that a head means another expert at another token.

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

    def __init__(self, shape: RoutedAttentionSpec, tensors: LayerTensors) -> None:
        self.shape, self._how, self.weights = shape, shape.summary, strip_prefix(tensors, "moa.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """See `PositionMixer`."""
        s, w, asking = self.shape, self.weights, history.needed(x)
        scores = taps("moa_router_logits", layer, product(asking, w["router"]).float())
        top, chosen = scores.topk(s.chosen, dim=-1)
        share = taps("moa_weights", layer, top.softmax(-1).to(x.dtype))
        each = asking.flatten(0, 1).unsqueeze(1).expand(-1, s.chosen, -1)
        q = self._by_expert(each, chosen.flatten(0, 1), w["q"]).unflatten(0, asking.shape[:2]).flatten(2)
        k, v = (split_heads(part, s.head_dim) for part in product(x, w["kv"]).chunk(2, dim=-1))
        q = taps("q", layer, split_heads(q, s.head_dim))
        k, v = taps("k", layer, k), taps("v", layer, v)
        q, k = apply_rope(q, k, s.rope, history)
        q, k = taps("rot_q", layer, q), taps("rot_k", layer, k)
        # Slots follow each other, so that heads that share keys are not neighbours.
        keys, values = (part.repeat(1, s.chosen, 1, 1) for part in (k, v))
        z = taps("moa_z", layer, history.attend(layer, q, keys, values, self._how))
        read = merge_heads(z).flatten(0, 1).unflatten(-1, (s.chosen, -1))
        written = self._by_expert(read, chosen.flatten(0, 1), w["out"]).unflatten(0, asking.shape[:2])
        out: Tensor = (written * share[..., None]).sum(2) + w["out.bias"]
        return out

    def _by_expert(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [n, s, in] through the map of the expert of each slot, of weights [expert, out, in]: [n, s,
        out]."""
        found = x.new_zeros(*x.shape[:2], weights.shape[1])
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            its, count = x[token, slot], len(token)
            if count < FEW_ROWS <= len(chosen):  # what a token gets does not depend on how many others come
                its = F.pad(its, (0, 0, 0, FEW_ROWS - count))
            found = torch.index_put(found, (token, slot), product(its, weights[expert])[:count])
        return found
