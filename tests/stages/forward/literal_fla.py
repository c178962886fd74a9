"""GLA, RetNet, DeltaNet and gated DeltaNet as their papers write them: token by token, a matrix for a state.

The oracle of these families, whose own code (flash-linear-attention) needs a GPU. Modules are named as that
code names them, so that the state_dict of a model is a checkpoint of it; what they compute is written from
the papers, with nothing of the product:

* GLA: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023, equation 3.
* RetNet: Sun et al., Retentive Network, 2023, equations 3, 6 and 8, with rope as in Su et al., 2021.
* DeltaNet: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 2.2.
* Gated DeltaNet: Yang et al., Gated Delta Networks, 2024, equation 10.

Axes: B prompts, T tokens, H heads, K keys, V values; states are [B, H, K, V].
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    found = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return found if weight is None else found * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def turned(x: Tensor, theta: float) -> Tensor:
    """x [B, T, H, K]: entries i and i + K / 2 as a complex number, times e^{i t theta^{-2i/K}}."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * speeds
    number = torch.complex(x[..., :half].double(), x[..., half:].double())
    number = number * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([number.real, number.imag], dim=-1).to(x.dtype)


def widths(c: dict[str, Any], key: float, value: float) -> tuple[int, int]:
    """Of keys and values of a head; key, value: how much wider than the stream all of them are usually."""
    hidden, heads = c["hidden_size"], c["num_heads"]
    return int(hidden * c.get("expand_k", key)) // heads, int(hidden * c.get("expand_v", value)) // heads


class Norm(nn.Module):
    def __init__(self, width: int, eps: float, *, has_weight: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)


class Convolution(nn.Module):
    """A token and those before it, each channel by itself, then silu."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        size, found = self.weight.shape[-1], torch.zeros_like(x)
        for t in range(x.shape[1]):
            for back in range(min(size, t + 1)):
                found[:, t] = found[:, t] + self.weight[:, 0, size - 1 - back] * x[:, t - back]
        return silu(found)


class Mixer(nn.Module):
    """What the four have in common: projections, convolutions, the norm of what is read, and its gate."""

    def __init__(self, c: dict[str, Any], heads: int, groups: int, key: int, value: int) -> None:
        super().__init__()
        hidden = c["hidden_size"]
        self.c, self.heads, self.key, self.value = c, heads, key, value
        queries = heads if self.has_query_heads else groups
        values = groups if self.has_query_heads else heads
        channels = {"q": queries * key, "k": groups * key, "v": values * value}
        for part, width in channels.items():
            self.add_module(f"{part}_proj", nn.Linear(hidden, width, bias=False))
            if self.convolves:
                self.add_module(f"{part}_conv1d", Convolution(width, c.get("conv_size", 4)))
        if self.is_gated:
            self.g_proj = nn.Linear(hidden, heads * value, bias=False)
        self.add_module(
            self.norm_name, Norm(value, c.get("norm_eps", 1e-6), has_weight=c.get("elementwise_affine", True))
        )
        self.o_proj = nn.Linear(heads * value, hidden, bias=False)

    has_query_heads = True
    """Whether groups share keys and values, as in grouped-query attention; else queries and keys."""

    @property
    def convolves(self) -> bool:
        return bool(self.c.get("use_short_conv", False))

    @property
    def is_gated(self) -> bool:
        return bool(self.c.get("use_output_gate", True))

    @property
    def norm_name(self) -> str:
        return "g_norm_swish_gate" if self.is_gated and self.c.get("fuse_norm", True) else "g_norm"

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, T, H, width]."""
        found = []
        for part, width in (("q", self.key), ("k", self.key), ("v", self.value)):
            y = self.get_submodule(f"{part}_proj")(x)
            y = self.get_submodule(f"{part}_conv1d")(y) if self.convolves else y
            y = y.unflatten(-1, (-1, width))
            found.append(y.repeat_interleave(self.heads // y.shape[2], dim=2))
        return found[0], found[1], found[2]

    def out(self, x: Tensor, read: Tensor) -> Tensor:
        read = self.get_submodule(self.norm_name)(read).flatten(-2)
        return self.o_proj(read * silu(self.g_proj(x)) if self.is_gated else read)

    def empty(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.heads, self.key, self.value)


class Gla(Mixer):
    def __init__(self, c: dict[str, Any]) -> None:
        hidden, heads = c["hidden_size"], c["num_heads"]
        key, value = widths(c, 0.5, 1.0)
        groups = c.get("num_kv_heads") or heads
        super().__init__(c, heads, groups, key, value)
        self.gk_proj = nn.Sequential(nn.Linear(hidden, 16, bias=False), nn.Linear(16, groups * key))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.c.get("feature_map") is not None:
            q, k = q.clamp(min=0), k.clamp(min=0)
        left = (1 / (1 + torch.exp(-self.gk_proj(x)))) ** (1 / 16)
        if self.c.get("clamp_min") is not None:
            left = left.clamp(min=math.exp(self.c["clamp_min"]))
        left = left.unflatten(-1, (-1, self.key))
        left = left.repeat_interleave(self.heads // left.shape[2], dim=2)
        state, read = self.empty(x), []
        for t in range(x.shape[1]):
            state = left[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / math.sqrt(self.key))
        return self.out(x, torch.stack(read, dim=1))


class RetNet(Mixer):
    convolves = False

    def __init__(self, c: dict[str, Any]) -> None:
        heads, (key, value) = c["num_heads"], widths(c, 1.0, 2.0)
        super().__init__(c, heads, c.get("num_kv_heads") or heads, key, value)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.c.get("feature_map") is not None:
            q, k = q.clamp(min=0), k.clamp(min=0)
        q, k = turned(q, 10000.0), turned(k, 10000.0)
        left = 1 - 2.0 ** (-5 - torch.arange(self.heads, dtype=torch.float64))
        read = []
        for t in range(x.shape[1]):
            scores = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, : t + 1]) / math.sqrt(self.key)
            scores = scores * (left[:, None] ** torch.arange(t, -1, -1)).to(x.dtype)
            read.append(torch.einsum("bhs,bshv->bhv", scores, v[:, : t + 1]))
        return self.out(x, torch.stack(read, dim=1))


class GatedDeltaNet(Mixer):
    has_query_heads = False
    norm_name = "o_norm"

    def __init__(self, c: dict[str, Any], *, forgets: bool = True) -> None:
        hidden = c["hidden_size"]
        if forgets:
            key, groups = c["head_dim"], c["num_heads"]
            heads, value = c.get("num_v_heads") or groups, int(key * c.get("expand_v", 2.0))
        else:
            heads = groups = c["num_heads"]
            key, value = widths(c, 1.0, 1.0)
        super().__init__(c, heads, groups, key, value)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.forgets = forgets
        if forgets:
            self.a_proj = nn.Linear(hidden, heads, bias=False)
            self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))

    @property
    def convolves(self) -> bool:
        return bool(self.c.get("use_short_conv", True))

    @property
    def is_gated(self) -> bool:
        return bool(self.c["use_gate"])

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(x)
        q, k, v = parts if self.convolves else (silu(part) for part in parts)
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        beta = (2 if self.c.get("allow_neg_eigval") else 1) / (1 + torch.exp(-self.b_proj(x)))
        left = torch.ones_like(beta)
        if self.forgets:
            left = torch.exp(-torch.exp(self.A_log) * torch.log1p(torch.exp(self.a_proj(x) + self.dt_bias)))
        state, read = self.empty(x), []
        unit = torch.eye(self.key, dtype=x.dtype)
        for t in range(x.shape[1]):
            kept = unit - beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None, :]
            written = beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
            state = left[:, t, :, None, None] * (kept @ state) + written
            read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / math.sqrt(self.key))
        return self.out(x, torch.stack(read, dim=1))


class DeltaNet(GatedDeltaNet):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__(c, forgets=False)


class Attention(nn.Module):
    def __init__(self, c: dict[str, Any], told: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.told = c["hidden_size"], told
        self.width = hidden // told["num_heads"]
        kv, bias = (told.get("num_kv_heads") or told["num_heads"]) * self.width, told.get("qkv_bias", False)
        self.q_proj = nn.Linear(hidden, hidden, bias=bias)
        self.k_proj, self.v_proj = nn.Linear(hidden, kv, bias=bias), nn.Linear(hidden, kv, bias=bias)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.width)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (turned(part, self.told.get("rope_theta", 10000.0)) for part in (q, k))
        k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], dim=2) for part in (k, v))
        window, read = self.told.get("window_size") or x.shape[1], []
        for t in range(x.shape[1]):
            seen = slice(max(0, t + 1 - window), t + 1)
            scores = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, seen]) / math.sqrt(self.width)
            read.append(torch.einsum("bhs,bshk->bhk", scores.softmax(-1), v[:, seen]).flatten(-2))
        return self.o_proj(torch.stack(read, dim=1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], mixer: nn.Module) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c.get("norm_eps", 1e-6)
        self.attn_norm, self.mlp_norm, self.attn = Norm(hidden, eps), Norm(hidden, eps), mixer
        self.mlp = Mlp(hidden, c["intermediate_size"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


MIXERS = {"gla": Gla, "retnet": RetNet, "delta_net": DeltaNet, "gated_deltanet": GatedDeltaNet}


class Base(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(c["vocab_size"], c["hidden_size"])
        sections = c.get("attn") or []
        attends = {layer: told for told in sections for layer in told["layers"]}
        mixer = MIXERS[c["model_type"]]
        self.layers = nn.ModuleList(
            Layer(c, Attention(c, attends[i]) if i in attends else mixer(c))
            for i in range(c["num_hidden_layers"])
        )
        self.norm = Norm(c["hidden_size"], c.get("norm_eps", 1e-6))


class LiteralFla(nn.Module):
    """A model of one of the four, called as transformers' are."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Base(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embeddings.weight

    @property
    def base_model(self) -> Base:
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embeddings

    def forward(self, ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.model.embeddings(ids)
        for layer in self.model.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(x)))
