"""Base of experiments on edges: pairs of prompts, replacements of sources, and the axes of the graph.

These experiments list no runs for the planner: an edge is no hook point, and thousands of edges share more
than prefixes of a run (forward/edges). Each cell is computed when its dataset is requested.

Border: declarations. Torch is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import PromptError
from ..forward.edges.layout import Layout
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run
from .pairs import Alternative, Pair, checked_layout

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["MEMORY", "EdgeExperiment", "concatenated", "labels", "nan_without_edge", "one_length"]

MEMORY = 1 << 30
"""Default memory in bytes, beside the model's weights."""


@dataclass(frozen=True, kw_only=True)
class EdgeExperiment(Experiment):
    """Base class of experiments that leave edges out of a model's graph, on pairs of prompts."""

    pairs: tuple[Pair, ...]
    """Pairs of prompts, whose metrics have the same unit."""
    alternative: Alternative = "corrupted"
    """What an edge carries when it is left out; see `Alternative`."""
    seed: int = 0
    """Seed of the prompts drawn for the alternative "resampled"."""
    memory: int = field(default=MEMORY, compare=False)
    """Memory in bytes beside the model; excluded from the key."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except the memory, which changes no number."""
        fields = {name: value for name, value in vars(self).items() if name != "memory"}
        return {**fields, "pairs": [pair.canonical() for pair in self.pairs]}

    @property
    def unit(self) -> str:
        """Unit of the metric of all pairs."""
        return self.pairs[0].metric.units

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs, in the unit of the metric."""
        return {name: replace(output, unit=self.unit) for name, output in self.outputs.items()}

    def check(self, config: Architecture) -> Layout:
        """Graph of the model, if the fields fit it; raises the errors of `checked_layout`."""
        return checked_layout(self.pairs, self.alternative, config)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell without labels, unless a subclass has several; raises the errors of `check`."""
        self.check(config)
        return [{}]

    def prepare(self, model: Model) -> Model:
        """Return the model, which computes every cell."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> list[Run]:
        """No planned runs, because `dataset` computes a cell edge by edge."""
        return []

    def sketch(self, config: Architecture, cell: CellLabels) -> None:
        """None, because there are no planned runs."""
        return

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> Any:
        """Never called, as there are no runs."""
        raise AssertionError("an experiment on edges lists no runs")


def labels(layout: Layout) -> dict[str, list[str]]:
    """Names of all sources and destinations of a graph, the coordinates of these axes."""
    return {"source": list(layout.sources), "destination": list(layout.destinations)}


def nan_without_edge(layout: Layout, values: Any, *, by_position: bool = False) -> Floats:
    """Values of edges as float64, with NaN where the graph has no edge.

    Arguments:
        layout: Graph of the model.
        values: Values [..., source, destination].
        by_position: Whether the axis before the source counts positions.
    """
    has_edge = layout.edges_at(np.shape(values)[-3]) if by_position else layout.edges
    # NaN, not 0: an edge without effect must not look like one that does not exist.
    masked: Floats = np.where(has_edge, np.asarray(values, np.float64), np.nan)
    return masked


def concatenated(parts: Sequence[xr.Dataset], axis: str) -> xr.Dataset:
    """Results of several cells, concatenated along an axis.

    Arguments:
        parts: One dataset per cell.
        axis: Name of the axis; variables without it are equal in all cells, and taken from the first.
    """
    import xarray as xr

    return xr.concat(parts, axis, data_vars="minimal", coords="minimal", compat="override", join="override")


def one_length(pairs: Sequence[Pair], length: int | None = None) -> int:
    """Number of tokens that all prompts have.

    Arguments:
        pairs: Pairs of prompts, each of two equally long ones.
        length: Number of tokens that they must have; None for any.

    Raises:
        PromptError: Prompts have several lengths, or another length than `length`.
    """
    lengths = sorted({len(pair.clean) for pair in pairs})
    if len(lengths) > 1 or length not in (None, lengths[0]):
        expected = "one length" if length is None else f"{length} tokens"
        raise PromptError(
            f"expected prompts of {expected}, as edges are told apart by position, found lengths {lengths}; "
            "choose other prompts, or edges without positions"
        )
    return lengths[0]
