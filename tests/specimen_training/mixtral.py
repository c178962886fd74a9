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

from mizarr.stages.forward.models.trainable import architecture_to_train

from .network import Shape, decoder_config, decoder_shape
from .served import Served

__all__ = ["Mixtral", "read_mixtral"]

EXPERTS, CHOSEN = 8, 2


class Mixtral(Served):
    """A decoder whose MLPs are experts; `mlp` of its shape is the width of each."""

    def __init__(self, shape: Shape):
        config = architecture_to_train(hub_config(shape, "float32", 0, 1), {})
        super().__init__(shape, config, lambda name, size: _beginning(name, size, shape.layers))

    def hub_config(self, dtype: str, bos: int, eos: int) -> dict[str, Any]:
        """See `Trained`."""
        return hub_config(self.shape, dtype, bos, eos)

    def untrained(self) -> Mixtral:
        """See `Served`."""
        return Mixtral(self.shape)


def read_mixtral(folder: Path, config: Mapping[str, Any]) -> Mixtral:
    """The network stored by `write_model`, weights in float32."""
    return Mixtral(decoder_shape(config)).holding(folder)


def hub_config(shape: Shape, dtype: str, bos: int, eos: int) -> dict[str, Any]:
    """The config.json of a MixtralForCausalLM of this shape."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "sliding_window": None,
        **decoder_config(shape, dtype, bos, eos),
    }


def _beginning(name: str, size: tuple[int, ...], layers: int) -> Tensor:
    """What a parameter is before training: norms of one, small numbers, smaller ones where 2 * layers parts
    add to the stream."""
    if len(size) == 1:
        return torch.ones(size)
    adds = name.endswith(("o_proj.weight", "w2.weight"))
    return torch.empty(size).normal_(std=0.02 / ((2 * layers) ** 0.5 if adds else 1.0))
