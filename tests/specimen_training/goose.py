"""The recurrent specimen while it is trained: an RWKV-7.

Its parameters begin as those of the RWKV-7 training code do (Peng et al. 2025, appendix E): decays spread
over the channels of a layer, low-rank maps that add nothing yet, outputs of zero.

Border: tensors; knows no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mizarr.stages.forward.architectures.architecture import Architecture
from mizarr.stages.forward.models.trainable import architecture_to_train

from .network import Shape
from .served import Served

__all__ = ["Goose", "read_goose"]

RANKS = {"w": 16, "a": 16, "v": 16, "g": 32}
"""Of the low-rank maps: decay, removal, mixture of values, gate."""
REACH = {
    "attn.x_r": 0.2,
    "attn.x_w": 0.9,
    "attn.x_k": 0.7,
    "attn.x_v": 0.7,
    "attn.x_a": 0.9,
    "attn.x_g": 0.2,
    "ffn.x_k": 4.0,
}
"""How steeply the share of the token before falls along the channels."""
CONSTANT = {
    "attn.k_k": 0.85,
    "attn.k_a": 1.0,
    "attn.r_k": 0.0,
    "attn.v_lora.lora.2.bias": 1.0,
    "attn.o_proj.weight": 0.0,
    "ffn.value.weight": 0.0,
}


class Goose(Served):
    """An RWKV-7 of some shape."""

    def __init__(self, shape: Shape):
        config = _architecture(hub_config(shape, "float32", 0, 1))
        super().__init__(shape, config, lambda name, size: _beginning(name, size, shape.layers))

    def hub_config(self, dtype: str, bos: int, eos: int) -> dict[str, Any]:
        """See `Trained`."""
        return hub_config(self.shape, dtype, bos, eos)

    def untrained(self) -> Goose:
        """See `Served`."""
        return Goose(self.shape)


def read_goose(folder: Path, config: Mapping[str, Any]) -> Goose:
    """The network stored by `write_model`, weights in float32."""
    shape = Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_heads"],
        mlp=config["intermediate_size"],
        eps=config["norm_eps"],
    )
    return Goose(shape).holding(folder)


def hub_config(shape: Shape, dtype: str, bos: int, eos: int) -> dict[str, Any]:
    """The config.json of an RWKV-7 of this shape, as flash-linear-attention writes it."""
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "head_dim": shape.hidden // shape.heads,
        "num_heads": shape.heads,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": shape.eps,
        "decay_low_rank_dim": RANKS["w"],
        "a_low_rank_dim": RANKS["a"],
        "v_low_rank_dim": RANKS["v"],
        "gate_low_rank_dim": RANKS["g"],
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def _architecture(raw: dict[str, Any]) -> Architecture:
    """What the config makes of a checkpoint that has the tensors it needs."""
    ranks = {
        f"model.layers.{layer}.attn.{name}_lora.lora.0.weight": (rank, raw["hidden_size"])
        for layer in range(raw["num_hidden_layers"])
        for name, rank in RANKS.items()
    }
    first = {"model.layers.0.attn.r_proj.weight": (raw["hidden_size"],) * 2}
    return architecture_to_train(raw, ranks | first)


def _beginning(name: str, size: tuple[int, ...], layers: int) -> Tensor:
    """What a parameter is before training."""
    _, room, *rest = name.split(".")
    if room != "layers":
        is_table = len(size) == 2
        return torch.empty(size).normal_(std=0.02) if is_table else _plain_norm(name, size)
    depth, kind = int(rest[0]) / max(1, layers - 1), ".".join(rest[1:])
    place = torch.arange(size[-1]) / max(1, size[-1] - 1)
    if kind in REACH:
        # Lower layers look further at the token before than upper ones; some channels more than others.
        return torch.pow(place, REACH[kind] * (1 - depth)).neg().add(1).expand(size).clone()
    if kind == "attn.w_lora.lora.2.bias":
        return torch.pow(place, 0.85 + depth**0.5).mul(5).sub(6.5)
    if kind in CONSTANT:
        return torch.full(size, CONSTANT[kind])
    if kind.endswith("lora.0.weight"):
        return torch.zeros(size)
    if kind.endswith("lora.2.weight"):
        return nn.init.orthogonal_(torch.empty(size)).mul(0.1)
    if kind.endswith(("lora.2.bias", "norm.weight", "norm.bias")):
        return _plain_norm(name, size)
    bound = 0.05 if kind == "attn.k_proj.weight" else 0.5
    return torch.empty(size).uniform_(-1, 1).mul(bound).div(size[1] ** 0.5)


def _plain_norm(name: str, size: tuple[int, ...]) -> Tensor:
    """Weights of one, biases of zero."""
    return torch.zeros(size) if name.endswith("bias") else torch.ones(size)
