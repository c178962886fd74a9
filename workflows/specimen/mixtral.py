"""The specimen of experts while it is trained: a Mixtral.

Nothing but the loss on the next token says which expert a token goes to: no loss balances them.

Border: tensors; knows no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...stages.forward.models.trainable import architecture_to_train
from .network import Shape
from .served import Served

__all__ = ["Mixtral", "read_mixtral"]

EXPERTS, CHOSEN = 8, 2


class Mixtral(Served):
    """A decoder whose MLPs are experts; `mlp` of its shape is the width of each."""

    def __init__(self, shape: Shape):
        config = architecture_to_train(hub_config(shape, "float32", 0, 1), {})
        super().__init__(shape, config, lambda name, size: _beginning(name, size, shape.layers))

    def hub_config(self, dtype: str, bos: int, eos: int) -> dict[str, Any]:
        """Its config.json."""
        return hub_config(self.shape, dtype, bos, eos)

    def untrained(self) -> Mixtral:
        """See `Served`."""
        return Mixtral(self.shape)


def read_mixtral(folder: Path, config: Mapping[str, Any]) -> Mixtral:
    """The network stored by `write_model`, weights in float32."""
    shape = Shape(
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
    return Mixtral(shape).holding(folder)


def hub_config(shape: Shape, dtype: str, bos: int, eos: int) -> dict[str, Any]:
    """The config.json of a MixtralForCausalLM of this shape."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.hidden // shape.heads,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def _beginning(name: str, size: tuple[int, ...], layers: int) -> Tensor:
    """What a parameter is before training: norms of one, small numbers, smaller ones where 2 * layers parts
    add to the stream."""
    if len(size) == 1:
        return torch.ones(size)
    adds = name.endswith(("o_proj.weight", "w2.weight"))
    return torch.empty(size).normal_(std=0.02 / ((2 * layers) ** 0.5 if adds else 1.0))
