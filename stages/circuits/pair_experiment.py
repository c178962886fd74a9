"""Experiments on edges that tell pairs apart, a cell each: what is changed, and what the metric then is.

Border: declarations; never imports torch until it runs.

Axes: pair, and what the experiment changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import PromptError, StageError
from ..forward.runs.experiment import CellLabels
from .experiment import EdgeExperiment
from .pairs import tokens_of, value

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.hooks.wants import Logits
    from ..forward.models.model import Model
    from .batches import PairBatch

__all__ = ["ByPair", "PairExperiment"]


@dataclass(frozen=True)
class ByPair:
    """One pair, run. clean: its metric. want: the logits that the metric sees. changes: of such logits
    [row, token], what the metric is beyond the clean one, float64 [row]."""

    batch: PairBatch
    clean: float
    want: Logits
    changes: Callable[[Any], list[float]]


@dataclass(frozen=True, kw_only=True)
class PairExperiment(EdgeExperiment):
    """Changes of each pair by itself. A cell is a pair.

    position: the only one at which sources are changed, negative from the end; None for all.
    """

    position: int | None = None

    def params(self) -> dict[str, Any]:
        """Without the pairs, which are in the cells, unless what stands for a source depends on all of
        them."""
        given = super().params()
        if self.alternative in ("corrupted", "zero"):
            del given["pairs"]
        return given

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """In the unit of the metric."""
        return {name: Output(each.dims, self.unit, each.long_name) for name, each in self.outputs.items()}

    def check(self, config: Architecture) -> Layout:
        """As of every experiment on edges; PromptError for a position that a prompt does not have, StageError
        for a pair given twice."""
        layout = super().check(config)
        shortest = min(len(pair.clean) for pair in self.pairs)
        if self.position is not None and not -shortest <= self.position < shortest:
            raise PromptError(
                f"expected a position in {-shortest}..{shortest - 1}, which all prompts have, found "
                f"{self.position}"
            )
        if len({str(pair.canonical()) for pair in self.pairs}) < len(self.pairs):
            raise StageError("expected pairs that differ, found one of them twice")
        return layout

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per pair. Raises what `checked` does."""
        self.check(config)
        return [{"pair": pair.canonical()} for pair in self.pairs]

    def of_cell(self, model: Model, layout: Layout, cell: CellLabels) -> ByPair:
        """The pair of a cell, run clean and otherwise."""
        from ..forward.hooks.wants import Logits
        from .batches import as_array, batches

        (place,) = (i for i, pair in enumerate(self.pairs) if pair.canonical() == cell["pair"])
        (batch,) = batches(
            model, layout, self.pairs, self.alternative, seed=self.seed, memory=self.memory, only=place
        )
        metric, clean = self.pairs[place].metric, batch.logits[0]
        chosen = tokens_of(metric)
        unchanged = value(metric, clean, clean)
        seen: Floats = clean if chosen is None else clean[chosen]

        def changes(logits: Any) -> list[float]:
            return [metric.value(row, seen) - unchanged for row in as_array(logits)]

        return ByPair(batch, unchanged, Logits((-1,), None if chosen is None else tuple(chosen)), changes)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Along pairs, in their order."""
        import xarray as xr

        along = [name for name, each in parts[0].data_vars.items() if "pair" in each.dims]
        found: xr.Dataset = xr.concat(
            parts, "pair", data_vars=along, coords="minimal", compat="override", join="override"
        )
        return found
