"""Attention of pairs of heads, of which one pattern is taken from the other.

    z_j = (1 - a) norm((P_j - lambda P_{j + H/2}) V_j)      lambda = e^(q1 k1) - e^(q2 k2) + a

(Ye et al., Differential Transformer, 2024, section 2.1.) A pair is a head of the first half and the one as
far in the second; both read values of two key heads side by side, one of either half. The norm is over what a
pair has read, without weights; a grows with the layer.

Axes: as in mixer.py; V values of a pair, twice as wide as a head.
"""

from __future__ import annotations

from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.mixers import DifferentialSpec
from ...hooks.taps import Taps
from ..attention import apply_rope, linear, project
from ..history import History
from ..weights import AttentionWeights, parts_of
from .mixer import LayerTensors, merge_heads, strip_prefix, upcast

__all__ = ["DifferentialAttention"]


class DifferentialAttention:
    """The differential attention of one layer (`PositionMixer`)."""

    def __init__(self, shape: DifferentialSpec, tensors: LayerTensors) -> None:
        parts, known = parts_of(tensors), {field.name for field in fields(AttentionWeights)}
        self.shape, self._how, self._learned = shape, shape.summary, strip_prefix(tensors, "diff.")
        self.weights = AttentionWeights(**{name: part for name, part in parts.items() if name in known})

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """See `PositionMixer`."""
        s = self.shape
        q, k, v = project(x, self.weights, s.attention, layer, taps)
        q, k = apply_rope(history.needed(q), k, s.rope, history)
        q, k = taps("rot_q", layer, q), taps("rot_k", layer, k)
        values = torch.cat(v.chunk(2, dim=1), dim=-1).repeat(1, 2, 1, 1)
        read = taps("diff_read", layer, history.attend(layer, q, k, values, self._how))
        one, other = read.chunk(2, dim=1)
        left = F.rms_norm(one - self._share(x.dtype) * other, (read.shape[-1],), eps=s.norm_eps)
        return linear(merge_heads(taps("diff_z", layer, (1 - s.start) * left)), self.weights.o)

    def _share(self, dtype: torch.dtype) -> Tensor:
        """Lambda: how much of the second pattern is taken away."""
        w = self._learned
        first, second = (torch.exp(upcast(w[f"q{i}"] * w[f"k{i}"]).sum()).to(dtype) for i in "12")
        return first - second + self.shape.start
