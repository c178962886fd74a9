"""Which heads change their attention to a position when features are exchanged there?

Features of the expected word are suppressed and another's injected at one position, and the weight with which
the prompt's last token attends to it is compared in every head of every layer, at one strength and over a
range.

The null is random features of the same layer that write the same norm, each with the head that changes most
under it: a head that was chosen by looking is compared with heads chosen by looking. That head is then
followed in other texts of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.logits.lens import format_token
from ..claim import Claim
from ..labelled import largest, stacked
from ..settings import ControlSettings, Count, InjectionSettings, Positive, setting
from ..views import Data, Heatmap, Lines, Table, View, together
from .workflow import ExchangeWorkflow

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["AttentionRouting", "AttentionRoutingSettings", "top_heads"]

TOP = 20
"""Heads listed."""


@dataclass(frozen=True)
class AttentionRoutingSettings(ControlSettings, InjectionSettings):
    """Settings; empty ones are the preset's."""

    site: str = setting("", "where features are exchanged: a token of the prompt, or its position")
    max_strength: Positive = setting(20.0, "end of the range of strengths")
    steps: Count = setting(12, "strengths in the range, evenly spaced up to its end")


class AttentionRouting(ExchangeWorkflow):
    """The attention of all heads from the end to the site, with features exchanged at the site."""

    name = "attention_routing"
    question = "Which heads attend elsewhere when features at a token are exchanged?"
    needs = "attention"
    settings_type = AttentionRoutingSettings
    settings: AttentionRoutingSettings
    every_position = False
    words = ()
    with_attention = True
    with_ending = False

    @property
    def range(self) -> list[float]:
        """The range of strengths."""
        steps = self.settings.steps
        return [step * self.settings.max_strength / steps for step in range(1, steps + 1)]

    def strengths(self) -> tuple[float, ...]:
        """The one strength and the range, ascending."""
        return tuple(sorted({self.exchange.strength, *self.range}))

    def views(self) -> Iterator[View]:
        """The claims, the heads that change most at the one strength, all heads, and the range of
        strengths."""
        yield from self.opening()
        exchange, strength, swept = self.exchange, self.exchange.strength, self.sweep.isel(place=0)
        change = swept["attention"] - swept["baseline_attention"]
        change = change.assign_attrs(units="1", long_name="change of attention weight")
        total = abs(change).sum(("layer", "head"))
        rows = top_heads(swept.sel(strength=strength), None)
        (layer, head), injected = self.head, self.labels.short(exchange.inject)
        query, key = map(exchange.token_label, (exchange.last, exchange.required_site))
        yield Data(json=self._about() | {"head_deltas": _by_layer(rows), "top_heads": rows[:TOP]})
        yield Table.of(
            rows[:10],
            ("layer", "layer", "d"),
            ("head", "head", "d"),
            ("untouched", "baseline_attn", ".4f"),
            ("steered", "steered_attn", ".4f"),
            ("change", "delta", "+.4f"),
            title=f"{exchange.heading}: {query} looking at {key} while {injected} is injected there, "
            f"strength {strength:g}",
            caption=f"sum of |change| over all heads and layers: {float(total.sel(strength=strength)):.4f}",
        )
        by_head = Heatmap.of(
            change.sel(strength=strength),
            "Change of the edge's weight, by head",
            f"strength {strength:g}; framed: layer {layer}, head {head}, {rows[0]['delta']:+.4f}",
            diverging=True,
            framed=((layer, head) * 2,),
            frame_name="moves most",
        )
        curves = {
            "sum of |change|, all heads": total,
            f"layer {layer}, head {head}": change.isel(layer=layer, head=head),
        }
        both = stacked("heads", curves).sel(strength=self.range)
        points = [
            {"strength": strength, "top_head_delta": top, "total_routing_shift": shift}
            for strength, shift, top in zip(self.range, *both.values, strict=True)
        ]
        by_strength = Lines.of(
            both, "The same by strength", y_name="change of weight", json={"strength_sweep": points}
        )
        query, key = (format_token(exchange.tokens[i]) for i in (exchange.last, exchange.required_site))
        title = f"How injected features move {query!r} looking at {key!r} in {self.subject.name}"
        yield from together("attention_routing", title, by_head, by_strength)

    @property
    def head(self) -> tuple[int, int]:
        """Layer and head whose weight changes most at the one strength."""
        (top,) = top_heads(self.sweep.isel(place=0).sel(strength=self.exchange.strength), 1)
        return top["layer"], top["head"]

    def claims(self) -> Iterator[Claim]:
        """The head that changes most, all heads together, and that head in other texts of the kind."""
        exchange, (layer, head), change = self.exchange, self.head, _changes(self.result("controls"))
        injected = f"{self.labels.short(exchange.inject)} injected at {exchange.site_label}"
        cause = f"{injected} moves the end's attention to it"
        most, total = abs(change).max(("layer", "head")).values, abs(change).sum(("layer", "head")).values
        yield self.claim_here(most, f"{cause}, most of all heads layer {layer} head {head}: |change|")
        yield self.claim_here(total, f"{cause}: sum of |change| over all heads")
        if exchange.held_out:
            direction = np.sign(change.isel(place=0, exchange=0, layer=layer, head=head).item())
            there = _changes(self.result("held_out")).isel(layer=layer, head=head).values * direction
            yield self.held_out_claim(
                there, f"layer {layer} head {head} moves as it did here in {exchange.kin.where}"
            )

    def _about(self) -> dict[str, Any]:
        """Settings and sizes, under the names of candle-mi's example."""
        exchange = self.exchange
        return {
            **{name: self.subject.about[name] for name in ("n_layers", "n_heads")},
            "model_id": self.subject.files.name,
            "clt_repo": self.preset.dictionary,
            "prompt": self.preset.prompt,
            "feature": self.labels.json(exchange.inject),
            "suppress_features": list(map(self.labels.json, exchange.suppress)),
            "strength": exchange.strength,
            "planning_site": exchange.required_site,
            "output_position": exchange.last,
        }


def _changes(result: xr.Dataset) -> xr.DataArray:
    """Change of the attention from the end to the place, [place, exchange, layer, head]."""
    change = result["attention"].isel(strength=0) - result["baseline_attention"]
    return change.transpose("place", "exchange", "layer", "head")


def top_heads(sweep: xr.Dataset, count: int | None = TOP) -> list[dict[str, Any]]:
    """Heads by |change| of their weight, largest first; equal ones in order of layer and head.

    sweep: attention and baseline_attention [layer, head]. count: how many; None for all.
    """
    changed = sweep.assign(delta=sweep["attention"] - sweep["baseline_attention"])
    columns = {"baseline_attn": "baseline_attention", "steered_attn": "attention", "delta": "delta"}
    return largest(changed, abs(changed["delta"]).transpose("layer", "head"), count, **columns)


def _by_layer(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The heads of each layer, in order."""
    ordered = sorted(rows, key=lambda row: (row["layer"], row["head"]))
    return [list(heads) for _, heads in groupby(ordered, key=lambda row: row["layer"])]
