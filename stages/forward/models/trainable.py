"""A network over trainable parameters: a model is trained by the same network that later serves it.

No file is read. The architecture comes from a configuration and the shapes that a checkpoint would have; the
network takes its tensors from a function, and gradients flow back to the tensors that this function returns.
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
    """The architecture of a model of a known family, read from a config.json without a checkpoint.

    Arguments:
        raw: contents of config.json.
        shapes: shapes of tensors by their name in a checkpoint; only families whose config leaves sizes open
            need some.

    Raises:
        ConfigError: for a config that does not describe a model of its family.
    """
    source = "the configuration to train"
    return KNOWN[model_type_of(raw, source)].read(ConfigReader(raw, source), shapes)


def network_over(architecture: Architecture, take: Callable[[str], Tensor]) -> Network:
    """A network that computes with trainable tensors, to which gradients flow back.

    Arguments:
        architecture: architecture of the model.
        take: returns the tensor to train for the name that it has in a checkpoint.
    """
    # Imported here, so that an architecture is made without torch.
    from ..networks.table import over

    return over(architecture, take)
