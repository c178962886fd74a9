"""A network over parameters that still move: a model is trained by the network that will serve it.

No file is read. An architecture is made of a configuration and the shapes a checkpoint would have; its
network of a function that gives the tensors, through which gradients flow back to whatever it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..architectures.families import model_type_of
from ..architectures.known import KNOWN
from ..architectures.transformer import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor

    from ..architectures.architecture import Architecture
    from ..networks.loop import Network

__all__ = ["architecture_to_train", "network_over"]


def architecture_to_train(raw: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
    """The architecture of a family known by name.

    raw: what its config.json would hold. shapes: of tensors by name, for families whose config does not say
    enough; those that decide suffice. Raises ConfigError as loading does.
    """
    source = "the configuration to train"
    return KNOWN[model_type_of(raw, source)].read(ConfigReader(raw, source), shapes)


def network_over(architecture: Architecture, take: Callable[[str], Tensor]) -> Network:
    """The network of an architecture; take gives a tensor by its name in a checkpoint."""
    from ..networks.table import over

    return over(architecture, take)
