"""Attention steering: dose response of the next token to scaled attention weights.

A dose multiplies the weight of some edges during the pass, and the affected rows are renormalised over their
visible keys, so that rows sum to 1 and causality holds. An edge of weight a under dose d gets

    a' = d a / (1 + (d - 1) a),

which is linear in d only while a is small, and never exceeds 1. `SteeringCalibration` offers the linear
approximation (d a, as in candle-mi) and the exact form; `exact_factor` inverts the formula, also for a mean
over heads, which has no closed form.

Border: labelled arrays and numbers; a SteeringSpec holds the edges, the planner shares work between runs.
Torch is imported when it runs.

Axes: layer (the first that is steered), dose, head, rank. Attention weights and doses have no unit.
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
"""Default factors of an attention weight."""
_NONE = 1e-10
"""Attention weight below which an edge counts as absent."""
_OVER = "mean over edges and steered layers"
"""Phrase that the descriptions of several outputs share."""


@dataclass(frozen=True)
class DoseResponse(LayerSweep):
    """Scales the attention weights of some edges by one dose at a time, in one layer or window at a time."""

    name: ClassVar[str] = "dose_response"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **effects_along("layer", "dose"),
        "baseline_attention": Output(("layer",), "1", f"attention weight before steering, {_OVER} and heads"),
        "attention": Output(("layer", "dose"), "1", f"attention weight after steering, {_OVER} and heads"),
        "baseline_head_attention": Output(
            ("layer", "head"), "1", f"attention weight before steering, {_OVER}"
        ),
        "head_attention": Output(("layer", "dose", "head"), "1", f"attention weight after steering, {_OVER}"),
    }

    edges: tuple[Edge, ...]
    """(query position, key position) of each edge; None means every position."""
    doses: tuple[float, ...] = DOSE_LEVELS
    """Factors of the weights, or new weights if `kind` is "set_value"; distinct."""
    window: int = 1
    """Number of neighbouring layers that are steered together; the first is the cell's label."""
    heads: tuple[int, ...] | None = None
    """Head indices with steered edges; None steers edges in all heads."""
    kind: Literal["scale", "set_value"] = "scale"
    """"scale" multiplies weights, "set_value" replaces them; then rows are renormalised to sum 1."""

    @property
    def width(self) -> int:
        """Number of neighbouring layers that are steered together."""
        return self.window

    def check(self, config: Architecture) -> None:
        """Check the fields against a model.

        Raises:
            StageError: Doses are missing or repeated.
            InterventionError: An edge or a head does not exist.
        """
        check_doses(self.doses)
        for dose in self.doses:
            self._spec(dose).validate(
                config.num_layers, config.axis_sizes["head"], len(self.tokens), ahead=config.looks_ahead
            )

    def prepare(self, model: Model) -> Baseline:
        """Result of the unchanged run, with the attention patterns of the steered layers."""
        # A set: windows of neighbouring cells overlap, and each layer is captured once.
        steered = {layer for cell in self.cells(model.config) for layer in self.changed(cell)}
        return baseline_run(model, self.tokens, self.target, sorted(steered))

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One run per dose, which captures the attention patterns of the steered layers."""
        points = [HookPoint.pattern(layer) for layer in self.changed(cell)]
        hooks = [
            self._spec(dose).layers(self.changed(cell)).hooks(prepared.config, len(self.tokens))
            for dose in self.doses
        ]
        return [self.run_of(spec.capture(*points)) for spec in hooks]

    def measure(self, prepared: Baseline, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Effects of one run by name, and `weight`, the attention weight of the edges, float64 [head]."""
        patterns = [array(result[HookPoint.pattern(layer)][0]) for layer in self.changed(cell)]
        weight = np.mean(
            [edge_weight(pattern, self.heads, self._resolved(prepared.config)) for pattern in patterns],
            axis=0,
        )
        return effect(prepared.logits, read_logits(result), self.target, self.top_k) | {"weight": weight}

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects [layer, dose], and the attention weight of the edges before and after steering."""
        import xarray as xr

        weights = [
            prepared.weight(layer, self.heads, self._resolved(prepared.config))
            for layer in self.changed(cell)
        ]
        before, after = np.mean(weights, axis=0), np.array([run["weight"] for run in measured])
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
        """(query position, key position) of each steered edge, with None replaced by all positions."""
        # Of the first dose: edges are the same for all.
        return self._spec(self.doses[0]).resolved(len(self.tokens), ahead=config.looks_ahead)

    def _spec(self, dose: float) -> SteeringSpec:
        if self.kind not in ("scale", "set_value"):
            raise StageError(f"{self.name}: expected kind to be 'scale' or 'set_value', found {self.kind!r}")
        spec = SteeringSpec.scale(dose) if self.kind == "scale" else SteeringSpec.set_value(dose)
        for query, key in self.edges:
            spec = spec.edge(query, key)
        return spec if self.heads is None else spec.heads(self.heads)


def check_doses(doses: Sequence[float]) -> None:
    """Raise StageError if there are no doses, or a dose is repeated."""
    if not doses or len(set(doses)) != len(doses):
        found = list(doses) or "none"
        raise StageError(
            f"expected at least one dose, and each dose once, found {found}; for example doses=(0.5, 1.0, "
            "2.0)"
        )


def measure_attention_to_targets(pattern: Any, query: int, keys: Sequence[int]) -> float:
    """Attention weight from a query to some keys, averaged over keys and leading axes (layers, heads, ...).

    Arguments:
        pattern: Attention weights [..., query, key]: an array, a DataArray or a tensor on the CPU.
        query: Query position; negative ones count from the end.
        keys: Key positions; negative ones count from the end.

    Raises:
        InterventionError: A position is out of range, or there are no keys.
    """
    weights = np.asarray(pattern, np.float64)
    n_queries, n_keys = weights.shape[-2:]
    if not len(keys):
        raise InterventionError("expected at least one key position to measure attention to, found none")
    for name, position, size in (("query", query, n_queries), *(("key", key, n_keys) for key in keys)):
        if not -size <= position < size:
            raise InterventionError(
                f"expected a {name} position from {-size} to {size - 1} (negative: from the end), found "
                f"{position}"
            )
    return float(weights[..., query, :][..., list(keys)].mean())


def steered_weight(weight: Any, factor: float) -> Any:
    """Attention weight after scaling one edge and renormalising its row: f a / (1 + (f - 1) a), elementwise.

    Arguments:
        weight: Attention weight a before, a number or an array.
        factor: Factor f > 0.

    >>> steered_weight(0.25, 2.0)
    0.4
    """
    return factor * weight / (1 - weight + factor * weight)


def exact_factor(weights: Any, target: float) -> float:
    """Factor that brings the mean of some attention weights to a target, renormalisation included.

    One weight a: t (1 - a) / (a (1 - t)). Several: by bisection, as the mean is monotonic in the factor.

    Arguments:
        weights: One attention weight per steered row (for example one per head of a query).
        target: Mean weight t to reach.

    Raises:
        InterventionError: No factor reaches the target, because it is outside 0 to 1 or all weights are 0 or
        1.
    """
    values = np.atleast_1d(np.asarray(weights, np.float64)).ravel()
    # Weights of exactly 0 and 1 are fixed points of every factor, so they bound the reachable mean.
    low, high = float((values >= 1).mean()), float((values > 0).mean())
    if target == low == 0.0:
        return 0.0
    if not low < target < high:
        raise InterventionError(
            f"expected a target attention weight between {low:.4g} and {high:.4g}, the limits that scaling "
            f"can reach, found {target}"
        )
    if len(values) == 1:
        return float(target * (1 - values[0]) / (values[0] * (1 - target)))
    # Bisection on the logarithm of the factor; exp(+-700) is just inside the range of float64.
    below, above = -700.0, 700.0
    for _ in range(200):
        middle = (below + above) / 2
        if steered_weight(values, float(np.exp(middle))).mean() < target:
            below = middle
        else:
            above = middle
    return float(np.exp((below + above) / 2))


@dataclass(frozen=True)
class SteeringCalibration:
    """Attention weights of two conditions, from which factors for steering one like the other follow.

    If the target condition has no attention (below 1e-10), no factor can create any: the ratio is 0, and
    factors are 1.
    """

    source_baseline: float
    """Mean attention weight of the source condition, which is imitated."""
    target_baseline: float
    """Mean attention weight of the target condition, which is steered."""
    layer: int
    """Layer at which both weights were measured."""
    n_source: int = 1
    """Number of samples of the source condition."""
    n_target: int = 1
    """Number of samples of the target condition."""
    recommended_target: float | None = None
    """Attention weight that steering aims at; None for that of the source condition."""

    def __post_init__(self) -> None:
        for name in ("source_baseline", "target_baseline"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InterventionError(
                    f"expected {name} to be an attention weight from 0 to 1, found {value}"
                )
        if self.recommended_target is None:
            object.__setattr__(self, "recommended_target", self.source_baseline)

    def with_target(self, attention: float) -> SteeringCalibration:
        """A copy in which steering aims at the attention weight `attention`."""
        baselines = (self.source_baseline, self.target_baseline)
        return SteeringCalibration(*baselines, self.layer, self.n_source, self.n_target, attention)

    @property
    def attention_ratio(self) -> float:
        """Ratio of attention weights, source to target condition; 0 for a target without attention."""
        # Weights below _NONE are rounding of the softmax: their ratio would be arbitrarily large.
        return 0.0 if self.target_baseline <= _NONE else self.source_baseline / self.target_baseline

    def scale_factor_for_target(self, attention: float) -> float:
        """Factor for an attention weight in the linear approximation, attention / target_baseline.

        It ignores that rows are renormalised, so that steering gives a smaller weight than requested;
        `exact_factor_for_target` takes this into account.
        """
        return 1.0 if self.target_baseline <= _NONE else attention / self.target_baseline

    def scale_factor_to_source(self) -> float:
        """Factor for the attention weight of the source condition, in the linear approximation."""
        return self.scale_factor_for_target(self.source_baseline)

    def exact_factor_for_target(self, attention: float) -> float:
        """Factor that brings an edge of weight target_baseline to `attention`, renormalisation included."""
        return 1.0 if self.target_baseline <= _NONE else exact_factor(self.target_baseline, attention)

    @property
    def dose_levels_absolute(self) -> list[tuple[float, float]]:
        """(dose, attention weight) of the default doses in the linear approximation; weights may exceed 1."""
        return [(dose, self.target_baseline * dose) for dose in DOSE_LEVELS]

    @property
    def dose_levels_exact(self) -> list[tuple[float, float]]:
        """(dose, attention weight) of the default doses for one edge, renormalisation included."""
        return [(dose, float(steered_weight(self.target_baseline, dose))) for dose in DOSE_LEVELS]


@dataclass(frozen=True)
class DosePoint:
    """Attention weight and effect under one dose, a point of a dose-response curve."""

    scale_factor: float
    """Factor of the attention weight."""
    attention_level: float
    """Mean attention weight of the edges under this dose."""
    kl_divergence: float
    """KL(baseline || steered) of the next token, in nats."""


@dataclass(frozen=True)
class DoseResponseCurve:
    """Dose-response curve of one layer and prompt."""

    sample_id: str
    """Name of the prompt."""
    condition: str
    """Name of the condition to which the prompt belongs."""
    layer: int
    """First steered layer."""
    baseline_attention: float
    """Mean attention weight of the edges without steering."""
    points: tuple[DosePoint, ...] = field(default=())
    """Points of the curve, in the order in which they were added."""

    @classmethod
    def of(cls, response: xr.Dataset, layer: int, *, sample_id: str, condition: str) -> DoseResponseCurve:
        """Dose-response curve of one layer, from the result of `DoseResponse`.

        Arguments:
            response: Result of `DoseResponse`.
            layer: First steered layer.
            sample_id: Name of the prompt.
            condition: Name of the condition to which the prompt belongs.
        """
        part = response.sel(layer=layer)
        columns = (part[name].values.tolist() for name in ("dose", "attention", "kl"))
        points = tuple(DosePoint(*row) for row in zip(*columns, strict=True))
        return cls(sample_id, condition, layer, float(part["baseline_attention"]), points)

    def with_point(
        self, scale_factor: float, attention_level: float, kl_divergence: float
    ) -> DoseResponseCurve:
        """A copy with one more point.

        Arguments:
            scale_factor: Factor of the attention weight.
            attention_level: Mean attention weight under this dose.
            kl_divergence: KL(baseline || steered) in nats.
        """
        points = (*self.points, DosePoint(scale_factor, attention_level, kl_divergence))
        return DoseResponseCurve(self.sample_id, self.condition, self.layer, self.baseline_attention, points)

    def scale_for_target(self, attention: float) -> float | None:
        """Factor at which the attention weight reaches `attention`, by linear interpolation between points.

        The first two neighbouring points that bracket it are used; None if no two points do.
        """
        for point, next_point in zip(self.points, self.points[1:], strict=False):
            low, high = point.attention_level, next_point.attention_level
            # Equal neighbours would divide by 0, and bracket the level only where they equal it.
            if abs(high - low) < _NONE or not min(low, high) <= attention <= max(low, high):
                continue
            share = (attention - low) / (high - low)
            return point.scale_factor + share * (next_point.scale_factor - point.scale_factor)
        return None
