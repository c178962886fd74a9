"""Experts: MLPs of which a router sends every token to a few, and perhaps one that all tokens go through.

| routing | weights of the chosen |
| --- | --- |
| "softmax of chosen" | softmax over the largest k scores (Granite) |
| "chosen of softmax" | the largest k of the softmax over all scores (Jamba), or over the best groups |
| "chosen of corrected softmax" | the same, chosen by these plus a correction, over their sum (ERNIE 4.5) |
| "sigmoid" | sigmoids of the scores, scaled; chosen by these plus any correction, in the best groups |
| "sigmoid of chosen" | sigmoids of the scores; chosen by the scores plus a correction (Kolibri) |
| "sigmoid of inputs" | sigmoids of the scores, of what the chosen read, not of what they give (Llama 4) |
| "sparse mixing" | of each of two, softmax over the scores near it and left (Phi 3.5 MoE) |

"sigmoid" is Nemotron's, from DeepSeek-V3 (2024, section 2.1.2); groups of softmaxes are DeepSeek-V2's. Tokens
are grouped by expert, so that each expert is one product over its own tokens.

Axes: n = tokens of all prompts, k = chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.mixers import ExpertsSpec
from ...hooks.taps import Taps
from ..gradients import is_recorded
from ..kernels import FEW_ROWS
from ..kernels.functions import evenly
from ..kernels.products import product
from ..mlp import ACTIVATIONS
from .mixer import LayerTensors, strip_prefix

__all__ = ["Experts"]

Given = tuple[int, Tensor, Tensor, Tensor]
"""An expert, the tokens it reads [m], their weights [m, 1], and what it gives [m, hidden]."""


class Experts:
    """The experts of one layer (`ChannelMixer`)."""

    def __init__(self, shape: ExpertsSpec, tensors: LayerTensors) -> None:
        found = strip_prefix(tensors, "experts.")
        self.shape = shape
        self.weights = {name: tensor for name, tensor in found.items() if not name[0].isdigit()}
        if shape.is_listed:
            words = ("gate", "up") if shape.is_gated else ("up",)
            both = [torch.cat([found[f"{e}.{word}"] for word in words]) for e in range(shape.count)]
            self.weights["up"] = torch.stack(both)
            self.weights["down"] = torch.stack([found[f"{e}.down"] for e in range(shape.count)])
        if shape.limits is not None:
            self._unravel()
        if shape.is_transposed:
            for name in ("up", "down"):
                self.weights[name] = self.weights[name].transpose(1, 2).contiguous()
        self._activation = ACTIVATIONS[shape.activation]

    def __call__(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """See `ChannelMixer`."""
        w, rows = self.weights, x.flatten(0, 1)
        chosen, share = self._weighed(*self._routed(x, layer, taps), x, layer, taps)
        inner = product(rows, w["into_latent"], w.get("into_latent.bias")) if self.shape.latent_size else rows
        found = torch.zeros_like(inner)
        given = self._given(inner, chosen, share)
        if taps.touches(layer, "expert_out"):
            given = iter(_shown(list(given), x, self.shape.count, layer, taps))
        for _, token, weight, out in given:
            found.index_add_(0, token, out * weight)
        if self.shape.latent_size:
            found = product(found, w["from_latent"], w.get("from_latent.bias"))
        if self.shape.shared_size:
            shared = self._shared(x)
            if self.shape.has_shared_gate:
                shared = shared * evenly(torch.sigmoid, product(x, w["shared_gate"]))
            found = found + taps("shared_expert_out", layer, shared).flatten(0, 1)
        if self.shape.has_output_bias:
            found = found + w["out.bias"]
        return found.view(x.shape)

    def _given(self, inner: Tensor, chosen: Tensor, share: Tensor) -> Iterator[Given]:
        """Expert by expert: the tokens it reads, its weights there, and what it gives."""
        w, by_inputs = self.weights, self.shape.routing == "sigmoid of inputs"
        for expert in chosen.unique().tolist():
            # A weight of 0 is that of an expert somebody left out; its gradient is what it would give. Where
            # the weight is of what it reads it would give nothing.
            is_its = chosen == expert
            takes_all = is_recorded(share) and not by_inputs
            token, place = (is_its if takes_all else is_its & (share != 0)).nonzero(as_tuple=True)
            if len(token):
                biases = (w[name][expert] if name in w else None for name in ("up.bias", "down.bias"))
                its, own, weight = inner[token], len(token), share[token, place, None]
                its = its * weight if by_inputs else its
                if own < FEW_ROWS <= len(chosen):  # what a token gets does not depend on how many others come
                    its = F.pad(its, (0, 0, 0, FEW_ROWS - own))
                out = self._through(its, w["up"][expert], w["down"][expert], *biases)[:own]
                # What is added is the weight times what an expert gives, in every routing.
                yield expert, token, weight, out / weight if by_inputs else out

    def _weighed(
        self, chosen: Tensor, share: Tensor, x: Tensor, layer: int, taps: Taps
    ) -> tuple[Tensor, Tensor]:
        """Experts of each token and their weights, past the hook point of weights; where these are changed,
        all experts, most of them with a weight of 0."""
        if not taps.touches(layer, "expert_weights"):
            return chosen, share
        every = share.new_zeros(*x.shape[:2], self.shape.count)
        every.view(-1, self.shape.count).scatter_(1, chosen, share)
        told = taps("expert_weights", layer, every).flatten(0, 1)
        if not taps.changes(layer, "expert_weights"):
            return chosen, share
        return torch.arange(self.shape.count, device=x.device).expand_as(told), told

    def _routed(self, x: Tensor, layer: int, taps: Taps) -> tuple[Tensor, Tensor]:
        """The experts of each token [n, k], and their weights [n, k]."""
        s, w = self.shape, self.weights
        is_sigmoid = s.routing.startswith("sigmoid")
        read = x.float() if s.routing == "sigmoid" else x
        scores = product(read, w["router"].to(read.dtype), w.get("router.bias")).float()
        scores = taps("router_logits", layer, scores)
        if taps.captures(layer, "router_probs"):
            taps("router_probs", layer, evenly(torch.sigmoid, scores) if is_sigmoid else scores.softmax(-1))
        chosen, share = self._chosen(scores.flatten(0, 1))
        return chosen, share.to(x.dtype)

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The same from scores [n, expert]."""
        s = self.shape
        if s.routing == "sigmoid":
            return self._by_sigmoid(evenly(torch.sigmoid, scores))
        if s.routing == "sparse mixing":
            chosen, share = _mixed_sparsely(scores, s.jitter)
        elif s.routing == "chosen of corrected softmax":
            chosen, share = self._corrected(scores.softmax(-1))
        elif s.routing == "sigmoid of chosen":
            chosen, share = self._corrected(scores)
        elif s.routing == "chosen of softmax":
            share, chosen = self._in_best_groups(scores.softmax(-1)).topk(s.chosen, dim=-1)
            share = share * s.routed_factor
        else:
            top, chosen = scores.topk(s.chosen, dim=-1)
            share = evenly(torch.sigmoid, top) if s.routing == "sigmoid of inputs" else top.softmax(-1)
        return chosen, share

    def _corrected(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the largest scores [n, expert] plus a correction, and their weights without it."""
        s = self.shape
        chosen = (scores + self.weights["correction"].float().flatten()).topk(s.chosen, dim=-1).indices
        share = scores.gather(-1, chosen)
        share = evenly(torch.sigmoid, share) if s.routing == "sigmoid of chosen" else share
        return chosen, share / share.sum(-1, keepdim=True).clamp_min(s.sum_eps) if s.sums_to_one else share

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """Scores [n, expert], 0 in all groups but those of the largest ones."""
        s = self.shape
        if s.groups == 1:
            return scores
        by_group = scores.unflatten(-1, (s.groups, -1))
        best = by_group.amax(-1).topk(s.chosen_groups, dim=-1).indices
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        found: Tensor = by_group.masked_fill(~allowed[..., None], 0).flatten(-2)
        return found

    def _by_sigmoid(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        s, w = self.shape, self.weights
        by_group = scores + w["correction"].float() if s.has_correction else scores
        by_group = by_group.unflatten(-1, (s.groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(s.chosen_groups, dim=-1).indices
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        candidates = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        chosen = candidates.topk(s.chosen, dim=-1).indices
        share = scores.gather(-1, chosen)
        if s.sums_to_one:
            share = share / (share.sum(-1, keepdim=True) + s.sum_eps)
        return chosen, share * s.routed_factor

    def _unravel(self) -> None:
        """Tensors of which gate and up projections take turns, [expert, in, out], as all others are."""
        w = self.weights
        rows = w["up"].transpose(1, 2)
        w["up"] = torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1).contiguous()
        w["up.bias"] = torch.cat([w["up.bias"][:, ::2], w["up.bias"][:, 1::2]], dim=1)
        w["down"] = w["down"].transpose(1, 2).contiguous()

    def _shared(self, x: Tensor) -> Tensor:
        """What the expert of all tokens adds to x [batch, position, hidden]."""
        w = self.weights
        if "shared.gate_up" in w:
            return self._through(x, w["shared.gate_up"], w["shared.down"])
        up, bias = w["shared.up"], w.get("shared.up.bias")
        if "shared.gate" in w:
            up = torch.cat([w["shared.gate"], up])
            bias = None if bias is None else torch.cat([w["shared.gate.bias"], bias])
        return self._through(x, up, w["shared.down"], bias, w.get("shared.down.bias"))

    def _through(
        self, x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None = None, last: Tensor | None = None
    ) -> Tensor:
        """x [..., in] through an MLP: up [inner, in], with the gate's rows before it where it is gated."""
        inner = product(x, up, bias)
        if self.shape.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            if self.shape.limits is not None:
                return product(_limited(gate, inner, *self.shape.limits), down, last)
            return product(evenly(self._activation, gate) * inner, down, last)
        return product(evenly(self._activation, inner), down, last)


def _shown(given: list[Given], x: Tensor, count: int, layer: int, taps: Taps) -> list[Given]:
    """What experts give, past its hook point. x: what they read, [batch, position, hidden]."""
    every = x.new_zeros(x.shape[0] * x.shape[1], count, x.shape[-1])
    for expert, token, _, out in given:
        every = every.index_put((token, torch.full_like(token, expert)), out)
    told = taps("expert_out", layer, every.view(*x.shape[:2], count, -1).transpose(1, 2))
    if not taps.changes(layer, "expert_out"):
        return given
    told = told.transpose(1, 2).flatten(0, 1)
    return [(expert, token, weight, told[token, expert]) for expert, token, weight, _ in given]


def _limited(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """x sigmoid(alpha x) of a gate held below a limit, times an up projection held within it, plus 1
    (gpt-oss)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * evenly(torch.sigmoid, gate * alpha))


def _mixed_sparsely(scores: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """The two largest of scores [n, expert] and their weights, each [n, 2] (Liu et al., GRIN, 2024, section
    2.1): softmax over scores no farther from the largest one left than a share of their size."""
    left, chosen, share = scores, [], []
    for _ in range(2):
        largest, place = left.max(dim=-1, keepdim=True)
        is_far = (largest - scores) / scores.abs().clamp(min=largest) > 2 * jitter
        share.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, place))
        chosen.append(place)
        left = left.scatter(-1, place, float("-inf"))
    return torch.cat(chosen, dim=-1), torch.cat(share, dim=-1)
