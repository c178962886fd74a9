"""A block of attention and MLP that several layers share, ahead of a mixer of their own.

    a = attention(norm([x, e]))     t = W_layer MLP(norm(a))        the mixer then reads norm(x + t)

(Glorioso et al., Zamba, 2024, section 2; Zamba2, 2024, section 2.) x is the stream that enters the layer, e
the embedding of the tokens, which is carried beside it. Nothing in the block is added to what it read: the
stream sees of it what the mixer makes of it. What a layer has to itself is W_layer and, in Zamba2, maps of
low rank beside the shared ones.

Axes: as in mixer.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...architectures.mixers import SharedBlockSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..norms import normalise
from ..weights import NormWeights
from .attention import SelfAttention
from .mixer import LayerTensors, strip_prefix
from .mlp import Mlp

__all__ = ["SharedBlock"]


class SharedBlock:
    """The shared block of one layer."""

    def __init__(self, shape: SharedBlockSpec, tensors: LayerTensors) -> None:
        found = strip_prefix(tensors, "shared.")
        self.shape = shape
        self.attention, self.mlp = SelfAttention(shape.attention, found), Mlp(shape.mlp, found)
        self._norms = {"shared": NormWeights(found["ln"]), "ln2": NormWeights(tensors["ln2"])}
        self._out = found["out"]

    def __call__(self, x: Tensor, start: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """The stream x and the embedding `start`, each [B, token, D], -> what is added to what the layer's
        mixer reads [B, token, D]."""
        h = self._normed(torch.cat([x, start], dim=-1), "shared", layer, taps)
        h = taps("shared_attn_out", layer, self.attention(h, layer, history, taps))
        h = taps("mlp_pre", layer, self._normed(h, "ln2", layer, taps))
        h = taps("mlp_post", layer, self.mlp(h, layer, taps))
        return taps("shared_out", layer, product(h, self._out))

    def _normed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        return normalise(x, self._norms[name], "rms", self.shape.norm_eps, taps, name, layer)
