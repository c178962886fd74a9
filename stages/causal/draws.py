"""Draws: one experiment done with many causes, side by side, as its null needs them.

    Draws((InjectionSweep(doses=random), InjectionSweep(doses=another), ...)).on(model)

Its result is theirs along an axis `draw`. All runs of all draws go to the planner as one list, so that what
they share is computed once; each draw is a cell of its own, so that twice as many cost the new ones only.
Many small draws cost more to store than to compute (a cell is a dozen arrays): `AtOnce` stores them as one.

Border: experiments that agree in everything but their cause; what a cause is, they know.

Axes: draw, then the experiment's own.
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
"""Among what `AtOnce` prepares: the runs of all draws, and after which of them each draw ends."""


@dataclass(frozen=True)
class Draws(Experiment):
    """Experiments of one kind, each a draw. Raises StageError for none, several kinds, or one twice."""

    experiments: tuple[Experiment, ...]

    def __post_init__(self) -> None:
        kinds = {(each.name, each.version) for each in self.experiments}
        if len(kinds) != 1:
            told = ", ".join(f"{name} {version}" for name, version in sorted(kinds)) or "none"
            raise StageError(f"expected draws of one experiment, found {told}")
        if len(self._numbers) < len(self.experiments):
            raise StageError(f"{self.name}: expected draws that differ, found one of them twice")

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the experiment, and that it was drawn."""
        return f"{self.experiments[0].name}/draws"

    @property
    def registered(self) -> str:
        """See `Experiment`: that of what is drawn."""
        return self.experiments[0].registered

    @property
    def version(self) -> int:  # type: ignore[override]
        """That of what is drawn."""
        return self.experiments[0].version

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        """See `Experiment`: as what is drawn does."""
        return self.experiments[0].reads_text

    def params(self) -> dict[str, Any]:
        """None of its own: every cell says what was drawn."""
        return {}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Those of the experiment, each along `draw` first."""
        own = self.experiments[0].outputs_on(config)
        return {name: replace(output, dims=("draw", *output.dims)) for name, output in own.items()}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """Those of every draw, with its parameters: a draw keeps its cells, whatever others there are."""
        return [{"draw": each.params(), **cell} for each in self.experiments for cell in each.cells(config)]

    def prepare(self, model: Model) -> Mapping[Hashable, Any]:
        """What each needs, once for those with the same `baseline`."""
        found: dict[Hashable, Any] = {}
        for number, each in enumerate(self.experiments):
            if (key := self._shared(number)) not in found:
                found[key] = each.prepare(model)
        return found

    def runs(self, prepared: Mapping[Hashable, Any], cell: CellLabels) -> Sequence[Run]:
        """Those of the draw's own cell."""
        number, own = self._of(cell)
        return self.experiments[number].runs(prepared[self._shared(number)], own)

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run] | None:
        """As the draw sketches them."""
        number, own = self._of(cell)
        return self.experiments[number].sketch(config, own)

    def measure(self, prepared: Mapping[Hashable, Any], cell: CellLabels, result: HookCache) -> Any:
        """As the draw measures it."""
        number, own = self._of(cell)
        return self.experiments[number].measure(prepared[self._shared(number)], own, result)

    def dataset(
        self, prepared: Mapping[Hashable, Any], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """One draw's, as it gives it."""
        number, own = self._of(cell)
        return self.experiments[number].dataset(prepared[self._shared(number)], own, measured)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Each draw's cells joined as the experiment joins them, then all of them along `draw`."""
        import xarray as xr

        each_has, rest = divmod(len(parts), len(self.experiments))
        if rest:
            raise StageError(f"{self.name}: expected as many cells of every draw, found {len(parts)} in all")
        of_each = [
            each.joined(parts[number * each_has : (number + 1) * each_has])
            for number, each in enumerate(self.experiments)
        ]
        found: xr.Dataset = xr.concat(
            of_each, "draw", data_vars="all", coords="minimal", compat="override", join="override"
        )
        return found

    @property
    def pinned(self) -> Sequence[Pinned]:
        """What any of the draws reads, each once."""
        return tuple(dict.fromkeys(resource for each in self.experiments for resource in each.pinned))

    def _of(self, cell: CellLabels) -> tuple[int, CellLabels]:
        """Number of the draw a cell belongs to, and the cell as that knows it."""
        own = {name: label for name, label in cell.items() if name != "draw"}
        return self._numbers[digest("draw", cell["draw"])], own

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {digest("draw", each.params()): number for number, each in enumerate(self.experiments)}

    def _shared(self, number: int) -> Hashable:
        """What stands for a draw's preparation: what that depends on, else the draw itself."""
        baseline = self.experiments[number].baseline
        return number if baseline is None else baseline


@dataclass(frozen=True)
class AtOnce(Draws):
    """Draws stored as one cell: one more computes all of them anew. The result is that of `Draws`."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the experiment, and how it was drawn."""
        return f"{super().name}/at_once"

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One, which lists those of every draw."""
        return [{"draws": super().cells(config)}]

    def runs(self, prepared: Mapping[Hashable, Any], cell: CellLabels) -> Sequence[Run]:
        """Those of every draw, one after another."""
        runs: Sequence[Run] = prepared[RUNS]
        return runs

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run] | None:
        """As the draws sketch them; None where one of them cannot."""
        sketched = [super(AtOnce, self).sketch(config, own) for own in cell["draws"]]
        return None if None in sketched else [run for runs in sketched for run in runs or ()]

    def prepare(self, model: Model) -> Mapping[Hashable, Any]:
        """What each needs, and the runs of all: a run's number says whose it is."""
        found = dict(super().prepare(model))
        (whole,) = self.cells(model.config)
        runs = [super(AtOnce, self).runs(found, own) for own in whole["draws"]]
        return found | {RUNS: [run for each in runs for run in each], ENDS: np.cumsum([*map(len, runs)])}

    def measure_run(
        self, prepared: Mapping[Hashable, Any], cell: CellLabels, number: int, result: HookCache
    ) -> Any:
        """As the draw measures it whose run it is."""
        own = int(np.searchsorted(prepared[ENDS], number, side="right"))
        return self.measure(prepared, cell["draws"][own], result)

    def dataset(
        self, prepared: Mapping[Hashable, Any], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """What each draw gives of its own cells, joined along `draw`."""
        ends = prepared[ENDS].tolist()
        parts = [
            super(AtOnce, self).dataset(prepared, own, measured[start:end])
            for own, start, end in zip(cell["draws"], [0, *ends], ends, strict=False)
        ]
        return super().joined(parts)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The one cell there is, as it was computed."""
        return parts[0]
