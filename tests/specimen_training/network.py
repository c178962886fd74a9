"""The specimen while it is trained: a Llama decoder, and its files in the layout of the hub.

Border: token ids and tensors; knows no text. The package's own forward pass (stages/forward) has no
training; this one has no hook points. A test holds both to transformers' Llama.

Axes: row, position, head, hidden. Weights are named as transformers names them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Llama", "Shape", "decoder_config", "decoder_shape", "read_llama", "rotate", "write_model"]


@dataclass(frozen=True)
class Shape:
    """The sizes of the decoder."""

    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    key_heads: int = 6
    mlp: int = 512
    theta: float = 2000.0
    eps: float = 1e-5
    positions: int = 512


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer key and value heads than query heads."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.key_heads = shape.heads, shape.key_heads
        self.head = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.head, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * self.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * self.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head, shape.hidden, bias=False)

    def pattern(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What every query pays attention to, [row, head, query position, key position]; rows sum to 1.

        x: [row, position, hidden], normed; cos, sin: [position, head size].
        """
        rows, size, _ = x.shape
        q = self.q_proj(x).view(rows, size, self.heads, self.head).transpose(1, 2)
        k = self.k_proj(x).view(rows, size, self.key_heads, self.head).transpose(1, 2)
        q, k = rotate(q, cos, sin) * self.head**-0.5, rotate(k, cos, sin)
        # The query heads of a key head stand behind each other, as so many more positions.
        scores: Tensor = q.reshape(rows, self.key_heads, -1, self.head) @ k.mT
        later = torch.full((size, size), -1e4, dtype=scores.dtype).triu(1)
        scores = scores.view(rows, self.heads, size, size) + later
        return scores.softmax(-1, dtype=scores.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[row, position, hidden] to the same; cos, sin: [position, head size].

        Written out: measured on one core, it is 1.4 times as fast as torch's own attention, most of it saved
        in the backward pass.
        """
        rows, size, _ = x.shape
        v = self.v_proj(x).view(rows, size, self.key_heads, self.head).transpose(1, 2)
        pattern = self.pattern(x, cos, sin).view(rows, self.key_heads, -1, size)
        z = (pattern @ v).view(rows, self.heads, size, self.head)
        out: Tensor = self.o_proj(z.transpose(1, 2).reshape(rows, size, -1))
        return out


class MLP(nn.Module):
    """SwiGLU without biases: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention, then MLP, each on the normed residual stream and added to it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[row, position, hidden] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm; a module of its own only so that names match (`model.…`)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class Llama(nn.Module):
    """A Llama decoder whose unembedding is its embedding."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        head = shape.hidden // shape.heads
        frequency = shape.theta ** (-torch.arange(0, head, 2).float() / head)
        angle = torch.outer(torch.arange(shape.positions).float(), frequency)
        angle = torch.cat([angle, angle], dim=1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that add to the residual stream start smaller, as there are 2 * layers of them.
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.layers) ** 0.5 if adds else 1.0))
        # What all tokens share is what a head that looks at places has to go by: its queries and keys have
        # no bias, and without it the first layer has none. The unembedding adds it to every logit alike.
        embedding = self.model.embed_tokens.weight
        nn.init.normal_(embedding, std=0.1)
        with torch.no_grad():
            embedding += 0.1 * torch.randn(shape.hidden)

    def states(self, ids: Tensor) -> list[Tensor]:
        """The residual stream after the embedding and after each layer, [row, position, hidden] each."""
        size = ids.shape[1]
        cos, sin = self.cos[:size], self.sin[:size]  # type: ignore[index]
        states = [self.model.embed_tokens(ids)]
        for layer in self.model.layers:
            states.append(layer(states[-1], cos, sin))
        return states

    def patterns(self, ids: Tensor) -> list[Tensor]:
        """Attention of each layer, [row, head, query position, key position] each."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]  # type: ignore[index]
        return [
            layer.self_attn.pattern(layer.input_layernorm(state), cos, sin)  # type: ignore[union-attr, operator]
            for layer, state in zip(self.model.layers, self.states(ids), strict=False)
        ]

    def logits(self, state: Tensor) -> Tensor:
        """[..., vocabulary] of the last state, [..., hidden]."""
        return F.linear(self.model.norm(state), self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [row, position, vocabulary] of ids [row, position]."""
        return self.logits(self.states(ids)[-1])

    def named_weights(self) -> dict[str, Tensor]:
        """Every parameter by its name in a checkpoint."""
        return dict(self.named_parameters())

    def hub_config(self, dtype: str, bos: int, eos: int) -> dict[str, Any]:
        """See `Trained`."""
        return hub_config(self.shape, dtype, bos, eos)

    def untrained(self) -> Llama:
        """One of its shape, as training begins."""
        return Llama(self.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split convention of transformers; x: [row, head, position, head size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class Trained(Protocol):
    """What is written of a network."""

    def named_weights(self) -> Mapping[str, Tensor]:
        """Every parameter by its name in a checkpoint."""
        ...

    def hub_config(self, dtype: str, bos: int, eos: int) -> dict[str, Any]:
        """Its config.json. dtype: of the tensors that are written. bos, eos: token ids."""
        ...


def write_model(network: Trained, folder: Path, *, dtype: torch.dtype, bos: int, eos: int) -> None:
    """config.json and model.safetensors as the hub has them, weights rounded to `dtype`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(dtype).contiguous() for name, p in network.named_weights().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(network.hub_config(str(dtype).removeprefix("torch."), bos, eos), indent=2)
    (folder / "config.json").write_text(text + "\n", "utf-8")


def read_llama(folder: Path, config: Mapping[str, Any]) -> Llama:
    """The decoder stored by `write_model`, weights in float32."""
    from safetensors.torch import load_file

    network = Llama(decoder_shape(config))
    network.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return network.eval()


def hub_config(shape: Shape, dtype: str, bos: int, eos: int) -> dict[str, Any]:
    """The config.json of a LlamaForCausalLM of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        **decoder_config(shape, dtype, bos, eos),
    }


def decoder_config(shape: Shape, dtype: str, bos: int, eos: int) -> dict[str, Any]:
    """What the config.json of a decoder of this shape says, whatever its MLPs are."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def decoder_shape(config: Mapping[str, Any]) -> Shape:
    """The shape of a decoder from such a config.json."""
    return Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        key_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
        positions=config["max_position_embeddings"],
    )
