"""Attention as one of a hybrid's mixers: networks/attention.py over the layer's own sizes."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from ...architectures.mixers import AttentionShape
from ...hooks.taps import Taps
from ..attention import attention
from ..history import History
from ..weights import AttentionWeights, parts_of
from .mixer import LayerTensors

__all__ = ["SelfAttention"]


class SelfAttention:
    """Grouped-query attention of one layer (`Mixer`)."""

    def __init__(self, shape: AttentionShape, tensors: LayerTensors) -> None:
        parts, known = parts_of(tensors), {field.name for field in fields(AttentionWeights)}
        self.shape, self._how = shape, shape.fact
        self.weights = AttentionWeights(**{name: part for name, part in parts.items() if name in known})

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """See `Mixer`."""
        return attention(x, self.weights, self.shape, self._how, layer, history, taps)
