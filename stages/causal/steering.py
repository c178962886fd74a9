"""Attention steering: how the model's answer moves as an edge is given more or less weight.

A dose multiplies the weight of some edges inside the pass and renormalises the rows it touched, over the keys
a query may see, so that rows sum to 1 and nothing leaks to the future. For one edge of weight a and dose d

    a' = d a / (1 + (d - 1) a),

which is linear in d only while a is small: a' never passes 1. `SteeringCalibration` offers both the linear
reading of doses (d a, as candle-mi has it) and the exact one; `exact_factor` inverts the formula, also for a
mean over heads, where it has no closed form.

Border: labelled arrays and numbers; what is steered is a SteeringSpec, how runs share their work is the
planner's. Never imports torch until it runs.

Axes: layer (the first that is steered), dose, head, rank. Units: attention weights and doses have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...pipeline import Output
from ...store.errors import InterventionError, StageError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.edge_interventions import Edge
from ..forward.hooks.edges import SteeringSpec
from ..forward.runs.experiment import CellLabels
from ..forward.runs.run import Run
from .effects import (
    Baseline,
    array,
    baseline_run,
    edge_weight,
    effect,
    effects_along,
    gather,
    of_baseline,
    read_logits,
)
from .layer_sweep import LayerSweep

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = [
    "DOSE_LEVELS",
    "DosePoint",
    "DoseResponse",
    "DoseResponseCurve",
    "SteeringCalibration",
    "exact_factor",
    "measure_attention_to_targets",
    "steered_weight",
]

DOSE_LEVELS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
_NONE = 1e-10
"""Weights below this are taken for no attention at all."""
_OVER = "mean over edges and steered layers"


@dataclass(frozen=True)
class DoseResponse(LayerSweep):
    """The same edges at several doses, from each layer by itself.

    edges: (query, key), None for every position. doses: factors, or weights where kind is "set_value".
    window: how many layers from there on are steered together. heads: None for all. The rest: see
    `LayerSweep`.
    """

    name: ClassVar[str] = "dose_response"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **effects_along("layer", "dose"),
        "baseline_attention": Output(("layer",), "1", f"attention weight before, {_OVER} and heads"),
        "attention": Output(("layer", "dose"), "1", f"attention weight after, {_OVER} and heads"),
        "baseline_head_attention": Output(("layer", "head"), "1", f"attention weight before, {_OVER}"),
        "head_attention": Output(("layer", "dose", "head"), "1", f"attention weight after, {_OVER}"),
    }

    edges: tuple[Edge, ...]
    doses: tuple[float, ...] = DOSE_LEVELS
    window: int = 1
    heads: tuple[int, ...] | None = None
    kind: Literal["scale", "set_value"] = "scale"

    @property
    def width(self) -> int:
        """How many neighbouring layers are steered together."""
        return self.window

    def check(self, config: Architecture) -> None:
        """Raise StageError for no doses, InterventionError for edges or heads that are not there."""
        check_doses(self.doses)
        for dose in self.doses:
            self._spec(dose).validate(
                config.num_layers, config.axis_sizes["head"], len(self.tokens), ahead=config.looks_ahead
            )

    def prepare(self, model: Model) -> Baseline:
        """The unchanged run with its attention."""
        steered = {layer for cell in self.cells(model.config) for layer in self.changed(cell)}
        return baseline_run(model, self.tokens, self.target, sorted(steered))

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One per dose, with the attention weights of the layers that are steered."""
        points = [HookPoint.pattern(layer) for layer in self.changed(cell)]
        hooks = [
            self._spec(dose).layers(self.changed(cell)).hooks(prepared.config, len(self.tokens))
            for dose in self.doses
        ]
        return [self.run_of(spec.capture(*points)) for spec in hooks]

    def measure(self, prepared: Baseline, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """What changed, and the weight of the edges in the steered run, by head."""
        patterns = [array(result[HookPoint.pattern(layer)][0]) for layer in self.changed(cell)]
        weight = np.mean(
            [edge_weight(pattern, self.heads, self._resolved(prepared.config)) for pattern in patterns],
            axis=0,
        )
        return effect(prepared.logits, read_logits(result), self.target, self.top_k) | {"weight": weight}

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The effects [layer, dose], and the attention to the targets before and after."""
        import xarray as xr

        weights = [
            prepared.weight(layer, self.heads, self._resolved(prepared.config))
            for layer in self.changed(cell)
        ]
        before, after = np.mean(weights, axis=0), np.array([one["weight"] for one in measured])
        heads = range(prepared.config.axis_sizes["head"]) if self.heads is None else self.heads
        attention = {
            "baseline_attention": [before.mean()],
            "attention": after.mean(1)[None],
            "baseline_head_attention": before[None],
            "head_attention": after[None],
        }
        return xr.Dataset(
            {
                **gather(measured, {"layer": 1, "dose": len(self.doses)}),
                **{name: self.outputs[name].variable(values) for name, values in attention.items()},
                **of_baseline(prepared, self.target, self.top_k),
            },
            coords={
                "layer": ("layer", [cell["layer"]], {"long_name": f"first of {self.window} steered layers"}),
                "dose": list(self.doses),
                "head": list(heads),
            },
        )

    def _resolved(self, config: Architecture) -> tuple[tuple[int, int], ...]:
        return self._spec(self.doses[0]).resolved(len(self.tokens), ahead=config.looks_ahead)

    def _spec(self, dose: float) -> SteeringSpec:
        if self.kind not in ("scale", "set_value"):
            raise StageError(f"expected kind to be 'scale' or 'set_value', found {self.kind!r}")
        spec = SteeringSpec.scale(dose) if self.kind == "scale" else SteeringSpec.set_value(dose)
        for query, key in self.edges:
            spec = spec.edge(query, key)
        return spec if self.heads is None else spec.heads(self.heads)


def check_doses(doses: Sequence[float]) -> None:
    """StageError for no doses, or one twice."""
    if not doses or len(set(doses)) != len(doses):
        found = list(doses) or "none"
        raise StageError(f"expected doses, each once, found {found}; DOSE_LEVELS is a good start")


def measure_attention_to_targets(pattern: Any, query: int, keys: Sequence[int]) -> float:
    """Mean weight a query gives to some keys, over all leading axes (layers, prompts, heads).

    pattern: [..., query, key], an array, a DataArray or a tensor on the CPU. Negative positions count from
    the end. Raises InterventionError for a position out of range, or no keys.
    """
    weights = np.asarray(getattr(pattern, "values", pattern), np.float64)
    queries, positions = weights.shape[-2:]
    if not len(keys):
        raise InterventionError("expected at least one key to measure attention to, found none")
    for what, place, size in (("a query", query, queries), *(("keys", key, positions) for key in keys)):
        if not -size <= place < size:
            raise InterventionError(
                f"expected {what} in 0..{size - 1} (or negative, from the end), found {place}"
            )
    return float(weights[..., query, :][..., list(keys)].mean())


def steered_weight(weight: Any, factor: float) -> Any:
    """Weight after scaling by a factor > 0 and renormalising: f a / (1 + (f - 1) a), elementwise.

    >>> steered_weight(0.25, 2.0)
    0.4
    """
    return factor * weight / (1 - weight + factor * weight)


def exact_factor(weights: Any, target: float) -> float:
    """The factor that gives the mean of some weights a target, renormalisation included.

    weights: one weight per row that is steered (the heads of a query), each of a row of its own. One weight
    a: t (1 - a) / (a (1 - t)). Several: found by bisection, as the mean grows with the factor.
    Raises InterventionError where no factor does: a target outside 0 … 1, or weights that are all 0 or 1.
    """
    held = np.atleast_1d(np.asarray(weights, np.float64)).ravel()
    low, high = float((held >= 1).mean()), float((held > 0).mean())
    if target == low == 0.0:
        return 0.0
    if not low < target < high:
        raise InterventionError(
            f"expected a mean weight between {low:.4g} and {high:.4g}, which the factors 0 and infinity "
            f"give, found {target}"
        )
    if len(held) == 1:
        return float(target * (1 - held[0]) / (held[0] * (1 - target)))
    below, above = -700.0, 700.0  # logarithms of the factor
    for _ in range(200):
        middle = (below + above) / 2
        if steered_weight(held, float(np.exp(middle))).mean() < target:
            below = middle
        else:
            above = middle
    return float(np.exp((below + above) / 2))


@dataclass(frozen=True)
class SteeringCalibration:
    """How much attention to give: from what a source condition has to what a target condition has.

    source_baseline, target_baseline: mean attention of n_source and n_target samples, at one layer. Where the
    target has none (below 1e-10) no factor can make any: the ratio is 0, and factors are 1.
    """

    source_baseline: float
    target_baseline: float
    layer: int
    n_source: int = 1
    n_target: int = 1
    recommended_target: float | None = None
    """Attention to aim at; None for that of the source."""

    def __post_init__(self) -> None:
        for name in ("source_baseline", "target_baseline"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InterventionError(f"expected {name} to be a weight in [0, 1], found {value}")
        if self.recommended_target is None:
            object.__setattr__(self, "recommended_target", self.source_baseline)

    def with_target(self, attention: float) -> SteeringCalibration:
        """The same with another attention to aim at."""
        baselines = (self.source_baseline, self.target_baseline)
        return SteeringCalibration(*baselines, self.layer, self.n_source, self.n_target, attention)

    @property
    def attention_ratio(self) -> float:
        """Source over target; 0 where the target has none."""
        return 0.0 if self.target_baseline <= _NONE else self.source_baseline / self.target_baseline

    def scale_factor_for_target(self, attention: float) -> float:
        """Factor for a wanted attention, read linearly: attention / target_baseline. Leaves renormalisation
        out, so the pass gives less than asked for; `exact_factor_for_target` does not."""
        return 1.0 if self.target_baseline <= _NONE else attention / self.target_baseline

    def scale_factor_to_source(self) -> float:
        """Factor for the source's attention, read linearly."""
        return self.scale_factor_for_target(self.source_baseline)

    def exact_factor_for_target(self, attention: float) -> float:
        """Factor that gives one edge of weight target_baseline this attention, renormalisation included."""
        return 1.0 if self.target_baseline <= _NONE else exact_factor(self.target_baseline, attention)

    @property
    def dose_levels_absolute(self) -> list[tuple[float, float]]:
        """(dose, attention) read linearly, dose * target_baseline; may exceed 1, where no weight goes."""
        return [(dose, self.target_baseline * dose) for dose in DOSE_LEVELS]

    @property
    def dose_levels_exact(self) -> list[tuple[float, float]]:
        """(dose, attention) that one edge of weight target_baseline gets, renormalisation included."""
        return [(dose, float(steered_weight(self.target_baseline, dose))) for dose in DOSE_LEVELS]


@dataclass(frozen=True)
class DosePoint:
    """One dose: attention to the targets under it, and what it did (nats)."""

    scale_factor: float
    attention_level: float
    kl_divergence: float


@dataclass(frozen=True)
class DoseResponseCurve:
    """Doses and what they did, in the order in which they were added."""

    sample_id: str
    condition: str
    layer: int
    baseline_attention: float
    points: tuple[DosePoint, ...] = field(default=())

    @classmethod
    def of(cls, response: xr.Dataset, layer: int, *, sample_id: str, condition: str) -> DoseResponseCurve:
        """The curve of one layer of a `DoseResponse`."""
        part = response.sel(layer=layer)
        columns = (part[name].values.tolist() for name in ("dose", "attention", "kl"))
        points = tuple(DosePoint(*row) for row in zip(*columns, strict=True))
        return cls(sample_id, condition, layer, float(part["baseline_attention"]), points)

    def with_point(
        self, scale_factor: float, attention_level: float, kl_divergence: float
    ) -> DoseResponseCurve:
        """The curve with one more point."""
        points = (*self.points, DosePoint(scale_factor, attention_level, kl_divergence))
        return DoseResponseCurve(self.sample_id, self.condition, self.layer, self.baseline_attention, points)

    def scale_for_target(self, attention: float) -> float | None:
        """Factor at which attention reaches a level, by linear interpolation between the first two
        neighbouring points that bracket it; None outside. Neighbours of equal level say nothing."""
        for one, next_one in zip(self.points, self.points[1:], strict=False):
            low, high = one.attention_level, next_one.attention_level
            if abs(high - low) < _NONE or not min(low, high) <= attention <= max(low, high):
                continue
            share = (attention - low) / (high - low)
            return one.scale_factor + share * (next_one.scale_factor - one.scale_factor)
        return None
