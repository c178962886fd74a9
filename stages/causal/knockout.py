"""Attention knockout: effect on the next token when one position may not attend to another.

An edge is cut by setting its attention score to -inf with the causal mask, after any soft cap, so that the
remaining keys share the full weight (Geva et al. 2023, "Dissecting Recall of Factual Associations in
Auto-Regressive Language Models", section 5). A head knocked out as a whole has z = 0.

Border: token ids and numbers; a KnockoutSpec holds the edges, effects.py measures, the planner shares work
between runs. Torch is imported when it runs.

Axes: layer (where edges are cut), edge (one run each), head, rank. An edge is (query, key). Positions are
those of the prompt: pieces of a target behind it are not cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.errors import InterventionError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.edge_interventions import Edge
from ..forward.hooks.edges import KnockoutSpec
from ..forward.hooks.interventions import Zero
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels
from ..forward.runs.run import Run
from .effects import Baseline, baseline_run, effects_along, gather, of_baseline
from .layer_sweep import LayerSweep

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.models.model import Model

__all__ = ["EdgeKnockout", "HeadKnockout"]


@dataclass(frozen=True)
class _Knockout(LayerSweep):
    """Base class of experiments that cut attention edges or heads, layer by layer."""

    edges: tuple[Edge, ...] = ()
    """(query position, key position) of each edge; None means every position."""
    keeps_self: bool = field(default=False, kw_only=True)
    """Whether an edge with None (all positions) cuts no attention of a position to itself."""

    def check(self, config: Architecture) -> None:
        """Raise InterventionError if an edge or a head does not exist."""
        for spec in self._specs():
            spec.validate(
                config.num_layers, config.axis_sizes["head"], len(self.tokens), ahead=config.looks_ahead
            )

    def prepare(self, model: Model) -> Baseline:
        """Result of the unchanged run, with the attention patterns of the swept layers."""
        # Of the swept layers only: patterns of all layers take layers x heads x length^2 numbers.
        layers = [cell["layer"] for cell in self.cells(model.config)]
        return baseline_run(model, self.tokens, self.target, layers)

    def _specs(self) -> list[KnockoutSpec]:
        """Knockout of each run of a cell, before it is assigned to the cell's layer."""
        raise NotImplementedError

    def _spec(self, edges: Sequence[Edge]) -> KnockoutSpec:
        """Knockout that cuts several edges together in all heads, not yet assigned to a layer."""
        spec = KnockoutSpec(keeps_self=self.keeps_self)
        for query, key in edges:
            spec = spec.edge(query, key)
        return spec


@dataclass(frozen=True)
class EdgeKnockout(_Knockout):
    """Cuts one edge at a time, in one layer at a time, in all heads or in `heads` together."""

    name: ClassVar[str] = "edge_knockout"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **effects_along("layer", "edge"),
        "attention": Output(
            ("layer", "edge"), "1", "attention weight before the cut, mean over heads and edges"
        ),
    }

    heads: tuple[int, ...] | None = None
    """Head indices with cut edges; None cuts edges in all heads."""

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One run per edge, which is cut in the layer of the cell."""
        length = len(self.tokens)
        # No captures: what an edge carried before the cut is read from the unchanged run.
        return [
            self.run_of(spec.layer(cell["layer"]).hooks(prepared.config, length)) for spec in self._specs()
        ]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects [layer, edge], and the attention weight of each edge before the cut."""
        import xarray as xr

        layer = cell["layer"]
        ahead = prepared.config.looks_ahead
        resolved = [spec.resolved(len(self.tokens), ahead=ahead) for spec in self._specs()]
        weight = [[prepared.weight(layer, self.heads, edges).mean() for edges in resolved]]
        # -1 stands for "all positions" in an integer coordinate, which cannot hold None.
        positions = np.array([[-1 if side is None else side for side in edge] for edge in self._from_start()])
        return xr.Dataset(
            {
                **gather(measured, {"layer": 1, "edge": len(resolved)}),
                "attention": self.outputs["attention"].variable(np.array(weight)),
                **of_baseline(prepared, self.target, self.top_k),
            },
            coords={
                "layer": [layer],
                "query": ("edge", positions[:, 0], {"long_name": "query position, -1 for all"}),
                "key": ("edge", positions[:, 1], {"long_name": "key position, -1 for all"}),
            },
        )

    def _specs(self) -> list[KnockoutSpec]:
        if not self.edges:
            raise InterventionError(
                "expected at least one attention edge to cut, found none; give positions as "
                "edges=((query, key),)"
            )
        # One spec per edge: `self.edges` together would be a single run.
        specs = [self._spec([edge]) for edge in self.edges]
        return specs if self.heads is None else [spec.heads(self.heads) for spec in specs]

    def _from_start(self) -> list[Edge]:
        """The edges, with positions counted from the start of the prompt; None (all positions) is kept."""
        length = len(self.tokens)
        return [
            (None if query is None else query % length, None if key is None else key % length)
            for query, key in self.edges
        ]


@dataclass(frozen=True)
class HeadKnockout(_Knockout):
    """Cuts the same edges in one head at a time; without edges, one head's output z at a time is zeroed."""

    name: ClassVar[str] = "head_knockout"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **effects_along("layer", "head"),
        "attention": Output(
            ("layer", "head"), "1", "attention weight before the cut, mean over edges", is_optional=True
        ),
    }

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One run per head: its edges are cut, or its z is set to 0 at the positions of the prompt."""
        config, layer = prepared.config, cell["layer"]
        heads = range(config.axis_sizes["head"])
        if self.edges:
            spec, length = self._spec(self.edges).layer(layer), len(self.tokens)
            return [self.run_of(spec.head(head).hooks(config, length)) for head in heads]
        # Tokens of the target behind the prompt keep their heads; a target of one token is not run.
        positions = tuple(range(len(self.tokens))) if len(self.target) > 1 else None
        point = HookPoint.z(layer)
        return [
            self.run_of(HookSpec().intervene(point, Zero(heads=(head,), positions=positions)))
            for head in heads
        ]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects [layer, head], and the attention weight of the edges in each head."""
        import xarray as xr

        layer, heads = cell["layer"], prepared.config.axis_sizes["head"]
        variables: dict[str, Any] = {
            **gather(measured, {"layer": 1, "head": heads}),
            **of_baseline(prepared, self.target, self.top_k),
        }
        if self.edges:
            edges = self._spec(self.edges).resolved(len(self.tokens), ahead=prepared.config.looks_ahead)
            weight = prepared.weight(layer, None, edges)
            variables["attention"] = self.outputs["attention"].variable(weight[None])
        return xr.Dataset(variables, coords={"layer": [layer], "head": np.arange(heads)})

    def _specs(self) -> list[KnockoutSpec]:
        return [self._spec(self.edges)] if self.edges else []
