"""Building a network from an architecture: a table with one entry per kind of architecture.

Border: the only file that knows which class computes which kind of architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..architectures.architecture import Architecture
from ..checkpoints.checkpoint import Files, checkpoint_of
from . import composed, weights
from .bridge import network as bridge
from .composed import ComposedNetwork
from .loop import Network

__all__ = ["NETWORKS", "build", "of_weights", "over"]

NETWORKS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Network]]] = {
    "composed": (composed.block, ComposedNetwork),
}
"""Kind of architecture -> (function that builds a layer's weights, class of the network)."""

WHOLE: dict[str, Callable[..., Network]] = {"bridge": bridge.build}
"""Kind of architecture -> function that builds the network from a checkpoint's folder, for kinds whose
weights transformers reads (the bridge)."""


def build(
    architecture: Architecture,
    files: Files,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool | None = None,
) -> Network:
    """Build the network of an architecture with the weights of a checkpoint.

    Arguments:
        architecture: the architecture.
        files: files of the checkpoint.
        dtype: dtype of the computation.
        device: device of the computation.
        progress: whether to show a progress bar on stderr; None for checkpoints over 1 GiB only.

    Raises:
        WeightsError: a tensor or file is missing, or does not fit the architecture.
    """
    if architecture.kind in WHOLE:
        return WHOLE[architecture.kind](
            architecture, checkpoint_of(files).files[0].parent, dtype=dtype, device=device
        )
    block, _ = NETWORKS[architecture.kind]
    loaded = weights.load(files, architecture, block, dtype=dtype, device=device, progress=progress)
    return of_weights(architecture, loaded)


def over(architecture: Architecture, take: Callable[[str], Tensor]) -> Network:
    """Build the network of an architecture from tensors in memory. take: reads a tensor by its checkpoint
    name, in the dtype and on the device of the computation."""
    block, _ = NETWORKS[architecture.kind]
    return of_weights(architecture, weights.assemble(take, architecture, block))


def of_weights(architecture: Architecture, loaded: weights.Weights[Any]) -> Network:
    """Network of an architecture over weights that are already loaded."""
    return NETWORKS[architecture.kind][1](architecture, loaded)
