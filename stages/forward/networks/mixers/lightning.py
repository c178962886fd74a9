"""Lightning attention: linear attention with one fixed decay per head.

    q, k, v = act(W u)      S_t = exp(-s) S_{t-1} + k v^T      out = W_out (sigmoid(W_z u) norm(q^T S_t))

(Qin et al., Various Lengths, Constant Speed, 2024; MiniMax-01, 2025, section 2.2.) Head h of H has the slope
s = slope 2^(-8 (h + 1) / H), with a factor `slope` per layer. Queries are not scaled, because the norm over
all heads removes any scale.

Axes: as in mixer.py; K = V, the width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...architectures.linear_mixers import LightningSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..mlp import ACTIVATIONS
from ..norms import apply_norm
from ..recurrences.linear import LinearRecurrence
from ..scan import scan
from ..weights import NormWeights
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["Lightning"]


class Lightning:
    """Lightning attention of one layer: linear attention with one fixed decay per head."""

    def __init__(self, spec: LightningSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, strip_prefix(tensors, "linear.")
        # In a checkpoint, each head's query, key and value rows are adjacent.
        by_part = self.weights["qkv"].unflatten(0, (spec.heads, 3, spec.head_dim)).transpose(0, 1)
        self.weights["qkv"] = by_part.flatten(0, 2)
        # The slopes of ALiBi, 2^(-8 (h + 1) / H).
        head_numbers = torch.arange(1, spec.heads + 1, dtype=torch.float64)
        slopes = spec.slope * 2 ** (-8 / spec.heads * head_numbers)
        self._log_decay = -slopes.to(by_part.device).view(1, -1, 1, 1)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec, w = self.spec, self.weights
        gate = torch.sigmoid(product(history.needed(x), w["gate"]))
        gate = taps("linear_gate", layer, split_heads(gate, spec.head_dim))
        inner = ACTIVATIONS[spec.activation](product(x, w["qkv"]))
        q, k, v = (split_heads(part, spec.head_dim) for part in inner.chunk(3, dim=-1))
        q, k, v = taps("linear_q", layer, q), taps("linear_k", layer, k), taps("linear_v", layer, v)
        log_decay = self._log_decay.to(upcast(q).dtype).expand(len(x), -1, x.shape[1], -1).contiguous()
        tokens = {"q": q, "k": k, "v": v, "log_decay": log_decay}
        read = scan(LinearRecurrence("after"), tokens, layer, history, taps, "linear")
        read = merge_heads(history.needed(taps("linear_out", layer, read))).to(x.dtype)
        normed = apply_norm(read, NormWeights(w["norm"]), "rms", spec.norm_eps)
        return product(merge_heads(gate) * normed, w["out"])
