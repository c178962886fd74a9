"""Attribution patching: first-order estimates of a patching grid from one backward pass.

The grid of `ActivationPatching` without its runs: the metric of the corrupted run plus (clean - corrupted) .
gradient at each place (Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale"). Only the
first-order term is exact; saturated attention, norms or a late MLP bend the metric. check.py measures that
error by exact runs.

A place may act through two paths that cancel, and its estimate is then near 0. Gradient dropout (AtP*; Kramar
et al. 2024, "AtP*: An efficient and scalable method for localizing LLM behaviour to components", section 3)
repeats the backward pass for each of the L layers with the gradient through that layer dropped, residual
stream kept. The size of a place's effect is the sum of its L absolute effects over L - 1, as its own layer
contributes 0.

Border: token ids and hook points in, labelled arrays out, as grids/patching.py; gradients come from
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
from ..grids.patching_metrics import Metric, Recovery, read_metrics
from ..grids.patching_results import PreparedGrid, as_vector, token_labels
from .attention import NEEDED, key_effects, query_effects, recomputed_attention

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.wants import Logits
    from ...forward.models.model import Model
    from ...forward.passes.backward import Cotangent

__all__ = ["AttributionPatching", "cotangent_of_pair", "plain"]

CLEAN, CORRUPTED = 0, 1
"""Batch rows of the two runs that are computed together."""


@dataclass(frozen=True, kw_only=True)
class AttributionPatching(ActivationPatching):
    """First-order estimates of `ActivationPatching`: the same fields, axes and scale, no run per place.

    Metrics need a gradient (`Recovery` of a metric that has one). `align` and `window` have no estimate.
    """

    attention: Literal["slope", "anew"] = "slope"
    """Estimate for queries and keys that are patched by head, or by head and position.

    "slope" takes the gradient at the query or key; "anew" recomputes attention weights and takes the gradient
    there (AtP*; attention.py).
    """
    dropout: bool = False
    """Whether gradient dropout gives the size of an effect; the full gradient gives its sign."""

    name: ClassVar[str] = "attribution_patching"
    version: ClassVar[int] = 1

    def check(self, config: Architecture) -> None:
        """Check the fields against a model, as `ActivationPatching.check` does.

        Raises:
            StageError: There is no estimate: for several layers patched together, aligned prompts, or metrics
                without gradient.
            ConfigError: The model has no backward pass.
        """
        config.require_gradients()
        super().check(config)
        if self.window > 1 or self.align is not None:
            found = f"window={self.window}" if self.window > 1 else "align=..."
            raise StageError(
                f"{self.name}: expected window=1 and prompts of equal length without align, found {found}; "
                "use activation_patching for windows of layers and for aligned prompts"
            )
        for metric in self.metrics:
            objective_of(plain(metric))
        if self.attention not in ("slope", "anew"):
            raise StageError(
                f"{self.name}: expected attention to be 'slope' or 'anew', found {self.attention!r}"
            )
        if self.dropout and config.num_layers < 2:
            raise StageError(
                f"{self.name}: expected a model of at least two layers for gradient dropout, found "
                f"{config.num_layers}; leave dropout out"
            )

    def prepare(self, model: Model) -> PreparedGrid:
        """Activations of both runs, and gradients of each metric in the corrupted run, in one batch."""
        points = [
            HookPoint(cell["kind"], cell["layer"]) for cell in AttributionPatching.cells(self, model.config)
        ]
        recomputed = [point for point in points if self._is_anew(point.kind)]
        attention_points = [
            HookPoint(kind, point.layer) for point in recomputed for kind in ("pattern", "attn_scores")
        ]
        points = list(dict.fromkeys([*points, *attention_points]))
        activations: dict[Any, Any] = {}
        for number, metric in enumerate(self.metrics):
            # Activations do not depend on the metric: they are captured in the first pass only.
            logits, captured = self._back(model, metric, points, with_activations=number == 0)
            for point in points:
                activations["gradient", number, point] = captured[Capture(point, is_gradient=True)][CORRUPTED]
                if number == 0:
                    activations["clean", point] = captured[Capture(point)][CLEAN]
                    activations["corrupted", point] = captured[Capture(point)][CORRUPTED]
        recomputed_values = recomputed_attention(
            model, self.corrupted, {point: activations["clean", point] for point in recomputed}
        )
        activations |= {("anew", point): numbers for point, numbers in recomputed_values.items()}
        if self.dropout:
            activations |= self._sizes(model, points, activations)
        labels = token_labels(model, token=self.corrupted, clean_token=self.clean)
        clean, corrupted = (as_vector(logits[row : row + 1]) for row in (CLEAN, CORRUPTED))
        return PreparedGrid(model.config, clean, [corrupted], activations, labels)

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """No runs: `prepare` computes all that the estimates need."""
        return []

    def sketch(self, config: Architecture, cell: CellLabels) -> None:  # type: ignore[override]
        """None, because the passes of `prepare` are not runs that a plan counts."""

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """Estimates of one hook point, in the form of the results of `ActivationPatching`."""
        numbers = self.estimates(prepared, cell["kind"], cell["layer"])
        return super().dataset(prepared, cell, list(numbers))

    def estimates(self, prepared: PreparedGrid, kind: str, layer: int) -> Floats:
        """Estimated metrics of patching each place of a hook point, not rescaled, float64 [place, metric].

        Arguments:
            prepared: Result of `prepare`.
            kind: Kind of the hook point.
            layer: Layer of the hook point.
        """
        point = HookPoint(kind, layer)
        base = read_metrics(self.metrics, prepared.unpatched[0], prepared.clean)
        estimates = []
        for number in range(len(self.metrics)):
            effects = self._effects(prepared.config, prepared.activations, number, point)
            if self.dropout:
                # AtP* averages absolute effects, which lose the sign; it is taken from the full gradient.
                effects = np.copysign(prepared.activations["size", number, point], effects)
            # Metrics, not effects: `dataset` rescales them as the metrics of real runs.
            estimates.append(base[number] + effects)
        return np.stack(estimates, axis=1)

    def _effects(
        self, config: Architecture, activations: Mapping[Any, Any], number: int, point: HookPoint
    ) -> Floats:
        """First-order effect of patching each place of a hook point on metric `number`, float64 [place]."""
        effects = recomputed_effects_of if self._is_anew(point.kind) else effects_of
        return at_places(effects(activations, number, point), point, self.places(config, point.kind))

    def _sizes(
        self, model: Model, points: Sequence[HookPoint], activations: Mapping[Any, Any]
    ) -> dict[Any, Floats]:
        """Size of effects by gradient dropout, float64 [place], by ("size", metric, hook point)."""
        # Only the gradients of one dropped layer are in memory at a time.
        patched = [point for point in points if point.kind in self.kinds]
        sizes: dict[Any, Floats] = {}
        for number, metric in enumerate(self.metrics):
            for layer in range(model.config.num_layers):
                captured = self._back(model, metric, points, with_activations=False, dropped=layer)[1]
                gradients = {
                    ("gradient", number, point): captured[Capture(point, is_gradient=True)][CORRUPTED]
                    for point in points
                }
                for point in patched:
                    effects = np.abs(self._effects(model.config, {**activations, **gradients}, number, point))
                    sizes["size", number, point] = sizes.get(("size", number, point), 0.0) + effects
        # L - 1, not L: dropping a place's own layer gives 0, as in the paper.
        return {key: total / (model.config.num_layers - 1) for key, total in sizes.items()}

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
        """One backward pass from a metric of the corrupted run; the clean run is the other row of the batch.

        Arguments:
            model: The model.
            metric: Metric that is differentiated.
            points: Hook points at which gradients are taken.
            with_activations: Whether activations at these points are captured along with the gradients.
            dropped: Layer whose gradient is dropped, except along the residual stream; None for none.

        Returns:
            (logits of both runs [2, 1, tokens], captured activations and gradients [2, ...]).
        """
        hooks = HookSpec().capture(*(Capture(point, is_gradient=True).name for point in points))
        hooks = hooks.capture(*points if with_activations else ())
        cotangent = cotangent_of_pair(metric, self.want)
        rows = [self.clean, self.corrupted]
        return model.backward(rows, model.bind(hooks), self.want, cotangent, dropped=dropped)


def plain(metric: Metric) -> Metric:
    """The metric that can be differentiated: the metric inside a `Recovery`, else the metric itself."""
    return metric.of if isinstance(metric, Recovery) else metric


def cotangent_of_pair(metric: Metric, want: Logits) -> Cotangent:
    """Make the function that gives the gradient of a metric with respect to logits.

    It takes the logits of the clean and the corrupted run, [2, 1, token], and returns a tensor of this shape,
    which is 0 for the clean run.

    Arguments:
        metric: Metric of the corrupted run that is differentiated.
        want: Tokens to which the logits belong.
    """

    def cotangent(logits: Tensor) -> Tensor:
        clean, corrupted = (as_vector(logits[row : row + 1]) for row in (CLEAN, CORRUPTED))
        gradient = np.zeros(tuple(logits.shape))
        read_columns = token_columns(plain(metric).tokens, want.tokens)
        # add.at, not +=: a metric may read one token twice, and += would keep the last gradient only.
        np.add.at(
            gradient[CORRUPTED, 0],
            read_columns,
            plain(metric).gradient(corrupted[read_columns], clean[read_columns]),
        )
        return logits.new_tensor(gradient)

    return cotangent


def effects_of(activations: Mapping[Any, Tensor], number: int, point: HookPoint) -> Floats:
    """First-order effect on a metric of patching each entry of the clean activation at a hook point.

    Arguments:
        activations: Activations and gradients from `AttributionPatching.prepare`.
        number: Index of the metric.
        point: The hook point.

    Returns:
        float64, with the shape of the activation without its batch axis.
    """
    difference = activations["clean", point].double() - activations["corrupted", point].double()
    effects: Floats = (difference * activations["gradient", number, point].double()).cpu().numpy()
    return effects


def recomputed_effects_of(activations: Mapping[Any, Any], number: int, point: HookPoint) -> Floats:
    """Effects of clean queries or keys, with recomputed attention weights, float64 [head, position, 1].

    Arguments:
        activations: Activations, gradients and recomputed attention from `AttributionPatching.prepare`.
        number: Index of the metric.
        point: Hook point of the queries or keys.
    """
    # The axis of length 1 stands for d_head, so that `at_places` treats both kinds of effects alike.

    def attention(name: tuple[Any, ...], kind: str) -> Floats:
        """Scores or weights [head, query, key] of the layer, float64. name: first parts of the key."""
        values: Floats = activations[(*name, HookPoint(kind, point.layer))].double().cpu().numpy()
        return values

    weights, gradient = attention(("corrupted",), "pattern"), attention(("gradient", number), "pattern")
    patched = activations["anew", point]
    if point.kind == "q":
        return query_effects(weights, patched, gradient)[..., None]
    heads = activations["clean", point].shape[0]
    return key_effects(weights, attention(("corrupted",), "attn_scores"), patched, gradient, heads)[..., None]


def at_places(effects: Floats, point: HookPoint, places: Sequence[GridPlace]) -> Floats:
    """Effect of each place, float64 [place]: effects of single entries, summed over what the place patches.

    Arguments:
        effects: Effect of each entry, with the axes of the hook point except the batch.
        point: The hook point.
        places: The places, which all index the same axes.
    """
    first = places[0]
    axes = {head_axis(point.dims): "head", "position": "position", "query_position": "position"}
    axes["key_position"] = "key"
    fields = [axes.get(dim, "") for dim in point.dims[1:]]
    is_indexed = [bool(name) and getattr(first, name) is not None for name in fields]
    summed: Floats = effects.sum(axis=tuple(axis for axis, is_index in enumerate(is_indexed) if not is_index))
    names = [name for name, is_index in zip(fields, is_indexed, strict=True) if is_index]
    # The whole activation is one place: broadcast the single sum.
    if not names:
        return np.broadcast_to(summed, len(places))
    indices = [np.array([getattr(place, name) for place in places]) for name in names]
    selected: Floats = summed[tuple(indices)]
    return selected
