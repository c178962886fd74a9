"""One experiment repeated with many random causes, as a null distribution needs it.

    Draws((InjectionSweep(doses=random), InjectionSweep(doses=another), ...)).on(model)

The result is the experiment's, with an additional first axis `draw`. All runs of all draws go to the planner
as one list, so shared work is computed once. Each draw has its own cells, so adding draws computes only the
new ones. Many small draws cost more to store than to compute (a cell is a dozen arrays): `AtOnce` stores all
draws as one cell.

Border: experiments that differ in their cause only; the experiments know what a cause is.

Axes: draw, then those of the experiment.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output
from ...store.digest import digest
from ...store.errors import StageError
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.pinned import Pinned
    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["AtOnce", "Draws"]

RUNS, ENDS = "runs of draws", "ends of draws"
"""Keys in the result of `AtOnce.prepare`: the runs of all draws, and their number up to each draw."""


@dataclass(frozen=True)
class Draws(Experiment):
    """An experiment repeated with random causes, whose results get a first axis `draw`.

    Raises:
        StageError: There are no experiments, they are of several kinds, or two are equal.
    """

    experiments: tuple[Experiment, ...]
    """The experiment of each draw; all have the same name and version."""

    def __post_init__(self) -> None:
        kinds = {(experiment.name, experiment.version) for experiment in self.experiments}
        if len(kinds) != 1:
            names = ", ".join(f"{name} {version}" for name, version in sorted(kinds)) or "none"
            raise StageError(f"expected draws of one kind of experiment, found {names}")
        if len(self._numbers) < len(self.experiments):
            raise StageError(
                f"{self.name}: expected draws that differ, found two equal ones; use another seed for each "
                "draw"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the experiment with the suffix "/draws"."""
        return f"{self.experiments[0].name}/draws"

    @property
    def registered(self) -> str:
        """Registered name of the experiment that is drawn."""
        return self.experiments[0].registered

    @property
    def version(self) -> int:  # type: ignore[override]
        """Version of the experiment that is drawn."""
        return self.experiments[0].version

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        """Whether the experiment that is drawn reads text."""
        return self.experiments[0].reads_text

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: none, as cells are labelled by the fields of their draw."""
        return {}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Outputs of the experiment, with the first axis `draw`."""
        outputs = self.experiments[0].outputs_on(config)
        return {name: replace(output, dims=("draw", *output.dims)) for name, output in outputs.items()}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """Cells of every draw, each with the draw's parameters among its labels."""
        return [
            # Parameters label the cell, not the draw's number: adding draws leaves the keys of others
            # unchanged.
            {"draw": experiment.params(), **cell}
            for experiment in self.experiments
            for cell in experiment.cells(config)
        ]

    def prepare(self, model: Model) -> Mapping[Hashable, Any]:
        """What each draw prepares, computed once for draws with the same `baseline`."""
        prepared: dict[Hashable, Any] = {}
        for number, experiment in enumerate(self.experiments):
            if (key := self._shared(number)) not in prepared:
                prepared[key] = experiment.prepare(model)
        return prepared

    def runs(self, prepared: Mapping[Hashable, Any], cell: CellLabels) -> Sequence[Run]:
        """Runs of a cell, as the experiment of its draw defines them."""
        number, draw_cell = self._of(cell)
        return self.experiments[number].runs(prepared[self._shared(number)], draw_cell)

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run] | None:
        """Runs of a cell without activations, for planning, as the experiment of its draw defines them."""
        number, draw_cell = self._of(cell)
        return self.experiments[number].sketch(config, draw_cell)

    def measure(self, prepared: Mapping[Hashable, Any], cell: CellLabels, result: HookCache) -> Any:
        """Measurement of one run, as the experiment of the cell's draw makes it."""
        number, draw_cell = self._of(cell)
        return self.experiments[number].measure(prepared[self._shared(number)], draw_cell, result)

    def dataset(
        self, prepared: Mapping[Hashable, Any], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """Result of one cell, as the experiment of its draw makes it."""
        number, draw_cell = self._of(cell)
        return self.experiments[number].dataset(prepared[self._shared(number)], draw_cell, measured)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of each draw joined as the experiment joins them, then concatenated along `draw`."""
        import xarray as xr

        # Draws differ in their cause only, so each has the same number of cells.
        cells_per_draw, remainder = divmod(len(parts), len(self.experiments))
        if remainder:
            raise StageError(
                f"{self.name}: expected the same number of cells for each of the {len(self.experiments)} "
                f"draws, found {len(parts)} cells in all"
            )
        joined_draws = [
            experiment.joined(parts[number * cells_per_draw : (number + 1) * cells_per_draw])
            for number, experiment in enumerate(self.experiments)
        ]
        whole: xr.Dataset = xr.concat(
            joined_draws, "draw", data_vars="all", coords="minimal", compat="override", join="override"
        )
        return whole

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Resources of all draws that must not change while they run, without duplicates."""
        return tuple(
            dict.fromkeys(resource for experiment in self.experiments for resource in experiment.pinned)
        )

    def _of(self, cell: CellLabels) -> tuple[int, CellLabels]:
        """(number of the draw to which a cell belongs, the cell's labels in the experiment of the draw)."""
        draw_cell = {name: label for name, label in cell.items() if name != "draw"}
        return self._numbers[digest("draw", cell["draw"])], draw_cell

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Digest of a draw's parameters -> its number."""
        # By digest, as parameters are a dict and cannot be a key themselves.
        return {
            digest("draw", experiment.params()): number for number, experiment in enumerate(self.experiments)
        }

    def _shared(self, number: int) -> Hashable:
        """Key of what a draw prepares: its `baseline`, or its number if it shares nothing."""
        baseline = self.experiments[number].baseline
        # Without a baseline a draw may depend on anything, so it shares its preparation with no other.
        return number if baseline is None else baseline


@dataclass(frozen=True)
class AtOnce(Draws):
    """All draws stored as one cell: another draw computes all of them again. Same result as `Draws`."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the draws with the suffix "/at_once"."""
        return f"{super().name}/at_once"

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell, which lists the cells of every draw."""
        return [{"draws": super().cells(config)}]

    def runs(self, prepared: Mapping[Hashable, Any], cell: CellLabels) -> Sequence[Run]:
        """Runs of all draws, draw by draw."""
        runs: Sequence[Run] = prepared[RUNS]
        return runs

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run] | None:
        """Runs of all draws without activations, for planning; None if those of a draw cannot be made."""
        sketched = [super(AtOnce, self).sketch(config, draw_cell) for draw_cell in cell["draws"]]
        return None if None in sketched else [run for runs in sketched for run in runs or ()]

    def prepare(self, model: Model) -> Mapping[Hashable, Any]:
        """Prepared values of each draw, the runs of all draws, and cumulative run counts."""
        prepared = dict(super().prepare(model))
        (whole,) = self.cells(model.config)
        runs = [super(AtOnce, self).runs(prepared, draw_cell) for draw_cell in whole["draws"]]
        return prepared | {
            RUNS: [run for draw_runs in runs for run in draw_runs],
            ENDS: np.cumsum([*map(len, runs)]),
        }

    def measure_run(
        self, prepared: Mapping[Hashable, Any], cell: CellLabels, number: int, result: HookCache
    ) -> Any:
        """Measurement of run `number` (its index in `runs`), by its draw's experiment."""
        # side="right": the run at a cumulative count belongs to the next draw.
        draw = int(np.searchsorted(prepared[ENDS], number, side="right"))
        return self.measure(prepared, cell["draws"][draw], result)

    def dataset(
        self, prepared: Mapping[Hashable, Any], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """Datasets of all draws, joined along `draw`."""
        ends = prepared[ENDS].tolist()
        parts = [
            super(AtOnce, self).dataset(prepared, draw_cell, measured[start:end])
            for draw_cell, start, end in zip(cell["draws"], [0, *ends], ends, strict=False)
        ]
        return super().joined(parts)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Result of the only cell, unchanged."""
        return parts[0]
