"""Mamba-1: a selective state-space model with one state per channel and input-dependent step sizes.

    x, z = W_in u                   x = silu(convolution of x)
    step, B, C = W_select x         dt = softplus(W_dt step + b)        A = -exp(A_log)
    S_t = exp(dt A) S_{t-1} + dt B x        out = W_out ((C S_t + D x) silu(z))

(Gu and Dao, Mamba, 2023, algorithm 2.) In terms of a linear recurrence, a channel is a head of one value:
queries C, keys dt B, values x. Falcon-Mamba and Jamba normalise step, B and C; in Zamba, groups of channels
have separate projections to all three.

Axes: head = channel; G groups of channels, N keys of a channel's state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.mixers import MambaSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..recurrences.linear import LinearRecurrence
from ..scan import scan
from .convolution import convolve
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["Mamba"]


class Mamba:
    """The Mamba-1 mixer of one layer (`PositionMixer`)."""

    def __init__(self, spec: MambaSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, _rearranged(strip_prefix(tensors, "ssm."), spec)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        w = self.weights
        inner, gate = product(x, w["in"], w.get("in.bias")).chunk(2, dim=-1)
        gate = taps("ssm_gate", layer, split_heads(F.silu(gate), 1))
        inner = F.silu(convolve(inner, w["conv"], w.get("conv.bias"), layer, history))
        inner = taps("ssm_conv", layer, inner)
        selected = self._by_group(inner, w["select"])  # before taps may write into the values
        values = taps("ssm_x", layer, split_heads(inner, 1))
        tokens = {**self._selected(selected, layer, taps), "v": values}
        read = taps("ssm_out", layer, scan(LinearRecurrence("after"), tokens, layer, history, taps, "ssm"))
        read, values, gate = (history.needed(tensor) for tensor in (read, values, gate))
        gated = torch.addcmul(read, upcast(values), upcast(w["D"])[:, None, None]) * gate
        return product(merge_heads(gated).to(x.dtype), w["out"], w.get("out.bias"))

    def _selected(self, selected: Tensor, layer: int, taps: Taps) -> dict[str, Tensor]:
        """Queries, keys and decays [B, channel, token, N] from projected [B, G, token, rank + 2 N]."""
        w, sizes = self.weights, (self.spec.rank, self.spec.state_size, self.spec.state_size)
        step, keys, queries = selected.split(sizes, dim=-1)
        step, keys, queries = self._normed(step, "dt"), self._normed(keys, "b"), self._normed(queries, "c")
        steps = [product(part, to) for part, to in zip(step.unbind(1), w["dt"], strict=True)]
        step = steps[0] if len(steps) == 1 else torch.cat(steps, dim=-1)
        step = F.softplus(upcast(step) + upcast(w["dt.bias"]))
        # Contiguous by head, so that tensors derived from it are: the scan reads them in that order.
        step = taps("ssm_dt", layer, split_heads(step, 1).contiguous())
        keys = self._of_channels(taps("ssm_B", layer, keys))
        queries = self._of_channels(taps("ssm_C", layer, queries))
        # A is stored as log(-A), so that no trained value makes the state grow.
        decays = -torch.exp(upcast(w["A_log"])).unsqueeze(1)
        return {"q": queries, "k": step * keys, "log_decay": step * decays}

    def _by_group(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [B, token, channel], each group of channels times its matrix of [G, out, in]: [B, G, token,
        out]."""
        parts = x.chunk(self.spec.groups, dim=-1)
        return torch.stack([product(part, to) for part, to in zip(parts, weights, strict=True)], dim=1)

    def _of_channels(self, x: Tensor) -> Tensor:
        """x [B, G, token, N] of groups, repeated for their channels: [B, channel, token, N]."""
        per_group = self.spec.channels // self.spec.groups
        return x.expand(-1, per_group, -1, -1) if len(x[0]) == 1 else x.repeat_interleave(per_group, dim=1)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """x divided by its root mean square, if the family normalises step, B and C."""
        if self.spec.norms is None:
            return x
        unit = upcast(x) * torch.rsqrt(upcast(x).pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        weight = self.weights.get(f"{name}_norm")
        return unit.to(x.dtype) if weight is None else weight * unit.to(x.dtype)


def _rearranged(w: Mapping[str, Tensor], spec: MambaSpec) -> dict[str, Tensor]:
    """Weights of both checkpoint layouts in one: "in" has the rows of x before those of the gate; "select"
    and "dt" have a leading group axis."""
    weights = dict(w)
    if spec.layout == "by group":
        for name in {"in", "in.bias"} & set(weights):
            weights[name] = weights[name].unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        for name in ("dt.bias", "A_log", "D"):
            weights[name] = weights[name].flatten(0, 1)
        return weights
    return weights | {name: weights[name].unsqueeze(0) for name in ("select", "dt")}
