"""From an architecture to the network that computes it: one entry for each kind.

Border: the only file that knows which class computes which kind of architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..architectures.architecture import Architecture
from ..checkpoints.checkpoint import Files, checkpoint_of
from . import hybrid, rwkv, weights
from .bridge import network as bridge
from .decoder import Decoder
from .hybrid import Hybrid
from .loop import Network
from .rwkv import Rwkv

__all__ = ["build", "over"]

NETWORKS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Network]]] = {
    "transformer": (weights.assemble, Decoder),
    "rwkv": (rwkv.assemble, Rwkv),
    "hybrid": (hybrid.assemble, Hybrid),
}
"""Kind -> what makes its weights of tensors, and what computes with them."""

WHOLE: dict[str, Callable[..., Network]] = {"bridge": bridge.build}
"""Kind -> what makes the network of a folder, where the weights are somebody else's to read."""


def build(
    architecture: Architecture,
    files: Files,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool | None = None,
) -> Network:
    """The network of an architecture with the weights of a checkpoint.

    progress: show a bar on stderr; None does so on a terminal for checkpoints over 1 GiB.
    Raises WeightsError naming the tensor or file that does not fit.
    """
    if architecture.kind in WHOLE:
        return WHOLE[architecture.kind](
            architecture, checkpoint_of(files).files[0].parent, dtype=dtype, device=device
        )
    assemble, network = NETWORKS[architecture.kind]
    held = weights.load(files, architecture, assemble, dtype=dtype, device=device, progress=progress)
    return network(architecture, held)


def over(architecture: Architecture, take: Callable[[str], Tensor]) -> Network:
    """The network of an architecture whose tensors a function gives by their names in a checkpoint."""
    assemble, network = NETWORKS[architecture.kind]
    return network(architecture, assemble(take, architecture))
