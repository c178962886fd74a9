"""Measured structure of a model that transformers computes: its layers, the outputs that they add to the
stream, and its final norm and head.

Border: paths of modules and names of tensors, as plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FoundLayer", "FoundReadout", "LayerPart", "TensorPlace"]


@dataclass(frozen=True)
class TensorPlace:
    """Location of a tensor in the output of a module."""

    path: str
    """Module path, relative to the model, or for `LayerPart` relative to the layer."""
    slot: str
    """Position of the tensor in the module output: index ("0"), name, or "" for the whole output."""


@dataclass(frozen=True)
class LayerPart:
    """An output that a layer adds to its stream."""

    kind: str
    """Kind of its hook point: "attn_out" or "mlp_out"."""
    place: TensorPlace
    """Module, relative to the layer, whose output it is, and its position in that output."""


@dataclass(frozen=True)
class FoundLayer:
    """A layer: one call of a module that maps the stream to the next stream."""

    path: str
    """Path of the module; layers that share weights have the same path."""
    parts: tuple[LayerPart, ...] = ()
    """Module outputs whose sum is the layer's change of the stream; () if none were measured."""


@dataclass(frozen=True)
class FoundReadout:
    """Final norm and head that map the last stream to logits."""

    norm_path: str
    """Path of the norm's module."""
    norm_type: Literal["rms", "gemma_rms", "layer"]
    """Kind of norm, `Architecture.norm_type`."""
    norm_eps: float
    """Epsilon that the norm adds to the mean square or variance."""
    final_norm: str
    """Tensor name of the norm's weight."""
    head: str
    """Tensor name of the head's matrix."""
    final_norm_bias: str = ""
    """Tensor name of the norm's bias; "" for none."""
    head_bias: str = ""
    """Tensor name of the head's bias; "" for none."""
    soft_cap: float | None = None
    """Cap c of the logits, c tanh(logits / c); None for no cap."""
    scale: float = 1.0
    """Factor of the logits, before the cap."""
