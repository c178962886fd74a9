"""Edge scores: effect of leaving out each edge on a metric, estimated (methods.py) or exact.

    scores = EdgeScores(pairs=pairs, method="EAP-IG-inputs")
    score = run(scores.on("specimen"), store)["score"]        # [source, destination]
    exact = EdgeEffects(pairs=pairs)                          # every edge by itself, one cell per pair

Border: pairs in, labelled arrays out; forward/edges computes passes edge by edge. Torch is imported when it
runs.

Axes: pair, source, destination. NaN where there is no edge. Positive: leaving the edge out raises the metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from ...pipeline import Output
from ...store.digest import digest
from ...store.errors import StageError
from ..forward.runs.experiment import CellLabels
from .experiment import EdgeExperiment, labels, nan_without_edge, one_length
from .names import METHODS, Method
from .pair_experiment import PairExperiment

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.models.model import Model

__all__ = ["EdgeEffects", "EdgeScores"]

AXES = ("source", "destination")
"""Axes of arrays with one value per edge."""
# A workflow stores the scores, and several experiments select circuits by them: computed once in a process.
# Weak: scores go when their model does. Nothing is published for a model whose weights changed meanwhile.
_RECENT: WeakKeyDictionary[Model, dict[str, xr.Dataset]] = WeakKeyDictionary()
"""The last MOST_RECENT scores computed with a loaded model, by the digest of their parameters."""
MOST_RECENT = 4
"""Largest number of scores kept: one for each task of a workflow, whose stages may run in any order."""


@dataclass(frozen=True, kw_only=True)
class EdgeScores(EdgeExperiment):
    """Estimated effect of leaving out each edge, and all edges of each node, averaged over pairs."""

    method: Method = "EAP-IG-inputs"
    """Method of estimation; methods.py defines the methods."""
    steps: int = 5
    """Number of steps of the integrated-gradients methods."""
    by_position: bool = False
    """Whether each position has edges of its own; needs prompts of one length, and gives no node scores."""

    name: ClassVar[str] = "edge_scores"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "score": Output(
            ("position?", *AXES), "<unit>", "estimated change of the metric when the edge is left out"
        ),
        "node_score": Output(
            ("source",), "<unit>", "estimated change when all edges of a node are left out", is_optional=True
        ),
    }

    @property
    def takes_gradients(self) -> bool:
        """Whether the method differentiates the metric; only then scores have the metric's unit."""
        return self.method != "information-flow-routes"

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs, in the unit of the metric; node scores only if the method has them."""
        # Information-flow shares have no unit; all other scores are changes of the metric.
        unit = self.unit if self.takes_gradients else "1"
        dims = {"score": ("position", *AXES) if self.by_position else AXES, "node_score": ("source",)}
        return {
            name: Output(dims[name], unit, output.long_name, output.is_optional)
            for name, output in self.outputs.items()
            if self._has_nodes or not output.is_optional
        }

    @property
    def _has_nodes(self) -> bool:
        return self.takes_gradients and not self.by_position

    def check(self, config: Architecture) -> Layout:
        """Check the fields against a model, as `EdgeExperiment.check`.

        Raises:
            StageError: The method is unknown, `steps` is below 1, or a metric has no gradient.
            PromptError: `by_position` is set, and prompts have several lengths.
        """
        layout = super().check(config)
        if self.method not in METHODS:
            raise StageError(f"expected method to be one of {', '.join(METHODS)}, found {self.method!r}")
        if self.steps < 1:
            raise StageError(f"expected steps to be at least 1, found {self.steps}")
        not_differentiable = [pair.metric for pair in self.pairs if not pair.metric.has_gradient]
        if self.takes_gradients and not_differentiable:
            raise StageError(
                f"expected metrics with a gradient for the method {self.method}, found "
                f"{not_differentiable[0].name!r}; use LogitDifference or KL"
            )
        if self.by_position:
            one_length(self.pairs)
        return layout

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """score [source, destination], by position with a first axis position, and node_score [source]."""
        request = digest(self.name, self.params())
        recent = _RECENT.setdefault(prepared, {})
        if request not in recent:
            recent[request] = self._computed(prepared)
            for oldest in list(recent)[:-MOST_RECENT]:
                del recent[oldest]
        return recent[request].copy(deep=True)

    def _computed(self, model: Model) -> xr.Dataset:
        """Scores of all pairs, computed batch by batch."""
        import xarray as xr

        from .batches import batches, gradients, network_of
        from .methods import edge_scores

        network = network_of(model)
        layout, declared = self.check(model.config), self.outputs_on(model.config)
        position_axis = (one_length(self.pairs),) if self.by_position else ()
        edge_sums, nodes = np.zeros((*position_axis, *layout.edges.shape)), np.zeros(len(layout.sources))
        for batch in batches(model, layout, self.pairs, self.alternative, seed=self.seed, memory=self.memory):
            of_logits = partial(gradients, batch)
            edges, node_scores = edge_scores(
                network, layout, batch, self.method, self.steps, of_logits, by_position=self.by_position
            )
            # Divided by the number of all pairs, so that batches of any size add up to the mean.
            edge_sums += edges.numpy() / len(self.pairs)
            nodes += node_scores.numpy() / len(self.pairs)
        scores = nan_without_edge(layout, edge_sums, by_position=self.by_position)
        variables = {"score": declared["score"].variable(scores)}
        if self._has_nodes:
            variables["node_score"] = declared["node_score"].variable(nodes)
        return xr.Dataset(variables, coords=labels(layout))


@dataclass(frozen=True, kw_only=True)
class EdgeEffects(PairExperiment):
    """Exact effect of leaving out one edge at a time, for each pair of prompts (one cell each)."""

    name: ClassVar[str] = "edge_effects"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "effect": Output(("pair", *AXES), "<unit>", "exact change of the metric when the edge is left out"),
        "clean": Output(("pair",), "<unit>", "metric of the clean run"),
    }

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """effect [pair, source, destination] and clean [pair], of one pair."""
        import torch
        import xarray as xr

        from ..forward.edges.effects import changed_edges
        from .batches import network_of

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        pair, effect = self.pair_run(prepared, layout, cell), np.zeros(layout.edges.shape)
        with torch.no_grad():
            for sources, destinations, logits in changed_edges(
                network_of(prepared),
                layout,
                pair.batch.clean,
                pair.batch.change[0],
                pair.want,
                position=self.position,
                memory=self.memory,
            ):
                effect[sources.numpy(), destinations.numpy()] = pair.changes(logits)
        return xr.Dataset(
            {
                "effect": declared["effect"].variable(nan_without_edge(layout, effect)[None]),
                "clean": declared["clean"].variable(np.array([pair.clean])),
            },
            coords=labels(layout),
        )
