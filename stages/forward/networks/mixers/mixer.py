"""Protocols of mixers, and tensor helpers that several of them use.

Border: networks/composed.py lists the mixers.

Axes: as in the files of this folder: [B, token, channel] outside of heads, [B, head, token, width] inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...hooks.taps import Taps
from ..history import History

__all__ = [
    "ChannelMixer",
    "LayerTensors",
    "PositionMixer",
    "merge_heads",
    "split_heads",
    "strip_prefix",
    "upcast",
]

LayerTensors = Mapping[str, Tensor]
"""Weights of a layer by their names in architectures/layer_tensors.py."""


class PositionMixer(Protocol):
    """Computes the part of a layer that mixes positions: attention, a recurrence or a convolution. The
    torch-free description of the same part is `architectures.layer_summaries.Mixer`."""

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Output that is added to the residual stream, [B, kept, D]; kept: the tokens whose output is needed
        later.

        Arguments:
            x: normalised stream [B, token, D].
            layer: number of the layer.
            history: finds the earlier tokens and mixes the positions.
            taps: captures and interventions of the pass, called at its hook points.
        """
        ...


class ChannelMixer(Protocol):
    """Computes the part of a layer that mixes channels of single tokens: an MLP or experts."""

    def __call__(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """Normalised x [B, kept, D] -> output that is added to the residual stream, [B, kept, D]."""
        ...


def strip_prefix(tensors: LayerTensors, prefix: str) -> dict[str, Tensor]:
    """Tensors whose names start with a prefix, by their names without it: for "ssm.", "ssm.A_log" becomes
    "A_log"."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def split_heads(x: Tensor, width: int) -> Tensor:
    """Heads side by side, x [B, token, head * width] -> an axis of heads, [B, head, token, width]."""
    # torch's own unflatten is two more calls in Python.
    return x.reshape(*x.shape[:-1], -1, width).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """An axis of heads, x [B, head, token, width] -> heads side by side, [B, token, head * width]."""
    return x.transpose(1, 2).flatten(2)


def upcast(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()
