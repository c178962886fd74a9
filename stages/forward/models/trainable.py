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
    """The architecture of a known family.

    Arguments:
        raw: contents of its config.json.
        shapes: shapes of tensors by their name in a checkpoint; only families whose config leaves sizes open
            need some.

    Raises:
        ConfigError: as loading a model does.
    """
    source = "the configuration to train"
    return KNOWN[model_type_of(raw, source)].read(ConfigReader(raw, source), shapes)


def network_over(architecture: Architecture, take: Callable[[str], Tensor]) -> Network:
    """The network of an architecture; `take` returns a tensor by its name in a checkpoint.

    Arguments:
        architecture: architecture of the model.
        take: name of a tensor in a checkpoint -> the tensor to train.
    """
    # Imported here, so that an architecture is made without torch.
    from ..networks.table import over

    return over(architecture, take)
