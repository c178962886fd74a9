"""Runs of circuits: the metric of prompt pairs under many circuits at once.

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
from .batches import as_array, batches, network_of
from .experiment import MEMORY
from .pairs import Alternative, Pair, metric_value

if TYPE_CHECKING:
    from ..forward.models.model import Model

__all__ = ["CircuitRuns"]


class CircuitRuns:
    """Pairs of prompts, held with clean runs and replacements, whose metrics under circuits are measured."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        pairs: Sequence[Pair],
        alternative: Alternative,
        seed: int = 0,
        memory: int = MEMORY,
    ) -> None:
        """Run all pairs once, without leaving out edges.

        Arguments:
            model: The model.
            layout: Graph of the model.
            pairs: Pairs of prompts.
            alternative: What an edge carries when it is left out; see `Alternative`.
            seed: Seed of the prompts drawn for "resampled".
            memory: Memory in bytes beside the model.
        """
        self._network, self._layout, self._pairs, self._memory = network_of(model), layout, pairs, memory
        # Kept in memory: a search runs thousands of circuits on the same clean runs.
        self._batches = list(batches(model, layout, pairs, alternative, seed=seed, memory=memory))
        with torch.no_grad():
            self._alternatives = [
                Alternatives.of(self._network, layout, batch.ids, batch.clean, batch.replacement)
                for batch in self._batches
            ]
        self.clean: Floats = np.zeros(len(pairs))
        """Metric of the full model, float64 [pair]."""
        for batch in self._batches:
            for index, pair, logits in zip(batch.indices, batch.pairs, batch.logits, strict=True):
                self.clean[index] = metric_value(pair.metric, logits, logits)

    def values(self, masks: Bools, first: int = 0) -> Floats:
        """Metric of each pair in runs of some circuits, float64 [circuit, pair].

        Arguments:
            masks: Edges of each circuit, bool [circuit, source, destination], or [circuit, position, source,
                destination] for pairs of one length.
            first: First layer into which edges are left out; layers below are taken from the clean run.
        """
        metrics: Floats = np.zeros((len(masks), len(self._pairs)))
        # Copied: masks of a `Circuit` are read-only, and torch warns about tensors over read-only arrays.
        circuits = torch.from_numpy(np.array(masks))
        network, layout = self._network, self._layout
        for batch, alternatives in zip(self._batches, self._alternatives, strict=True):
            with torch.no_grad():
                run_logits = circuit_logits(
                    network, layout, alternatives, circuits, Logits(), memory=self._memory, first_layer=first
                )
            logits = as_array(run_logits)
            rows = zip(batch.indices, batch.pairs, batch.logits, strict=True)
            for row, (index, pair, clean) in enumerate(rows):
                metrics[:, index] = [metric_value(pair.metric, run, clean) for run in logits[:, row]]
        return metrics
