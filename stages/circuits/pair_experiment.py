"""Base of experiments on edges with one cell per pair: the changed runs of a pair and their metric.

Border: declarations. Torch is imported when it runs.

Axes: pair, and what the experiment changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...store.arrays import Floats
from ...store.errors import PromptError, StageError
from ..forward.runs.experiment import CellLabels
from .experiment import EdgeExperiment, concatenated
from .pairs import metric_value, tokens_of

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.hooks.wants import Logits
    from ..forward.models.model import Model
    from .batches import PairBatch

__all__ = ["PairMetricRun", "PairExperiment"]


@dataclass(frozen=True)
class PairMetricRun:
    """The clean run of one pair of prompts, and a function that measures changed runs."""

    batch: PairBatch
    """Batch that holds this pair only."""
    clean: float
    """Metric of the clean run."""
    want: Logits
    """Logits that the metric reads."""
    changes: Callable[[Any], list[float]]
    """Function from the logits of changed runs [run, token] to their metric minus the clean metric [run]."""


@dataclass(frozen=True, kw_only=True)
class PairExperiment(EdgeExperiment):
    """Base class of experiments that change sources in one pair of prompts per cell."""

    position: int | None = None
    """Position at which sources are changed (negative: from the end); None for all positions."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results; pairs only if the alternative depends on all pairs."""
        params = super().params()
        # These replacements depend on the pair alone, so a cell keeps its key when other pairs are added.
        if self.alternative in ("corrupted", "zero"):
            del params["pairs"]
        return params

    def check(self, config: Architecture) -> Layout:
        """Check the fields against a model, as `EdgeExperiment.check`.

        Raises:
            PromptError: The position is outside a prompt.
            StageError: A pair is repeated.
        """
        layout = super().check(config)
        shortest = min(len(pair.clean) for pair in self.pairs)
        if self.position is not None and not -shortest <= self.position < shortest:
            raise PromptError(
                f"expected a position from {-shortest} to {shortest - 1}, which every prompt has, found "
                f"{self.position}"
            )
        # Equal pairs would be two cells of one key.
        if len({str(pair.canonical()) for pair in self.pairs}) < len(self.pairs):
            raise StageError("expected pairs of prompts that differ, found one pair twice; leave one out")
        return layout

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per pair of prompts; raises the errors of `check`."""
        self.check(config)
        return [{"pair": pair.canonical()} for pair in self.pairs]

    def pair_run(self, model: Model, layout: Layout, cell: CellLabels) -> PairMetricRun:
        """Clean run of a cell's pair, with the replacements of its sources.

        Arguments:
            model: The model.
            layout: Graph of the model.
            cell: Labels of the cell.
        """
        from ..forward.hooks.wants import Logits
        from .batches import as_array, batches

        (index,) = (i for i, pair in enumerate(self.pairs) if pair.canonical() == cell["pair"])
        (batch,) = batches(
            model, layout, self.pairs, self.alternative, seed=self.seed, memory=self.memory, only=index
        )
        metric, clean = self.pairs[index].metric, batch.logits[0]
        tokens = tokens_of(metric)
        unchanged = metric_value(metric, clean, clean)
        clean_values: Floats = clean if tokens is None else clean[tokens]

        def changes(logits: Any) -> list[float]:
            return [metric.value(row, clean_values) - unchanged for row in as_array(logits)]

        return PairMetricRun(
            batch, unchanged, Logits((-1,), None if tokens is None else tuple(tokens)), changes
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all pairs, concatenated along `pair`."""
        return concatenated(parts, "pair")
