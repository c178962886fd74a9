"""What is found of a model that transformers computes: where its layers are, what in them adds to the stream,
and with what the last stream is read.

Border: paths of modules and names of tensors, as plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FoundLayer", "FoundReadout", "LayerPart", "TensorPlace"]


@dataclass(frozen=True)
class TensorPlace:
    """A tensor that a module gives.

    path: of the module in the model; of a part, in its layer. slot: where the tensor is among what it gives:
    "0" by position, a name, "" where it is all of it.
    """

    path: str
    slot: str


@dataclass(frozen=True)
class LayerPart:
    """What a layer adds to its stream. kind: the hook point, "attn_out" or "mlp_out"."""

    kind: str
    place: TensorPlace


@dataclass(frozen=True)
class FoundLayer:
    """A call of a module that takes a stream and gives the next. path: layers that share weights share it."""

    path: str
    parts: tuple[LayerPart, ...] = ()


@dataclass(frozen=True)
class FoundReadout:
    """A final norm and a head that make the logits of the last stream, as `Architecture` tells them.

    norm_path: of the norm's module. final_norm, head, …: names of tensors in the checkpoint; "" where there
    is none. scale: what logits are multiplied by.
    """

    norm_path: str
    norm_type: Literal["rms", "gemma_rms", "layer"]
    norm_eps: float
    final_norm: str
    head: str
    final_norm_bias: str = ""
    head_bias: str = ""
    soft_cap: float | None = None
    scale: float = 1.0
