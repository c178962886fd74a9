"""Edge scores: what leaving out each edge would do to a metric, estimated (methods.py) or exactly.

    scores = EdgeScores(pairs=pairs, method="EAP-IG-inputs")
    found = run(scores.on("specimen"), store)["score"]        # [source, destination]
    exact = EdgeEffects(pairs=pairs)                          # every edge by itself, one cell per pair

Border: pairs in, labelled arrays out; how a pass is taken apart is in forward/edges. Never imports torch
until it runs.

Axes: pair, source, destination. NaN where there is no edge. Positive: leaving the edge out raises the metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.errors import StageError
from ..forward.runs.experiment import CellLabels
from .by_pair import PairExperiment
from .experiment import EdgeExperiment, labels, one_length, where_there_are_edges
from .names import METHODS, Method

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.models.model import Model

__all__ = ["EdgeEffects", "EdgeScores"]

AXES = ("source", "destination")


@dataclass(frozen=True, kw_only=True)
class EdgeScores(EdgeExperiment):
    """Estimates of every edge, and of every node by the same gradients, averaged over pairs.

    method: see methods.py. steps: of integrated gradients. by_position: whether edges are told apart by
    position, in pairs of one length; no scores of nodes then.
    """

    method: Method = "EAP-IG-inputs"
    steps: int = 5
    by_position: bool = False

    name: ClassVar[str] = "edge_scores"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "score": Output(
            ("position?", *AXES), "<unit>", "estimated change of the metric where the edge is left out"
        ),
        "node_score": Output(
            ("source",), "<unit>", "the same of all edges that leave a node", is_optional=True
        ),
    }

    @property
    def takes_gradients(self) -> bool:
        """Whether the method does; a share of a stream has no unit."""
        return self.method != "information-flow-routes"

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """In the unit of the metric."""
        unit = self.unit if self.takes_gradients else "1"
        dims = {"score": ("position", *AXES) if self.by_position else AXES, "node_score": ("source",)}
        return {
            name: Output(dims[name], unit, each.long_name, each.is_optional)
            for name, each in self.outputs.items()
            if self._has_nodes or not each.is_optional
        }

    @property
    def _has_nodes(self) -> bool:
        return self.takes_gradients and not self.by_position

    def check(self, config: Architecture) -> Layout:
        """As of every experiment on edges; StageError for a method there is not, for no steps, or for a
        metric without a gradient."""
        layout = super().check(config)
        if self.method not in METHODS:
            raise StageError(f"expected a method among {', '.join(METHODS)}, found {self.method!r}")
        if self.steps < 1:
            raise StageError(f"expected at least one step, found {self.steps}")
        without = [pair.metric for pair in self.pairs if not pair.metric.has_gradient]
        if self.takes_gradients and without:
            raise StageError(
                f"{self.method}: expected metrics with a gradient, found {without[0].name!r}; take a logit "
                "difference, or a KL"
            )
        if self.by_position:
            one_length(self.pairs)
        return layout

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """score [source, destination], node_score [source]."""
        import xarray as xr

        from .batches import batches, gradients, network_of
        from .methods import edge_scores

        model, network = prepared, network_of(prepared)
        layout, declared = self.check(model.config), self.outputs_on(model.config)
        places = (one_length(self.pairs),) if self.by_position else ()
        found, nodes = np.zeros((*places, *layout.edges.shape)), np.zeros(len(layout.sources))
        for batch in batches(model, layout, self.pairs, self.alternative, seed=self.seed, memory=self.memory):
            of_logits = partial(gradients, batch)
            edges, own = edge_scores(
                network, layout, batch, self.method, self.steps, of_logits, by_position=self.by_position
            )
            found += edges.numpy() / len(self.pairs)
            nodes += own.numpy() / len(self.pairs)
        scores = where_there_are_edges(layout, found, by_position=self.by_position)
        given = {"score": declared["score"].variable(scores)}
        if self._has_nodes:
            given["node_score"] = declared["node_score"].variable(nodes)
        return xr.Dataset(given, coords=labels(layout))


@dataclass(frozen=True, kw_only=True)
class EdgeEffects(PairExperiment):
    """Every edge left out by itself, in each pair, exactly. A cell is a pair."""

    name: ClassVar[str] = "edge_effects"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "effect": Output(
            ("pair", *AXES), "<unit>", "change of the metric where the edge is left out, exactly"
        ),
        "clean": Output(("pair",), "<unit>", "the metric of the clean run"),
    }

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """effect [pair, source, destination], clean [pair], of one pair."""
        import torch
        import xarray as xr

        from ..forward.edges.effects import changed_edges
        from .batches import network_of

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        pair, effect = self.of_cell(prepared, layout, cell), np.zeros(layout.edges.shape)
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
                "effect": declared["effect"].variable(where_there_are_edges(layout, effect)[None]),
                "clean": declared["clean"].variable(np.array([pair.clean])),
            },
            coords=labels(layout),
        )
