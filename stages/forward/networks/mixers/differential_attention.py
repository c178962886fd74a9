"""Differential attention: the pattern of one head of a pair is subtracted from that of the other.

    z_j = (1 - a) norm((P_j - lambda P_{j + H/2}) V_j)      lambda = e^(q1 k1) - e^(q2 k2) + a

(Ye et al., Differential Transformer, 2024, section 2.1.) Head j of the first half and head j + H/2 form a
pair. Both read the concatenated values of two key heads, one of either half. The RMS norm is over the output
of a pair, without weights; a grows with the layer.

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
    """Differential attention of one layer: one pattern of each pair of heads is subtracted from the other."""

    def __init__(self, spec: DifferentialSpec, tensors: LayerTensors) -> None:
        parts, names = parts_of(tensors), {field.name for field in fields(AttentionWeights)}
        self.spec, self._mixer, self._learned = spec, spec.summary, strip_prefix(tensors, "diff.")
        self.weights = AttentionWeights(**{name: part for name, part in parts.items() if name in names})

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec = self.spec
        q, k, v = project(x, self.weights, spec.attention, layer, taps)
        q, k = apply_rope(history.needed(q), k, spec.rope, history)
        q, k = taps("rot_q", layer, q), taps("rot_k", layer, k)
        # Both heads of a pair read the values of two key heads, one of either half, side by side.
        values = torch.cat(v.chunk(2, dim=1), dim=-1).repeat(1, 2, 1, 1)
        read = taps("diff_read", layer, history.attend(layer, q, k, values, self._mixer))
        read_by_first, read_by_second = read.chunk(2, dim=1)
        difference = read_by_first - self._lambda(x.dtype) * read_by_second
        normed = F.rms_norm(difference, (read.shape[-1],), eps=spec.norm_eps)
        return linear(merge_heads(taps("diff_z", layer, (1 - spec.start) * normed)), self.weights.o)

    def _lambda(self, dtype: torch.dtype) -> Tensor:
        """Factor lambda of the subtracted pattern, a scalar."""
        w = self._learned
        exp1, exp2 = (torch.exp(upcast(w[f"q{i}"] * w[f"k{i}"]).sum()).to(dtype) for i in "12")
        return exp1 - exp2 + self.spec.start
