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
    """Gated linear attention or retention of one layer: linear attention with a decaying state."""

    def __init__(self, spec: LinearAttentionSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, _rearranged(strip_prefix(tensors, "linear."))
        # Retention: head h keeps 1 - 2^(-5 - h) of its state at each token.
        lost_shares = 2.0 ** (-5 - torch.arange(spec.heads, dtype=torch.float64))
        self._fixed_log_decay = torch.log1p(-lost_shares).to(self.weights["out"].device).view(1, -1, 1, 1)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec, w = self.spec, self.weights
        gate = None
        if spec.has_gate:
            gate = F.silu(upcast(product(history.needed(x), w["gate"])))
            gate = taps("linear_gate", layer, split_heads(gate, spec.value_size))
        queries, keys, values = self._projected(x, layer, history, taps)
        queries = taps("linear_q", layer, queries * spec.key_size**-0.5)
        keys = taps("linear_k", layer, self._repeat_for_heads(keys))
        values = taps("linear_v", layer, self._repeat_for_heads(values))
        tokens = {"q": queries, "k": keys, "v": values, "log_decay": self._log_decay(x)}
        read = scan(LinearRecurrence("after"), tokens, layer, history, taps, "linear")
        read = self._normed(history.needed(taps("linear_out", layer, read)))
        return product(merge_heads(read if gate is None else read * gate).to(x.dtype), w["out"])

    def _projected(
        self, x: Tensor, layer: int, history: History, taps: Taps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, head, token, K], keys [B, group, token, K] and values [B, group, token, V] of the
        normalised stream x [B, token, D], after convolution, activation and RoPE."""
        spec, w = self.spec, self.weights
        inner = product(x, w["qkv"])
        if spec.conv_size:
            inner = F.silu(convolve(inner, w["conv"], None, layer, history))
            inner = taps("linear_conv", layer, inner)
        queries, keys, values = inner.split(spec.parts, dim=-1)
        queries, keys = split_heads(queries, spec.key_size), split_heads(keys, spec.key_size)
        values = split_heads(values, spec.value_size)
        if spec.activation is not None:
            queries, keys = (ACTIVATIONS[spec.activation](part) for part in (queries, keys))
        if spec.rope is not None:
            cos, sin = history.rotation(spec.rope, x.dtype)
            queries, keys = (rotate(part.contiguous(), cos, sin) for part in (queries, keys))
        return queries, keys, values

    def _log_decay(self, x: Tensor) -> Tensor:
        """Natural logarithm of the state's decay at each token, [B, head, token, K or 1]; x: normalised
        stream [B, token, D]."""
        spec, w = self.spec, self.weights
        if spec.decays == "fixed":
            log_decay = self._fixed_log_decay.to(upcast(x).dtype)
            return log_decay.expand(len(x), -1, x.shape[1], -1).contiguous()
        logits = product(product(x, w["decay.down"]), w["decay"], w["decay.bias"])
        log_decay = split_heads(F.logsigmoid(upcast(logits)) / spec.decay_divisor, spec.key_size)
        if spec.least_log_decay is not None:
            log_decay = log_decay.clamp(min=spec.least_log_decay)
        return self._repeat_for_heads(log_decay)

    def _repeat_for_heads(self, x: Tensor) -> Tensor:
        """x [B, group, token, width], one row per group of heads, repeated for the heads of each group: [B,
        head, token, width]."""
        per_group = self.spec.heads // self.spec.groups
        return x if per_group == 1 else x.repeat_interleave(per_group, dim=1)

    def _normed(self, read: Tensor) -> Tensor:
        """What tokens read from the state, [B, head, token, V], RMS-normalised over V in float32."""
        read = upcast(read)
        unit = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        return unit * upcast(self.weights["norm"]) if self.spec.has_norm_weight else unit


def _rearranged(w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy of the weights in which the projections (and convolutions) of queries, keys and values are one
    matrix, "qkv" (and "conv")."""
    merged = {name: x for name, x in w.items() if name not in "qkv" and not name.startswith("conv.")}
    merged["qkv"] = torch.cat([w[part] for part in "qkv"])
    if "conv.q" in w:
        merged["conv"] = torch.cat([w[f"conv.{part}"] for part in "qkv"])
    return merged
