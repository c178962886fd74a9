"""What mixers are called with, and what several of them need.

Border: protocols and a few lines on tensors; which mixers there are is known to networks/composed.py.

Axes: as in the files of this room: [B, token, channel] outside of heads, [B, head, token, width] inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...hooks.taps import Taps
from ..history import History

__all__ = ["ChannelMixer", "LayerTensors", "Mixer", "by_heads", "flat", "own", "wide"]

LayerTensors = Mapping[str, Tensor]
"""Tensors of a layer by the names of architectures/layer_tensors.py."""


class Mixer(Protocol):
    """What mixes positions in a layer."""

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised x [B, token, D] -> what is added to the stream [B, kept, D]."""
        ...


class ChannelMixer(Protocol):
    """What mixes channels of single tokens."""

    def __call__(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """Normalised x [B, kept, D] -> what is added to the stream [B, kept, D]."""
        ...


def own(tensors: LayerTensors, room: str) -> dict[str, Tensor]:
    """The tensors of a mixer, its room taken off their names: "ssm." of "ssm.A_log"."""
    return {name.removeprefix(room): tensor for name, tensor in tensors.items() if name.startswith(room)}


def by_heads(x: Tensor, width: int) -> Tensor:
    """[B, token, head * width] -> [B, head, token, width]."""
    found: Tensor = x.unflatten(-1, (-1, width)).transpose(1, 2)
    return found


def flat(x: Tensor) -> Tensor:
    """[B, head, token, width] -> [B, token, head * width]."""
    return x.transpose(1, 2).flatten(2)


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 where the model computes in it."""
    return x if x.dtype == torch.float64 else x.float()
