"""A Llama as a graph of edges, written out: every destination reads its own sum of what sources add.

Plain torch over the tensors of a checkpoint, and nothing of ours: embedding, RMS norms, rope in halves,
grouped queries, gated MLP. An edge is changed by giving the destination another addend in the place of the
source's.
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

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = self.config["num_hidden_layers"], self.config["num_attention_heads"]
        self.groups = self.heads // self.config["num_key_value_heads"]
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
        added = {"input": self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]}

        def read(destination: str) -> Tensor:
            total = torch.zeros_like(added["input"])
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
            added |= heads
            added[f"m{layer}"] = self.mlp(layer, read(f"m{layer}"))
        final = self.norm(read("logits")[-1], "model.norm.weight")
        tied = self.config.get("tie_word_embeddings")
        return final @ self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T, added

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
