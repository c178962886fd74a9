"""Which heads carry the difference between two prompts, by gradients, and do exact runs agree?

Attribution patching: one pass back through the corrupted prompt gives an estimate of what every head does at
every position when its clean value is put in (stages/causal/attribution/patching.py), on the scale on which 0
is as corrupted and 100 % as clean by the difference of the two answers' logits. The largest estimates, and as
many cells drawn at random, are then patched exactly.

Defaults: pairs of shipped facts, of which those count that the model knows. Two claims: the cell with the
largest estimate moves the answer when it is patched, beside cells of the same grid drawn at random; and
estimates rank cells as exact runs do, beside estimates shuffled among them. Where attention or norms saturate
first order is wrong, and the worst miss says how much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...stages.causal.attribution.check import LARGEST, PLACE, AttributionCheck
from ...stages.causal.attribution.patching import AttributionPatching
from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.patching_metrics import LogitDifference, Recovery
from ...stages.logits.lens import format_token
from ...store.arrays import Floats
from ..claim import Claim
from ..labelled import records
from ..material.answers import named
from ..settings import Count, require_together, setting
from ..views import Heatmap, Table, View, together
from ..workflow import Nodes, loaded
from .pairs import AttributedPairs, AttributionSettings, pair_json

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AttributionPatchingTrace", "AttributionPatchingTraceSettings"]

HEADS = "heads"
STREAM = "states"
AGREEMENT = ("correlation", "rank_correlation", "worst_miss")
"""Numbers that say how estimates agree with exact runs."""


@dataclass(frozen=True)
class AttributionPatchingTraceSettings(AttributionSettings):
    """What `--set` can change."""

    what: Literal["heads", "states"] = setting(
        HEADS, '"heads" by position (what they have read), or "states" of the stream by position'
    )
    wrong: str = setting("", "what comes next in a corrupted prompt of one's own")
    dropout: bool = setting(False, "whether effects have the size of gradient dropout (AtP*)")
    verify: Count = setting(12, "largest estimates that are run exactly, and as many others at random")

    def __post_init__(self) -> None:
        require_together(self, "prompt", "corrupted", "answer", "wrong")


class AttributionPatchingTrace(AttributedPairs):
    """A grid of estimates of the first pair, and cells of every pair run exactly."""

    name = "attribution_patching"
    question = "Which heads carry the difference between two prompts, by gradients, and do exact runs agree?"
    settings_type = AttributionPatchingTraceSettings
    settings: AttributionPatchingTraceSettings

    grid = loaded("grid")
    """Estimates of the pair shown: recovery [layer, head, position], or [layer, position]."""
    checked = loaded("checked")
    """Cells of every pair, [draw = pair, cell]."""

    def plan(self) -> Nodes:
        """The grid of the first pair, cells of all of them, and which answers the model knows."""
        self.read = self.read_pairs(self.settings.wrong)
        by_head = self.settings.what == HEADS
        kind = self.subject.config.read_kind if by_head else "resid_post"
        self.kind = kind

        def given(number: int) -> dict[str, Any]:
            pair = self.read[number]
            return {
                "clean": pair.clean,
                "corrupted": pair.corrupted,
                "kinds": (kind,),
                "over": "head_position" if by_head else "position",
                "layers": tuple(self.subject.config.layers_with(kind)),
                "metrics": (Recovery(LogitDifference(pair.answer, pair.wrong)),),
                "dropout": self.settings.dropout,
            }

        checks = tuple(
            AttributionCheck(verify=self.settings.verify, seed=self.settings.seed + number, **given(number))
            for number in range(len(self.read))
        )
        return self.known_pairs_node(self.read) | {
            "grid": self.on_model(AttributionPatching(**given(0))),
            "checked": self.on_model(AtOnce(checks)),
        }

    @cached_property
    def effects(self) -> tuple[Floats, Floats]:
        """Estimated and exact effects of the cells of pairs that count, percent [pair, cell]."""
        estimate, exact = (
            100 * self.checked[name].transpose("draw", "cell").values[self.counts]
            for name in ("estimate", "exact")
        )
        return estimate, exact

    claim_sources = ("checked",)

    def claims(self) -> Iterator[Claim]:
        """What the cell of the largest estimate does by a run, and whether estimates rank cells."""
        settings, (estimate, exact) = self.settings, self.effects
        drawn = self.checked["sort"].transpose("draw", "cell").values[0] != LARGEST
        if drawn.any():
            text = f"the {self._place} with the largest estimate, patched exactly, moves the answer"
            moved, others = np.abs(exact[:, 0]), np.abs(exact[:, drawn])
            yield Claim.over(text, moved, others, f"another {self._place} of each pair", settings, unit="%")
        text = "estimates rank cells as exact runs do (Spearman)"
        yield Claim.ranking(text, list(zip(estimate, exact, strict=True)), "cells of each pair", settings)

    def claims_caption(self) -> str:
        """Pairs that count, cells that were run, and the worst estimate."""
        estimate, exact = self.effects
        return (
            f"{int(self.counts.sum())} of {len(self.read)} pairs, whose answer the model predicts; the "
            f"{self.settings.verify} largest estimates and as many random cells of each are run exactly. "
            f"Worst miss {float(np.abs(estimate - exact).max()):.1f} %. Estimates choose a cell before it "
            "is run."
        )

    @property
    def _place(self) -> str:
        return f"{'head and ' if self.settings.what == HEADS else ''}position"

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """Cells of the pair shown, largest estimates first: place, estimate and exact effect in percent."""
        here = self.checked.isel(draw=0)
        percent = here.assign(estimate=100 * here["estimate"], exact=100 * here["exact"])
        tokens = named(self.subject, self.read[0].corrupted)
        rows = records(percent, "cell", *PLACE, "sort", "estimate", "exact")
        return [row | {"token": tokens[row["position"]]} for row in rows]

    def views(self) -> Iterator[View]:
        """The claims, the grid of the pair shown by head and by position, and its cells both ways."""
        pair = self.read[0]
        # A recovery counts from the corrupted run, which is 0: estimates of parts add up.
        whole = (100 * self.grid["recovery"]).assign_attrs(units="%", long_name="estimated recovery")
        maps = [self._map(whole, "position", "head")]
        if "head" in whole.dims:
            maps.insert(0, self._map(whole, "head", "position"))
        title = f"Estimates of {pair.texts[0]!r} put into {pair.texts[1]!r}"
        yield from together("attribution_patching", title, *maps, beside=[self.findings], columns=2)
        yield self._told(pair)

    def _map(self, whole: xr.DataArray, kept: str, summed: str) -> Heatmap:
        shown = whole.sum(summed, keep_attrs=True) if summed in whole.dims else whole
        tokens = named(self.subject, self.read[0].corrupted)
        over = f", summed over {summed}s" if summed in whole.dims else ""
        return Heatmap.of(
            shown.transpose("layer", kept).reset_coords(drop=True),
            f"Estimated recovery by {kept}",
            f"share of the answers' logit difference that comes back, to first order{over}; "
            f"{self.read[0].texts[0]!r} put into {self.read[0].texts[1]!r}",
            diverging=True,
            sources=("grid",),
            json={f"estimate_by_{kept}": shown.transpose("layer", kept)},
            **({"columns": tuple(format_token(each) for each in tokens)} if kept == "position" else {}),
        )

    def _told(self, pair: Any) -> Table:
        agree = [
            row | {"pair": number, "is_known": bool(self.counts[number])}
            for number in range(len(self.read))
            for row in records(self.checked.isel(draw=number), "chosen", "chosen", *AGREEMENT)
        ]
        return Table.of(
            self.cells,
            ("layer", "layer", "d"),
            ("head", lambda row: row["head"] if row["head"] >= 0 else "all", "{}".format),
            ("position", lambda row: f"{format_token(row['token'])} ({row['position']})"),
            ("chosen", "sort"),
            ("estimate", "estimate", "{:+.1f} %".format),
            ("exact", "exact", "{:+.1f} %".format),
            title=f"{self.subject.name}: {pair.texts[0]!r} put into {pair.texts[1]!r}",
            caption=f"Recovery of the logit difference {pair.answers[0]!r} - {pair.answers[1]!r} by one "
            f"patch of {self.kind}: to first order, and by a run.",
            sources=("checked",),
            json={
                **self.subject.about,
                "kind": self.kind,
                "pairs": [pair_json(each) for each in self.read],
                "cells": self.cells,
                "agreement": agree,
            },
        )
