"""Mamba-2: a state-space model with one decay per head; groups of heads share keys and queries.

    z, (x, B, C), dt = W_in u       x, B, C = silu(convolution)     dt = softplus(dt + b), within limits
    S_t = exp(dt A) S_{t-1} + dt B x^T      y = C S_t + D x         out = W_out norm(y silu(z))

(Dao and Gu, Transformers are SSMs, 2024, section 7.) In terms of a linear recurrence: queries C, keys dt B,
values x, one decay per head. The norm is over each group's channels, as in the reference code; Falcon-H1
normalises before the gate, or not at all.

Axes: G groups, N keys of a head's state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.mixers import Mamba2Spec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..recurrences.linear import LinearRecurrence
from ..scan import scan
from .convolution import convolve
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["Mamba2"]


class Mamba2:
    """The Mamba-2 mixer of one layer: a state-space model with one decay per head."""

    def __init__(self, spec: Mamba2Spec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, strip_prefix(tensors, "ssm.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec, w = self.spec, self.weights
        sizes = (spec.channels, spec.convolved, spec.heads)
        gate, inner, step = product(x, w["in"], w.get("in.bias")).split(sizes, dim=-1)
        gate = taps("ssm_gate", layer, split_heads(F.silu(upcast(gate)), spec.head_dim))
        inner = F.silu(convolve(inner, w["conv"], w.get("conv.bias"), layer, history))
        inner = taps("ssm_conv", layer, inner)
        shared = spec.groups * spec.state_size
        values, keys, queries = inner.split((spec.channels, shared, shared), dim=-1)
        values = taps("ssm_x", layer, split_heads(values, spec.head_dim))
        low, high = spec.limits
        # Clamped for every token; transformers leaves it out for one new token on kept states, so that its
        # texts depend on the cache.
        step = F.softplus(upcast(step) + upcast(w["dt_bias"])).clamp(low, high)
        step = taps("ssm_dt", layer, split_heads(step, 1))
        keys = self._repeat_for_heads(taps("ssm_B", layer, split_heads(keys, spec.state_size)))
        queries = self._repeat_for_heads(taps("ssm_C", layer, split_heads(queries, spec.state_size)))
        # A is stored as log(-A), so that no trained value makes the state grow.
        decays = -torch.exp(upcast(w["A_log"]))[:, None, None]
        tokens = {"q": queries, "k": step * keys, "v": values, "log_decay": step * decays}
        read = taps("ssm_out", layer, scan(LinearRecurrence("after"), tokens, layer, history, taps, "ssm"))
        read, values, gate = (history.needed(tensor) for tensor in (read, values, gate))
        read = torch.addcmul(read, upcast(values), upcast(w["D"])[:, None, None])
        return product(
            self._gated(merge_heads(read), merge_heads(gate), x.dtype), w["out"], w.get("out.bias")
        )

    def _repeat_for_heads(self, x: Tensor) -> Tensor:
        """x [B, G, token, N], one row per group of heads, repeated for the heads of each group: [B, head,
        token, N]."""
        return x.repeat_interleave(self.spec.heads // self.spec.groups, dim=1)

    def _gated(self, read: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """What tokens read from the state, [B, token, channel], gated and normalised in the order of the
        family; gate: of the same shape; dtype: of the result."""
        if self.spec.norm is None:
            return (read * gate).to(dtype)
        if self.spec.norm == "before gate":
            return (self._unit(read) * self.weights["norm"] * gate).to(dtype)
        return self.weights["norm"] * self._unit(read * gate).to(dtype)

    def _unit(self, x: Tensor) -> Tensor:
        """x [B, token, channel], each group of channels divided by its root mean square."""
        groups: Tensor = x.unflatten(-1, (self.spec.groups, -1))
        scale = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        return (groups * scale).flatten(-2)
