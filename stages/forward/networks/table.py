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
from . import composed, rwkv, weights
from .bridge import network as bridge
from .carrying import network as carrying
from .composed import ComposedNetwork
from .loop import Network
from .pairs import network as pairs
from .rwkv import Rwkv

__all__ = ["NETWORKS", "build", "of_weights", "over"]

NETWORKS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Network]]] = {
    "rwkv": (rwkv.block, Rwkv),
    "composed": (composed.block, ComposedNetwork),
    "carrying": (carrying.block, carrying.Carrying),
    "pair": (pairs.block, pairs.PairNetwork),
}
"""Kind -> what makes the weights of a layer of tensors, and what computes with all of them."""

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
    block, _ = NETWORKS[architecture.kind]
    held = weights.load(files, architecture, block, dtype=dtype, device=device, progress=progress)
    return of_weights(architecture, held)


def over(architecture: Architecture, take: Callable[[str], Tensor]) -> Network:
    """The network of an architecture whose tensors a function gives by their names in a checkpoint."""
    block, _ = NETWORKS[architecture.kind]
    return of_weights(architecture, weights.assemble(take, architecture, block))


def of_weights(architecture: Architecture, held: weights.Weights[Any]) -> Network:
    """The network of an architecture with weights that somebody has made."""
    return NETWORKS[architecture.kind][1](architecture, held)
