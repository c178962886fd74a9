"""Experts: MLPs of which a router sends every token to a few, and perhaps one that all tokens go through.

| routing | weights of the chosen |
| --- | --- |
| "softmax of chosen" | softmax over the largest k scores (Granite) |
| "chosen of softmax" | the largest k of the softmax over all scores, as they are (Jamba) |
| "sigmoid" | sigmoids of the scores, scaled; chosen by these plus any correction, in the best groups |

The last is Nemotron's, from DeepSeek-V3 (2024, section 2.1.2). Tokens are grouped by expert, so that each
expert is one product over its own tokens.

Axes: n = tokens of all prompts, k = chosen experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...architectures.mixers import ExpertsShape
from ...hooks.taps import Taps
from ..mlp import ACTIVATIONS
from ..products import product
from .mixer import LayerTensors, own

__all__ = ["Experts"]


class Experts:
    """The experts of one layer (`ChannelMixer`); they have no hook points of their own."""

    def __init__(self, shape: ExpertsShape, tensors: LayerTensors) -> None:
        found = own(tensors, "experts.")
        self.shape = shape
        self.weights = {name: tensor for name, tensor in found.items() if not name[0].isdigit()}
        if shape.is_listed:
            words = ("gate", "up") if shape.is_gated else ("up",)
            both = [torch.cat([found[f"{e}.{word}"] for word in words]) for e in range(shape.count)]
            self.weights["up"] = torch.stack(both)
            self.weights["down"] = torch.stack([found[f"{e}.down"] for e in range(shape.count)])
        self._activation = ACTIVATIONS[shape.activation]

    def __call__(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """See `ChannelMixer`."""
        w, rows = self.weights, x.flatten(0, 1)
        chosen, share = self._routed(rows)
        inner = product(rows, w["into_latent"], w.get("into_latent.bias")) if self.shape.latent_size else rows
        found = torch.zeros_like(inner)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            out = self._through(inner[token], w["up"][expert], w["down"][expert])
            found.index_add_(0, token, out * share[token, place, None])
        if self.shape.latent_size:
            found = product(found, w["from_latent"], w.get("from_latent.bias"))
        if self.shape.shared_size:
            shared = self._shared(rows)
            if self.shape.has_shared_gate:
                shared = shared * torch.sigmoid(product(rows, w["shared_gate"]))
            found = found + shared
        return found.view(x.shape)

    def _routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token [n, k], and their weights [n, k]."""
        s, router = self.shape, self.weights["router"]
        if s.routing == "sigmoid":
            return self._by_sigmoid(rows)
        scores = product(rows, router).float()
        if s.routing == "chosen of softmax":
            share, chosen = scores.softmax(-1).topk(s.chosen, dim=-1)
        else:
            top, chosen = scores.topk(s.chosen, dim=-1)
            share = top.softmax(-1)
        return chosen, share.to(rows.dtype)

    def _by_sigmoid(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        s, w = self.shape, self.weights
        scores = product(rows.float(), w["router"].float()).sigmoid()
        by_group = scores + w["correction"].float() if s.has_correction else scores
        by_group = by_group.unflatten(-1, (s.groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(s.chosen_groups, dim=-1).indices
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        candidates = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        chosen = candidates.topk(s.chosen, dim=-1).indices
        share = scores.gather(-1, chosen)
        if s.sums_to_one:
            share = share / (share.sum(-1, keepdim=True) + s.sum_eps)
        return chosen, (share * s.routed_factor).to(rows.dtype)

    def _shared(self, rows: Tensor) -> Tensor:
        """What the expert of all tokens adds."""
        w = self.weights
        if "shared.gate_up" in w:
            return self._through(rows, w["shared.gate_up"], w["shared.down"])
        up = w["shared.up"]
        if "shared.gate" in w:
            up = torch.cat([w["shared.gate"], up])
        return self._through(rows, up, w["shared.down"], w.get("shared.up.bias"), w.get("shared.down.bias"))

    def _through(
        self, x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None = None, last: Tensor | None = None
    ) -> Tensor:
        """x [n, in] through an MLP: up [inner, in], with the gate's rows before it where it is gated."""
        inner = product(x, up, bias)
        if self.shape.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            return product(self._activation(gate) * inner, down, last)
        return product(self._activation(inner), down, last)
