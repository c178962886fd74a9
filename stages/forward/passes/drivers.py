"""Who drives a network: what a `Model` asks of one, answered by the passes its kind of architecture takes.

Border: the only file that knows which driver a kind of architecture has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..hooks.taps import PassTaps
from ..hooks.wants import Logits
from ..networks.loop import Network
from .branches import Wanted
from .kept import Cache, read_on
from .plain import forward
from .planner import Block
from .sweep import Result, sweep
from .whole import WholePasses

__all__ = ["Passes", "passes_over"]


class Passes(Protocol):
    """Passes over a network, whatever it is made of."""

    def forward(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """One pass over token ids [B, S]: the logits wanted, [B, positions, tokens]. order: see
        `through_layers`. Taps made with ``stop_early`` end it at the last wanted hook point."""
        ...

    def read_on(self, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
        """Logits [B, vocab] behind sequences of one length, of which only what the cache does not hold is
        read; see kept.py."""
        ...

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """What the runs that end in a block of a plan give. room: bytes that may be taken beside the row of
        tokens."""
        ...


class LayeredPasses:
    """Passes over a network that computes layer by layer: the loop in networks/loop.py."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def forward(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """See `Passes`."""
        return forward(self._network, ids, taps, want, order)

    def read_on(self, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
        """See `Passes`."""
        return read_on(self._network, rows, cache, taps)

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """See `Passes`."""
        yield from sweep(self._network, block, wanted, room)


DRIVERS: dict[str, Callable[[Any], Passes]] = {"bridge": WholePasses}
"""Kind of architecture -> its driver, where it is not the loop."""


def passes_over(network: Network) -> Passes:
    """The driver of a network."""
    return DRIVERS.get(network.config.kind, LayeredPasses)(network)
