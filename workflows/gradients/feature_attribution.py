"""Which features carry the difference between two prompts, by gradients, and do exact runs agree?

Where a dictionary (SAE, transcoder, CLT) writes, a clean and a corrupted run differ by the changes of its
features and by the dictionary's error, which no feature explains ("rest" in names). One backward pass through
the corrupted prompt estimates, to first order, the effect of patching in each feature's clean activation
(stages/features/effects/attribution.py; Marks et al. 2024, "Sparse Feature Circuits", section 3.1). Effects
are recoveries of the difference of the two answers' logits: 0 % for the corrupted run, 100 % for the clean
one. The cells (feature or error, position) with the largest estimates, and as many random cells, are then
patched exactly.

Two claims, about pairs of facts that the model knows. (1) Patching the feature with the largest estimate has
a larger effect than random features. For each draw, every feature that differs between the runs is exchanged
for a random one of its layer with the same norm of its write at the same position, and the one with the
largest estimate is patched: the null distribution includes the selection (random_attribution.py). (2)
Estimates rank cells as exact effects do, against shuffled estimates.

The share of errors among the largest estimates is reported: if it is large, features explain little of the
difference. The pair shown is the first that the model knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.attribution.check import LARGEST
from ...stages.causal.controls import Null
from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.patching_metrics import LogitDifference, Recovery
from ...stages.features.effects.attribution import REST, FeatureAttribution
from ...stages.features.effects.random_attribution import RandomAttribution
from ...stages.features.effects.words import words_of_attribution
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_token
from ...stages.logits.readout import readout_node
from ..claim import Claim
from ..labelled import labelled, record
from ..material.dictionaries import fitting_dictionary
from ..material.feature_labels import FeatureLabels, writes_to_stream
from ..settings import Count, setting
from ..views import Heatmap, Table, View, together
from ..workflow import Nodes
from .pairs import AGREEMENT, AttributedPair, AttributedPairs, VerifiedSettings, pair_json

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["FeatureAttributionTrace", "FeatureAttributionTraceSettings"]


@dataclass(frozen=True)
class FeatureAttributionTraceSettings(VerifiedSettings):
    """Settings of the workflow `feature_attribution`: the dictionary of features, and the number of random
    draws."""

    dictionary: str = setting("", "dictionary of features: directory or org/repo; none: specimen/clt")
    draws: Count = setting(
        50, "draws of random features, of which the one with the largest estimate is patched"
    )


class FeatureAttributionTrace(AttributedPairs):
    """Workflow that estimates by gradients which features carry the difference between two prompts, and
    patches some of them exactly."""

    name = "feature_attribution"
    question = (
        "Which features carry the difference between two prompts, by gradients, and do exact runs agree?"
    )
    settings_type = FeatureAttributionTraceSettings
    settings: FeatureAttributionTraceSettings

    def plan(self) -> Nodes:
        """Nodes of each pair: estimates and exact patches, tokens that its features promote, and random
        features as controls."""
        settings = self.settings
        self.read = self.read_pairs(settings.wrong)
        self.dictionary = dictionary = fitting_dictionary(
            self.subject, settings.dictionary, settings.model, "clt"
        )
        nodes: Nodes = {}
        random = []
        for number, pair in enumerate(self.read):
            arguments: dict[str, Any] = {
                "clean": pair.clean,
                "corrupted": pair.corrupted,
                "metric": Recovery(LogitDifference(pair.answer, pair.wrong)),
                "dictionary": dictionary.name,
                "features": dictionary.identity,
                "seed": settings.seed + number,
            }
            nodes[f"pair_{number}"] = self.on_model(FeatureAttribution(verify=settings.verify, **arguments))
            random.append(RandomAttribution(draws=settings.draws, **arguments))
        if writes_to_stream(self.subject, dictionary):
            readout = readout_node(self.subject.files, dtype=self.subject.dtype)
            # A copy, as the loop adds nodes.
            for name in tuple(nodes):
                nodes[f"words_{name}"] = words_of_attribution.on(
                    attribution=nodes[name],
                    readout=readout,
                    dictionary=dictionary.as_resource(),
                )
        return self.known_pairs_node() | nodes | {"random": self.on_model(AtOnce(tuple(random)))}

    # -- the results

    @cached_property
    def pairs(self) -> list[xr.Dataset]:
        """Result of each pair, in memory: estimates of every (feature or error, position), [cell], and exact
        effects of some of them."""
        return [self.result(f"pair_{number}").load() for number in range(len(self.read))]

    @cached_property
    def counted(self) -> list[int]:
        """Indices of the pairs that claims are about; see `counts`."""
        return np.flatnonzero(self.counts).tolist()

    @cached_property
    def random(self) -> xr.Dataset:
        """Feature with the largest estimate in each pair, then the one of each draw of random features, [draw
        = pair, cause]."""
        return self.result("random").load()

    def labels(self, number: int) -> FeatureLabels:
        """Labels of the features of pair `number`: tokens that they promote, and labels that people gave."""
        name = f"words_pair_{number}"
        words = self.result(name).load() if name in self.nodes else None
        return FeatureLabels.of_words(self.subject, words).with_labels_by_people(self.store, self.dictionary)

    @property
    def spoken(self) -> tuple[str, ...]:
        """Labels that people gave to the displayed features; see `Workflow.spoken`."""
        return self.labels(0).spoken

    def claims(self) -> Iterator[Claim]:
        """Claims about the exact effect of the feature with the largest estimate, and about the rank
        correlation of estimates with exact effects."""
        exact = 100 * np.abs(self.random["exact"].transpose("draw", "cause").values[self.counted])
        text = (
            "patching the feature with the largest estimate changes the logit difference (absolute recovery)"
        )
        of = "the feature selected likewise among random features of the same layers and write norms"
        yield Claim.over(text, exact[:, 0], exact[:, 1:], of, self.settings, unit="%")
        text = "gradient estimates rank features as exact patches do (Spearman correlation)"
        pairs = list(map(self._checked, self.counted))
        yield Claim.ranking(text, pairs, "patched features of each pair", self.settings)

    def claims_caption(self) -> str:
        """Caption of the claims: number of pairs, largest error of an estimate, and the reason for claims
        without held-out pairs."""
        # Over all patched cells, random ones included.
        worst = max(float(np.abs(a - b).max()) for a, b in map(self._checked, self.counted))
        errors, verify = np.mean(list(map(self._rests, self.counted))), self.settings.verify
        return (
            f"Claims are about {len(self.counted)} of {len(self.read)} pairs of prompts, those whose answer "
            f"the model predicts. In each pair, the {verify} features (or errors of the dictionary) with the "
            "largest estimates, and as many random ones, are patched in an exact run. An error of the "
            "dictionary is what its features leave unexplained in one layer. Estimates differ from the exact "
            f"recovery by at most {worst:.1f} %. Of the {verify} largest estimates, {errors:.0f} % belong to "
            "errors. A feature is selected by its estimate in the pair in which it is patched. Each control "
            "draw selects in the same way among random features, so that no pairs need to be held out."
        )

    def _checked(self, number: int) -> tuple[Any, Any]:
        """(estimated, exact) recoveries of the patched features and errors of pair `number` in percent,
        [patched cell] each."""
        pair = self.pairs[number]
        estimate = pair["estimate"].values[pair["chosen_cell"].values]
        return 100 * estimate, 100 * pair["exact"].values

    def _rests(self, number: int) -> float:
        """Percentage of the largest estimates of pair `number` that belong to errors of the dictionary
        instead of features."""
        pair = self.pairs[number]
        cells = pair["chosen_cell"].values[pair["sort"].values == LARGEST]
        return 100 * float((pair["feature"].values[cells] == REST).mean())

    def document(self, number: int) -> dict[str, Any]:
        """JSON document of pair `number`: its feature with the largest estimate, compared with random ones,
        and the agreement of estimates with exact effects."""
        causes, pair = self.random.isel(draw=number), self.pairs[number]
        exact = 100 * causes["exact"].values
        feature = FeatureId(int(causes["layer"][0]), int(causes["feature"][0]))
        position = int(causes["position"][0])
        null = Null(np.abs(exact[1:]), "random features")
        return {
            **pair_json(self.read[number]),
            "is_known": bool(self.counts[number]),
            **self.labels(number).json(feature),
            "position": position,
            "token": self.subject.token_texts(self.read[number].clean)[position],
            "estimate": 100 * float(causes["estimate"][0]),
            "exact": float(exact[0]),
            "random_median": null.median,
            "quantile": float((np.abs(exact[1:]) < abs(exact[0])).mean()),
            "candidates": int(causes["candidates"]),
            "rests": self._rests(number),
            **record(pair.sel(chosen="all"), *AGREEMENT),
        }

    def cells(self, number: int) -> list[dict[str, Any]]:
        """Records of the patched features and errors of pair `number`, largest estimates first, then random
        ones; effects in percent."""
        pair, labels = self.pairs[number], self.labels(number)
        tokens = [
            self.subject.token_texts(ids) for ids in (self.read[number].clean, self.read[number].corrupted)
        ]
        estimate, exact = self._checked(number)
        rows = []
        for i, cell in enumerate(pair["chosen_cell"].values.tolist()):
            layer, position, index = (int(pair[name][cell]) for name in ("layer", "position", "feature"))
            feature = FeatureId(layer, index)
            is_rest = index == REST
            random = 100 * float(pair["random"][i])
            rows.append(
                {
                    "layer": layer,
                    "index": None if is_rest else index,
                    "label": "error of the dictionary" if is_rest else labels.label(feature),
                    "short": f"error of layer {layer}" if is_rest else labels.short(feature),
                    "position": position,
                    "tokens": [texts[position] for texts in tokens],
                    "change": float(pair["change"][cell]),
                    "sort": str(pair["sort"].values[i]),
                    "estimate": float(estimate[i]),
                    "exact": float(exact[i]),
                    "random_direction": None if np.isnan(random) else random,
                }
            )
        return rows

    def views(self) -> Iterator[View]:
        """Views in reading order: heatmaps of the displayed pair's estimates by layer and position, its
        patched features, and a table of all pairs."""
        number = self.counted[0] if self.counted else 0
        pair = self.read[number]
        maps = [
            self._map(number, "features", "Features: sum of estimates"),
            self._map(number, "rests", "Errors of the dictionary: estimates"),
        ]
        title = f"Feature attribution: {pair.texts[0]!r} patched into {pair.texts[1]!r}"
        yield from together("feature_attribution", title, *maps, beside=[self.findings], columns=2)
        yield self._cells_table(number, pair)
        yield self._pairs_table()

    def _map(self, number: int, cells: str, title: str) -> Heatmap:
        """Heatmap of estimates summed by layer and position, in percent.

        Arguments:
            number: index of the pair.
            cells: "features", or "rests" for errors of the dictionary.
            title: of the heatmap.
        """
        pair = self.pairs[number]
        rows = np.flatnonzero((pair["feature"].values == REST) == (cells == "rests"))
        layers, positions = (pair[name].values[rows] for name in ("layer", "position"))
        sums = np.zeros((self.subject.config.num_layers, len(self.read[number].corrupted)))
        # `np.add.at` sums several features of one cell; `sums[...] += ...` would keep only the last.
        np.add.at(sums, (layers, positions), 100 * pair["estimate"].values[rows])
        array = labelled(sums, "estimated recovery", "%", layer=None, position=None)
        what, where = (
            ("all features", "that features read")
            if cells == "features"
            else ("the dictionary's errors", "that is written to")
        )
        return Heatmap.of(
            array,
            title,
            f"Each cell: first-order estimate of the recovery when {what} of {self.read[number].texts[0]!r} "
            f"in one layer (row; the one {where}) at one token (column) are patched into "
            f"{self.read[number].texts[1]!r}. Recovery: share of the answers' logit difference that comes "
            "back.",
            diverging=True,
            columns=self.token_columns(number),
            sources=(f"pair_{number}",),
            json={f"estimate_of_{cells}": sums},
        )

    def _cells_table(self, number: int, pair: AttributedPair) -> Table:
        """Table of the patched features of a pair: estimated recovery, exact recovery, and that of a random
        direction."""
        cells = self.cells(number)
        return Table.of(
            cells,
            ("feature", "short"),
            ("position", lambda row: f"{_tokens(row['tokens'])} ({row['position']})"),
            ("chosen", "sort"),
            ("estimate", "estimate", "{:+.1f} %".format),
            ("exact", "exact", "{:+.1f} %".format),
            ("random direction", "random_direction", "{:+.1f} %".format),
            strong=lambda row: row["index"] is not None and row["sort"] == LARGEST,
            title=f"{self.subject.name}: {pair.texts[0]!r} patched into {pair.texts[1]!r}",
            caption=f"One row per patched feature of {self.dictionary.name}, or reconstruction error of one "
            f"layer. Percentages: share of the logit difference {pair.answers[0]!r} - {pair.answers[1]!r} "
            "that comes back by patching (0 %: corrupted run, 100 %: clean run). Estimate: by gradients. "
            "Exact: in a patched run. Random direction: control, in a run patched with a random direction of "
            "the same norm. Chosen: as one of the largest estimates, or at random. In quotes: tokens that a "
            "feature promotes. Position: token of the clean prompt, and of the corrupted one if it differs. "
            "Bold: features with the largest estimates.",
            sources=(f"pair_{number}",),
            json={
                **self.subject.about,
                "dictionary": self.dictionary.name,
                "pair_shown": number,
                "cells": cells,
            },
        )

    def _pairs_table(self) -> Table:
        """Table of the feature with the largest estimate in each pair, beside random features."""
        rows = [self.document(number) for number in range(len(self.read))]
        labels = [self.labels(number) for number in range(len(self.read))]

        def short(row: dict[str, Any]) -> str:
            return labels[rows.index(row)].short(FeatureId(row["layer"], row["index"]))

        return Table.of(
            rows,
            ("pair", lambda row: f"{row['clean_prompt']} / {row['corrupted_prompt']}"),
            ("largest feature", lambda row: f"{short(row)} on {format_token(row['token'])}"),
            ("exact", "exact", "{:+.1f} %".format),
            ("random, median", "random_median", "{:.1f} %".format),
            ("quantile", "quantile", ".2f"),
            ("chosen among", "candidates", "d"),
            ("errors", "rests", "{:.0f} %".format),
            strong=lambda row: row["is_known"],
            title="The feature with the largest estimate in each pair, against random features",
            caption="One row per pair of prompts. Exact: share of the answers' logit difference that comes "
            "back when the feature is patched. Random, median: control, the same in absolute value for "
            "features that are selected in the same way among random ones, of the same layers and positions "
            "and with the same norms of writes. Quantile: share of these draws with a smaller effect. Chosen "
            "among: number of features that differ between the prompts. Errors: share of the largest "
            "estimates that belong to reconstruction errors of the dictionary. Bold: the model predicts the "
            "answer.",
            sources=("random",),
            json={"pairs": rows},
        )


def _tokens(tokens: list[str]) -> str:
    """Clean token at a position, followed by the corrupted one if it differs: "␣F / ␣J"."""
    clean, corrupted = map(format_token, tokens)
    return clean if clean == corrupted else f"{clean} / {corrupted}"
