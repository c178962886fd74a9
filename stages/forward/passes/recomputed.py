"""A network with activation checkpointing: each layer is computed again in the backward pass.

Autograd then stores what enters each layer and the inside of one layer at a time (Chen et al. 2016, Training
Deep Nets with Sublinear Memory Cost). The second computation gives the same bits as the first. The taps of a
layer are therefore called twice.
"""

from __future__ import annotations

from typing import Any, cast

from torch.utils.checkpoint import checkpoint

from ..networks.history import Carried
from ..networks.loop import Network

__all__ = ["recomputed"]


def recomputed(network: Network) -> Network:
    """Wrap a network with activation checkpointing of every layer; the weights are shared."""
    return cast(Network, _Recomputed(network))


class _Recomputed:
    """A network whose layers are computed again in the backward pass; all else is that of the network."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def layer(self, *arguments: Any) -> Carried:
        """Run a layer so that autograd stores its input only, and return its output."""
        # No layer draws random numbers, so saving the generator's state would only cost time.
        carried: Carried = checkpoint(
            self._network.layer, *arguments, use_reentrant=False, preserve_rng_state=False
        )
        return carried
