"""A Llama and a GPT-NeoX as graphs of edges, written out: every destination reads its own sum of what sources
add.

Plain torch over the tensors of a checkpoint, and nothing of ours: embedding, RMS norms, rope in halves,
grouped queries, gated MLP; and layer norms, biases, an MLP beside the heads or behind them, rope on a part of
each head. An edge is changed by giving the destination another addend in the place of the source's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Edges = Mapping[tuple[str, str], Tensor]
"""(source, destination) -> what the destination gets in place of what the source adds, [S, D]."""


class LiteralLlama:
    """The weights of a directory, layer by layer."""

    is_parallel = False

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = self.config["num_hidden_layers"], self.config["num_attention_heads"]
        self.groups = self.heads // self.config.get("num_key_value_heads", self.heads)
        self.width = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def run(
        self,
        ids: list[int],
        changed: Edges | None = None,
        other: Mapping[str, Tensor] | None = None,
        at: Mapping[tuple[str, str], Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Last logits, and what every source added. changed: edges that carry something else. other: what
        every edge carries that is not among `changed`'s keys, by source: `changed` then names the edges of a
        circuit, whose values are not read. at: of a circuit by position, bool [S, 1] of each of its edges."""
        added = {"input": self.embedding()[torch.tensor(ids)]}
        constant = torch.zeros_like(added["input"])

        def read(destination: str) -> Tensor:
            total = constant
            for source, own in added.items():
                edge = (source, destination)
                if other is not None:
                    is_carried = (at or {}).get(edge, torch.tensor(edge in (changed or {})))
                    total = total + torch.where(is_carried, own, other[source])
                else:
                    total = total + (changed or {}).get(edge, own)
            return total

        for layer in range(self.layers):
            heads = {f"a{layer}.h{head}": self.head(layer, head, read) for head in range(self.heads)}
            beside = self.mlp(layer, read(f"m{layer}")) if self.is_parallel else None
            added |= heads
            constant = constant + self.output_bias(layer)
            added[f"m{layer}"] = self.mlp(layer, read(f"m{layer}")) if beside is None else beside
        return self.unembed(read("logits")[-1]), added

    def embedding(self) -> Tensor:
        """[vocab, D]."""
        return self.tensors["model.embed_tokens.weight"]

    def output_bias(self, layer: int) -> Any:
        """What attention adds whatever it reads; no edge carries it."""
        return 0.0

    def unembed(self, stream: Tensor) -> Tensor:
        """Logits of a row."""
        tied = self.config.get("tie_word_embeddings")
        weight = self.embedding() if tied else self.tensors["lm_head.weight"]
        return self.norm(stream, "model.norm.weight") @ weight.T

    def head(self, layer: int, head: int, read: Any) -> Tensor:
        """What one head adds, of the three streams it reads."""
        made = {}
        for kind, own in (("q", head), ("k", head // self.groups), ("v", head // self.groups)):
            x = self.norm(read(f"a{layer}.h{head}<{kind}>"), f"model.layers.{layer}.input_layernorm.weight")
            made[kind] = x @ self.rows(layer, kind, own).T
        q, k = self.turned(made["q"]), self.turned(made["k"])
        scores = q @ k.T / self.width**0.5
        masked = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
        z = masked.softmax(-1) @ made["v"]
        out = self.tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
        return z @ out[:, head * self.width : (head + 1) * self.width].T

    def rows(self, layer: int, kind: str, head: int) -> Tensor:
        """The rows of a projection that are one head's."""
        weight = self.tensors[f"model.layers.{layer}.self_attn.{kind}_proj.weight"]
        return weight[head * self.width : (head + 1) * self.width]

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        """What an MLP adds."""
        x = self.norm(stream, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate, up, down = (
            self.tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm."""
        unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return unit * self.tensors[name]

    def turned(self, x: Tensor) -> Tensor:
        """Rope over halves, [S, d_head]."""
        theta = self.config["rope_parameters"]["rope_theta"]
        turns = theta ** -(torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.arange(len(x)).float()[:, None] * turns
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        half = self.width // 2
        return x * cos + torch.cat([-x[:, half:], x[:, :half]], dim=-1) * sin


class LiteralNeoX(LiteralLlama):
    """Of a GPT-NeoX."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_parallel = self.config["use_parallel_residual"]

    def named(self, layer: int, name: str) -> Tensor:
        """A tensor of a layer; zeros for a bias that it does not have."""
        return self.tensors.get(f"gpt_neox.layers.{layer}.{name}", torch.zeros(()))

    def embedding(self) -> Tensor:
        """[vocab, D]."""
        return self.tensors["gpt_neox.embed_in.weight"]

    def output_bias(self, layer: int) -> Tensor:
        """What attention adds whatever it reads."""
        return self.named(layer, "attention.dense.bias")

    def unembed(self, stream: Tensor) -> Tensor:
        """Logits of a row."""
        names = ("embed_out.weight", "lm_head.weight", "gpt_neox.embed_in.weight")
        weight = next(self.tensors[name] for name in names if name in self.tensors)
        return self.norm(stream, "gpt_neox.final_layer_norm") @ weight.T

    def head(self, layer: int, head: int, read: Any) -> Tensor:
        """What one head adds, of the three streams it reads. Rows of a head lie together: q, k, v."""
        start, made = 3 * head * self.width, {}
        for number, kind in enumerate("qkv"):
            x = self.norm(read(f"a{layer}.h{head}<{kind}>"), f"gpt_neox.layers.{layer}.input_layernorm")
            rows = slice(start + number * self.width, start + (number + 1) * self.width)
            bias = self.named(layer, "attention.query_key_value.bias")
            made[kind] = x @ self.named(layer, "attention.query_key_value.weight")[rows].T
            made[kind] = made[kind] + (bias[rows] if bias.ndim else 0.0)
        scores = self.turned(made["q"]) @ self.turned(made["k"]).T / self.width**0.5
        masked = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
        out = self.named(layer, "attention.dense.weight")[:, head * self.width : (head + 1) * self.width]
        return masked.softmax(-1) @ made["v"] @ out.T

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        """What an MLP adds, with its bias."""
        x = self.norm(stream, f"gpt_neox.layers.{layer}.post_attention_layernorm")
        inside = x @ self.named(layer, "mlp.dense_h_to_4h.weight").T + self.named(
            layer, "mlp.dense_h_to_4h.bias"
        )
        out = torch.nn.functional.silu(inside) @ self.named(layer, "mlp.dense_4h_to_h.weight").T
        return out + self.named(layer, "mlp.dense_4h_to_h.bias")

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Layer norm."""
        weight, bias = (self.tensors[f"{name}.{each}"] for each in ("weight", "bias"))
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, self.config["layer_norm_eps"])

    def turned(self, x: Tensor) -> Tensor:
        """Rope over halves of the first part of each head."""
        part = int(self.width * self.config["rope_parameters"]["partial_rotary_factor"])
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = torch.arange(len(x)).float()[:, None] * theta ** -(torch.arange(0, part, 2).float() / part)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        turned, rest = x[:, :part], x[:, part:]
        half = torch.cat([-turned[:, part // 2 :], turned[:, : part // 2]], dim=-1)
        return torch.cat([turned * cos + half * sin, rest], dim=-1)
