"""How does the answer change with the weight of one attention edge? Dose-response of attention.

The attention weight of one edge (query, key) is multiplied by several factors ("doses") inside the forward
pass, and each row is renormalised (stages/causal/steering.py). Measured are the resulting attention weight
and the last position's prediction. A calibration gives the factor that reaches a target attention weight:
assuming linearity, interpolated on the measured curve, and exactly.

Null distribution of the claims: the largest dose of the other edges of the same query whose attention weights
are nearest. Default edge: the query is the last token; layer and key are those, by role, whose scaling has
the largest mean KL on other shipped facts (material/edge_choice.py), with the ones with the smallest for
comparison; the target is twice its attention weight. Every other layer is run for comparison. Of a target of
several tokens, logits are those of its first token, and the probability is that of all of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.draws import AtOnce
from ...stages.causal.steering import (
    DOSE_LEVELS,
    DoseResponse,
    DoseResponseCurve,
    SteeringCalibration,
    exact_factor,
)
from ...stages.logits.lens import format_text, format_token
from ...store.arrays import Floats
from ...store.errors import InterventionError
from ..claim import CandidateEffects, Claim
from ..labelled import records
from ..material.answers import target_json, top_changed_json
from ..material.edge_choice import ROLES, EdgeWorkflow, Indices
from ..settings import ChosenEdgeSettings, Count, Positive, setting
from ..views import Data, Line, Lines, Table, View, dash, points, together
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.hooks.edge_interventions import Edge
    from ...stages.forward.runs.experiment import Experiment

__all__ = ["SteeringDoseResponseSettings", "SteeringDoseResponse"]

NEAREST = 6
"""Number of control edges in each other fact: those with the nearest attention weights."""


@dataclass(frozen=True)
class SteeringDoseResponseSettings(ChosenEdgeSettings):
    """Settings of the workflow `steering_dose_response`: the attention edge, and the factors of its
    weight."""

    doses: tuple[float, ...] = setting(
        DOSE_LEVELS, "factors that the attention weight of the edge is multiplied by"
    )
    ratio: Positive = setting(2.0, "target attention weight, as a multiple of the edge's own")
    window: Count = setting(1, "number of consecutive layers steered together")
    sweep: bool = setting(True, "show every layer that is steered; false: only the selected one")


class SteeringDoseResponse(EdgeWorkflow):
    """Workflow that multiplies the weight of one attention edge by several factors (doses), in one layer at a
    time."""

    name = "steering_dose_response"
    question = "How does the answer change with the weight of one attention edge?"
    needs = "attention"
    settings_type = SteeringDoseResponseSettings
    settings: SteeringDoseResponseSettings

    rule = "kind of key whose edge, scaled by the largest dose, changes"
    beside = "other (layer, key) edges of each prompt with the nearest attention weights"

    def plan(self) -> Nodes:
        """Nodes that scale candidate edges by every dose, and controls and edges of other facts by the
        largest dose."""
        settings = self.settings
        shared = self.read_edge(settings.window) | {"window": settings.window}
        layers = None if settings.sweep or settings.layer is None else (settings.layer,)
        responses = [
            DoseResponse(edges=((self.query, key),), doses=settings.doses, layers=layers, **shared)
            for key in self.keys
        ]
        for response in responses:
            response.cells(self.subject.config)  # raises for wrong settings before anything runs
        nodes = {"response": self.by_key(responses)}
        if not settings.controls:
            return nodes
        controls = tuple(
            # Controls need KL and logits, not the most changed tokens.
            DoseResponse(edges=((self.query, key),), doses=(max(settings.doses),), **shared | {"top_k": 1})
            for key in range(self.query + 1)
        )
        self.only_claims = ("controls",)
        return {**nodes, "controls": self.on_model(AtOnce(controls)), **self.facts_node()}

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[Edge]) -> list[Experiment]:
        """Experiments on another fact that scale each edge by the largest dose, in every layer."""
        settings = self.settings
        return [
            DoseResponse(tokens, (edge,), doses=(max(settings.doses),), window=settings.window, top_k=1)
            for edge in edges
        ]

    @cached_property
    def response(self) -> xr.Dataset:
        """Result of scaling the selected edge by every dose, in every displayed layer, [layer, dose], in
        memory."""
        response = self.at_key("response", self.edge[1])
        return response if self.settings.sweep else response.sel(layer=[self.layer])

    def lost_here(self, key: int) -> Floats:
        """KL by layer when the edge to one key of the displayed prompt is scaled by the largest dose, in
        nats, [layer]; NaN for layers that are not steered."""
        largest_dose = int(np.argmax(self.settings.doses))
        kl = self.at_key("response", key)["kl"].isel(dose=largest_dose)
        by_layer: Floats = np.full(self.last_layer + 1, np.nan)
        by_layer[kl["layer"].values] = kl.values
        return by_layer

    @cached_property
    def strongest(self) -> xr.Dataset:
        """Result of scaling every edge of the query by the largest dose, in every layer, [key, layer]."""
        return self.result("controls").load().isel(dose=0).rename(draw="key")

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """Claim about scaling one edge of the displayed prompt by the largest dose, compared with edges of
        the same query that have the nearest attention weights; see `PlaceWorkflow` for the arguments."""
        effects, weights = (
            self.strongest[name].transpose("key", "layer").values.ravel()
            for name in (measure, "baseline_attention")
        )
        cell = key * self.strongest.sizes["layer"] + layer
        distance = weight_distance(weights, cell)
        # The edge itself is at distance inf, and so comes last.
        near = np.argsort(distance, kind="stable")[: min(self.settings.controls, len(distance) - 1)]
        low, high = weights[near].min(), weights[near].max()
        attention = f"({low:.2g} to {high:.2g}; this edge {weights[cell]:.2g})"
        of = f"other edges of this query with the nearest attention weights {attention}"
        return Claim.against(text, effects[cell], effects[near], of, **fields)

    def doing(self, query: str, key: str, layer: int) -> str:
        """Intervention on an edge in words, as claims begin: "scaling the last token's attention to … in
        layer 3 by 6"."""
        return f"scaling {query}'s attention to {key} in layer {layer} by {max(self.settings.doses):g}"

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """KL in nats when the edge of each layer and role is scaled in other facts, [fact, layer, role]; its
        controls are the NEAREST edges of the same fact by attention weight. See `PlaceWorkflow` for the
        arguments."""
        lost, weights = map(self.measured_on_facts, ("kl", "baseline_attention"))
        flat, weights = (values[scored].reshape(len(scored), -1) for values in (lost, weights))
        near = [
            np.argsort(weight_distance(weights, edge), axis=1, kind="stable") for edge in range(flat.shape[1])
        ]
        controls = [np.take_along_axis(flat, order[:, :NEAREST], axis=1) for order in near]
        return CandidateEffects(
            # Edges of roles come first; the random keys after them are controls, never candidates.
            lost[chosen_on][..., : len(ROLES)],
            lost[scored],
            np.stack(controls, axis=-1).reshape(len(scored), -1, *lost.shape[1:]),
        )

    @property
    def selected(self) -> xr.Dataset:
        """Result of scaling the selected edge in the selected layer, [dose]."""
        return self.response.sel(layer=self.layer)

    @property
    def exact(self) -> float | None:
        """Dose at which the mean attention weight over heads is exactly the target weight; None if no dose
        reaches it, or if several layers are steered."""
        # With a window the layers above the first have changed inputs, and no closed form.
        if self.settings.window > 1:
            return None
        try:
            return exact_factor(
                self.selected["baseline_head_attention"].values, self.calibration.source_baseline
            )
        except InterventionError:
            return None

    @property
    def calibration(self) -> SteeringCalibration:
        """Attention weight of the edge, and the target weight: settings.ratio times as much, at most 1."""
        baseline = float(self.selected["baseline_attention"])
        return SteeringCalibration(min(1.0, self.settings.ratio * baseline), baseline, self.layer)

    def views(self) -> Iterator[View]:
        """Views in reading order: table of the doses in the selected layer, and curves of attention weight
        and KL in every layer."""
        selected, baseline = self.selected, self.calibration.target_baseline
        reads, is_read = map(self.token_label, self.edge)
        yield Data(
            json={
                **self.choice_json(),
                **{name: self.subject.about[name] for name in ("model_id", "n_layers", "n_heads")},
                **target_json(self.subject, self.target, self.pieces),
                "prompt": self.prompt,
                "tokens": self.subject.token_texts(self.encoding.ids),
                "target_layer": self.layer,
                "edge": self.edge,
                "baseline_p_target": np.exp(selected["baseline_target_logprob"]),
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
        yield self._doses(f"attention of {reads} to {is_read}, mean weight {baseline:.3f}")
        shared: dict[str, Any] = {"x_name": "dose (factor of the weight)", "low": 0.0, "strong": self.layer}
        attention, kl = (self.response[name].transpose("layer", "dose") for name in ("attention", "kl"))
        weights = Lines.of(
            attention,
            f"Attention of {reads} to {is_read} by dose",
            "x: dose, the factor of one attention weight, that of an edge from query to key. y: the weight "
            "after multiplication and renormalisation, mean over heads. One curve per layer; thick: layer "
            f"{self.layer}. Dashed: that layer's weight times the dose, without renormalisation of the "
            "attention row.",
            **shared,
        )
        linear = Line("without renormalisation", baseline * np.array(weights.x), control=True)
        weights = replace(weights, lines=(*weights.lines, linear))
        answer = Lines.of(
            kl,
            "Effect on the next-token distribution",
            "x: dose. y: KL(unchanged run || steered run) of the next-token distribution, in nats. One curve "
            f"per layer; thick: layer {self.layer}.",
            **shared,
        )
        query, key = map(repr, self.subject.token_labels(self.encoding.ids[place] for place in self.edge))
        title = f"{self.subject.name}: attention of {query} to {key} scaled in '{format_text(self.prompt)}'"
        beside = [self.findings]
        yield from together("steering_dose_response", title, weights, answer, beside=beside, columns=2)

    def _points(self, layer: int) -> list[dict[str, Any]]:
        """JSON records of one layer, one per dose, in the fields of candle-mi's example."""
        in_layer = self.response.sel(layer=layer)
        columns = {
            "scale_factor": "dose",
            "attention_level": "attention",
            "kl_divergence": "kl",
            "target_logit_diff": "logit_diff",
            "p_target": "p_target",
        }
        return records(in_layer.assign(p_target=np.exp(in_layer["target_logprob"])), "dose", **columns)

    def _doses(self, edge: str) -> Table:
        """Table of the doses in the selected layer; the caption gives the factor that reaches the target
        weight."""
        calibration, exact = self.calibration, self.exact
        aim, baseline = calibration.source_baseline, calibration.target_baseline
        condition = f"edge {self.edge}"
        curve = DoseResponseCurve.of(self.response, self.layer, sample_id=self.prompt, condition=condition)
        interpolated = curve.scale_for_target(aim)
        changed = [
            top_changed_json(self.subject, self.selected.isel(dose=i), "steered_prob")
            for i in range(self.selected.sizes["dose"])
        ]
        rows = [
            {**point, "top_changed": tokens}
            for point, tokens in zip(self._points(self.layer), changed, strict=True)
        ]

        def most_changed(point: dict[str, Any]) -> str:
            top = point["top_changed"][0]
            return f"'{format_token(top['token'])}' {points(top['steered_prob'] - top['baseline_prob'])}"

        return Table.of(
            rows,
            ("dose", "scale_factor", "{:g}x".format),
            ("attention", "attention_level", ".3f"),
            ("if linear", lambda point: point["scale_factor"] * baseline, ".3f"),
            ("KL", "kl_divergence", ".5f"),
            ("logit diff", lambda point: dash(point["target_logit_diff"], "+.4f"), str),
            ("p(target)", lambda point: dash(point["p_target"], ".4f"), str),
            ("changed most", most_changed),
            title=f"{self.subject.name}, layer {self.layer}: {edge}",
            caption="One row per dose: the attention weight of the edge is multiplied by it in all heads, "
            "and the attention row renormalised. Attention: resulting weight. If linear: without "
            "renormalisation. KL: of the next-token distribution from that of the unchanged run, in nats. "
            "Logit diff: target logit of the unchanged run minus that of the steered run. Dose for a weight "
            f"of {aim:.3f}: {calibration.scale_factor_to_source():.3g}x if weights were linear in the dose; "
            f"{_or(interpolated, 'outside these doses')} interpolated between the rows; "
            f"{_or(exact, 'out of reach')} exactly.",
            json={
                "points": rows,
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


def _or(factor: float | None, otherwise: str) -> str:
    """A factor as text, "1.5x"; `otherwise` for None."""
    return otherwise if factor is None else f"{factor:.3g}x"


def weight_distance(weights: Floats, edge: int) -> Floats:
    """Distance |ln ratio| of each attention weight from that of one edge, [..., edge]; inf for this edge
    itself.

    Arguments:
        weights: attention weights, [..., edge].
        edge: index of the edge.
    """
    # ln 0 is -inf, and a weight of 0 cannot be scaled: clipped, it is farther than all that can be.
    log_weights = np.log(np.maximum(weights, 1e-12))
    distance: Floats = np.abs(log_weights - log_weights[..., [edge]])
    distance[..., edge] = np.inf
    return distance
