"""What experiments on edges share: pairs, what an edge carries that is left out, and the axes of a graph.

They list no runs: an edge is no hook point, and what thousands of edges share is more than prefixes
(forward/edges). Each cell is computed when its dataset is asked for.

Border: declarations; never imports torch until it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.arrays import Floats
from ...store.errors import PromptError
from ..forward.edges.layout import Layout
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run
from .pairs import Alternative, Pair, checked

if TYPE_CHECKING:
    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["EdgeExperiment", "labels", "one_length", "where_there_are_edges"]

MEMORY = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EdgeExperiment(Experiment):
    """Pairs of prompts, and what stands for a source where an edge is left out.

    seed: of what is drawn for "resampled". memory: bytes that passes may take, in no key.
    """

    pairs: tuple[Pair, ...]
    alternative: Alternative = "corrupted"
    seed: int = 0
    memory: int = field(default=MEMORY, compare=False)

    def params(self) -> dict[str, Any]:
        """All fields but the memory."""
        given = {name: value for name, value in vars(self).items() if name != "memory"}
        return {**given, "pairs": [pair.canonical() for pair in self.pairs]}

    @property
    def unit(self) -> str:
        """The unit of the metric that all pairs share."""
        return self.pairs[0].metric.units

    def check(self, config: Architecture) -> Layout:
        """The graph of a model; raises what `checked` raises."""
        return checked(self.pairs, self.alternative, config)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One without labels, unless a kind says otherwise. Raises what `checked` does."""
        self.check(config)
        return [{}]

    def prepare(self, model: Model) -> Model:
        """The model: every cell computes by itself."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> list[Run]:
        """None: a cell is computed when its dataset is asked for."""
        return []

    def sketch(self, config: Architecture, cell: CellLabels) -> None:
        """What no runs are made of, nobody can sketch."""
        return

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> Any:
        """Never called: there are no runs."""
        raise AssertionError("an experiment on edges lists no runs")


def labels(layout: Layout) -> dict[str, list[str]]:
    """Coordinates of a graph's axes."""
    return {"source": list(layout.sources), "destination": list(layout.destinations)}


def where_there_are_edges(layout: Layout, values: Any, *, by_position: bool = False) -> Floats:
    """Values [..., source, destination], NaN where there is no edge. by_position: whether positions are the
    axis before the source."""
    every = layout.edges_at(np.shape(values)[-3]) if by_position else layout.edges
    found: Floats = np.where(every, np.asarray(values, np.float64), np.nan)
    return found


def one_length(pairs: Sequence[Pair], wanted: int | None = None) -> int:
    """Tokens of every prompt. Raises PromptError where positions are told apart and pairs differ in them, or
    have others than wanted."""
    lengths = sorted({len(pair.clean) for pair in pairs})
    if len(lengths) > 1 or wanted not in (None, lengths[0]):
        expected = "one length" if wanted is None else f"{wanted} tokens"
        raise PromptError(
            f"expected prompts of {expected}, as positions are told apart, found lengths {lengths}; choose "
            "others, or edges of all positions together"
        )
    return lengths[0]
