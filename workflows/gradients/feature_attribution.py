"""Which features carry the difference between two prompts, by gradients, and do exact runs agree?

Where a dictionary writes, two runs differ by what its features do and by a rest that no feature accounts for.
One pass back through the corrupted prompt estimates what each of them moves when it is put in from the
clean one (stages/features/effects/attribution.py; Marks et al. 2024, "Sparse Feature Circuits", section 3.1),
on the scale on which 0 is as corrupted and 100 % as clean by the difference of the two answers' logits. The
largest estimates, and as many cells drawn at random, are then run exactly.

Two claims, of pairs of shipped facts that the model knows. The feature with the largest estimate, put in
exactly, moves the answer more than random ones: every feature that differs is exchanged for another one of
its layer that writes as much at the same position, and the largest of these is put in, so that the draws pay
for the choice too (random_attribution.py). And estimates rank cells as exact runs do, beside estimates
shuffled.

What no feature accounts for is told beside them: a dictionary that leaves most of a difference in the rest
says little about it, whatever its features do. The pair shown is the first that the model knows.
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
from ...stages.features.labels import labels_of
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_token
from ...stages.logits.readout import readout_node
from ..claim import Claim
from ..features.sae_features import dictionary_of
from ..labelled import labelled, record
from ..material.answers import named
from ..material.feature_labels import FeatureLabels, writes_to_stream
from ..settings import Count, require_together, setting
from ..views import Heatmap, Table, View, together
from ..workflow import Nodes
from .attribution_patching import AGREEMENT
from .pairs import AttributedPair, AttributedPairs, AttributionSettings, pair_json

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["FeatureAttributionTrace", "FeatureAttributionTraceSettings"]


@dataclass(frozen=True)
class FeatureAttributionTraceSettings(AttributionSettings):
    """What `--set` can change."""

    wrong: str = setting("", "what comes next in a corrupted prompt of one's own")
    dictionary: str = setting("", "features: directory or org/repo; none: specimen/clt")
    verify: Count = setting(12, "largest estimates that are run exactly, and as many others at random")
    draws: Count = setting(50, "times random features are drawn, of which the largest is put in")

    def __post_init__(self) -> None:
        require_together(self, "prompt", "corrupted", "answer", "wrong")


class FeatureAttributionTrace(AttributedPairs):
    """Cells of every pair, estimated and run."""

    name = "feature_attribution"
    question = (
        "Which features carry the difference between two prompts, by gradients, and do exact runs agree?"
    )
    settings_type = FeatureAttributionTraceSettings
    settings: FeatureAttributionTraceSettings

    def plan(self) -> Nodes:
        """The cells of each pair, what their features write, and what random ones do."""
        given = self.settings
        self.read = self.read_pairs(given.wrong)
        self.dictionary = held = dictionary_of(given.dictionary, given.model, "clt")
        held.require_fit(self.subject.config, self.subject.name)
        nodes: Nodes = {}
        random = []
        for number, pair in enumerate(self.read):
            asked: dict[str, Any] = {
                "clean": pair.clean,
                "corrupted": pair.corrupted,
                "metric": Recovery(LogitDifference(pair.answer, pair.wrong)),
                "dictionary": held.name,
                "features": held.identity,
                "seed": given.seed + number,
            }
            nodes[f"pair_{number}"] = self.on_model(FeatureAttribution(verify=given.verify, **asked))
            random.append(RandomAttribution(draws=given.draws, **asked))
        if writes_to_stream(self.subject, held):
            readout = readout_node(self.subject.files, dtype=self.subject.dtype)
            for name in tuple(nodes):
                nodes[f"words_{name}"] = words_of_attribution.on(
                    attribution=nodes[name],
                    readout=readout,
                    dictionary=held.as_resource(),
                )
        return self.known_pairs_node(self.read) | nodes | {"random": self.on_model(AtOnce(tuple(random)))}

    # -- what came out

    @cached_property
    def pairs(self) -> list[xr.Dataset]:
        """The cells of every pair."""
        return [self.result(f"pair_{number}").load() for number in range(len(self.read))]

    @cached_property
    def counted(self) -> list[int]:
        """Numbers of the pairs that count."""
        return np.flatnonzero(self.counts).tolist()

    @cached_property
    def random(self) -> xr.Dataset:
        """The largest feature of each pair, and of each draw, [draw = pair, cause]."""
        return self.result("random").load()

    def labels(self, number: int) -> FeatureLabels:
        """What the largest features of a pair write, and what people call them."""
        name = f"words_pair_{number}"
        words = self.result(name).load() if name in self.nodes else None
        return FeatureLabels.of_words(self.subject, words).called(labels_of(self.store, self.dictionary))

    @property
    def spoken(self) -> tuple[str, ...]:
        """See `Workflow`."""
        return self.labels(0).spoken

    def claims(self) -> Iterator[Claim]:
        """What the largest feature does by a run, and whether estimates rank cells."""
        exact = 100 * np.abs(self.random["exact"].transpose("draw", "cause").values[self.counted])
        text = "the feature with the largest estimate, put in exactly, moves the answer"
        of = "the largest of as many random features of the same layers, which write as much"
        yield Claim.over(text, exact[:, 0], exact[:, 1:], of, self.settings, unit="%")
        text = "estimates rank cells as exact runs do (Spearman)"
        yield Claim.ranking(text, list(map(self._checked, self.counted)), "cells of each pair", self.settings)

    def claims_caption(self) -> str:
        """Pairs that count, the worst estimate, and why no pairs are held out."""
        worst = max(float(np.abs(a - b).max()) for a, b in map(self._checked, self.counted))
        rest, verify = np.mean(list(map(self._rests, self.counted))), self.settings.verify
        return (
            f"{len(self.counted)} of {len(self.read)} pairs, whose answer the model predicts; the {verify} "
            f"largest estimates and as many random cells of each are run exactly. Worst miss {worst:.1f} %. "
            f"Of the {verify} largest, {rest:.0f} % are errors of the dictionary. A feature is chosen by "
            "its estimate in the pair it is run in, and each draw chooses in the same way among random "
            "features, so that no pairs need to be held out."
        )

    def _checked(self, number: int) -> tuple[Any, Any]:
        """Estimates and exact effects of the cells of a pair that were run, percent."""
        pair = self.pairs[number]
        estimate = pair["estimate"].values[pair["chosen_cell"].values]
        return 100 * estimate, 100 * pair["exact"].values

    def _rests(self, number: int) -> float:
        """Share of the largest estimates of a pair that are rests, percent."""
        pair = self.pairs[number]
        cells = pair["chosen_cell"].values[pair["sort"].values == LARGEST]
        return 100 * float((pair["feature"].values[cells] == REST).mean())

    def document(self, number: int) -> dict[str, Any]:
        """A pair in plain values: its largest feature, beside the draws, and how estimates agree."""
        found, pair = self.random.isel(draw=number), self.pairs[number]
        exact = 100 * found["exact"].values
        feature = FeatureId(int(found["layer"][0]), int(found["feature"][0]))
        position = int(found["position"][0])
        null = Null(np.abs(exact[1:]), "random features")
        return {
            **pair_json(self.read[number]),
            "is_known": bool(self.counts[number]),
            **self.labels(number).json(feature),
            "position": position,
            "token": named(self.subject, self.read[number].clean)[position],
            "estimate": 100 * float(found["estimate"][0]),
            "exact": float(exact[0]),
            "random_median": null.median,
            "quantile": float((np.abs(exact[1:]) < abs(exact[0])).mean()),
            "candidates": int(found["candidates"]),
            "rests": self._rests(number),
            **record(pair.sel(chosen="all"), *AGREEMENT),
        }

    def cells(self, number: int) -> list[dict[str, Any]]:
        """Cells of a pair that were run, largest estimates first, then those drawn; percent."""
        pair, labels = self.pairs[number], self.labels(number)
        tokens = [named(self.subject, ids) for ids in (self.read[number].clean, self.read[number].corrupted)]
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
                    "label": "what no feature accounts for" if is_rest else labels.label(feature),
                    "short": f"rest of layer {layer}" if is_rest else labels.short(feature),
                    "position": position,
                    "tokens": [each[position] for each in tokens],
                    "change": float(pair["change"][cell]),
                    "sort": str(pair["sort"].values[i]),
                    "estimate": float(estimate[i]),
                    "exact": float(exact[i]),
                    "random_direction": None if np.isnan(random) else random,
                }
            )
        return rows

    def views(self) -> Iterator[View]:
        """The claims, where the estimates of the pair shown are, its cells both ways, and all pairs."""
        number = self.counted[0] if self.counted else 0
        pair = self.read[number]
        maps = [
            self._map(number, "features", "Features, summed by place"),
            self._map(number, "rests", "What no feature accounts for"),
        ]
        title = f"Estimates of {pair.texts[0]!r} put into {pair.texts[1]!r}"
        yield from together("feature_attribution", title, *maps, beside=[self.findings], columns=2)
        yield self._cells_table(number, pair)
        yield self._pairs_table()

    def _map(self, number: int, what: str, title: str) -> Heatmap:
        """Estimates summed over the features, or of the rests, by layer and position, percent."""
        pair, tokens = self.pairs[number], named(self.subject, self.read[number].corrupted)
        mine = np.flatnonzero((pair["feature"].values == REST) == (what == "rests"))
        layers, positions = (pair[name].values[mine] for name in ("layer", "position"))
        sums = np.zeros((self.subject.config.num_layers, len(tokens)))
        np.add.at(sums, (layers, positions), 100 * pair["estimate"].values[mine])
        array = labelled(sums, "estimated recovery", "%", layer=None, position=None)
        where = "read" if what == "features" else "written to"
        return Heatmap.of(
            array,
            title,
            f"share of the answers' logit difference that comes back, to first order, by layer {where}; "
            f"{self.read[number].texts[0]!r} put into {self.read[number].texts[1]!r}",
            diverging=True,
            columns=tuple(format_token(each) for each in tokens),
            sources=(f"pair_{number}",),
            json={f"estimate_of_{what}": sums},
        )

    def _cells_table(self, number: int, pair: AttributedPair) -> Table:
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
            title=f"{self.subject.name}: {pair.texts[0]!r} put into {pair.texts[1]!r}",
            caption=f"Recovery of the logit difference {pair.answers[0]!r} - {pair.answers[1]!r} by one "
            f"feature of {self.dictionary.name} or one rest: to first order, by a run, and by a run with a "
            "random direction as long in its place. In quotes what a feature writes; tokens: clean, and "
            "corrupted where that is another.",
            sources=(f"pair_{number}",),
            json={
                **self.subject.about,
                "dictionary": self.dictionary.name,
                "pair_shown": number,
                "cells": cells,
            },
        )

    def _pairs_table(self) -> Table:
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
            ("rests", "rests", "{:.0f} %".format),
            strong=lambda row: row["is_known"],
            title="The largest feature of each pair, and the largest of as many random ones",
            caption="By runs; random ones: other features of the same layers, writing as much at the same "
            "positions, sizes of effects. Quantile: share of these draws that move the answer less. Rests: "
            "share of the largest estimates that no feature accounts for. Bold: the model says the answer.",
            sources=("random",),
            json={"pairs": rows},
        )


def _tokens(tokens: list[str]) -> str:
    clean, corrupted = map(format_token, tokens)
    return clean if clean == corrupted else f"{clean} / {corrupted}"
