"""Mixture of experts: a router sends every token to its top-k MLPs; a shared expert may process all tokens.

| routing | weights of the top-k experts |
| --- | --- |
| "softmax of chosen" | softmax over the k largest scores (Granite) |
| "chosen of softmax" | k largest of the softmax over all scores (Jamba), or over those of the best groups |
| "chosen of corrected softmax" | likewise, selected after adding a correction, divided by their sum (ERNIE
4.5) | | "sigmoid" | sigmoids of scores, scaled; selected after adding a correction, in the best groups |
| "sigmoid of chosen" | sigmoids of scores; selected by scores plus a correction (Kolibri) |
| "sigmoid of inputs" | sigmoids of scores; they multiply the experts' inputs, not their outputs (Llama 4) |
| "sparse mixing" | for each of two, softmax over the scores near it that remain (Phi 3.5 MoE) |

"sigmoid" is Nemotron's, from DeepSeek-V3 (2024, section 2.1.2); groups of softmaxes are DeepSeek-V2's. Tokens
are grouped by expert, so that each expert is one product over its own tokens.

Axes: n = tokens of all prompts, k = experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.mixers import ExpertsSpec, MlpAndExpertsSpec
from ...hooks.taps import Taps
from ..gradients import is_recorded
from ..kernels import FEW_ROWS
from ..kernels.functions import evenly
from ..kernels.products import product
from ..mlp import ACTIVATIONS
from ..norms import apply_norm
from ..weights import NormWeights
from .mixer import LayerTensors, strip_prefix
from .mlp import Mlp

__all__ = ["Experts", "MlpAndExperts"]

ExpertOutput = tuple[int, Tensor, Tensor, Tensor]
"""Output of one expert: (number of the expert, indices of the m tokens routed to it [m], their routing
weights [m, 1], its outputs for them [m, hidden])."""


class Experts:
    """The routed experts of one layer, and its shared expert if there is one."""

    def __init__(self, spec: ExpertsSpec, tensors: LayerTensors) -> None:
        tensors = strip_prefix(tensors, "experts.")
        self.spec = spec
        self.weights = {name: tensor for name, tensor in tensors.items() if not name[0].isdigit()}
        if spec.is_listed:
            # The checkpoint has one tensor per expert, named by its number.
            experts, parts = range(spec.count), ("gate", "up") if spec.is_gated else ("up",)
            per_expert = [torch.cat([tensors[f"{expert}.{part}"] for part in parts]) for expert in experts]
            self.weights["up"] = torch.stack(per_expert)
            self.weights["down"] = torch.stack([tensors[f"{expert}.down"] for expert in experts])
        if spec.limits is not None:
            self._deinterleave()
        if spec.is_transposed:
            for name in ("up", "down"):
                self.weights[name] = self.weights[name].transpose(1, 2).contiguous()
        self._activation = ACTIVATIONS[spec.activation]

    def __call__(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """Normalised stream x [B, kept, D] -> output that is added to the residual stream, [B, kept, D]."""
        w, inputs = self.weights, x.flatten(0, 1)
        experts, routing_weights = self._tapped_weights(*self._routed(x, layer, taps), x, layer, taps)
        if self.spec.latent_size:
            inputs = product(inputs, w["into_latent"], w.get("into_latent.bias"))
        total = torch.zeros_like(inputs)
        outputs = self._expert_outputs(inputs, experts, routing_weights)
        if taps.touches(layer, "expert_out"):
            outputs = iter(_tapped(list(outputs), x, self.spec.count, layer, taps))
        for _, tokens, weights_of_tokens, out in outputs:
            total.index_add_(0, tokens, out * weights_of_tokens)
        if self.spec.latent_size:
            total = product(total, w["from_latent"], w.get("from_latent.bias"))
        if self.spec.shared_size:
            shared = self._shared(x)
            if self.spec.has_shared_gate:
                shared = shared * evenly(torch.sigmoid, product(x, w["shared_gate"]))
            total = total + taps("shared_expert_out", layer, shared).flatten(0, 1)
        if self.spec.has_output_bias:
            total = total + w["out.bias"]
        return total.view(x.shape)

    def _expert_outputs(self, inner: Tensor, experts: Tensor, share: Tensor) -> Iterator[ExpertOutput]:
        """Output of each expert that some token is routed to.

        Arguments:
            inner: inputs of the experts, [n, in].
            experts: numbers of the experts of each token, [n, k].
            share: routing weights of these experts, [n, k].
        """
        w, multiplies_inputs = self.weights, self.spec.routing == "sigmoid of inputs"
        for expert in experts.unique().tolist():
            # Tokens with weight 0 (an intervention left the expert out) are skipped, except under autograd:
            # the gradient of the weight is the expert's output. If weights multiply inputs, that output is 0.
            is_routed = experts == expert
            needs_all = is_recorded(share) and not multiplies_inputs
            token, slot = (is_routed if needs_all else is_routed & (share != 0)).nonzero(as_tuple=True)
            if len(token):
                rows, n_tokens, weight = inner[token], len(token), share[token, slot, None]
                rows = rows * weight if multiplies_inputs else rows
                if n_tokens < FEW_ROWS <= len(experts):
                    # Products of few rows sum in another order; padding keeps a token's bits in every batch.
                    rows = F.pad(rows, (0, 0, 0, FEW_ROWS - n_tokens))
                biases = (w[name][expert] if name in w else None for name in ("up.bias", "down.bias"))
                out = self._mlp(rows, w["up"][expert], w["down"][expert], *biases)[:n_tokens]
                # The caller multiplies outputs by the weight in every routing.
                yield expert, token, weight, out / weight if multiplies_inputs else out

    def _tapped_weights(
        self, experts: Tensor, share: Tensor, x: Tensor, layer: int, taps: Taps
    ) -> tuple[Tensor, Tensor]:
        """Experts of each token and their routing weights, each [n, k], after the hook point
        "expert_weights". If an intervention changes weights, k is the number of all experts, most of which
        have weight 0.

        Arguments:
            experts: numbers of the top-k experts of each token, [n, k].
            share: their routing weights, [n, k].
            x: input of the layer, [batch, position, hidden].
            layer: number of the layer.
            taps: captures and interventions of the pass, called at its hook points.
        """
        if not taps.touches(layer, "expert_weights"):
            return experts, share
        weights = share.new_zeros(*x.shape[:2], self.spec.count)
        weights.view(-1, self.spec.count).scatter_(1, experts, share)
        changed = taps("expert_weights", layer, weights).flatten(0, 1)
        if not taps.changes(layer, "expert_weights"):
            return experts, share
        return torch.arange(self.spec.count, device=x.device).expand_as(changed), changed

    def _routed(self, x: Tensor, layer: int, taps: Taps) -> tuple[Tensor, Tensor]:
        """Numbers of the top-k experts of each token and their routing weights, each [n, k], for the layer's
        input x [batch, position, hidden]."""
        spec, w = self.spec, self.weights
        # DeepSeek-V3's router computes in float32; others compute in the model's dtype.
        router_input = x.float() if spec.routing == "sigmoid" else x
        scores = product(router_input, w["router"].to(router_input.dtype), w.get("router.bias")).float()
        scores = taps("router_logits", layer, scores)
        if taps.captures(layer, "router_probs"):
            is_sigmoid = spec.routing.startswith("sigmoid")
            taps("router_probs", layer, evenly(torch.sigmoid, scores) if is_sigmoid else scores.softmax(-1))
        experts, share = self._top_k(scores.flatten(0, 1))
        return experts, share.to(x.dtype)

    def _top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the top-k experts of each token and their routing weights, each [n, k], from router
        scores [n, expert], by the rule `ExpertsSpec.routing`."""
        spec = self.spec
        if spec.routing == "sigmoid":
            return self._route_by_sigmoid(evenly(torch.sigmoid, scores))
        if spec.routing == "sparse mixing":
            experts, share = _sparse_mixing(scores, spec.jitter)
        elif spec.routing == "chosen of corrected softmax":
            experts, share = self._corrected(scores.softmax(-1))
        elif spec.routing == "sigmoid of chosen":
            experts, share = self._corrected(scores)
        elif spec.routing == "chosen of softmax":
            share, experts = self._in_best_groups(scores.softmax(-1)).topk(spec.chosen, dim=-1)
            share = share * spec.routed_factor
        else:
            top, experts = scores.topk(spec.chosen, dim=-1)
            share = evenly(torch.sigmoid, top) if spec.routing == "sigmoid of inputs" else top.softmax(-1)
        return experts, share

    def _corrected(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the experts with the largest scores plus correction, and their weights without the
        correction, each [n, k] (auxiliary-loss-free balancing); scores: [n, expert]."""
        spec = self.spec
        experts = (scores + self.weights["correction"].float().flatten()).topk(spec.chosen, dim=-1).indices
        share = scores.gather(-1, experts)
        if spec.routing == "sigmoid of chosen":
            share = evenly(torch.sigmoid, share)
        if spec.sums_to_one:
            share = share / share.sum(-1, keepdim=True).clamp_min(spec.sum_eps)
        return experts, share

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """Scores [n, expert] with 0 outside of the groups that have the largest scores (DeepSeek-V2)."""
        spec = self.spec
        if spec.groups == 1:
            return scores
        by_group = scores.unflatten(-1, (spec.groups, -1))
        best = by_group.amax(-1).topk(spec.chosen_groups, dim=-1).indices
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        # 0 is below every softmax score.
        masked: Tensor = by_group.masked_fill(~allowed[..., None], 0).flatten(-2)
        return masked

    def _route_by_sigmoid(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the top-k experts within the best groups and their routing weights, each [n, k], from
        sigmoids of router scores [n, expert] (DeepSeek-V3, 2024, section 2.1.2)."""
        spec, w = self.spec, self.weights
        corrected = scores + w["correction"].float() if spec.has_correction else scores
        by_group = corrected.unflatten(-1, (spec.groups, -1))
        # DeepSeek-V3 ranks a group by its two largest scores, DeepSeek-V2 by the largest.
        group_scores = by_group.topk(2, dim=-1).values.sum(-1)
        best_groups = group_scores.topk(spec.chosen_groups, dim=-1).indices
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best_groups, True)
        # Not 0 as above: a score with a negative correction may be below 0.
        candidates = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        experts = candidates.topk(spec.chosen, dim=-1).indices
        share = scores.gather(-1, experts)
        if spec.sums_to_one:
            share = share / (share.sum(-1, keepdim=True) + spec.sum_eps)
        return experts, share * spec.routed_factor

    def _deinterleave(self) -> None:
        """Bring weights with alternating gate and up columns, [expert, in, out] (gpt-oss), into the layout of
        the other families: gate rows, then up rows, [expert, out, in]."""
        w = self.weights
        rows = w["up"].transpose(1, 2)
        w["up"] = torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1).contiguous()
        w["up.bias"] = torch.cat([w["up.bias"][:, ::2], w["up.bias"][:, 1::2]], dim=1)
        w["down"] = w["down"].transpose(1, 2).contiguous()

    def _shared(self, x: Tensor) -> Tensor:
        """Output of the shared expert for x [batch, position, hidden]."""
        w = self.weights
        if "shared.gate_up" in w:
            return self._mlp(x, w["shared.gate_up"], w["shared.down"])
        up, bias = w["shared.up"], w.get("shared.up.bias")
        if "shared.gate" in w:
            up = torch.cat([w["shared.gate"], up])
            bias = None if bias is None else torch.cat([w["shared.gate.bias"], bias])
        return self._mlp(x, up, w["shared.down"], bias, w.get("shared.down.bias"))

    def _mlp(
        self, x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None = None, last: Tensor | None = None
    ) -> Tensor:
        """Output [..., in] of one expert's MLP.

        Arguments:
            x: inputs [..., in].
            up: up projection [inner, in], or gate and up projection [2 * inner, in] if experts are gated.
            down: down projection [in, inner].
            bias: bias of `up`; None for no bias.
            last: bias of `down`; None for no bias.
        """
        inner = product(x, up, bias)
        if self.spec.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            if self.spec.limits is not None:
                return product(_clamped_gate(gate, inner, *self.spec.limits), down, last)
            return product(evenly(self._activation, gate) * inner, down, last)
        return product(evenly(self._activation, inner), down, last)


class MlpAndExperts:
    """An MLP and experts of one layer, in parallel (Gemma 4): norm(MLP(h)) + norm(experts(norm(x))).

    h is the normalised stream, x the stream before that norm. Router and experts read another RMS norm of x,
    with a separate gain each. Each expert has a learned factor of its routing weight.
    """

    def __init__(self, spec: MlpAndExpertsSpec, tensors: LayerTensors) -> None:
        extra = strip_prefix(tensors, "beside.")
        self._mlp, self._eps = Mlp(spec.mlp, tensors), spec.norm_eps
        self._experts = _GainedExperts(spec, tensors)
        self._mlp_post, self._experts_post = (
            NormWeights(extra[f"{name}_post"]) for name in ("mlp", "experts")
        )
        self._unit = NormWeights(extra["experts"].new_ones(extra["experts"].shape))

    def __call__(self, h: Tensor, layer: int, taps: Taps, x: Tensor) -> Tensor:
        """Sum of both outputs [B, kept, D], from the MLP's input h and the stream x, each [B, kept, D]."""
        dense = apply_norm(self._mlp(h, layer, taps), self._mlp_post, "rms", self._eps)
        routed = self._experts(apply_norm(x, self._unit, "rms", self._eps), layer, taps)
        dense = taps("shared_expert_out", layer, dense)
        return dense + apply_norm(routed, self._experts_post, "rms", self._eps)


class _GainedExperts(Experts):
    """Experts of Gemma 4: their input and their router's input have separate norm gains, and each expert's
    routing weight has a learned factor."""

    def __init__(self, spec: MlpAndExpertsSpec, tensors: LayerTensors) -> None:
        super().__init__(spec.experts, tensors)
        extra = strip_prefix(tensors, "beside.")
        self._gain, self._expert_gains = extra["experts"], extra["expert_gains"]
        # The gain of the router's norm is folded into its weights.
        router_gain = extra["router_gain"] * len(extra["router_gain"]) ** -0.5
        self.weights["router"] = self.weights["router"] * router_gain

    def _expert_outputs(self, inner: Tensor, experts: Tensor, share: Tensor) -> Iterator[ExpertOutput]:
        return super()._expert_outputs(inner * self._gain, experts, share)

    def _top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        experts, share = super()._top_k(scores)
        return experts, share * self._expert_gains[experts]


def _tapped(outputs: list[ExpertOutput], x: Tensor, count: int, layer: int, taps: Taps) -> list[ExpertOutput]:
    """Outputs of the experts after the hook point "expert_out".

    Arguments:
        outputs: output of each expert for its own tokens.
        x: input of the layer, [batch, position, hidden].
        count: number of experts.
        layer: number of the layer.
        taps: captures and interventions of the pass, called at its hook points.
    """
    dense = x.new_zeros(x.shape[0] * x.shape[1], count, x.shape[-1])
    for expert, token, _, out in outputs:
        dense = dense.index_put((token, torch.full_like(token, expert)), out)
    changed = taps("expert_out", layer, dense.view(*x.shape[:2], count, -1).transpose(1, 2))
    if not taps.changes(layer, "expert_out"):
        return outputs
    changed = changed.transpose(1, 2).flatten(0, 1)
    return [(expert, token, weight, changed[token, expert]) for expert, token, weight, _ in outputs]


def _clamped_gate(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate sigmoid(alpha gate) (up + 1), with the gate clamped to at most the limit and the up projection to
    [-limit, limit] (gpt-oss)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * evenly(torch.sigmoid, gate * alpha))


def _sparse_mixing(scores: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """SparseMixer routing: the two experts with the largest scores [n, expert] and their weights, each [n, 2]
    (Liu et al., GRIN, 2024, section 2.1). A weight is the softmax over the remaining scores whose relative
    distance from the largest is at most 2 jitter."""
    remaining, experts, weights = scores, [], []
    for _ in range(2):
        largest, expert = remaining.max(dim=-1, keepdim=True)
        is_far = (largest - scores) / scores.abs().clamp(min=largest) > 2 * jitter
        weights.append(remaining.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, expert))
        experts.append(expert)
        remaining = remaining.scatter(-1, expert, float("-inf"))
    return torch.cat(experts, dim=-1), torch.cat(weights, dim=-1)
