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
    """The Mamba-1 mixer of one layer: a state-space model with one state per channel."""

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
        selected = self._map_groups(inner, w["select"])  # before taps may write into the values
        values = taps("ssm_x", layer, split_heads(inner, 1))
        tokens = {**self._recurrence_inputs(selected, layer, taps), "v": values}
        read = taps("ssm_out", layer, scan(LinearRecurrence("after"), tokens, layer, history, taps, "ssm"))
        read, values, gate = (history.needed(tensor) for tensor in (read, values, gate))
        gated = torch.addcmul(read, upcast(values), upcast(w["D"])[:, None, None]) * gate
        return product(merge_heads(gated).to(x.dtype), w["out"], w.get("out.bias"))

    def _recurrence_inputs(self, selected: Tensor, layer: int, taps: Taps) -> dict[str, Tensor]:
        """Queries "q", keys "k" and "log_decay" of the recurrence, each [B, channel, token, N].

        Arguments:
            selected: projections of each group to step size, B and C, side by side, [B, G, token, rank + 2
                N].
            layer: number of the layer.
            taps: captures and interventions of the pass, called at its hook points.
        """
        w, sizes = self.weights, (self.spec.rank, self.spec.state_size, self.spec.state_size)
        low_rank_step, keys, queries = selected.split(sizes, dim=-1)
        low_rank_step = self._normed(low_rank_step, "dt")
        keys, queries = self._normed(keys, "b"), self._normed(queries, "c")
        groups = zip(low_rank_step.unbind(1), w["dt"], strict=True)
        steps = [product(group_step, matrix) for group_step, matrix in groups]
        step = steps[0] if len(steps) == 1 else torch.cat(steps, dim=-1)
        step = F.softplus(upcast(step) + upcast(w["dt.bias"]))
        # Contiguous by head, so that tensors derived from it are: the scan reads them in that order.
        step = taps("ssm_dt", layer, split_heads(step, 1).contiguous())
        keys = self._repeat_for_channels(taps("ssm_B", layer, keys))
        queries = self._repeat_for_channels(taps("ssm_C", layer, queries))
        # A is stored as log(-A), so that no trained value makes the state grow.
        decays = -torch.exp(upcast(w["A_log"])).unsqueeze(1)
        return {"q": queries, "k": step * keys, "log_decay": step * decays}

    def _map_groups(self, x: Tensor, weights: Tensor) -> Tensor:
        """Each group of channels of x [B, token, channel] times its own matrix: [B, G, token, out]; weights:
        matrices [G, out, in]."""
        groups = zip(x.chunk(self.spec.groups, dim=-1), weights, strict=True)
        return torch.stack([product(channels, matrix) for channels, matrix in groups], dim=1)

    def _repeat_for_channels(self, x: Tensor) -> Tensor:
        """x [B, G, token, N], one row per group of channels, repeated for the channels of each group: [B,
        channel, token, N]."""
        per_group = self.spec.channels // self.spec.groups
        return x.expand(-1, per_group, -1, -1) if len(x[0]) == 1 else x.repeat_interleave(per_group, dim=1)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """x [..., width] RMS-normalised, if the family normalises step sizes, B and C; else x. name: "dt",
        "b" or "c", by which the norm's weight is found."""
        if self.spec.norms is None:
            return x
        unit = upcast(x) * torch.rsqrt(upcast(x).pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        weight = self.weights.get(f"{name}_norm")
        return unit.to(x.dtype) if weight is None else weight * unit.to(x.dtype)


def _rearranged(w: Mapping[str, Tensor], spec: MambaSpec) -> dict[str, Tensor]:
    """Weights by name in a common layout of both checkpoint kinds: rows of x precede gate rows in "in";
    "select" and "dt" have a leading group axis."""
    weights = dict(w)
    if spec.layout == "by group":
        for name in {"in", "in.bias"} & set(weights):
            weights[name] = weights[name].unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        for name in ("dt.bias", "A_log", "D"):
            weights[name] = weights[name].flatten(0, 1)
        return weights
    return weights | {name: weights[name].unsqueeze(0) for name in ("select", "dt")}
