"""Which heads look elsewhere when features are exchanged where they look?

Features of the expected word are suppressed and another's injected at one position, and the weight with
which the prompt's last token attends to it is compared in every head of every layer, at one strength and
over a range (stages/features/effects/sweeps.py). What any change of that size does to the weights is its
null: random features of the same layer that write as much, each with the head that moves most under it, so
that a head chosen by looking is held against heads chosen by looking. That head is then followed in other
texts of the same kind (material/feature_controls.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.logits.lens import format_token
from ..material.exchange_views import (
    ExchangeWorkflow,
    features_table,
    finding,
    held_out_finding,
    site_told,
)
from ..material.feature_controls import FeatureControls
from ..material.feature_injection import Planned
from ..material.feature_presets import chosen_preset
from ..settings import ControlSettings, Count, InjectionSettings, Positive, setting
from ..views import Data, Finding, Findings, Heatmap, Lines, Table, View, together
from ..workflow import loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.model import Model

__all__ = ["AttentionRouting", "AttentionRoutingSettings", "top_heads"]

TOP = 20
"""Heads listed."""


@dataclass(frozen=True)
class AttentionRoutingSettings(ControlSettings, InjectionSettings):
    """What `--set` can change; what is left empty is the preset's."""

    site: str = setting("", "where features are exchanged: a token of the prompt, or its position")
    max_strength: Positive = setting(20.0, "end of the range of strengths")
    steps: Count = setting(12, "strengths in the range, evenly spaced up to its end")


class AttentionRouting(ExchangeWorkflow):
    """One edge, all heads, with features exchanged at its source."""

    name = "attention_routing"
    question = "Which heads look elsewhere when features are exchanged where they look?"
    needs = "attention"
    settings_type = AttentionRoutingSettings
    settings: AttentionRoutingSettings

    sweep = loaded("sweep")
    """At the one position, [strength, position, layer, head]."""

    def __init__(self, settings: AttentionRoutingSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = chosen_preset(settings)
        self.planned = planned = Planned(preset, model, settings)
        planned.subject.require(self.needs, self.name)
        self.strength = preset.strength
        self.range = [step * settings.max_strength / settings.steps for step in range(1, settings.steps + 1)]
        strengths = tuple(sorted({self.strength, *self.range}))
        place: dict[str, Any] = {"positions": (planned.site,), "edge": (planned.last, planned.site)}
        self.controls = FeatureControls(
            planned, planned.doses, preset.strength, (), settings, preset.looked_at, edge=True
        )
        sweep = planned.sweep(planned.doses, strengths, (), **place)
        self.nodes = {"sweep": sweep, **self.controls.nodes}

    def views(self) -> Iterator[View]:
        """The heads that move most at the one strength, all heads, and the range of strengths."""
        import xarray as xr

        planned, strength, swept = self.planned, self.strength, self.sweep.isel(position=0)
        change = swept["attention"] - swept["baseline_attention"]
        change = change.assign_attrs(units="1", long_name="change of attention weight")
        here, moved = change.sel(strength=strength), abs(change).sum(("layer", "head"))
        rows = top_heads(swept.sel(strength=strength), None)
        layer, head = rows[0]["layer"], rows[0]["head"]
        query, key = (format_token(planned.tokens[place]) for place in (planned.last, planned.site))
        yield Findings.of(*self._findings(layer, head), caption=planned.preset.found)
        yield features_table(self.controls, self.labels)
        yield Data(json=self._about() | {"head_deltas": _by_place(rows), "top_heads": rows[:TOP]})
        yield Table.of(
            rows[:10],
            ("layer", "layer", "d"),
            ("head", "head", "d"),
            ("untouched", "baseline_attn", ".4f"),
            ("steered", "steered_attn", ".4f"),
            ("change", "delta", "+.4f"),
            title=f"{planned.heading}: {query!r} ({planned.last}) looking at {key!r} ({planned.site}) while "
            f"{self.labels.short(planned.inject)} is injected there, strength {strength:g}",
            caption=f"sum of |change| over all heads and layers: {float(moved.sel(strength=strength)):.4f}",
        )
        by_head = Heatmap.of(
            here,
            "Change of the edge's weight, by head",
            f"strength {strength:g}; framed: layer {layer}, head {head}, {rows[0]['delta']:+.4f}",
            diverging=True,
            framed=((layer, head) * 2,),
            frame_name="moves most",
        )
        curves: list[xr.DataArray] = [moved, change.isel(layer=layer, head=head)]
        names = ["sum of |change|, all heads", f"layer {layer}, head {head}"]
        both = xr.concat(curves, "heads").assign_coords(heads=names).sel(strength=self.range)
        points = [
            {"strength": one, "top_head_delta": top, "total_routing_shift": total}
            for one, total, top in zip(self.range, *both.values, strict=True)
        ]
        by_strength = Lines.of(
            both, "The same by strength", y_name="change of weight", json={"strength_sweep": points}
        )
        title = f"How injected features move {query!r} looking at {key!r} in {planned.subject.name}"
        yield from together("attention_routing", title, by_head, by_strength)

    def _findings(self, layer: int, head: int) -> Iterator[Finding]:
        """The head that moves most, all heads together, and that head in others of its kind."""
        controls, change = self.controls, _moved(self.result("controls"))
        injected = self.labels.short(self.planned.inject)
        done = f"{injected} injected at {site_told(controls)} moves the end's attention to it"
        most, total = abs(change).max(("layer", "head")).values, abs(change).sum(("layer", "head")).values
        yield finding(controls, most, f"{done}, most of all heads layer {layer} head {head}: |change|")
        yield finding(controls, total, f"{done}: sum of |change| over all heads")
        if controls.held_out:
            way = np.sign(change.isel(place=0, exchange=0, layer=layer, head=head).item())
            there = _moved(self.result("held_out")).isel(layer=layer, head=head).values * way
            claim = f"layer {layer} head {head} moves as it did here in {controls.kin.where}"
            yield held_out_finding(controls, there, claim)

    def _about(self) -> dict[str, Any]:
        """What was asked, in the fields of candle-mi's example."""
        planned = self.planned
        return {
            **{name: planned.subject.about[name] for name in ("n_layers", "n_heads")},
            "model_id": planned.subject.files.name,
            "clt_repo": planned.preset.dictionary,
            "prompt": planned.prompt,
            "feature": self.labels.json(planned.inject),
            "suppress_features": list(map(self.labels.json, planned.suppress)),
            "strength": self.strength,
            "planning_site": planned.site,
            "output_position": planned.last,
        }


def _moved(found: xr.Dataset) -> xr.DataArray:
    """Change of the edge's weight, [place, exchange, layer, head]."""
    return (found["attention"] - found["baseline_attention"]).transpose("place", "exchange", "layer", "head")


def top_heads(sweep: xr.Dataset, count: int | None = TOP) -> list[dict[str, Any]]:
    """Heads by how much their weight on the edge changed, largest first; equal ones in order of layer and
    head.

    sweep: attention and baseline_attention [layer, head].
    """
    after, before = sweep["attention"].values, sweep["baseline_attention"].values
    order = np.argsort(-np.abs(after - before), axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(order, after.shape), strict=True)
    return [
        {
            "layer": int(layer),
            "head": int(head),
            "baseline_attn": float(before[layer, head]),
            "steered_attn": float(after[layer, head]),
            "delta": float(after[layer, head] - before[layer, head]),
        }
        for layer, head in places
    ]


def _by_place(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """A list of heads per layer, in order."""
    ordered = sorted(rows, key=lambda row: (row["layer"], row["head"]))
    return [list(layer) for _, layer in groupby(ordered, key=lambda row: row["layer"])]


WORKFLOW = AttentionRouting
