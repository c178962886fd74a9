"""A block of attention and MLP whose weights several layers share, before each layer's own mixer (Zamba).

    a = attention(norm([x, e]))     t = W_layer MLP(norm(a))        the mixer then reads norm(x + t)

(Glorioso et al., Zamba, 2024, section 2; Zamba2, 2024, section 2.) x is the stream that enters the layer, e
the embedding of the tokens. The block has no residual connection, and its output reaches the stream only
through the mixer. Each layer has its own W_layer and, in Zamba2, low-rank additions to the shared weights.

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
    """A block of attention and MLP that several layers share, with the weights that one layer uses
    (Zamba)."""

    def __init__(self, spec: SharedBlockSpec, tensors: LayerTensors) -> None:
        shared = strip_prefix(tensors, "shared.")
        self.spec = spec
        self.attention, self.mlp = SelfAttention(spec.attention, shared), Mlp(spec.mlp, shared)
        self._norms = {"shared": NormWeights(shared["ln"]), "ln2": NormWeights(tensors["ln2"])}
        self._out = shared["out"]

    def __call__(self, x: Tensor, start: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Output of the block, which is added to the input of the layer's mixer, [B, token, D].

        Arguments:
            x: residual stream [B, token, D].
            start: token embeddings [B, token, D].
            layer: number of the layer.
            history: mixes the positions.
            taps: captures and interventions of the pass, called at its hook points.
        """
        h = self._normed(torch.cat([x, start], dim=-1), "shared", layer, taps)
        h = taps("shared_attn_out", layer, self.attention(h, layer, history, taps))
        h = taps("mlp_pre", layer, self._normed(h, "ln2", layer, taps))
        h = taps("mlp_post", layer, self.mlp(h, layer, taps))
        return taps("shared_out", layer, product(h, self._out))

    def _normed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        """x [B, token, width] after the block's norm called `name`, "shared" or "ln2", with its hook
        points."""
        return normalise(x, self._norms[name], "rms", self.spec.norm_eps, taps, name, layer)
