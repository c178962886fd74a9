"""The driver of each kind of network: what a `Model` calls for passes, whatever computes the layers.

The only file that knows which driver belongs to which kind of architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ..hooks.taps import PassTaps
from ..hooks.wants import Logits
from ..networks.loop import Network
from .branches import Wanted
from .kept import Cache, read_on
from .plain import forward
from .planner import Block
from .sweep import Result, one_by_one, sweep
from .whole import WholePasses

__all__ = ["Passes", "passes_over"]


class Passes(Protocol):
    """How forward passes run over a network, whatever computes its layers."""

    def forward(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """Run prompts of one length through the network.

        Arguments:
            ids: token ids, int [B, S].
            taps: called at every hook point; with ``stop_early`` they end the pass after the last capture.
            want: which logits to compute; None for none.
            order: layers in execution order; None for each layer once.

        Returns:
            Logits [B, positions, tokens]; None where none are wanted or the taps ended the pass.
        """
        ...

    def read_on(self, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
        """Compute the tokens of sequences that the cache lacks, and return the next-token logits.

        Arguments:
            rows: token ids of whole sequences, all of one length.
            cache: keys, values and states of the positions computed so far; extended in place.
            taps: called at every hook point of the new positions, to capture or change the value there.

        Returns:
            Next-token logits [B, vocab] at the last position.
        """
        ...

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """Compute the runs that end in one block of a plan.

        Arguments:
            block: branches of the runs, which share one pass over the layers.
            wanted: all runs of the plan.
            room: bytes that may be allocated beside the activations of the tokens.

        Yields:
            (index of a run, its logits [1, positions, tokens] or None, its captures).
        """
        ...


class LayeredPasses:
    """Forward passes over a network that mizarr runs layer by layer (networks/loop.py)."""

    def __init__(self, network: Network) -> None:
        self.forward = partial(forward, network)
        self.read_on = partial(read_on, network)
        # A head that reads the mean over positions needs each run in a row of its own.
        self.sweep = partial(sweep if network.config.shares_prefixes else one_by_one, network)


DRIVERS: dict[str, Callable[[Any], Passes]] = {"bridge": WholePasses}
"""Architecture kind -> driver; kinds without entry use `LayeredPasses`."""


def passes_over(network: Network) -> Passes:
    """How forward passes run over a network: layer by layer, or as a whole through transformers."""
    return DRIVERS.get(network.config.kind, LayeredPasses)(network)
