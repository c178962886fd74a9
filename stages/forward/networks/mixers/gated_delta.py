"""Gated DeltaNet: linear attention in which a token replaces the value stored under its key (delta rule).

    q, k, v = silu(convolution of W u)      q, k over their lengths, q / sqrt(K)      beta = sigmoid(W_b u)
    S_t = d S_{t-1} + beta k (v - k^T d S_{t-1})^T         y = q^T S_t          out = W_out norm(y) gate(z)

(Yang et al., Gated Delta Networks, 2024, equation 10.) q and k are divided by their lengths. log d is
-exp(A_log) softplus(W_a u + b), one number per head, or one per key channel (Kimi Delta Attention; Kimi
Linear, 2025, section 3), which has low-rank projections to decay and gate. Without decays it is DeltaNet
(Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 2.2). Groups of heads share
queries and keys; convolution and gate are optional.

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
from ..scan import scan_decayed, tapped_log_decay
from .convolution import convolve
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["GatedDelta"]

_EPS = 1e-6
"""Added to squared lengths of queries and keys."""


class GatedDelta:
    """Gated DeltaNet of one layer: linear attention in which a token replaces the value stored under its
    key."""

    def __init__(self, spec: GatedDeltaSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, _rearranged(strip_prefix(tensors, "linear."), spec)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec, w = self.spec, self.weights
        gate = self._gate(history.needed(x), layer, taps)
        inner = product(x, w["qkv"])
        if spec.conv_size:
            inner = taps("linear_conv", layer, F.silu(convolve(inner, w["conv"], None, layer, history)))
        else:
            inner = F.silu(inner)
        queries, keys, values = inner.split(spec.parts, dim=-1)
        queries = taps("linear_q", layer, _unit(split_heads(queries, spec.key_size)) * spec.key_size**-0.5)
        keys = self._repeat_for_heads(taps("linear_k", layer, _unit(split_heads(keys, spec.key_size))))
        values = taps("linear_v", layer, split_heads(values, spec.value_size))
        # A factor of 2 lets beta reach 2, where I - beta k k^T reflects (eigenvalue -1).
        beta = upcast(product(x, w["b"])).sigmoid() * spec.beta_factor
        beta = taps("linear_beta", layer, split_heads(beta, 1))
        log_decay = torch.zeros_like(beta)
        if spec.decays is not None:
            log_decay = tapped_log_decay(self._log_decay(x), layer, taps, "linear")
        replaced = beta * keys
        tokens = {"q": self._repeat_for_heads(queries), "k": replaced, "v": values, "log_decay": log_decay}
        # The removed value is read from the decayed state: alpha = d k, beta = -beta k.
        tokens |= {"alpha": keys * log_decay.exp(), "beta": -replaced}
        read = scan_decayed(LinearRecurrence("after"), tokens, layer, history, taps, "linear")
        read = self._normed(history.needed(taps("linear_out", layer, read)), x.dtype)
        return product(merge_heads(read if gate is None else read * gate).to(x.dtype), w["out"])

    def _gate(self, x: Tensor, layer: int, taps: Taps) -> Tensor | None:
        """Gate of the output, [B, head, kept, V], float32, from the normalised stream x [B, kept, D]; None if
        the family has no gate."""
        if self.spec.gate is None:
            return None
        gate = upcast(self._projected(x, "z"))
        gate = F.silu(gate) if self.spec.gate == "silu" else gate.sigmoid()
        return taps("linear_gate", layer, split_heads(gate, self.spec.value_size))

    def _projected(self, x: Tensor, name: str) -> Tensor:
        """x [..., D] times the matrix called `name`, or times the two matrices of a low-rank map."""
        down = self.weights.get(f"{name}.down")
        return product(x if down is None else product(x, down), self.weights[name])

    def _log_decay(self, x: Tensor) -> Tensor:
        """Natural logarithm of the state's decay at each token, [B, head, token, K or 1], from the normalised
        stream x [B, token, D]."""
        w, width = self.weights, self.spec.axis_sizes["linear_decay"]
        step = F.softplus(upcast(self._projected(x, "a")) + upcast(w["dt_bias"]))
        return split_heads(step, width) * -torch.exp(upcast(w["A_log"])).view(-1, 1, 1)

    def _repeat_for_heads(self, x: Tensor) -> Tensor:
        """x [B, G, token, K], one row per group of heads, repeated for the heads of each group: [B, head,
        token, K]."""
        return x.repeat_interleave(self.spec.heads // self.spec.groups, dim=1)

    def _normed(self, read: Tensor, dtype: torch.dtype) -> Tensor:
        """What tokens read from the state, [B, head, token, V], rounded to `dtype`, then RMS-normalised over
        V and returned in float32."""
        # Rounded first: transformers' scan returns the model's dtype.
        read = upcast(read.to(dtype))
        unit = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        return upcast(self.weights["norm"] * unit.to(dtype))


def _unit(x: Tensor) -> Tensor:
    """x [..., K] divided by its Euclidean length, in float32."""
    x = upcast(x)
    # Epsilon inside of the root, as in flash-linear-attention's l2norm.
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPS)


def _rearranged(w: Mapping[str, Tensor], spec: GatedDeltaSpec) -> dict[str, Tensor]:
    """Weights by name in one layout for all checkpoints: "qkv", "conv", "z" (gate), "b" (beta) and "a"
    (decay); if gate and decay are low-rank maps, also "z.down" and "a.down"."""
    if spec.layout == "by part":
        return dict(w)
    if spec.layout == "by group":
        n_rows = [*spec.parts, spec.parts[2]]  # the gate is as wide as the values
        queries, keys, values, gate = _split_grouped_rows(w["qkvz"], n_rows, spec.groups)
        b, a = _split_grouped_rows(w["ba"], [spec.heads, spec.heads], spec.groups)
        unchanged = {name: w[name] for name in ("conv", "A_log", "dt_bias", "norm", "out")}
        return {**unchanged, "qkv": torch.cat([queries, keys, values]), "z": gate, "b": b, "a": a}
    weights = {name: w[name] for name in ("A_log", "dt_bias", "norm", "out", "b") if name in w}
    weights["qkv"] = torch.cat([w[part] for part in "qkv"])
    if spec.conv_size:
        weights["conv"] = torch.cat([w[f"conv.{part}"] for part in "qkv"])
    names = {"z": "g", "a": "a", "z.down": "g_a", "a.down": "f_a"}
    if spec.decays == "key":
        names |= {"z": "g_b", "a": "f_b"}
    return weights | {name: w[stored] for name, stored in names.items() if stored in w}


def _split_grouped_rows(rows: Tensor, counts: list[int], groups: int) -> list[Tensor]:
    """Split a weight, with rows ordered by head group and then by part, into one matrix per part.

    Arguments:
        rows: The weight [row, in].
        counts: Number of rows of each part, over all groups.
        groups: Number of groups.
    """
    split = rows.unflatten(0, (groups, -1)).split([count // groups for count in counts], dim=1)
    return [part.flatten(0, 1) for part in split]
