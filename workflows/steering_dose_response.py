"""How does the answer move as one position attends to another more or less? Dose-response of attention.

Multiplies the weight of one attention edge by several doses, inside the pass and renormalised
(stages/causal/steering.py), and measures the attention that comes of it and what the last position
predicts. A calibration says which factor reaches a wanted attention: read linearly, interpolated on the
measured curve, and exactly.

Defaults: the middle layer, all heads, the edge from the last token to the first, twice its attention as the
aim; every other layer is run for comparison. A target of several tokens is followed by its first piece
(logits) and by all of them (probability), never by its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.causal.steering import (
    DOSE_LEVELS,
    DoseResponse,
    DoseResponseCurve,
    SteeringCalibration,
    exact_factor,
)
from ..stages.corpus.positions import position_of
from ..stages.logits.lens import format_token
from ..store.errors import ConfigError, InterventionError
from .material.answers import answer_pieces, encoded, fact, named, number, target_json, top_changed_json
from .settings import Count, EdgeSettings, FactSettings, setting
from .views import Data, Line, Lines, Table, View, dash, points, together
from .workflow import ModelWorkflow, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ..pipeline.nodes import ResultNode

__all__ = ["SteeringDoseResponseSettings", "SteeringDoseResponse"]


@dataclass(frozen=True)
class SteeringDoseResponseSettings(EdgeSettings, FactSettings):
    """What `--set` can change."""

    layer: int | None = setting(None, "layer told in full; none: the middle one")
    doses: tuple[float, ...] = setting(DOSE_LEVELS, "factors of the edge's weight")
    ratio: float = setting(2.0, "attention to aim at, as a multiple of what the edge has")
    window: int = setting(1, "layers steered together, from each layer on")
    sweep: bool = setting(True, "also steer every other layer")
    top_k: Count = setting(10, "changed tokens kept of each run")

    def __post_init__(self) -> None:
        if self.ratio <= 0:
            raise ConfigError(f"expected ratio to be above 0, found {self.ratio}")


class SteeringDoseResponse(ModelWorkflow):
    """One edge at several doses."""

    name = "steering_dose_response"
    question = "How does the answer move as one position attends to another more or less?"
    settings_type = SteeringDoseResponseSettings
    settings: SteeringDoseResponseSettings

    response = loaded("response")
    """Every layer at every dose, [layer, dose]."""

    def plan(self) -> Mapping[str, ResultNode]:
        """One edge at every dose, in one layer or in each."""
        given = self.settings
        self.prompt, self.target = fact(given.model, given.prompt, given.target)
        self.encoding = encoded(self.subject, self.prompt)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        layers = self.subject.config.num_layers
        self.layer = layers // 2 if given.layer is None else given.layer
        if not 0 <= self.layer <= layers - given.window:
            raise ConfigError(
                f"expected a layer in 0..{layers - given.window} (with a window of {given.window}), "
                f"found {self.layer}"
            )
        self.edge = (position_of(self.encoding, given.query), position_of(self.encoding, given.key))
        experiment = DoseResponse(
            tuple(self.encoding.ids),
            (self.edge,),
            doses=given.doses,
            layers=None if given.sweep else (self.layer,),
            window=given.window,
            target=self.pieces,
            top_k=given.top_k,
        )
        experiment.cells(self.subject.config)  # wrong settings are told now, not when it runs
        return {"response": self.on_model(experiment)}

    @property
    def told(self) -> xr.Dataset:
        """The one layer, [dose]."""
        return self.response.sel(layer=self.layer)

    @property
    def exact(self) -> float | None:
        """Factor that takes the mean over heads exactly to the aim; None if no factor does, or if several
        layers are steered, as those above the first then have other inputs."""
        if self.settings.window > 1:
            return None
        try:
            return exact_factor(self.told["baseline_head_attention"].values, self.calibration.source_baseline)
        except InterventionError:
            return None

    @property
    def calibration(self) -> SteeringCalibration:
        """What the edge has, and what to aim at: `ratio` times that, at most all of the row."""
        baseline = float(self.told["baseline_attention"])
        return SteeringCalibration(min(1.0, self.settings.ratio * baseline), baseline, self.layer)

    def views(self) -> Iterator[View]:
        """The doses at the one layer, and every layer's curves."""
        told, baseline = self.told, self.calibration.target_baseline
        tokens = named(self.subject, self.encoding.ids)
        reads, is_read = (f"{format_token(tokens[place])!r} ({place})" for place in self.edge)
        yield Data(
            json={
                **{name: self.subject.about[name] for name in ("model_id", "n_layers", "n_heads")},
                **target_json(self.subject, self.target, self.pieces),
                "prompt": self.prompt,
                "tokens": tokens,
                "target_layer": self.layer,
                "edge": self.edge,
                "baseline_p_target": np.exp(told["baseline_target_logprob"]),
                "baseline_attention": baseline,
                "layers": lambda: [
                    {
                        "layer": layer,
                        "baseline_attention": self.response["baseline_attention"].sel(layer=layer),
                        "points": self._points(layer),
                    }
                    for layer in self.response["layer"].values.tolist()
                ],
            }
        )
        yield self._doses(f"{reads} reads {is_read}, mean weight {baseline:.3f}")
        shared: dict[str, Any] = {"x_name": "dose (factor of the weight)", "low": 0.0, "strong": self.layer}
        attention, kl = (self.response[name].transpose("layer", "dose") for name in ("attention", "kl"))
        moved = Lines.of(
            attention,
            f"How much {reads} then reads {is_read}",
            f"thick: layer {self.layer}; dashed: what it would be there without renormalisation",
            **shared,
        )
        linear = Line("if doses were linear", baseline * np.array(moved.x), control=True)
        moved = replace(moved, lines=(*moved.lines, linear))
        answer = Lines.of(kl, "How far the answer moves", f"thick: layer {self.layer}", **shared)
        query, key = (repr(format_token(tokens[place])) for place in self.edge)
        title = f"{self.subject.name}: {query} reads {key} more or less in {format_token(self.prompt)!r}"
        yield from together("steering_dose_response", title, moved, answer)

    def _points(self, layer: int) -> list[dict[str, Any]]:
        """A layer in the fields of candle-mi's example, dose by dose."""
        here = self.response.sel(layer=layer)
        return [
            {
                "scale_factor": dose,
                "attention_level": float(one["attention"]),
                "kl_divergence": float(one["kl"]),
                "target_logit_diff": number(one["logit_diff"]),
                "p_target": number(np.exp(one["target_logprob"])),
            }
            for dose, one in zip(here["dose"].values.tolist(), _each(here, "dose"), strict=True)
        ]

    def _doses(self, edge: str) -> Table:
        """The doses at the one layer, and which of them reaches the aim."""
        calibration, exact = self.calibration, self.exact
        aim, baseline = calibration.source_baseline, calibration.target_baseline
        condition = f"edge {self.edge}"
        curve = DoseResponseCurve.of(self.response, self.layer, sample_id=self.prompt, condition=condition)
        interpolated = curve.scale_for_target(aim)
        changed = [top_changed_json(self.subject, one, "steered_prob") for one in _each(self.told, "dose")]
        told = [
            {**point, "top_changed": most}
            for point, most in zip(self._points(self.layer), changed, strict=True)
        ]

        def most(point: dict[str, Any]) -> str:
            first = point["top_changed"][0]
            return (
                f"{format_token(first['token'])!r} {points(first['steered_prob'] - first['baseline_prob'])}"
            )

        return Table.of(
            told,
            ("dose", "scale_factor", "{:g}x".format),
            ("attention", "attention_level", ".3f"),
            ("if linear", lambda point: point["scale_factor"] * baseline, ".3f"),
            ("KL", "kl_divergence", ".5f"),
            ("logit diff", lambda point: dash(point["target_logit_diff"], "+.4f"), str),
            ("p(target)", lambda point: dash(point["p_target"], ".4f"), str),
            ("changed most", most),
            title=f"{self.subject.name}, layer {self.layer}: {edge}",
            caption=f"to attend {aim:.3f}: {calibration.scale_factor_to_source():.3g}x if doses were linear, "
            f"{_or(interpolated, 'outside these doses')} interpolated, {_or(exact, 'out of reach')} exactly "
            "(rows are renormalised)",
            json={
                "points": told,
                "calibration": {
                    "aim": aim,
                    "scale_factor_linear": calibration.scale_factor_to_source(),
                    "scale_factor_interpolated": interpolated,
                    "scale_factor_exact": exact,
                    "dose_levels_absolute_linear": calibration.dose_levels_absolute,
                    "dose_levels_absolute_exact": calibration.dose_levels_exact,
                },
            },
        )


def _each(part: xr.Dataset, dim: str) -> list[xr.Dataset]:
    """What there is at each place of a dim."""
    return [part.isel({dim: place}) for place in range(part.sizes[dim])]


def _or(factor: float | None, otherwise: str) -> str:
    return otherwise if factor is None else f"{factor:.3g}x"


WORKFLOW = SteeringDoseResponse
