"""A gated delta net: linear attention whose tokens replace what the state holds under their key.

    q, k, v = silu(convolution of W u)      q, k over their lengths, q / sqrt(K)      beta = sigmoid(W_b u)
    S_t = d S_{t-1} + beta k (v - k^T d S_{t-1})^T         y = q^T S_t          out = W_out norm(y) gate(z)

(Yang et al., Gated Delta Networks, 2024, equation 10.) The logarithm of d is -exp(A_log) softplus(W_a u + b):
one number a head, or one a key channel (Kimi Delta Attention; Kimi Linear, 2025, section 3), then with maps
of low rank to it and to the gate. Without decays it is a delta net (Yang et al., Parallelizing Linear
Transformers with the Delta Rule, 2024, section 2.2). Groups of heads share queries and keys; convolution and
gate may be missing.

Axes: G groups, K keys and V values of a head's state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.linear_mixers import GatedDeltaSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..recurrences.linear import LinearRecurrence
from ..scan import scan_decayed, shown_decay
from .convolution import convolve
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["GatedDelta"]

_EPS = 1e-6
"""Of lengths of queries and keys, squared."""


class GatedDelta:
    """The gated delta net of one layer (`PositionMixer`)."""

    def __init__(self, shape: GatedDeltaSpec, tensors: LayerTensors) -> None:
        self.shape, self.weights = shape, _arranged(strip_prefix(tensors, "linear."), shape)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """See `PositionMixer`."""
        s, w = self.shape, self.weights
        gate = self._gate(history.needed(x), layer, taps)
        inner = product(x, w["qkv"])
        inner = F.silu(convolve(inner, w["conv"], None, layer, history) if s.conv_size else inner)
        inner = taps("linear_conv", layer, inner) if s.conv_size else inner
        queries, keys, values = inner.split(s.parts, dim=-1)
        queries = taps("linear_q", layer, _unit(split_heads(queries, s.key_size)) * s.key_size**-0.5)
        keys = self._of_heads(taps("linear_k", layer, _unit(split_heads(keys, s.key_size))))
        values = taps("linear_v", layer, split_heads(values, s.value_size))
        beta = taps(
            "linear_beta", layer, split_heads(upcast(product(x, w["b"])).sigmoid() * s.beta_factor, 1)
        )
        log_decay = torch.zeros_like(beta)
        if s.decays is not None:
            log_decay = shown_decay(self._log_decay(x), layer, taps, "linear")
        replaced = beta * keys
        tokens = {"q": self._of_heads(queries), "k": replaced, "v": values, "log_decay": log_decay}
        # What is taken away is what the decayed state holds under the key.
        tokens |= {"alpha": keys * log_decay.exp(), "beta": -replaced}
        read = scan_decayed(LinearRecurrence("after"), tokens, layer, history, taps, "linear")
        read = self._normed(history.needed(taps("linear_out", layer, read)), x.dtype)
        return product(merge_heads(read if gate is None else read * gate).to(x.dtype), w["out"])

    def _gate(self, x: Tensor, layer: int, taps: Taps) -> Tensor | None:
        """What multiplies what was read [B, head, kept, V], in float32."""
        if self.shape.gate is None:
            return None
        gate = upcast(self._projected(x, "z"))
        gate = F.silu(gate) if self.shape.gate == "silu" else gate.sigmoid()
        return taps("linear_gate", layer, split_heads(gate, self.shape.value_size))

    def _projected(self, x: Tensor, name: str) -> Tensor:
        """x by one map, or by two that meet in few channels."""
        down = self.weights.get(f"{name}.down")
        return product(x if down is None else product(x, down), self.weights[name])

    def _log_decay(self, x: Tensor) -> Tensor:
        """[B, head, token, K or 1]."""
        w, width = self.weights, self.shape.axis_sizes["linear_decay"]
        step = F.softplus(upcast(self._projected(x, "a")) + upcast(w["dt_bias"]))
        return split_heads(step, width) * -torch.exp(upcast(w["A_log"])).view(-1, 1, 1)

    def _of_heads(self, x: Tensor) -> Tensor:
        """What groups share, [B, G, token, K], for each of their heads [B, head, token, K]."""
        return x.repeat_interleave(self.shape.heads // self.shape.groups, dim=1)

    def _normed(self, read: Tensor, dtype: torch.dtype) -> Tensor:
        """What was read [B, head, token, V] over its root mean square, in float32."""
        read = upcast(read.to(dtype))
        unit = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        return upcast(self.weights["norm"] * unit.to(dtype))


def _unit(x: Tensor) -> Tensor:
    """x [..., K] over its length."""
    x = upcast(x)
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPS)


def _arranged(w: Mapping[str, Tensor], shape: GatedDeltaSpec) -> dict[str, Tensor]:
    """Weights of any layout as this mixer asks for them: "qkv", "conv", "z", "b", "a", the last two maps with
    "….down" before them where they are of low rank."""
    if shape.layout == "by part":
        return dict(w)
    if shape.layout == "by group":
        parts = [*shape.parts, shape.parts[2]]
        queries, keys, values, gate = _of_groups(w["qkvz"], parts, shape.groups)
        b, a = _of_groups(w["ba"], [shape.heads, shape.heads], shape.groups)
        kept = {name: w[name] for name in ("conv", "A_log", "dt_bias", "norm", "out")}
        return {**kept, "qkv": torch.cat([queries, keys, values]), "z": gate, "b": b, "a": a}
    found = {name: w[name] for name in ("A_log", "dt_bias", "norm", "out", "b") if name in w}
    found["qkv"] = torch.cat([w[part] for part in "qkv"])
    if shape.conv_size:
        found["conv"] = torch.cat([w[f"conv.{part}"] for part in "qkv"])
    names = {"z": "g", "a": "a", "z.down": "g_a", "a.down": "f_a"}
    if shape.decays == "key":
        names |= {"z": "g_b", "a": "f_b"}
    return found | {name: w[told] for name, told in names.items() if told in w}


def _of_groups(rows: Tensor, counts: list[int], groups: int) -> list[Tensor]:
    """Parts of a weight whose rows lie by group, in each of which the parts do; each part as one matrix."""
    split = rows.unflatten(0, (groups, -1)).split([count // groups for count in counts], dim=1)
    return [part.flatten(0, 1) for part in split]
