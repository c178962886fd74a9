"""Verification of attribution patching: estimated effects compared with exact runs.

The grid cells with the largest estimates, and as many drawn at random from the rest, are patched exactly, in
one list of runs that the planner shares. The largest test whether proposed cells matter (false positives);
the random ones test whether the estimate misses any (false negatives).

Border: selects cells and compares numbers; estimates come from patching.py, runs from the planner. Planning
imports no torch.

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
from ..grids.patching_grid import GridPlace
from ..grids.patching_metrics import read_metrics
from ..grids.patching_results import PreparedGrid
from .patching import AttributionPatching

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture

__all__ = ["LARGEST", "RANDOM", "AttributionCheck", "agreement"]

LARGEST, RANDOM = "largest", "random"
"""Labels of the two groups of verified cells."""
PLACE = ("kind", "layer", "position", "head", "key_position")
"""Outputs that say which hook point, position and head a verified cell is."""


@dataclass(frozen=True, kw_only=True)
class AttributionCheck(AttributionPatching):
    """Checks attribution patching: exact runs of the `verify` largest estimates and of as many random cells.

    Cells are ranked by the absolute effect on the first metric. The other fields are those of
    `AttributionPatching`.

    Raises:
        StageError: `verify` is below 1.
    """

    verify: int
    """Number of cells of largest estimate, and of random cells; fewer if the grid is smaller."""
    seed: int = 0
    """Seed of the random cells."""

    name: ClassVar[str] = "attribution_check"
    version: ClassVar[int] = 1
    selects: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[Mapping[str, Output]] = {
        "estimate": Output(("cell",), "as the metric", "first-order effect of the patch"),
        "exact": Output(("cell",), "as the metric", "effect of the patch, by a run"),
        "correlation": Output(("chosen",), "1", "Pearson correlation of the two over cells"),
        "rank_correlation": Output(("chosen",), "1", "Spearman correlation of the two over cells"),
        "worst_miss": Output(("chosen",), "as the metric", "largest difference of estimate and exact effect"),
        "unpatched": Output(("run",), "as the metric", "metric of the unpatched runs"),
        "sort": Output(("cell",), "1", "whether a cell is among the largest estimates or drawn at random"),
        "kind": Output(("cell",), "1", "kind of the patched hook point"),
        "layer": Output(("cell",), "1", "patched layer"),
        "position": Output(("cell",), "1", "patched position (of a pattern: query), -1 for all"),
        "head": Output(("cell",), "1", "patched head, -1 for all or none"),
        "key_position": Output(("cell",), "1", "key position of a patched attention edge, else -1"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify < 1:
            raise StageError(f"{self.name}: expected verify to be at least 1, found {self.verify}")

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """All declared outputs; unlike those of a grid, they do not depend on the metrics."""
        return self.outputs

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell: which estimates are largest depends on the whole grid."""
        super().cells(config)
        return [{"part": "whole"}]

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """One patched run per verified cell, those of largest estimate first."""
        # The patch of ActivationPatching, because AttributionPatching itself makes no runs.
        patch = super(AttributionPatching, self).change
        return [
            Run(self.corrupted, patch(HookSpec(), prepared, kind, [layer], place, 0), self.want)
            for kind, layer, place, _ in self._verified_cells(prepared)[0]
        ]

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """Estimated and exact effect of every verified cell, and their agreement.

        Agreement is given over the cells of largest estimate, over the random cells, and over all.
        """
        import xarray as xr

        verified, count = self._verified_cells(prepared)
        metric = self.metrics[0]
        clean, corrupted = (
            float(read_metrics(self.metrics, entry, prepared.clean)[0])
            for entry in (prepared.clean, prepared.unpatched[0])
        )
        # Effects are differences on the reported scale, as a Recovery scales estimates and runs alike.
        unpatched = metric.scaled(np.array(corrupted), clean, corrupted)
        estimate, exact = (
            metric.scaled(np.array(numbers), clean, corrupted) - unpatched
            for numbers in ([entry[3] for entry in verified], [float(entry[0]) for entry in measured])
        )
        sorts = {LARGEST: slice(0, count), RANDOM: slice(count, None), "all": slice(None)}
        agreements = [agreement(estimate[cells], exact[cells]) for cells in sorts.values()]
        rows = [
            (kind, layer, *(-1 if at is None else at for at in (place.position, place.head, place.key)))
            for kind, layer, place, _ in verified
        ]
        columns = dict(zip(PLACE, map(list, zip(*rows, strict=True)), strict=True))
        data = {
            "estimate": estimate,
            "exact": exact,
            "unpatched": [clean, corrupted],
            "sort": [LARGEST] * count + [RANDOM] * (len(verified) - count),
            **columns,
            **{name: [entry[name] for entry in agreements] for name in agreements[0]},
        }
        variables = {name: self.outputs[name].variable(np.asarray(values)) for name, values in data.items()}
        coords = {"chosen": list(sorts), "run": ["clean", "corrupted"]}
        return xr.Dataset(variables, coords, {"metric": metric.name, "units": metric.units})

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Result of the only cell, unchanged."""
        # `Grid.joined` would stack datasets along a layer axis, which this one does not have.
        (whole,) = parts
        return whole

    def _verified_cells(self, prepared: PreparedGrid) -> tuple[list[tuple[str, int, GridPlace, float]], int]:
        """(cells to verify, number of those of largest estimate, which come first).

        A cell is (kind of hook point, layer, place, estimated metric).
        """
        cells = [
            (kind, layer, place, float(number[0]))
            for kind, layer in self._points(prepared)
            for place, number in zip(
                self.places(prepared.config, kind), self.estimates(prepared, kind, layer), strict=True
            )
        ]
        base = float(read_metrics(self.metrics, prepared.unpatched[0], prepared.clean)[0])
        # By the size of the effect, not of the metric: a grid's cells share the unpatched metric `base`.
        order = np.argsort([-abs(number - base) for *_, number in cells], kind="stable")
        n_largest = min(self.verify, len(cells))
        random_cells = np.random.default_rng(self.seed).permutation(order[n_largest:])[: self.verify]
        return [cells[i] for i in (*order[:n_largest], *random_cells)], n_largest

    def _points(self, prepared: PreparedGrid) -> list[tuple[str, int]]:
        return [(cell["kind"], cell["layer"]) for cell in AttributionPatching.cells(self, prepared.config)]


def agreement(estimate: Floats, exact: Floats) -> dict[str, float]:
    """How well estimated effects agree with exact effects of the same cells.

    Arguments:
        estimate: First-order effects [cell].
        exact: Effects measured by runs [cell].

    Returns:
        `correlation` (Pearson) and `rank_correlation` (Spearman), NaN for fewer than three cells or constant
        effects, and `worst_miss`, the largest absolute difference, NaN for no cells.
    """
    miss = float(np.abs(estimate - exact).max()) if len(estimate) else float("nan")
    return {
        "correlation": correlation(estimate, exact),
        "rank_correlation": rank_correlation(estimate, exact),
        "worst_miss": miss,
    }
