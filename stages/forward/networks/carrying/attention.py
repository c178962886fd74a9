"""Attention that may reuse keys and values of an earlier layer, or its key projection for values (Gemma 3n,
4).

    q = rope(norm(W_q h))     k = rope(norm(W_k h))     v = norm(W_v h), or norm(W_k h)

A layer that shares keys and values reads those of its source layer, keys after RoPE. The norm of values has
no weights.

Axes: [B, token, channel] outside of heads, [B, head, token, width] inside.
"""

from __future__ import annotations

from torch import Tensor

from ...architectures.mixers import AttentionSpec
from ...hooks.taps import Taps
from ..attention import apply_rope, linear, output
from ..history import Carried, History
from ..mixers.mixer import LayerTensors, merge_heads, split_heads
from ..norms import apply_norm
from ..rope import rotate
from ..weights import parts_of

__all__ = ["CarriedAttention"]


class CarriedAttention:
    """Attention of one layer, with keys and values that later layers may reuse."""

    def __init__(self, shape: AttentionSpec, tensors: LayerTensors) -> None:
        names = ("q", "k", "v", "o", "q_norm", "k_norm", "v_norm")
        parts = parts_of(tensors)
        self.shape, self._mixer = shape, shape.summary
        self.parts = {name: parts[name] for name in names if name in parts}

    def __call__(
        self, x: Tensor, layer: int, history: History, taps: Taps, carried: Carried
    ) -> tuple[Tensor, Carried]:
        """Attention from the normalised stream to the output projection.

        Arguments:
            x: normalised stream [B, token, D].
            layer: the layer.
            history: mixes the positions.
            taps: hook points of the pass.
            carried: keys and values of earlier layers, among others.

        Returns:
            Output [B, kept, D], and the layer's keys and values by name, each [B, token, head * width]; empty
            if it reuses those of another layer.
        """
        s = self.shape
        q = history.needed(taps("q", layer, self._normed(linear(x, self.parts["q"]), "q_norm")))
        lent: Carried = {}
        if s.source is None:
            k, v = self._keys_and_values(x, layer, taps)
            q, k = apply_rope(q, k, s.rope, history)
            q, k = taps("rot_q", layer, q), taps("rot_k", layer, k)
            lent = dict(zip(_names(layer), (merge_heads(k), merge_heads(v)), strict=True))
        else:
            k, v = (split_heads(carried[name], s.head_dim) for name in _names(s.source))
            if s.rope is not None:
                cos, sin = history.rotation(s.rope, q.dtype)
                q = rotate(q, history.needed(cos), history.needed(sin))
            q = taps("rot_q", layer, q)
        z = taps("z", layer, history.attend(layer, q, k, v, self._mixer))
        return output(z, self.parts["o"], layer, taps), lent

    def _keys_and_values(self, x: Tensor, layer: int, taps: Taps) -> tuple[Tensor, Tensor]:
        """Keys before RoPE, and values, each [B, head, token, width]."""
        keys = linear(x, self.parts["k"])
        values = keys if self.shape.values_from_keys else linear(x, self.parts["v"])
        k, v = self._normed(keys, "k_norm"), self._normed(values, "v_norm")
        return taps("k", layer, k), taps("v", layer, v)

    def _normed(self, x: Tensor, norm: str) -> Tensor:
        """x [B, token, head * width] -> [B, head, token, width], normalised per head."""
        assert self.shape.qk_norm is not None  # in all families of this kind
        return apply_norm(
            split_heads(x, self.shape.head_dim), self.parts[norm], "rms", self.shape.qk_norm.eps
        )


def _names(layer: int) -> tuple[str, str]:
    """Names of a layer's keys and values in `Carried`."""
    return f"keys.{layer}", f"values.{layer}"
