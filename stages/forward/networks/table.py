"""From an architecture to the network that computes it: one entry for each kind.

Border: the only file that knows which class computes which kind of architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..architectures.architecture import Architecture
from . import weights
from .decoder import Decoder
from .loop import Network

__all__ = ["build"]

NETWORKS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Network]]] = {
    "transformer": (weights.load, Decoder),
}
"""Kind -> what reads its weights from files, and what computes with them."""


def build(
    architecture: Architecture,
    files: Sequence[Path],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool | None = None,
) -> Network:
    """The network of an architecture with the weights of some safetensors files.

    progress: show a bar on stderr; None does so on a terminal for checkpoints over 1 GiB.
    Raises WeightsError naming the tensor or file that does not fit.
    """
    load, network = NETWORKS[architecture.kind]
    return network(architecture, load(files, architecture, dtype=dtype, device=device, progress=progress))
