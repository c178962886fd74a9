"""Attribution patching: a whole grid of patches, estimated from one pass back.

The grid of `ActivationPatching` without its runs: the metric of the corrupted run, plus (clean - corrupted) .
gradient at each place (Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale"). Exact is
the first order alone; where saturated attention, norms or a late MLP bend the metric it is wrong, which
check.py measures by exact runs.

Border: token ids and hook points in, labelled arrays out, as patching.py; asks the model for gradients by
`Model.differentiate`. Planning imports no torch.

    grid = AttributionPatching(clean=a, corrupted=b, kinds=("z",), over="head_position",
                               metrics=(LogitDifference(x, y),))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ....store.arrays import Floats
from ....store.errors import StageError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.objective import objective_of
from ...forward.hooks.spec import Capture, HookSpec
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..grids.patching import ActivationPatching
from ..grids.patching_grid import GridPlace, part_of
from ..grids.patching_metrics import Metric, Recovery, read
from ..grids.patching_results import PreparedGrid, as_vector, token_texts

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model

__all__ = ["AttributionPatching"]


@dataclass(frozen=True, kw_only=True)
class AttributionPatching(ActivationPatching):
    """Estimates of `ActivationPatching`: the same fields, axes and scale, no run per place.

    Metrics must have a gradient (`Recovery` of one that has). align and window are not for estimates.
    """

    name: ClassVar[str] = "attribution_patching"
    version: ClassVar[int] = 1

    def check(self, config: Architecture) -> None:
        """As of patching. StageError for what has no estimate: layers that overwrite each other, aligned
        prompts, metrics without gradient; ConfigError for a model that cannot be gone back through."""
        config.require_gradients()
        super().check(config)
        if self.window > 1 or self.align is not None:
            found = f"window={self.window}" if self.window > 1 else "align=…"
            raise StageError(
                f"{self.name}: expected window=1 and prompts of equal length, found {found}; what layers do "
                "together, and aligned prompts, are for activation_patching"
            )
        for metric in self.metrics:
            objective_of(plain(metric))

    def prepare(self, model: Model) -> PreparedGrid:
        """Both runs with their activations, and the gradient of every metric in the corrupted one."""
        points = [
            HookPoint(cell["kind"], cell["layer"]) for cell in AttributionPatching.cells(self, model.config)
        ]
        clean, held = self._clean(model, points)
        activations: dict[Any, Tensor] = {("clean", point): held[Capture(point)][0] for point in points}
        for number, metric in enumerate(self.metrics):
            corrupted, found = self._back(model, metric, points if number == 0 else [], points)
            for point in points:
                activations["gradient", number, point] = found[Capture(point, is_gradient=True)][0]
                if number == 0:
                    activations["corrupted", point] = found[Capture(point)][0]
        tokens = {
            "token": token_texts(model, self.corrupted),
            "clean_token": token_texts(model, self.clean),
        }
        known = {name: each for name, each in tokens.items() if each is not None}
        unpatched = [as_vector(corrupted)]
        return PreparedGrid(model.config, as_vector(clean), unpatched, activations, known)

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """None: what was prepared is enough."""
        return []

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """The estimates of one hook point, as patching would report its runs."""
        return super().dataset(prepared, cell, self.estimates(prepared, cell["kind"], cell["layer"]))

    def estimates(self, prepared: PreparedGrid, kind: str, layer: int) -> list[Floats]:
        """Of each place of a hook point every metric, not yet rescaled: float64 [metric]."""
        point = HookPoint(kind, layer)
        base = read(self.metrics, prepared.unpatched[0], prepared.clean)
        effects = [effects_of(prepared.activations, number, point) for number, _ in enumerate(self.metrics)]
        return [
            base + [float(part_of(each, point, place)[_key(place)].sum()) for each in effects]
            for place in self.places(prepared.config, kind)
        ]

    def _clean(self, model: Model, points: Sequence[HookPoint]) -> tuple[Tensor, dict[Capture, Tensor]]:
        spec = model.bind(HookSpec().capture(*points))
        logits, held = model.run_batch([self.clean], spec, self.want)
        assert logits is not None  # they are wanted
        return logits, held

    def _back(
        self, model: Model, metric: Metric, also: Sequence[HookPoint], points: Sequence[HookPoint]
    ) -> tuple[Tensor, Mapping[Capture, Tensor]]:
        """The corrupted run: logits wanted, activations where they are asked for, gradients of one metric."""
        asked = HookSpec().capture(*also, *(Capture(point, is_gradient=True).name for point in points))
        asked.gradient_of(plain(metric), at=self.at, baseline=self.clean)
        return model.differentiate([self.corrupted], model.bind(asked), [0], want=self.want)


def plain(metric: Metric) -> Metric:
    """The metric that is differentiated: of a recovery, the one it rescales."""
    return metric.of if isinstance(metric, Recovery) else metric


def effects_of(activations: Mapping[Any, Tensor], number: int, point: HookPoint) -> Tensor:
    """What each entry of the clean activation does to metric `number`, to first order: float64, shaped as the
    activation without its batch."""
    moved = activations["clean", point].double() - activations["corrupted", point].double()
    return moved * activations["gradient", number, point].double()


def _key(place: GridPlace) -> Any:
    """Of an attention edge, its key among those of the row."""
    return (..., slice(None) if place.key is None else slice(place.key, place.key + 1))
