"""Linear attention with a decaying state: gated linear attention (GLA) and retention.

    q, k, v = W u       S_t = diag(d_t) S_{t-1} + k v^T       y = q^T S_t / sqrt(K)
    out = W_out (norm(y) silu(W_g u))

(Yang et al., Gated Linear Attention, 2023, section 4.) In GLA, the decay of each key channel depends on the
token: sigmoid(W_2 W_1 u + b)^(1/16). In retention (Sun et al., Retentive Network, 2023, equations 3 to 8)
head h has the fixed decay 1 - 2^(-5 - h), and RoPE is applied to queries and keys. Both may have short
convolutions, activations of queries and keys, and groups of heads that share keys and values.

Axes: K keys and V values of a head's state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.linear_mixers import LinearAttentionSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..mlp import ACTIVATIONS
from ..recurrences.linear import LinearRecurrence
from ..rope import rotate
from ..scan import scan
from .convolution import convolve
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["LinearAttention"]


class LinearAttention:
    """The linear attention of one layer (`PositionMixer`)."""

    def __init__(self, shape: LinearAttentionSpec, tensors: LayerTensors) -> None:
        self.shape, self.weights = shape, _rearranged(strip_prefix(tensors, "linear."))
        losses = 2.0 ** (-5 - torch.arange(shape.heads, dtype=torch.float64))
        self._fixed = torch.log1p(-losses).to(self.weights["out"].device).view(1, -1, 1, 1)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        s, w = self.shape, self.weights
        gate = None
        if s.has_gate:
            gate = F.silu(upcast(product(history.needed(x), w["gate"])))
            gate = taps("linear_gate", layer, split_heads(gate, s.value_size))
        queries, keys, values = self._projected(x, layer, history, taps)
        queries = taps("linear_q", layer, queries * s.key_size**-0.5)
        keys = taps("linear_k", layer, self._repeat_for_heads(keys))
        values = taps("linear_v", layer, self._repeat_for_heads(values))
        tokens = {"q": queries, "k": keys, "v": values, "log_decay": self._log_decay(x)}
        read = scan(LinearRecurrence("after"), tokens, layer, history, taps, "linear")
        read = self._normed(history.needed(taps("linear_out", layer, read)))
        return product(merge_heads(read if gate is None else read * gate).to(x.dtype), w["out"])

    def _projected(
        self, x: Tensor, layer: int, history: History, taps: Taps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, head, token, K], keys [B, group, token, K] and values [B, group, token, V], after
        RoPE."""
        s, w = self.shape, self.weights
        inner = product(x, w["qkv"])
        if s.conv_size:
            inner = F.silu(convolve(inner, w["conv"], None, layer, history))
            inner = taps("linear_conv", layer, inner)
        parts = zip(inner.split(s.parts, dim=-1), (s.key_size, s.key_size, s.value_size), strict=True)
        queries, keys, values = (split_heads(part, width) for part, width in parts)
        if s.activation is not None:
            queries, keys = (ACTIVATIONS[s.activation](part) for part in (queries, keys))
        if s.rope is not None:
            cos, sin = history.rotation(s.rope, x.dtype)
            queries, keys = (rotate(part.contiguous(), cos, sin) for part in (queries, keys))
        return queries, keys, values

    def _log_decay(self, x: Tensor) -> Tensor:
        """Log decay of the state, [B, head, token, K or 1]."""
        s, w = self.shape, self.weights
        if s.decays == "fixed":
            fixed = self._fixed.to(upcast(x).dtype)
            return fixed.expand(len(x), -1, x.shape[1], -1).contiguous()
        logits = product(product(x, w["decay.down"]), w["decay"], w["decay.bias"])
        log_decay = split_heads(F.logsigmoid(upcast(logits)) / s.decay_divisor, s.key_size)
        if s.least_log_decay is not None:
            log_decay = log_decay.clamp(min=s.least_log_decay)
        return self._repeat_for_heads(log_decay)

    def _repeat_for_heads(self, x: Tensor) -> Tensor:
        """x [B, group, token, width] of groups, repeated for their heads: [B, head, token, width]."""
        per_group = self.shape.heads // self.shape.groups
        return x if per_group == 1 else x.repeat_interleave(per_group, dim=1)

    def _normed(self, read: Tensor) -> Tensor:
        """Output of the scan [B, head, token, V], RMS-normalised per head in float32."""
        read = upcast(read)
        unit = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        return unit * upcast(self.weights["norm"]) if self.shape.has_norm_weight else unit


def _rearranged(w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the projections (and convolutions) of queries, keys and values concatenated."""
    merged = {name: x for name, x in w.items() if name not in "qkv" and not name.startswith("conv.")}
    merged["qkv"] = torch.cat([w[part] for part in "qkv"])
    if "conv.q" in w:
        merged["conv"] = torch.cat([w[f"conv.{part}"] for part in "qkv"])
    return merged
