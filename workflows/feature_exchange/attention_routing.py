"""Which heads change their attention to a position when features are exchanged there?

Features of the expected word are suppressed and one of another word is injected at one position. The last
token's attention to that position is measured in every head of every layer, at one strength and over a range.

The null distribution is random features of the same layer with the same norm of their write. As the head is
chosen on this prompt, the largest change over heads is compared with the largest change over heads under each
random feature. The chosen head is then measured in held-out texts of the same kind.
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
"""Number of heads listed in the JSON document."""


@dataclass(frozen=True)
class AttentionRoutingSettings(ControlSettings, InjectionSettings):
    """Settings of the workflow `attention_routing`; empty ones are taken from the preset."""

    site: str = setting("", "position at which features are exchanged: a token of the prompt, or an index")
    max_strength: Positive = setting(20.0, "largest strength of the range")
    steps: Count = setting(12, "number of strengths in the range, evenly spaced up to the largest")


class AttentionRouting(ExchangeWorkflow):
    """Workflow that exchanges features at one token and measures the last token's attention to it in every
    head."""

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
        """Strengths at which the exchange is run for the curves, ascending."""
        steps = self.settings.steps
        return [step * self.settings.max_strength / steps for step in range(1, steps + 1)]

    def strengths(self) -> tuple[float, ...]:
        """All strengths of the exchange, for the claim and the curves, ascending."""
        return tuple(sorted({self.exchange.strength, *self.range}))

    def views(self) -> Iterator[View]:
        """Views in reading order: the exchange, the heads with the largest changes, a heatmap of all heads,
        and curves by strength."""
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
            ("baseline", "baseline_attn", ".4f"),
            ("steered", "steered_attn", ".4f"),
            ("change", "delta", "+.4f"),
            title=f"{exchange.heading}: attention of {query} to {key} with {injected} injected there, "
            f"strength {strength:g}",
            caption="One row per head: those with the largest change. Baseline, steered: attention weight of "
            "the last token on one position, without and with the exchange of features there. Change: "
            "steered minus baseline. Sum of |change| over all heads and layers: "
            f"{float(total.sel(strength=strength)):.4f}.",
        )
        by_head = Heatmap.of(
            change.sel(strength=strength),
            "Change of the attention weight by head",
            "Each cell: attention weight from the last token to the position of the exchange in one head "
            f"(column) of one layer (row), with an exchange of strength {strength:g} minus without. Framed: "
            f"the largest change, {rows[0]['delta']:+.4f} in layer {layer}, head {head}.",
            diverging=True,
            framed=((layer, head, layer, head),),
            frame_name="largest change",
        )
        curves = {
            "sum of |change|, all heads": total,
            f"layer {layer}, head {head}": change.isel(layer=layer, head=head),
        }
        by_heads = stacked("heads", curves).sel(strength=self.range)
        points = [
            {"strength": strength, "top_head_delta": top, "total_routing_shift": shift}
            for strength, shift, top in zip(self.range, *by_heads.values, strict=True)
        ]
        by_strength = Lines.of(
            by_heads,
            "Change of attention by strength",
            "x: strength of the exchange of features. y: the last token's attention weight on the position "
            "of the exchange, with the exchange minus without. Curves: the sum of absolute values over all "
            "heads, and the head with the largest change.",
            y_name="change of weight",
            json={"strength_sweep": points},
        )
        query, key = (format_token(exchange.tokens[i]) for i in (exchange.last, exchange.required_site))
        title = f"Attention of {query!r} to {key!r} with features injected, in {self.subject.name}"
        yield from together("attention_routing", title, by_head, by_strength)

    @property
    def head(self) -> tuple[int, int]:
        """(layer, head) with the largest absolute change of attention at the strength of the claim."""
        (top,) = top_heads(self.sweep.isel(place=0).sel(strength=self.exchange.strength), 1)
        return top["layer"], top["head"]

    def claims(self) -> Iterator[Claim]:
        """Claims about the head with the largest change, the sum over all heads, and that head in held-out
        texts."""
        exchange, (layer, head), change = self.exchange, self.head, _changes(self.result("controls"))
        injected = f"injecting {self.labels.short(exchange.inject)} at {exchange.site_label}"
        cause = f"{injected} changes the last token's attention to it"
        largest_change, total = (
            abs(change).max(("layer", "head")).values,
            abs(change).sum(("layer", "head")).values,
        )
        text = f"{cause}, most in head {head} of layer {layer} (|change|, largest over heads)"
        yield self.claim_here(largest_change, text)
        yield self.claim_here(total, f"{cause} (sum of |change| over all heads)")
        if exchange.held_out:
            # Signed by the change in this prompt: a head that changes the other way does not confirm it.
            direction = np.sign(change.isel(place=0, exchange=0, layer=layer, head=head).item())
            held_out = _changes(self.result("held_out")).isel(layer=layer, head=head).values * direction
            text = f"the same injection changes head {head} of layer {layer} in the same direction in"
            yield self.held_out_claim(held_out, f"{text} {exchange.kin.where}")

    def _about(self) -> dict[str, Any]:
        """Settings and sizes for the JSON document, under the names of candle-mi's example."""
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
    """Change of the last token's attention to the position at which features are exchanged, [place, exchange,
    layer, head]."""
    change = result["attention"].isel(strength=0) - result["baseline_attention"]
    return change.transpose("place", "exchange", "layer", "head")


def top_heads(sweep: xr.Dataset, count: int | None = TOP) -> list[dict[str, Any]]:
    """Records of heads by the absolute change of their attention weight, largest first; ties by layer and
    head.

    Arguments:
        sweep: with variables attention and baseline_attention, [layer, head].
        count: number of heads; None for all.
    """
    changed = sweep.assign(delta=sweep["attention"] - sweep["baseline_attention"])
    columns = {"baseline_attn": "baseline_attention", "steered_attn": "attention", "delta": "delta"}
    return largest(changed, abs(changed["delta"]).transpose("layer", "head"), count, **columns)


def _by_layer(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Records of heads grouped by layer, both in ascending order."""
    ordered = sorted(rows, key=lambda row: (row["layer"], row["head"]))
    return [list(heads) for _, heads in groupby(ordered, key=lambda row: row["layer"])]
