"""Attribution patching: a whole grid of patches, estimated from one pass back.

The grid of `ActivationPatching` without its runs: the metric of the corrupted run, plus (clean - corrupted) .
gradient at each place (Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale"). Exact is
the first order alone; where saturated attention, norms or a late MLP bend the metric it is wrong, which
check.py measures by exact runs.

A place may matter on two ways that cancel out, and then its estimate is near 0 whatever either does. With
gradient dropout (AtP*; Kramar et al. 2024, "AtP*: An efficient and scalable method for localizing LLM
behaviour to components", section 3) there is a pass back for each of L layers, past which the gradient goes
by the stream alone; a place counts with the sum of its L sizes over L - 1, as its own layer's is 0.

Border: token ids and hook points in, labelled arrays out, as patching.py; asks the model for gradients by
`Model.backward`. Planning imports no torch.

    grid = AttributionPatching(clean=a, corrupted=b, kinds=("z",), over="head_position",
                               metrics=(LogitDifference(x, y),))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ....store.arrays import Floats
from ....store.errors import StageError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.objective import objective_of, token_columns
from ...forward.hooks.spec import Capture, HookSpec
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..grids.patching import ActivationPatching
from ..grids.patching_grid import GridPlace, head_axis
from ..grids.patching_metrics import Metric, Recovery, read
from ..grids.patching_results import PreparedGrid, as_vector, token_texts
from .attention import NEEDED, key_effects, query_effects, remade

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.wants import Logits
    from ...forward.models.model import Model
    from ...forward.passes.backward import Cotangent

__all__ = ["AttributionPatching", "cotangent_of_pair", "plain"]

CLEAN, CORRUPTED = 0, 1
"""Rows of the batch of both runs."""


@dataclass(frozen=True, kw_only=True)
class AttributionPatching(ActivationPatching):
    """Estimates of `ActivationPatching`: the same fields, axes and scale, no run per place.

    Metrics must have a gradient (`Recovery` of one that has). align and window are not for estimates.
    attention: of queries and keys, "slope" for the gradient there, "anew" for that at the weights they give
    (AtP*; attention.py), where each is patched by head or by head and position. dropout: whether effects have
    the size that gradient dropout gives, their sign that of the whole gradient.
    """

    attention: Literal["slope", "anew"] = "slope"
    dropout: bool = False

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
        if self.attention not in ("slope", "anew"):
            raise StageError(
                f"{self.name}: expected attention to be 'slope' or 'anew', found {self.attention!r}"
            )
        if self.dropout and config.num_layers < 2:
            raise StageError(
                f"{self.name}: expected two or more layers for gradient dropout, found {config.num_layers}; "
                "leave dropout out"
            )

    def prepare(self, model: Model) -> PreparedGrid:
        """Both runs with their activations, side by side in one pass, and back from it for every metric."""
        points = [
            HookPoint(cell["kind"], cell["layer"]) for cell in AttributionPatching.cells(self, model.config)
        ]
        remaking = [point for point in points if self._is_anew(point.kind)]
        beside = [HookPoint(kind, point.layer) for point in remaking for kind in ("pattern", "attn_scores")]
        points = list(dict.fromkeys([*points, *beside]))
        activations: dict[Any, Any] = {}
        for number, metric in enumerate(self.metrics):
            logits, found = self._back(model, metric, points, with_activations=number == 0)
            for point in points:
                activations["gradient", number, point] = found[Capture(point, is_gradient=True)][CORRUPTED]
                if number == 0:
                    activations["clean", point] = found[Capture(point)][CLEAN]
                    activations["corrupted", point] = found[Capture(point)][CORRUPTED]
        anew = remade(model, self.corrupted, {point: activations["clean", point] for point in remaking})
        activations |= {("anew", point): numbers for point, numbers in anew.items()}
        if self.dropout:
            activations |= self._sizes(model, points, activations)
        texts = {
            "token": token_texts(model, self.corrupted),
            "clean_token": token_texts(model, self.clean),
        }
        known = {name: each for name, each in texts.items() if each is not None}
        clean, corrupted = (as_vector(logits[row : row + 1]) for row in (CLEAN, CORRUPTED))
        return PreparedGrid(model.config, clean, [corrupted], activations, known)

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """None: what was prepared is enough."""
        return []

    def sketch(self, config: Architecture, cell: CellLabels) -> None:  # type: ignore[override]
        """None: a pass and its way back are no runs that a plan counts."""

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """The estimates of one hook point, as patching would report its runs."""
        numbers = self.estimates(prepared, cell["kind"], cell["layer"])
        return super().dataset(prepared, cell, list(numbers))

    def estimates(self, prepared: PreparedGrid, kind: str, layer: int) -> Floats:
        """Of each place of a hook point every metric, not yet rescaled: float64 [place, metric]."""
        point = HookPoint(kind, layer)
        base = read(self.metrics, prepared.unpatched[0], prepared.clean)
        found = []
        for number in range(len(self.metrics)):
            effects = self._effects(prepared.config, prepared.activations, number, point)
            if self.dropout:
                effects = np.copysign(prepared.activations["size", number, point], effects)
            found.append(base[number] + effects)
        return np.stack(found, axis=1)

    def _effects(
        self, config: Architecture, held: Mapping[Any, Any], number: int, point: HookPoint
    ) -> Floats:
        """What each place of a point does to metric `number`, to first order [place]."""
        effects = remade_effects_of if self._is_anew(point.kind) else effects_of
        return at_places(effects(held, number, point), point, self.places(config, point.kind))

    def _sizes(self, model: Model, points: Sequence[HookPoint], held: Mapping[Any, Any]) -> dict[Any, Floats]:
        """Of each metric and point, the size of each place's effect by gradient dropout; the gradients of one
        layer left out are held at a time."""
        patched = [point for point in points if point.kind in self.kinds]
        sizes: dict[Any, Floats] = {}
        for number, metric in enumerate(self.metrics):
            for layer in range(model.config.num_layers):
                found = self._back(model, metric, points, with_activations=False, dropped=layer)[1]
                gradients = {
                    ("gradient", number, point): found[Capture(point, is_gradient=True)][CORRUPTED]
                    for point in points
                }
                for point in patched:
                    effects = np.abs(self._effects(model.config, {**held, **gradients}, number, point))
                    sizes["size", number, point] = sizes.get(("size", number, point), 0.0) + effects
        return {mark: each / (model.config.num_layers - 1) for mark, each in sizes.items()}

    def _is_anew(self, kind: str) -> bool:
        return self.attention == "anew" and kind in NEEDED

    def _back(
        self,
        model: Model,
        metric: Metric,
        points: Sequence[HookPoint],
        *,
        with_activations: bool,
        dropped: int | None = None,
    ) -> tuple[Tensor, Mapping[Capture, Tensor]]:
        """Logits wanted of both runs [2, 1, tokens]; what stands at the points, and there the gradient of one
        metric of the corrupted run, which has the clean one beside it to compare with."""
        asked = HookSpec().capture(*(Capture(point, is_gradient=True).name for point in points))
        asked = asked.capture(*points if with_activations else ())
        cotangent = cotangent_of_pair(metric, self.want)
        rows = [self.clean, self.corrupted]
        return model.backward(rows, model.bind(asked), self.want, cotangent, dropped=dropped)


def plain(metric: Metric) -> Metric:
    """The metric that is differentiated: of a recovery, the one it rescales."""
    return metric.of if isinstance(metric, Recovery) else metric


def cotangent_of_pair(metric: Metric, want: Logits) -> Cotangent:
    """The gradient of a metric of the corrupted run with respect to logits [2, 1, tokens] of both, which has
    the clean one beside it to compare with. want: what these are."""

    def cotangent(logits: Tensor) -> Tensor:
        clean, corrupted = (as_vector(logits[row : row + 1]) for row in (CLEAN, CORRUPTED))
        found = np.zeros(tuple(logits.shape))
        held = token_columns(plain(metric).tokens, want.tokens)
        np.add.at(found[CORRUPTED, 0], held, plain(metric).gradient(corrupted[held], clean[held]))
        return logits.new_tensor(found)

    return cotangent


def effects_of(activations: Mapping[Any, Tensor], number: int, point: HookPoint) -> Floats:
    """What each entry of the clean activation does to metric `number`, to first order: float64, shaped as the
    activation without its batch."""
    moved = activations["clean", point].double() - activations["corrupted", point].double()
    found: Floats = (moved * activations["gradient", number, point].double()).cpu().numpy()
    return found


def remade_effects_of(activations: Mapping[Any, Any], number: int, point: HookPoint) -> Floats:
    """The same of clean queries or keys by the weights they give: their entries have it in one, [head,
    position, 1]."""

    def held(mark: tuple[Any, ...], kind: str) -> Floats:
        found: Floats = activations[(*mark, HookPoint(kind, point.layer))].double().cpu().numpy()
        return found

    weights, gradient = held(("corrupted",), "pattern"), held(("gradient", number), "pattern")
    patched = activations["anew", point]
    if point.kind == "q":
        return query_effects(weights, patched, gradient)[..., None]
    heads = activations["clean", point].shape[0]
    return key_effects(weights, held(("corrupted",), "attn_scores"), patched, gradient, heads)[..., None]


def at_places(effects: Floats, point: HookPoint, places: Sequence[GridPlace]) -> Floats:
    """Effects of entries [axes of the point but the batch], summed over what each place holds: [place]."""
    first = places[0]
    axes = {head_axis(point.dims): "head", "position": "position", "query_position": "position"}
    axes["key_position"] = "key"
    cut = [axes.get(dim, "") for dim in point.dims[1:]]
    kept = [bool(name) and getattr(first, name) is not None for name in cut]
    summed: Floats = effects.sum(axis=tuple(axis for axis, is_kept in enumerate(kept) if not is_kept))
    names = [name for name, is_kept in zip(cut, kept, strict=True) if is_kept]
    if not names:
        return np.broadcast_to(summed, len(places))
    chosen = [np.array([getattr(place, name) for place in places]) for name in names]
    found: Floats = summed[tuple(chosen)]
    return found
