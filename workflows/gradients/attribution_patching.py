"""Which heads carry the difference between two prompts, by gradients, and do exact runs agree?

Attribution patching: one backward pass through the corrupted prompt estimates, to first order, the effect of
patching in the clean activation of every head at every position (stages/causal/attribution/patching.py).
Effects are recoveries of the difference of the two answers' logits: 0 % for the corrupted run, 100 % for the
clean one. The cells with the largest estimates, and as many random cells, are then patched exactly.

Two claims, about pairs of facts that the model knows: patching the cell with the largest estimate has a
larger effect than patching random cells of the same grid; and estimates rank cells as exact effects do,
against shuffled estimates. First-order estimates are wrong where attention or norms saturate; the largest
error is reported.
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
from ..settings import setting
from ..views import Heatmap, Table, View, together
from ..workflow import Nodes, loaded
from .pairs import AGREEMENT, AttributedPair, AttributedPairs, VerifiedSettings, pair_json

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AttributionPatchingTrace", "AttributionPatchingTraceSettings"]

HEADS = "heads"
STREAM = "states"
"""Values of the setting `what`: outputs of heads before the output projection, or states of the residual
stream."""


@dataclass(frozen=True)
class AttributionPatchingTraceSettings(VerifiedSettings):
    """Settings of the workflow `attribution_patching`: what is patched, and how many estimates are
    checked."""

    what: Literal["heads", "states"] = setting(
        HEADS,
        'what is patched: "heads", their outputs by position, or "states" of the residual stream by position',
    )
    dropout: bool = setting(False, "estimate the size of effects by gradient dropout (AtP*)")


class AttributionPatchingTrace(AttributedPairs):
    """Workflow of attribution patching: estimates by gradients of patching every activation of the first
    pair, and exact patches of some activations in every pair."""

    name = "attribution_patching"
    question = "Which heads carry the difference between two prompts, by gradients, and do exact runs agree?"
    settings_type = AttributionPatchingTraceSettings
    settings: AttributionPatchingTraceSettings

    grid = loaded("grid")
    """Estimated recovery in the first pair, [layer, head, position] or [layer, position]; 1 is the clean
    run."""
    checked = loaded("checked")
    """Estimates and exact effects of the activations that were patched in every pair, [draw = pair, cell], in
    memory; a cell is one (layer, head, position)."""

    def plan(self) -> Nodes:
        """Nodes of the first pair's estimates, of exact patches in all pairs, and of the ranks of their
        answers."""
        self.read = self.read_pairs(self.settings.wrong)
        by_head = self.settings.what == HEADS
        self.kind = kind = self.subject.config.read_kind if by_head else "resid_post"

        def arguments(number: int) -> dict[str, Any]:
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
            AttributionCheck(
                verify=self.settings.verify, seed=self.settings.seed + number, **arguments(number)
            )
            for number in range(len(self.read))
        )
        return self.known_pairs_node() | {
            "grid": self.on_model(AttributionPatching(**arguments(0))),
            "checked": self.on_model(AtOnce(checks)),
        }

    @cached_property
    def effects(self) -> tuple[Floats, Floats]:
        """(estimated, exact) recoveries of the patched activations in percent, [pair, cell] each, for the
        pairs that claims are about."""
        estimate, exact = (
            100 * self.checked[name].transpose("draw", "cell").values[self.counts]
            for name in ("estimate", "exact")
        )
        return estimate, exact

    claim_sources = ("checked",)

    def claims(self) -> Iterator[Claim]:
        """Claims about the exact effect of the activation with the largest estimate, and about the rank
        correlation of estimates with exact effects."""
        settings, (estimate, exact) = self.settings, self.effects
        is_random = self.checked["sort"].transpose("draw", "cell").values[0] != LARGEST
        # A grid of at most `verify` cells is checked whole, and leaves none to draw at random.
        if is_random.any():
            text = (
                f"patching the {self._cell_name} with the largest estimate changes the logit difference "
                "(absolute recovery)"
            )
            # Cell 0 has the largest |estimate|, of either sign, so exact effects are compared by size too.
            largest, controls = np.abs(exact[:, 0]), np.abs(exact[:, is_random])
            of = f"patching a random {self._cell_name} of each pair"
            yield Claim.over(text, largest, controls, of, settings, unit="%")
        text = "gradient estimates rank activations as exact patches do (Spearman correlation)"
        pairs = list(zip(estimate, exact, strict=True))
        yield Claim.ranking(text, pairs, "patched activations of each pair", settings)

    def claims_caption(self) -> str:
        """Caption of the claims: the pairs they are about, which activations were patched, and the largest
        error of an estimate."""
        estimate, exact = self.effects
        return (
            f"Claims are about {int(self.counts.sum())} of {len(self.read)} pairs of prompts, those whose "
            f"answer the model predicts. A place is one {self._cell_name}. In each pair, the "
            f"{self.settings.verify} places with the largest estimates, and as many random places, are "
            "patched in an exact run. Estimates differ from the exact recovery by at most "
            f"{float(np.abs(estimate - exact).max()):.1f} %. The place of the first claim is chosen by its "
            "estimate alone, so that no held-out pairs are needed."
        )

    @property
    def _cell_name(self) -> str:
        """What identifies a patched activation within a layer, as claims name it: "head and position" or
        "position"."""
        return f"{'head and ' if self.settings.what == HEADS else ''}position"

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """Records of the patched activations of the first pair, largest estimates first, with estimated and
        exact recovery in percent."""
        cells = self.checked.isel(draw=0)
        percent = cells.assign(estimate=100 * cells["estimate"], exact=100 * cells["exact"])
        # Patches go into the corrupted run, so that a position is one of its tokens.
        tokens = self.subject.token_texts(self.read[0].corrupted)
        rows = records(percent, "cell", *PLACE, "sort", "estimate", "exact")
        return [row | {"token": tokens[row["position"]]} for row in rows]

    def views(self) -> Iterator[View]:
        """Views in reading order: heatmaps of the first pair's estimates by head and by position, and a table
        of its patched activations."""
        pair = self.read[0]
        # Recovery is 0 for the corrupted run, so that first-order estimates of cells can be summed.
        estimates = (100 * self.grid["recovery"]).assign_attrs(units="%", long_name="estimated recovery")
        maps = [self._map(estimates, "position", "head")]
        if "head" in estimates.dims:
            maps.insert(0, self._map(estimates, "head", "position"))
        title = f"Attribution patching of {pair.texts[0]!r} into {pair.texts[1]!r}"
        yield from together("attribution_patching", title, *maps, beside=[self.findings], columns=2)
        yield self._cells_table(pair)

    def _map(self, estimates: xr.DataArray, axis: str, summed: str) -> Heatmap:
        """Heatmap of estimates by layer and `axis` ("head" or "position"), summed over the other axis,
        `summed`, if it exists."""
        shown = estimates.sum(summed, keep_attrs=True) if summed in estimates.dims else estimates
        over = f", summed over {summed}s" if summed in estimates.dims else ""
        return Heatmap.of(
            shown.transpose("layer", axis).reset_coords(drop=True),
            f"Estimated recovery by {axis}",
            "Each cell: first-order estimate of the recovery when one activation of "
            f"{self.read[0].texts[0]!r} is patched into {self.read[0].texts[1]!r}{over}. Recovery: share of "
            "the answers' logit difference that comes back.",
            diverging=True,
            sources=("grid",),
            json={f"estimate_by_{axis}": shown.transpose("layer", axis)},
            **({"columns": self.token_columns(0)} if axis == "position" else {}),
        )

    def _cells_table(self, pair: AttributedPair) -> Table:
        """Table of the patched activations of the first pair: estimated beside exact recovery."""
        agreement = [
            row | {"pair": number, "is_known": bool(self.counts[number])}
            for number in range(len(self.read))
            for row in records(self.checked.isel(draw=number), "chosen", "chosen", *AGREEMENT)
        ]
        return Table.of(
            self.cells,
            ("layer", "layer", "d"),
            # -1: a state of the residual stream, which has no heads.
            ("head", lambda row: row["head"] if row["head"] >= 0 else "all", "{}".format),
            ("position", lambda row: f"{format_token(row['token'])} ({row['position']})"),
            ("chosen", "sort"),
            ("estimate", "estimate", "{:+.1f} %".format),
            ("exact", "exact", "{:+.1f} %".format),
            title=f"{self.subject.name}: {pair.texts[0]!r} patched into {pair.texts[1]!r}",
            caption=f"One row per patched activation ({self.kind} of one place). Estimate, exact: share of "
            f"the logit difference {pair.answers[0]!r} - {pair.answers[1]!r} that comes back by patching (0 "
            "%: corrupted run, 100 %: clean run), estimated by gradients and measured in an exact run. "
            "Chosen: as one of the largest estimates, or at random (control).",
            sources=("checked",),
            json={
                **self.subject.about,
                "kind": self.kind,
                "pairs": [pair_json(p) for p in self.read],
                "cells": self.cells,
                "agreement": agreement,
            },
        )
