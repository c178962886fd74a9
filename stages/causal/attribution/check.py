"""Estimates held against exact runs: how far attribution patching can be believed here.

The cells with the largest estimates, and as many drawn from the rest, are patched exactly, all in one list
that the planner shares. The largest say whether what is proposed is there; the random ones what is missed.

Border: which cells, and numbers of both; estimates are patching.py's, runs the planner's. Planning imports no
torch.

Axes: cell, largest estimates first, then those drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.arrays import Floats
from ....store.errors import StageError
from ...forward.hooks.spec import HookSpec
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..controls import correlation, rank_correlation
from ..grids.patching import ActivationPatching
from ..grids.patching_grid import GridPlace
from ..grids.patching_metrics import read
from ..grids.patching_results import PreparedGrid
from .patching import AttributionPatching

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache

__all__ = ["LARGEST", "RANDOM", "AttributionCheck", "agreement"]

LARGEST, RANDOM = "largest", "random"
PLACE = ("kind", "layer", "position", "head", "key_position")


@dataclass(frozen=True, kw_only=True)
class AttributionCheck(AttributionPatching):
    """The `verify` largest estimates of a grid, and as many others at random, run exactly.

    verify: cells of each sort, fewer where the grid is smaller. seed: of the draw. Cells are ranked by the
    size of the first metric's effect. The other fields: of `AttributionPatching`.
    """

    verify: int
    seed: int = 0

    name: ClassVar[str] = "attribution_check"
    version: ClassVar[int] = 1
    selects: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[Mapping[str, Output]] = {
        "estimate": Output(("cell",), "as the metric", "first-order effect of the patch"),
        "exact": Output(("cell",), "as the metric", "effect of the patch, by a run"),
        "correlation": Output(("chosen",), "1", "Pearson correlation of the two over cells"),
        "rank_correlation": Output(("chosen",), "1", "Spearman correlation of the two over cells"),
        "worst_miss": Output(("chosen",), "as the metric", "largest difference of the two"),
        "unpatched": Output(("run",), "as the metric", "metric of the runs nothing was patched in"),
        "sort": Output(("cell",), "1", "whether a cell is among the largest estimates or drawn at random"),
        "kind": Output(("cell",), "1", "hook point that is patched"),
        "layer": Output(("cell",), "1", "its layer"),
        "position": Output(("cell",), "1", "its position (of a pattern: query), -1 for all"),
        "head": Output(("cell",), "1", "its head, -1 for all or none"),
        "key_position": Output(("cell",), "1", "of an attention edge its key, else -1"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify < 1:
            raise StageError(f"{self.name}: expected at least one cell to verify, found {self.verify}")

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """The same of every model."""
        return self.outputs

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One: which cells are largest depends on all of them."""
        super().cells(config)
        return [{"part": "whole"}]

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """One for each chosen place."""
        patch = super(AttributionPatching, self).change
        return [
            Run(self.corrupted, patch(HookSpec(), prepared, kind, [layer], place, 0), self.want)
            for kind, layer, place, _ in self._picked(prepared)[0]
        ]

    def measure(self, prepared: PreparedGrid, cell: CellLabels, result: HookCache) -> Floats:
        """Every metric of one run."""
        return ActivationPatching.measure(self, prepared, cell, result)

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """Both effects of every chosen cell, and how they agree, of the largest, the random ones, and all."""
        import xarray as xr

        chosen, count = self._picked(prepared)
        metric = self.metrics[0]
        clean, corrupted = (
            float(read(self.metrics, each, prepared.clean)[0])
            for each in (prepared.clean, prepared.unpatched[0])
        )
        # Differences: a rescaled metric moves by as much less as it is scaled.
        none = metric.scaled(np.array(corrupted), clean, corrupted)
        estimate, exact = (
            metric.scaled(np.array(numbers), clean, corrupted) - none
            for numbers in ([each[3] for each in chosen], [float(each[0]) for each in measured])
        )
        sorts = {LARGEST: slice(0, count), RANDOM: slice(count, None), "all": slice(None)}
        told = [agreement(estimate[which], exact[which]) for which in sorts.values()]
        rows = [
            (kind, layer, *(-1 if at is None else at for at in (place.position, place.head, place.key)))
            for kind, layer, place, _ in chosen
        ]
        columns = dict(zip(PLACE, map(list, zip(*rows, strict=True)), strict=True))
        data = {
            "estimate": estimate,
            "exact": exact,
            "unpatched": [clean, corrupted],
            "sort": [LARGEST] * count + [RANDOM] * (len(chosen) - count),
            **columns,
            **{name: [each[name] for each in told] for name in told[0]},
        }
        given = {name: self.outputs[name].variable(np.asarray(values)) for name, values in data.items()}
        coords = {"chosen": list(sorts), "run": ["clean", "corrupted"]}
        return xr.Dataset(given, coords, {"metric": metric.name, "units": metric.units})

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The one cell there is, as it was computed."""
        (whole,) = parts
        return whole

    def _picked(self, prepared: PreparedGrid) -> tuple[list[tuple[str, int, GridPlace, float]], int]:
        """(kind, layer, place, estimated metric) of chosen cells, and how many of them are the largest."""
        cells = [
            (kind, layer, place, float(number[0]))
            for kind, layer in self._points(prepared)
            for place, number in zip(
                self.places(prepared.config, kind), self.estimates(prepared, kind, layer), strict=True
            )
        ]
        base = float(read(self.metrics, prepared.unpatched[0], prepared.clean)[0])
        order = np.argsort([-abs(number - base) for *_, number in cells], kind="stable")
        count = min(self.verify, len(cells))
        others = np.random.default_rng(self.seed).permutation(order[count:])[: self.verify]
        return [cells[i] for i in (*order[:count], *others)], count

    def _points(self, prepared: PreparedGrid) -> list[tuple[str, int]]:
        return [(cell["kind"], cell["layer"]) for cell in AttributionPatching.cells(self, prepared.config)]


def agreement(estimate: Floats, exact: Floats) -> dict[str, float]:
    """How two effects of the same cells agree: correlations, NaN for fewer than three cells or constant ones,
    and the worst miss, NaN for none."""
    miss = float(np.abs(estimate - exact).max()) if len(estimate) else float("nan")
    return {
        "correlation": correlation(estimate, exact),
        "rank_correlation": rank_correlation(estimate, exact),
        "worst_miss": miss,
    }
