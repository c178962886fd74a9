"""Mamba-1: a state for every channel, written to and forgotten by step sizes that tokens choose.

    x, z = W_in u                   x = silu(convolution of x)
    step, B, C = W_select x         dt = softplus(W_dt step + b)        A = -exp(A_log)
    S_t = exp(dt A) S_{t-1} + dt B x        out = W_out ((C S_t + D x) silu(z))

(Gu and Dao, Mamba, 2023, algorithm 2.) A channel is a head of one value, so that the scan is that of every
linear recurrence: queries C, keys dt B, values x. Falcon-Mamba and Jamba norm step, B and C before they are
used; in Zamba groups of channels have maps of their own to all three.

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

    def __init__(self, shape: MambaSpec, tensors: LayerTensors) -> None:
        self.shape, self.weights = shape, _arranged(strip_prefix(tensors, "ssm."), shape)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """See `PositionMixer`."""
        w = self.weights
        inner, gate = product(x, w["in"], w.get("in.bias")).chunk(2, dim=-1)
        gate = taps("ssm_gate", layer, split_heads(F.silu(gate), 1))
        inner = F.silu(convolve(inner, w["conv"], w.get("conv.bias"), layer, history))
        inner = taps("ssm_conv", layer, inner)
        selected = self._by_group(inner, w["select"])  # before taps may write into the values
        values = taps("ssm_x", layer, split_heads(inner, 1))
        tokens = {**self._selected(selected, layer, taps), "v": values}
        read = taps("ssm_out", layer, scan(LinearRecurrence("after"), tokens, layer, history, taps, "ssm"))
        read, values, gate = (history.needed(each) for each in (read, values, gate))
        found = torch.addcmul(read, upcast(values), upcast(w["D"])[:, None, None]) * gate
        return product(merge_heads(found).to(x.dtype), w["out"], w.get("out.bias"))

    def _selected(self, selected: Tensor, layer: int, taps: Taps) -> dict[str, Tensor]:
        """Queries, keys and decays [B, channel, token, N] from projected [B, G, token, rank + 2 N]."""
        w, sizes = self.weights, (self.shape.rank, self.shape.state_size, self.shape.state_size)
        step, keys, queries = selected.split(sizes, dim=-1)
        step, keys, queries = self._normed(step, "dt"), self._normed(keys, "b"), self._normed(queries, "c")
        steps = [product(part, to) for part, to in zip(step.unbind(1), w["dt"], strict=True)]
        step = steps[0] if len(steps) == 1 else torch.cat(steps, dim=-1)
        step = F.softplus(upcast(step) + upcast(w["dt.bias"]))
        # Contiguous by head, as what is made of it then is: a scan reads it in that order.
        step = taps("ssm_dt", layer, split_heads(step, 1).contiguous())
        keys = self._of_channels(taps("ssm_B", layer, keys))
        queries = self._of_channels(taps("ssm_C", layer, queries))
        decays = -torch.exp(upcast(w["A_log"])).unsqueeze(1)
        return {"q": queries, "k": step * keys, "log_decay": step * decays}

    def _by_group(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [B, token, channel], each group of channels by its own map [G, out, in]: [B, G, token, out]."""
        parts = x.chunk(self.shape.groups, dim=-1)
        return torch.stack([product(part, to) for part, to in zip(parts, weights, strict=True)], dim=1)

    def _of_channels(self, x: Tensor) -> Tensor:
        """What groups share, [B, G, token, N], for each of their channels."""
        each = self.shape.channels // self.shape.groups
        return x.expand(-1, each, -1, -1) if len(x[0]) == 1 else x.repeat_interleave(each, dim=1)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """x over its root mean square, where the family norms it."""
        if self.shape.norms is None:
            return x
        unit = upcast(x) * torch.rsqrt(upcast(x).pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        weight = self.weights.get(f"{name}_norm")
        return unit.to(x.dtype) if weight is None else weight * unit.to(x.dtype)


def _arranged(w: Mapping[str, Tensor], shape: MambaSpec) -> dict[str, Tensor]:
    """Weights of either layout: "in" with rows of x before those of the gate, "select" and "dt" by group."""
    found = dict(w)
    if shape.layout == "by group":
        for name in {"in", "in.bias"} & set(found):
            found[name] = found[name].unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        for name in ("dt.bias", "A_log", "D"):
            found[name] = found[name].flatten(0, 1)
        return found
    return found | {name: found[name].unsqueeze(0) for name in ("select", "dt")}
