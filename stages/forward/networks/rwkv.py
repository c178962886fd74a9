"""RWKV 4 to 7: time mix and channel mix, as plain code over an RwkvConfig and its weights.

    embed -> (layer 0: pre_norm replaces the stream)
          -> [resid_pre -> ln1 -> time mix -> attn_out -> resid_mid
                        -> ln2 -> channel mix -> mlp_out -> resid_post] * L -> final_norm -> logits

The state belongs to the history; this file computes the queries, keys, values and decays of the tokens
(section 1 of each paper: Peng et al. 2023, 2024, 2025). Decay, state and head norm are float32 in any dtype.

Axes: [batch, token, channel] outside of heads, [batch, head, token, key or value] inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import ConfigError
from ..architectures.rwkv import RwkvConfig
from ..architectures.rwkv_tensors import MIXES
from ..checkpoints.source import Take
from ..hooks.taps import Taps
from .ends import Ends
from .history import STREAM, Carried, History, Shares
from .kernels.products import product
from .mixers.mixer import upcast
from .norms import apply_norm, normalise
from .recurrences.linear import LinearRecurrence
from .recurrences.recurrence import Recurrence
from .recurrences.rwkv4 import ExponentialAverage
from .scan import scan
from .weights import NormWeights

__all__ = ["Rwkv", "block"]

FIRST_VALUES = "first_values"
"""Name in `Carried` of the values of layer 0 [B, token, channel], which all layers of RWKV-7 mix with
theirs."""
DECAY_SCALE = -0.6065306597126334
"""-exp(-1/2): the strongest log-decay of RWKV-7."""

LayerTensors = Mapping[str, Tensor]
"""Weights of a layer by their names in `architectures/rwkv_tensors.py`."""


def block(take: Take, config: RwkvConfig, layer: int) -> LayerTensors:
    """Read the weights of one layer; take: reads a tensor by its checkpoint name."""
    tensors, weights = config.tensors, dict[str, Tensor]()
    for weight, stored in tensors.layers[layer].items():
        tensor = take(tensors.in_layer(layer, weight))
        if stored.is_transposed:
            tensor = tensor.T.contiguous()
        # Checkpoints store vectors as [1, 1, channel] or [channel], depending on the training code.
        weights[weight] = tensor.flatten() if stored.shape[:2] == (1, 1) else tensor
    if (mixes := weights.pop("mixes", None)) is not None:
        weights |= {f"mix_{mix}": mixes[row] for row, mix in enumerate(MIXES)}
    return weights


class Rwkv(Ends[RwkvConfig, LayerTensors]):
    """The network of every RWKV generation (`Network` in loop.py)."""

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Token ids [B, S] -> embeddings [B, S, D]."""
        return {STREAM: self.weights.embedded(ids)}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """One layer: resid_pre [B, token, D] -> resid_post [B, kept, D], at which the loop calls the taps."""
        c, weights = self.config, self.weights.layers[layer]
        x = taps("resid_pre", layer, carried[STREAM])
        if "pre_norm" in weights:
            x = taps(
                "pre_norm", layer, apply_norm(x, self.norm_of("pre_norm", layer), c.norm_type, c.norm_eps)
            )
        y = normalise(x, self.norm_of("ln1", layer), c.norm_type, c.norm_eps, taps, "ln1", layer)
        mixed, extra = self._time_mix(y, layer, carried, history, taps)
        x = taps("resid_mid", layer, x + taps("attn_out", layer, mixed))
        z = normalise(x, self.norm_of("ln2", layer), c.norm_type, c.norm_eps, taps, "ln2", layer)
        z = taps("mlp_pre", layer, z)
        previous = history.before(layer, "channel mix", z, 1)[:, :, 0]
        mixed = self._channel_mix(history.needed(z), history.needed(previous), layer, taps)
        extra = {name: history.needed(tensor) for name, tensor in extra.items()}
        return {**extra, STREAM: history.needed(x) + taps("mlp_out", layer, mixed)}

    # -- time mix

    def _time_mix(
        self, y: Tensor, layer: int, carried: Carried, history: History, taps: Taps
    ) -> tuple[Tensor, Carried]:
        """Normalised y [B, token, D] -> output that is added to the stream, and further tensors for later
        layers."""
        previous = history.before(layer, "time mix", y, 1)[:, :, 0]
        if self.config.generation == 4:
            return self._time_mix_4(y, previous, layer, history, taps), {}
        if self.config.generation == 7:
            return self._time_mix_7(y, previous, layer, carried, history, taps)
        return self._time_mix_5_6(y, previous, layer, history, taps), {}

    def _time_mix_4(self, y: Tensor, previous: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Exponentially weighted average of values, per channel."""
        w = self.weights.layers[layer]
        mixed = {s: torch.lerp(previous, y, w[f"mix_{s}"]) for s in ("r", "k", "v")}
        r, k, v = (taps(f"rwkv_{s}", layer, self._heads(product(mixed[s], w[s]))) for s in ("r", "k", "v"))
        recurrence = ExponentialAverage(-torch.exp(w["decay"].float()), w["bonus"].float())
        tokens = {"k": _channels(k)[:, None], "v": _channels(v)[:, None]}
        read = history.scan(layer, recurrence, tokens, "rwkv")[:, 0]
        out = _channels(taps("rwkv_wkv_out", layer, self._heads(read)))
        return product(torch.sigmoid(_channels(r)) * out.to(y.dtype), w["o"])

    def _time_mix_5_6(self, y: Tensor, previous: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """A matrix state per head, with constant (5) or token-dependent decay (6); a token reads the state
        before its own write."""
        w, mixed = self.weights.layers[layer], self._mixed(y, previous, layer)
        r, k, v = (taps(f"rwkv_{s}", layer, self._heads(product(mixed[s], w[s]))) for s in ("r", "k", "v"))
        gate = None
        if "g" in w:
            gate = taps("rwkv_g", layer, self._heads(F.silu(product(mixed["g"], w["g"]))))
        exponent = w["decay"]
        if self.config.generation == 6:
            exponent = exponent + torch.tanh(mixed["w"] @ w["decay_w1"]) @ w["decay_w2"]
        log_decay = -torch.exp(upcast(exponent))
        if self.config.generation == 6:
            log_decay = self._heads(log_decay)
        else:
            # Contiguous, because taps may write into it, and an expanded view shares memory between tokens.
            log_decay = log_decay.reshape(1, self.config.num_heads, 1, -1).expand_as(k).contiguous()
        bonus = upcast(w["bonus"]).reshape(self.config.num_heads, -1).expand(-1, self.config.head_dim)
        tokens = {"q": r, "k": k, "v": v, "log_decay": log_decay}
        out = self._read(LinearRecurrence("before", bonus=bonus), tokens, layer, history, taps)
        return self._written(self._head_norm(out, layer), gate, y.dtype, layer)

    def _time_mix_7(
        self, y: Tensor, previous: Tensor, layer: int, carried: Carried, history: History, taps: Taps
    ) -> tuple[Tensor, Carried]:
        """A matrix state per head with delta-rule updates; a token reads the state after its own write."""
        w, heads = self.weights.layers[layer], self._heads
        mixed = {s: torch.lerp(y, previous, w[f"mix_{s}"]) for s in MIXES}
        r = taps("rwkv_r", layer, heads(product(mixed["r"], w["r"])))
        raw_k, v = product(mixed["k"], w["k"]), product(mixed["v"], w["v"])
        kk = F.normalize(heads(raw_k * w["k_k"]), dim=-1)
        kk = taps("rwkv_kk", layer, kk)
        a = taps("rwkv_a", layer, heads(torch.sigmoid(_low_rank(mixed["a"], w, "a"))))
        k = taps("rwkv_k", layer, heads(raw_k) * (1 + (a - 1) * heads(w["k_a"])))
        first_values = v if layer == 0 else carried[FIRST_VALUES]
        if layer:
            v = torch.lerp(v, first_values, torch.sigmoid(_low_rank(mixed["v"], w, "v")))
        elif taps.changes(layer, "rwkv_v"):
            v = v.clone()  # later layers mix with the values before an intervention
        v = taps("rwkv_v", layer, heads(v))
        gate = taps("rwkv_g", layer, heads(product(torch.sigmoid(product(mixed["g"], w["g1"])), w["g2"])))
        decay = _low_rank(mixed["w"], w, "w", torch.tanh)
        tokens = {
            "q": r,
            "k": k,
            "v": v,
            "log_decay": heads(DECAY_SCALE * torch.sigmoid(upcast(decay))),
            "alpha": -kk,
            "beta": kk * a,
        }
        out = self._read(LinearRecurrence("after"), tokens, layer, history, taps)
        out = self._head_norm(out, layer)
        r_k = w["r_k"][None, :, None]
        out = out + upcast((r * k * r_k).sum(-1, keepdim=True) * v)
        return self._written(out, gate, y.dtype, layer), {FIRST_VALUES: first_values}

    def _read(
        self, recurrence: Recurrence, tokens: dict[str, Tensor], layer: int, history: History, taps: Taps
    ) -> Tensor:
        """Output of the scan [B, head, token, value], with the hook points of decay, state and output."""
        return taps("rwkv_wkv_out", layer, scan(recurrence, tokens, layer, history, taps, "rwkv"))

    def _mixed(self, y: Tensor, previous: Tensor, layer: int) -> dict[str, Tensor]:
        """Inputs of the projections of versions 5 and 6: interpolations of a token and the previous one
        (token shift)."""
        w = self.weights.layers[layer]
        if self.config.generation == 5:
            return {s: torch.lerp(previous, y, w[f"mix_{s}"]) for s in "rkvg" if f"mix_{s}" in w}
        difference = previous - y
        low = torch.tanh((y + difference * w["mix_x"]) @ w["mix_w1"]).unflatten(-1, (5, -1))
        shares = torch.einsum("btsm,smh->sbth", low, w["mix_w2"])
        # Order of the five maps in the checkpoint.
        return {s: y + difference * (w[f"mix_{s}"] + share) for s, share in zip("wkvrg", shares, strict=True)}

    def _head_norm(self, x: Tensor, layer: int) -> Tensor:
        """Group norm of [B, head, token, value], one group per head."""
        w, c = self.weights.layers[layer], self.config
        rows = x.transpose(1, 2)
        gain, bias = (w[name].to(x.dtype) for name in ("head_norm", "head_norm.bias"))
        flat = F.group_norm(rows.flatten(2).flatten(0, 1), c.num_heads, gain, bias, c.head_norm_eps)
        return flat.view(rows.shape).transpose(1, 2)

    def _written(self, x: Tensor, gate: Tensor | None, dtype: torch.dtype, layer: int) -> Tensor:
        """Output projection of heads [B, head, token, value], after the gate if there is one: [B, token,
        D]."""
        x = x if gate is None else x * gate
        return product(_channels(x).to(dtype), self.weights.layers[layer]["o"])

    def _heads(self, x: Tensor) -> Tensor:
        """[B, token, channel] -> [B, head, token, width]; a vector [channel] -> [head, 1, width]."""
        size = self.config.head_dim
        return x.unflatten(-1, (-1, size)).transpose(-3, -2) if x.ndim > 1 else x.view(-1, 1, size)

    # -- channel mix, and norms

    def _channel_mix(self, z: Tensor, previous: Tensor, layer: int, taps: Taps) -> Tensor:
        """Output of the channel mix from z and the previous tokens, each [B, kept, D]."""
        w, generation = self.weights.layers[layer], self.config.generation

        def mixed(s: str) -> Tensor:
            # Versions 4 and 5 store the share of the token itself, 6 and 7 that of the previous one.
            start, end = (previous, z) if generation < 6 else (z, previous)
            return torch.lerp(start, end, w[f"ffn_mix_{s}"])

        inner = taps("mlp_pre_act", layer, product(mixed("k"), w["ffn_key"]))
        inner = taps("mlp_post_act", layer, torch.relu(inner).square())
        out = product(inner, w["ffn_value"])
        if generation < 7:
            out = torch.sigmoid(product(mixed("r"), w["ffn_receptance"])) * out
        return taps("mlp_post", layer, out)

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """Weights of a norm: "ln1", "ln2", or in layer 0 "pre_norm"."""
        weights = self.weights.layers[layer]
        return NormWeights(weights[name], weights.get(f"{name}.bias"))

    def value_matrix(self, layer: int) -> Tensor:
        """Raises ConfigError: there is no attention."""
        raise self._no_attention()

    def output_matrix(self, layer: int) -> Tensor:
        """Raises ConfigError: there is no attention."""
        raise self._no_attention()

    def _no_attention(self) -> ConfigError:
        return ConfigError(
            f"expected a model with attention, found {self.config.model_type}, whose heads read a state; ask "
            "for its hook points blocks.*.rwkv.* instead"
        )


def _channels(x: Tensor) -> Tensor:
    """[B, head, token, width] -> [B, token, channel]."""
    return x.transpose(1, 2).flatten(2)


def _low_rank(
    x: Tensor, weights: LayerTensors, name: str, between: Callable[[Tensor], Tensor] = lambda low: low
) -> Tensor:
    """Low-rank map of x with bias; between: activation between its two factors."""
    return product(between(product(x, weights[f"{name}1"])), weights[f"{name}2"], weights[f"{name}0"])
