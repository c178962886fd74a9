"""RWKV 4 to 7: the time mix of each version, and the token-shifted channel mix.

The state belongs to the history; this file computes the queries, keys, values and decays of the tokens
(section 1 of each paper: Peng et al. 2023, 2024, 2025). Decay, state and head norm are float32 in any dtype.

A time mix returns its output for every token that enters the layer, as the channel mix also reads the
previous token.

Axes: as in mixer.py; K = V, the channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.rwkv import ChannelMixSpec, TimeMixSpec
from ...architectures.rwkv_tensors import MIXES
from ...hooks.taps import Taps
from ..history import Carried, History
from ..kernels.products import product
from ..mlp import mlp
from ..recurrences.linear import LinearRecurrence
from ..recurrences.rwkv4 import ExponentialAverage
from ..scan import scan
from ..weights import Linear, MlpWeights
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["ChannelMix", "TimeMix", "time_mix"]

FIRST_VALUES = "first_values"
"""Name among the tensors that layers pass on (`Carried`): values of layer 0 [B, token, channel], which all
later layers of RWKV-7 mix with their own."""
DECAY_SCALE = -0.6065306597126334
"""-exp(-1/2): the strongest log-decay of RWKV-7."""


class TimeMix:
    """The time mix of one RWKV layer, which mixes positions; each subclass computes one or two versions of
    RWKV."""

    def __init__(self, spec: TimeMixSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, _flat_vectors(strip_prefix(tensors, "rwkv."))
        if (mixes := self.weights.pop("mixes", None)) is not None:
            self.weights |= {f"mix_{mix}": row for mix, row in zip(MIXES, mixes, strict=True)}

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps, beside: Carried) -> Tensor:
        """Output that is added to the residual stream.

        Arguments:
            x: normalised stream, [B, token, D].
            layer: number of the layer.
            history: runs the recurrence, and knows the previous tokens.
            taps: captures and interventions of the pass, called at its hook points.
            beside: tensors carried in addition to the stream; layer 0 of RWKV-7 adds its values.

        Returns:
            Output [B, token, D], for all tokens that enter the layer.
        """
        raise NotImplementedError

    def _normed(self, x: Tensor) -> Tensor:
        """What tokens read from the state, x [B, head, token, V], after a group norm with one group per head;
        same shape."""
        w, rows = self.weights, x.transpose(1, 2)
        gain, bias = w["head_norm"].to(x.dtype), w["head_norm.bias"].to(x.dtype)
        flat = F.group_norm(rows.flatten(2).flatten(0, 1), self.spec.heads, gain, bias, self.spec.norm_eps)
        return flat.view(rows.shape).transpose(1, 2)

    def _written(self, x: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Output of the time mix, [B, token, D]: output projection of x [B, head, token, V] times the gate.

        Arguments:
            x: normalised values that tokens read from the state.
            gate: gate of the same shape; None for versions without one.
            dtype: dtype of the result.
        """
        x = x if gate is None else x * gate
        return product(merge_heads(x).to(dtype), self.weights["o"])


class TimeMix4(TimeMix):
    """RWKV-4: exponentially weighted average of values, per channel."""

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps, beside: Carried) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, token, D].
        beside: tensors that are passed from layer to layer besides the stream, by name."""
        w, size = self.weights, self.spec.head_dim
        previous = history.before(layer, "time mix", x, 1)[:, :, 0]
        mixed = {part: torch.lerp(previous, x, w[f"mix_{part}"]) for part in "rkv"}
        projected = {part: split_heads(product(mixed[part], w[part]), size) for part in "rkv"}
        r, k, v = (taps(f"rwkv_{part}", layer, projected[part]) for part in "rkv")
        # Stored as log(-w), so that every trained value decays.
        recurrence = ExponentialAverage(-torch.exp(w["decay"].float()), w["bonus"].float())
        tokens = {"k": merge_heads(k)[:, None], "v": merge_heads(v)[:, None]}
        read = history.scan(layer, recurrence, tokens, "rwkv")[:, 0]
        read = merge_heads(taps("rwkv_wkv_out", layer, split_heads(read, size)))
        return product(torch.sigmoid(merge_heads(r)) * read.to(x.dtype), w["o"])


class TimeMix5And6(TimeMix):
    """RWKV-5 and 6: a matrix state per head, with constant (5) or token-dependent decay (6); a token reads
    the state before its own write."""

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps, beside: Carried) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, token, D].
        beside: tensors that are passed from layer to layer besides the stream, by name."""
        spec, w, size, is_6 = self.spec, self.weights, self.spec.head_dim, self.spec.generation == 6
        mixed = self._token_shifted(x, history.before(layer, "time mix", x, 1)[:, :, 0])
        projected = {part: split_heads(product(mixed[part], w[part]), size) for part in "rkv"}
        r, k, v = (taps(f"rwkv_{part}", layer, projected[part]) for part in "rkv")
        gate = None
        if spec.has_gate:
            gate = taps("rwkv_g", layer, split_heads(F.silu(product(mixed["g"], w["g"])), size))
        exponent = w["decay"]
        if is_6:
            exponent = exponent + torch.tanh(mixed["w"] @ w["decay_w1"]) @ w["decay_w2"]
        log_decay = -torch.exp(upcast(exponent))
        if is_6:
            log_decay = split_heads(log_decay, size)
        else:
            # Contiguous, because taps may write into it, and an expanded view shares memory between tokens.
            log_decay = log_decay.reshape(1, spec.heads, 1, -1).expand_as(k).contiguous()
        bonus = upcast(w["bonus"]).reshape(spec.heads, -1).expand(-1, size)
        tokens = {"q": r, "k": k, "v": v, "log_decay": log_decay}
        read = scan(LinearRecurrence("before", bonus=bonus), tokens, layer, history, taps, "rwkv")
        return self._written(self._normed(taps("rwkv_wkv_out", layer, read)), gate, x.dtype)

    def _token_shifted(self, x: Tensor, previous: Tensor) -> dict[str, Tensor]:
        """Inputs of the projections by name ("r", "k", "v", …), each [B, token, D]: interpolations of each
        token x and the previous token (token shift), both [B, token, D]."""
        w = self.weights
        if self.spec.generation == 5:
            parts = "rkvg" if "g" in w else "rkv"
            return {part: torch.lerp(previous, x, w[f"mix_{part}"]) for part in parts}
        difference = previous - x
        # Version 6: the share of the previous token depends on the token, by five low-rank maps.
        low_rank = torch.tanh((x + difference * w["mix_x"]) @ w["mix_w1"]).unflatten(-1, (5, -1))
        shares = torch.einsum("btsm,smh->sbth", low_rank, w["mix_w2"])
        # Order of the five maps in the checkpoint.
        shares_by_part = zip("wkvrg", shares, strict=True)
        return {part: x + difference * (w[f"mix_{part}"] + share) for part, share in shares_by_part}


class TimeMix7(TimeMix):
    """RWKV-7: a matrix state per head with delta-rule updates; a token reads the state after its own
    write."""

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps, beside: Carried) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, token, D].
        beside: tensors that are passed from layer to layer besides the stream, by name."""
        w, size = self.weights, self.spec.head_dim
        previous = history.before(layer, "time mix", x, 1)[:, :, 0]
        # Version 7 stores the share of the previous token, version 4 that of the token itself.
        mixed = {part: torch.lerp(x, previous, w[f"mix_{part}"]) for part in MIXES}
        r = taps("rwkv_r", layer, split_heads(product(mixed["r"], w["r"]), size))
        raw_k, v = product(mixed["k"], w["k"]), product(mixed["v"], w["v"])
        kk = taps("rwkv_kk", layer, F.normalize(split_heads(raw_k * w["k_k"], size), dim=-1))
        a = taps("rwkv_a", layer, split_heads(torch.sigmoid(self._low_rank(mixed, "a")), size))
        k = split_heads(raw_k, size) * (1 + (a - 1) * w["k_a"].view(-1, 1, size))
        k = taps("rwkv_k", layer, k)
        if self.spec.reads_first_values:
            v = torch.lerp(v, beside[FIRST_VALUES], torch.sigmoid(self._low_rank(mixed, "v")))
        else:
            beside[FIRST_VALUES] = v
            # Later layers mix with the values before an intervention, which may write into its input.
            v = v.clone() if taps.changes(layer, "rwkv_v") else v
        v = taps("rwkv_v", layer, split_heads(v, size))
        gate = product(torch.sigmoid(product(mixed["g"], w["g1"])), w["g2"])
        gate = taps("rwkv_g", layer, split_heads(gate, size))
        decay = product(torch.tanh(product(mixed["w"], w["w1"])), w["w2"], w["w0"])
        log_decay = split_heads(DECAY_SCALE * torch.sigmoid(upcast(decay)), size)
        tokens = {"q": r, "k": k, "v": v, "log_decay": log_decay, "alpha": -kk, "beta": kk * a}
        read = scan(LinearRecurrence("after"), tokens, layer, history, taps, "rwkv")
        read = self._normed(taps("rwkv_wkv_out", layer, read))
        # Version 7 adds the current token's bonus after the norm; in 5 and 6 it is in what the norm reads.
        read = read + upcast((r * k * w["r_k"][None, :, None]).sum(-1, keepdim=True) * v)
        return self._written(read, gate, x.dtype)

    def _low_rank(self, mixed: dict[str, Tensor], name: str) -> Tensor:
        """Low-rank map with bias of the token-shifted input called `name` ("a", "v"), [B, token, channel];
        mixed: token-shifted inputs by name."""
        w = self.weights
        return product(product(mixed[name], w[f"{name}1"]), w[f"{name}2"], w[f"{name}0"])


VERSIONS = {4: TimeMix4, 5: TimeMix5And6, 6: TimeMix5And6, 7: TimeMix7}
"""Version of RWKV -> class of its time mix."""


def time_mix(spec: TimeMixSpec, tensors: LayerTensors) -> TimeMix:
    """The time mix of one layer, of the class for its version of RWKV."""
    return VERSIONS[spec.generation](spec, tensors)


class ChannelMix:
    """The channel mix of one RWKV layer: an MLP on a mix of each token and the previous one."""

    def __init__(self, spec: ChannelMixSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, _flat_vectors(strip_prefix(tensors, "shifted."))
        up, down = Linear(self.weights.pop("up")), Linear(self.weights.pop("down"))
        self.mlp = MlpWeights(up=up, down=down)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised x [B, token, D] -> output that is added to the residual stream, [B, kept, D]."""
        w, generation = self.weights, self.spec.generation
        previous = history.needed(history.before(layer, "channel mix", x, 1)[:, :, 0])
        x = history.needed(x)
        # Versions 4 and 5 store the share of the token itself, 6 and 7 that of the previous one.
        start, end = (previous, x) if generation < 6 else (x, previous)
        out = mlp(torch.lerp(start, end, w["mix_k"]), self.mlp, "relu2", layer, taps)
        if generation == 7:
            return out
        return torch.sigmoid(product(torch.lerp(start, end, w["mix_r"]), w["receptance"])) * out


def _flat_vectors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name, with all vectors of shape [channel]; checkpoints store [1, 1, channel] or [channel],
    depending on the training code."""
    return {name: x.flatten() if x.shape[:2] == (1, 1) else x for name, x in weights.items()}
