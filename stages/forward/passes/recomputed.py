"""A network whose layers keep nothing for the way back: each is computed again when the gradient reaches it.

What autograd keeps of a pass is then what enters each layer, and the inside of one of them (Chen et al.,
Training Deep Nets with Sublinear Memory Cost, 2016). The second time gives the bits of the first.

Border: a network and torch's own checkpoints; knows no taps, but that they are asked twice.
"""

from __future__ import annotations

from typing import Any, cast

from torch.utils.checkpoint import checkpoint

from ..networks.history import Carried
from ..networks.loop import Network

__all__ = ["recomputed"]


def recomputed(network: Network) -> Network:
    """The network, its layers computed again on the way back; the same weights."""
    return cast(Network, _Recomputed(network))


class _Recomputed:
    """All of a network but its layers, by delegation."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def layer(self, *given: Any) -> Carried:
        """See `Network`."""
        found: Carried = checkpoint(
            self._network.layer, *given, use_reentrant=False, preserve_rng_state=False
        )
        return found
