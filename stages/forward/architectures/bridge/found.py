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
    """Place of a tensor in the output of a module of a transformers model."""

    path: str
    """Dotted path of the module, relative to its layer."""
    slot: str
    """Place of the tensor in the module's output: index ("0"), name, or "" for the whole output."""


@dataclass(frozen=True)
class LayerPart:
    """Output of a module within a layer that the layer adds to the residual stream."""

    kind: str
    """Kind of its hook point: "attn_out" or "mlp_out"."""
    place: TensorPlace
    """The module, by its path relative to the layer, and the place of the tensor in its output."""


@dataclass(frozen=True)
class FoundLayer:
    """A layer of a transformers model: one call of a module that maps the residual stream to the next one."""

    path: str
    """Dotted path of the module; layers that share weights have the same path."""
    parts: tuple[LayerPart, ...] = ()
    """Module outputs whose sum is the layer's change of the residual stream; () if none were found."""


@dataclass(frozen=True)
class FoundReadout:
    """Final norm and language head that map the last layer's output to logits (the readout)."""

    norm_path: str
    """Dotted path of the norm's module."""
    norm_type: Literal["rms", "gemma_rms", "layer"]
    """Kind of norm: RMS norm, RMS norm with 1 + weight, or layer norm."""
    norm_eps: float
    """Epsilon that the norm adds to the mean square or variance."""
    final_norm: str
    """Name of the checkpoint tensor with the norm's weight."""
    head: str
    """Name of the checkpoint tensor with the head's matrix."""
    final_norm_bias: str = ""
    """Name of the checkpoint tensor with the norm's bias; "" for no bias."""
    head_bias: str = ""
    """Name of the checkpoint tensor with the head's bias; "" for no bias."""
    soft_cap: float | None = None
    """Cap c of the logits, c tanh(logits / c); None for no cap."""
    scale: float = 1.0
    """Factor of the logits, before the cap."""
