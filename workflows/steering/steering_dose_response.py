"""How does the answer change with the weight of one attention edge? Dose-response of attention.

Multiplies the weight of one attention edge by several doses, inside the pass and renormalised
(stages/causal/steering.py), and measures the attention that comes of it and what the last position
predicts. A calibration says which factor reaches a wanted attention: read linearly, interpolated on the
measured curve, and exactly.

The strongest dose stands beside the same dose of other edges of the same query: those whose attention is
most alike. Defaults: the last token's edge, in all heads, whose layer and kind of key move other shipped
facts most at that dose (material/edge_choice.py), beside the one that moves them least, and twice its
attention as the aim; every other layer is run for comparison. A target of several tokens is followed by its
first piece (logits) and by all of them (probability), never by its last.
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
from ..material.answers import named, target_json, top_changed_json
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
"""Number of control edges in each other fact."""


@dataclass(frozen=True)
class SteeringDoseResponseSettings(ChosenEdgeSettings):
    """What `--set` can change."""

    doses: tuple[float, ...] = setting(DOSE_LEVELS, "factors of the edge's weight")
    ratio: Positive = setting(2.0, "attention to aim at, as a multiple of what the edge has")
    window: Count = setting(1, "layers steered together, from each layer on")
    sweep: bool = setting(True, "show every layer that is steered, and not only the selected one")


class SteeringDoseResponse(EdgeWorkflow):
    """One edge at several doses."""

    name = "steering_dose_response"
    question = "How does the answer change with the weight of one attention edge?"
    needs = "attention"
    settings_type = SteeringDoseResponseSettings
    settings: SteeringDoseResponseSettings

    rule = "kind of key whose edge, at the strongest dose,"
    beside = "other (layer, key) edges of each prompt, nearest in attention"

    def plan(self) -> Nodes:
        """Candidate edges at every dose, in one layer or in each; all edges at the largest dose."""
        given = self.settings
        shared = self.read_edge(given.window) | {"window": given.window}
        layers = None if given.sweep or given.layer is None else (given.layer,)
        asked = tuple(
            DoseResponse(edges=((self.query, key),), doses=given.doses, layers=layers, **shared)
            for key in self.keys
        )
        for each in asked:
            each.cells(self.subject.config)  # refuse wrong settings now, before anything runs
        nodes = {"response": self.on_model(asked[0] if len(asked) == 1 else AtOnce(asked))}
        if not given.controls:
            return nodes
        others = tuple(
            DoseResponse(edges=((self.query, key),), doses=(max(given.doses),), **shared | {"top_k": 1})
            for key in range(self.query + 1)
        )
        self.only_claims = ("controls",)
        return {**nodes, "controls": self.on_model(AtOnce(others)), **self.facts_node()}

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[Edge]) -> list[Experiment]:
        """The strongest dose of each edge."""
        given = self.settings
        return [
            DoseResponse(tokens, (edge,), doses=(max(given.doses),), window=given.window, top_k=1)
            for edge in edges
        ]

    @cached_property
    def response(self) -> xr.Dataset:
        """The edge in every layer that is shown, at every dose, [layer, dose]."""
        found = self.result("response").load()
        if "draw" in found.dims:
            found = found.isel(draw=self.keys.index(self.edge[1]))
        return found if self.settings.sweep else found.sel(layer=[self.layer])

    def lost_here(self, key: int) -> Floats:
        """See `PlaceWorkflow`: of one edge at the strongest dose, [layer]; NaN where it is not steered."""
        found = self.result("response").load()
        if "draw" in found.dims:
            found = found.isel(draw=self.keys.index(key))
        at_most = found["kl"].isel(dose=int(np.argmax(self.settings.doses)))
        lost: Floats = np.full(self.last_layer + 1, np.nan)
        lost[at_most["layer"].values] = at_most.values
        return lost

    @cached_property
    def strongest(self) -> xr.Dataset:
        """Every edge of the query in every layer at the strongest dose, [key, layer]."""
        return self.result("controls").load().isel(dose=0).rename(draw="key")

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """What the strongest dose does to one edge, beside edges with as much attention."""
        effects, weights = (
            self.strongest[name].transpose("key", "layer").values.ravel()
            for name in (measure, "baseline_attention")
        )
        own = key * self.strongest.sizes["layer"] + layer
        apart = unlike(weights, own)
        near = np.argsort(apart, kind="stable")[: min(self.settings.controls, len(apart) - 1)]
        low, high = weights[near].min(), weights[near].max()
        attention = f"({low:.2g} to {high:.2g}, here {weights[own]:.2g})"
        of = f"other edges of this query, nearest in attention {attention}"
        return Claim.against(text, effects[own], effects[near], of, **fields)

    def doing(self, query: str, key: str, layer: int) -> str:
        """Scaling by the strongest dose."""
        return f"scaling {query}'s attention to {key} in layer {layer} by {max(self.settings.doses):g}"

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """See `PlaceWorkflow`; beside the edges of each fact whose attention is most like that of the edge
        chosen."""
        lost, weights = map(self.measured_on_facts, ("kl", "baseline_attention"))
        flat, weights = (each[scored].reshape(len(scored), -1) for each in (lost, weights))
        near = [np.argsort(unlike(weights, own), axis=1, kind="stable") for own in range(flat.shape[1])]
        controls = [np.take_along_axis(flat, order[:, :NEAREST], axis=1) for order in near]
        return CandidateEffects(
            lost[chosen_on][..., : len(ROLES)],
            lost[scored],
            np.stack(controls, axis=-1).reshape(len(scored), -1, *lost.shape[1:]),
        )

    @property
    def selected(self) -> xr.Dataset:
        """Dose-response of the selected edge in the selected layer, [dose]."""
        return self.response.sel(layer=self.layer)

    @property
    def exact(self) -> float | None:
        """Factor that takes the mean over heads exactly to the aim; None if no factor does, or if several
        layers are steered, as those above the first then have other inputs."""
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
        """Attention weight of the edge and the weight to aim at: `ratio` times as much, at most 1."""
        baseline = float(self.selected["baseline_attention"])
        return SteeringCalibration(min(1.0, self.settings.ratio * baseline), baseline, self.layer)

    def views(self) -> Iterator[View]:
        """What is claimed; the doses at the one layer, and every layer's curves."""
        selected, baseline = self.selected, self.calibration.target_baseline
        tokens = named(self.subject, self.encoding.ids)
        reads, is_read = (f"'{format_token(tokens[place])}' ({place})" for place in self.edge)
        yield Data(
            json={
                **self.choice_json(),
                **{name: self.subject.about[name] for name in ("model_id", "n_layers", "n_heads")},
                **target_json(self.subject, self.target, self.pieces),
                "prompt": self.prompt,
                "tokens": tokens,
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
        title = f"{self.subject.name}: {query} reads {key} more or less in '{format_text(self.prompt)}'"
        beside = [self.findings]
        yield from together("steering_dose_response", title, moved, answer, beside=beside, columns=2)

    def _points(self, layer: int) -> list[dict[str, Any]]:
        """A layer in the fields of candle-mi's example, dose by dose."""
        here = self.response.sel(layer=layer)
        columns = {
            "scale_factor": "dose",
            "attention_level": "attention",
            "kl_divergence": "kl",
            "target_logit_diff": "logit_diff",
            "p_target": "p_target",
        }
        return records(here.assign(p_target=np.exp(here["target_logprob"])), "dose", **columns)

    def _doses(self, edge: str) -> Table:
        """Table of the doses in the selected layer; the caption says which factor reaches the aim."""
        calibration, exact = self.calibration, self.exact
        aim, baseline = calibration.source_baseline, calibration.target_baseline
        condition = f"edge {self.edge}"
        curve = DoseResponseCurve.of(self.response, self.layer, sample_id=self.prompt, condition=condition)
        interpolated = curve.scale_for_target(aim)
        changed = [
            top_changed_json(self.subject, one, "steered_prob") for one in _each(self.selected, "dose")
        ]
        rows = [
            {**point, "top_changed": most}
            for point, most in zip(self._points(self.layer), changed, strict=True)
        ]

        def most(point: dict[str, Any]) -> str:
            first = point["top_changed"][0]
            return (
                f"'{format_token(first['token'])}' {points(first['steered_prob'] - first['baseline_prob'])}"
            )

        return Table.of(
            rows,
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


def _each(part: xr.Dataset, dim: str) -> list[xr.Dataset]:
    """Datasets along a dim, one for each of its positions."""
    return [part.isel({dim: place}) for place in range(part.sizes[dim])]


def _or(factor: float | None, otherwise: str) -> str:
    return otherwise if factor is None else f"{factor:.3g}x"


def unlike(weights: Floats, own: int) -> Floats:
    """How far each weight [..., edge] is from that of one edge, as |ln ratio|; that edge is the farthest."""
    # A weight of zero has no logarithm, and cannot be scaled either: farther than all that can.
    known = np.log(np.maximum(weights, 1e-12))
    apart: Floats = np.abs(known - known[..., [own]])
    apart[..., own] = np.inf
    return apart
