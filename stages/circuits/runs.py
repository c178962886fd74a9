"""Runs of circuits: the metric of pairs under many circuits at once.

Border: a model, pairs and masks in, numbers out.

Axes: circuit, pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...store.arrays import Floats
from ..forward.edges.circuits import Alternatives, circuit_logits
from ..forward.edges.layout import Bools, Layout
from ..forward.hooks.wants import Logits
from .batches import MEMORY, PairBatch, as_array, batches, network_of
from .pairs import Alternative, Pair, value

if TYPE_CHECKING:
    from ..forward.models.model import Model

__all__ = ["Measured"]


class Measured:
    """Pairs whose clean pass and whatever stands for it are kept, to be run under circuits again and
    again."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        pairs: Sequence[Pair],
        alternative: Alternative,
        seed: int = 0,
        memory: int = MEMORY,
    ) -> None:
        """Raises what `checked` raises. seed: see `batches`. memory: bytes that passes may take."""
        self._network, self._layout, self._pairs, self._memory = network_of(model), layout, pairs, memory
        self._batches = list(batches(model, layout, pairs, alternative, seed=seed, memory=memory))
        with torch.no_grad():
            self._given = [
                Alternatives.of(self._network, layout, batch.ids, batch.clean, batch.other)
                for batch in self._batches
            ]
        self.clean: Floats = np.zeros(len(pairs))
        """The metric of the model, [pair]."""
        for batch in self._batches:
            for place, pair, logits in zip(batch.places, batch.pairs, batch.logits, strict=True):
                self.clean[place] = value(pair.metric, logits, logits)

    def values(self, masks: Bools, first: int = 0) -> Floats:
        """The metric under circuits, bool [circuit, source, destination], or of pairs of one length [circuit,
        position, source, destination]: float64 [circuit, pair].

        first: the first layer into which edges are left out.
        """
        found: Floats = np.zeros((len(masks), len(self._pairs)))
        chosen = torch.from_numpy(np.array(masks))
        for batch, given in zip(self._batches, self._given, strict=True):
            self._read(batch, given, chosen, first, found)
        return found

    @torch.no_grad()
    def _read(
        self, batch: PairBatch, given: Alternatives, chosen: torch.Tensor, first: int, found: Floats
    ) -> None:
        network, layout = self._network, self._layout
        logits = as_array(
            circuit_logits(network, layout, given, chosen, Logits(), memory=self._memory, first=first)
        )
        for row, (place, pair, clean) in enumerate(zip(batch.places, batch.pairs, batch.logits, strict=True)):
            found[:, place] = [value(pair.metric, run, clean) for run in logits[:, row]]
