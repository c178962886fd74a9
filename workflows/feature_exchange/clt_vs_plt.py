"""Do cross-layer and per-layer transcoders find the same features of a word, and do they steer alike?

The published injection of the preset is run first (planning_in_poems). Then, for both kinds of transcoders,
features are ranked by the cosine of their decoder with the word's embedding; their activity along the prompt
is traced, and the top five are suppressed at each position, alone or with the top one injected
(stages/features/effects/ranked.py). Each kind reads from its own hook point.

The preset's injection is compared with random features, as in planning_in_poems. The ranked features are
chosen without running the prompt: suppressing the top five and injecting the top one at the site is compared
with as many random features of the same layers with the same norms of their writes.

Caution about the published numbers: subtracting vectors along a word may raise its probability, and large
additions leave the range in which the model is nearly linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.features.dictionary import Dictionary
from ...stages.features.effects.ranked import RankedExchanges, RankedTrace
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_token
from ...store.errors import ConfigError
from ..claim import Claim
from ..material.answers import word_id
from ..material.feature_labels import FeatureLabels, ranked_words
from ..settings import ControlSettings, InjectionSettings, setting
from ..views import Data, Heatmap, Line, Lines, Table, View, together
from ..workflow import Nodes
from .exchange import changes
from .presets import PRESETS, FeaturePreset
from .workflow import ExchangeWorkflow, position_sweep

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["CltVsPlt", "CltVsPltSettings"]

TOP = 20
"""Number of features, ranked by cosine with the word's embedding, whose activity is traced."""
REFERENCE = {"llama3.2-1b-524k": (0.687, 0.50), "gemma2-2b-426k": (0.457, 0.30)}
"""By preset: published maximum of P(word) under the preset's injection, and a lower bound that it must
reach."""
CLOSE = 0.01
"""Largest difference from the published maximum that counts as close."""
CLAIMED = "suppress_inject"
"""Sweep that is compared with random features, for both kinds of transcoders."""
PROTOCOLS: dict[str, tuple[bool, Any]] = {
    "suppress_only": (False, ""),
    "suppress_inject": (False, "ranked"),
    "over_targets_suppress_only": (True, ""),
    "over_targets_suppress_inject": (True, "ranked"),
    "over_targets_suppress_inject_same_layer": (True, "same_layer"),
}
"""Sweeps by name: (whether features are ranked over all layers that they write to, which feature is injected
as in `RankedExchanges.inject`)."""


@dataclass(frozen=True)
class CltVsPltSettings(ControlSettings, InjectionSettings):
    """Settings of the workflow `clt_vs_plt`; empty ones are taken from the preset."""

    suppress: tuple[str, ...] = setting(
        (), 'features to suppress in the first run, layer:index; "none" for none'
    )
    inject: str = setting(
        "", "feature to inject in the first run, layer:index; its layer is the target of the rankings"
    )
    site: str = setting(
        "",
        "position that the claims are about: a token of the prompt, or an index; none: the preset's, and for "
        "a prompt of your own the best position, as for each control",
    )
    per_layer: str = setting("", "per-layer transcoders to compare with: directory or org/repo")
    suppress_word: str = setting("", "word that the suppressed features stand for, one token")
    inject_word: str = setting("", "word by whose embedding features are ranked, one token")


class CltVsPlt(ExchangeWorkflow):
    """Workflow that exchanges features of one word, found in cross-layer and in per-layer transcoders."""

    name = "clt_vs_plt"
    question = "Do cross-layer and per-layer transcoders find the same features, and do they steer alike?"
    settings_type = CltVsPltSettings
    settings: CltVsPltSettings

    def checked(self, preset: FeaturePreset) -> FeaturePreset:
        """The preset, if it names per-layer transcoders; raises ConfigError otherwise."""
        if not preset.per_layer:
            raise ConfigError(
                f"expected a preset with per-layer transcoders, found {self.settings.preset!r}; name some: "
                "per_layer=DIRECTORY or ORG/REPO"
            )
        return preset

    @cached_property
    def word(self) -> int:
        """Token id of the injected word, along whose embedding features are ranked."""
        return word_id(self.subject, self.preset.inject_word)

    @property
    def target(self) -> int:
        """Layer that ranked features write to."""
        return self.exchange.inject.layer

    @cached_property
    def arms(self) -> dict[str, Dictionary]:
        """The compared dictionaries: cross-layer transcoders by "clt", per-layer transcoders by "plt"."""
        per_layer = Dictionary.from_pretrained(self.preset.per_layer)
        per_layer.require_fit(self.subject.config, self.subject.name)
        return {"clt": self.exchange.dictionary, "plt": per_layer}

    def further_nodes(self) -> Nodes:
        """Nodes of each kind of transcoders: the ranking of its features, sweeps of their exchange, controls
        at the site, and tokens that the features promote."""
        nodes: Nodes = {}
        ids, site, strength = self.exchange.ids, self.exchange.site, self.exchange.strength
        for arm, dictionary in self.arms.items():
            ranked = (ids, dictionary.name, dictionary.identity, self.word, self.target)
            swept: dict[str, Any] = {"strength": strength, "words": (self.word,)}
            experiments: dict[str, RankedTrace | RankedExchanges] = {
                "trace": RankedTrace(*ranked, top_k=TOP),
                "controls": RankedExchanges(
                    *ranked,
                    inject=PROTOCOLS[CLAIMED][1],
                    positions=None if site is None else (site,),
                    draws=self.settings.controls,
                    seed=self.settings.seed,
                    **swept,
                ),
            }
            for protocol in protocols(arm):
                over_targets, inject = PROTOCOLS[protocol]
                experiments[protocol] = RankedExchanges(
                    *ranked, over_targets=over_targets, inject=inject, **swept
                )
            for name, experiment in experiments.items():
                # Raises for wrong settings before anything runs.
                experiment.cells(self.subject.config)
                node = nodes[f"{arm}_{name}"] = self.subject.on_model(experiment)
                if name != "controls":
                    nodes[f"{arm}_{name}_words"] = ranked_words(self.subject, dictionary, node)
        return nodes

    @cached_property
    def opened(self) -> dict[str, xr.Dataset]:
        """Results of both kinds of transcoders by name, in memory."""
        return {name: self.result(name).load() for name in self.nodes if name[:4] in ("clt_", "plt_")}

    @cached_property
    def ranked_labels(self) -> dict[str, FeatureLabels]:
        """Labels of the ranked features, by "clt" and "plt": the token that each promotes, and the token that
        it fires on."""
        labels = {}
        for arm in self.arms:
            trace = self.opened[f"{arm}_trace"]
            words = [self.opened[f"{arm}_{name}_words"] for name in ("trace", *protocols(arm))]
            parts = [FeatureLabels.of_trace(self.subject, self.exchange.ids, part, trace) for part in words]
            labels[arm] = reduce(or_, parts)
        return labels

    @property
    def baseline(self) -> tuple[float, float]:
        """(probability, logit) of the word at the end of the prompt, without injection."""
        sweep = self.sweep.isel(place=0)
        return float(np.exp(sweep["baseline_logprob"][0])), float(sweep["baseline_logit"][0])

    def views(self) -> Iterator[View]:
        """Views in reading order: probability of the word by protocol, rankings of both kinds of transcoders,
        curves by position, and activity along the prompt."""
        yield self.features_table()
        preset, exchange = self.preset, self.exchange
        preset_record = self._record(
            "preset", self.sweep.isel(strength=0), self.labels, exchange.suppress, exchange.inject
        )
        arms = {arm: {name: self._protocol(arm, name) for name in protocols(arm)} for arm in self.arms}
        yield Data(
            json={
                "experiment": self.name,
                "model": self.subject.files.name,
                "prompt": preset.prompt + preset.ending,
                "tokens": exchange.tokens,
                "inject_word": preset.inject_word,
                "inject_token_id": self.word,
                "top_k_target_layer": self.target,
                "baseline_prob": self.baseline[0],
                "baseline_logit": self.baseline[1],
                "step_a": preset_record,
                "arms": {arm: self._ranked_json(arm) | records for arm, records in arms.items()},
                "sanity_gates": self._gates(preset_record["max_prob"]),
            }
        )
        rows = [("clt", "preset's features", preset_record)]
        rows += [
            (arm, name.replace("_", " "), record)
            for arm, records in arms.items()
            for name, record in records.items()
        ]
        yield Table.of(
            rows,
            ("transcoders", lambda row: row[0]),
            ("protocol", lambda row: row[1]),
            ("p", lambda row: row[2]["max_prob"], ".4e"),
            ("logit", lambda row: row[2]["max_logit"], ".3f"),
            ("position", lambda row: row[2]["spike_position"], "d"),
            ("token", lambda row: format_token(row[2]["spike_token"])),
            title=f"{exchange.heading}: highest probability of {preset.inject_word!r} over positions",
            caption="One row per kind of transcoder (clt: cross-layer, plt: per-layer) and protocol, which "
            "says what features are suppressed and injected. The exchange is made at one position at a time. "
            "p, logit: of the word at the end of the prompt, for the position with the highest probability. "
            f"Position, token: that position. Without injection p is {self.baseline[0]:.4e} and the logit "
            f"{self.baseline[1]:.3f}.",
        )
        yield self._ranking()
        by_position = self._by_position(rows)
        title = (
            f"Exchanges of features of {preset.inject_word!r} in {self.subject.name}, by kind of transcoder"
        )
        yield from together("clt_vs_plt", title, by_position, caption=by_position.caption)
        tokens = [f"{i} {format_token(token)}" for i, token in enumerate(exchange.tokens)]
        for arm in self.arms:
            grid = self.opened[f"{arm}_trace"]["trace"].drop_vars(["score", "source_layer", "feature"])
            grid = grid.assign_coords(rank=self._short(arm), position=tokens)
            yield Heatmap.of(
                grid.rename(rank="feature", position="token"),
                f"{arm}: activity of the top-ranked features along the prompt",
                f"Each cell: activation of one feature (row) at one token (column). Features: the {TOP} of "
                f"the {arm} whose decoders have the largest cosine with the embedding of "
                f"{preset.inject_word!r}.",
            ).without_first_token()

    def claims(self) -> Iterator[Claim]:
        """Claims about the preset's features, and about the top-ranked features of each kind of
        transcoders."""
        yield from super().claims()
        word = self.preset.inject_word
        for arm in self.arms:
            # The ranked exchange and each control take their best position, if no site is set.
            effects = changes(self.opened[f"{arm}_controls"]).max(axis=0)
            text = (
                f"{arm}: suppressing the five features that write most along {word!r} and injecting the "
                f"first of them at {self.exchange.site_label} changes P({word!r}) at the end of the prompt"
            )
            of = "sets of other features with the same write norms"
            yield Claim.against(text, effects[0], effects[1:], of)

    def _ranking(self) -> Table:
        """Table of the top-ranked features of both kinds of transcoders, side by side."""
        traces = {arm: self.opened[f"{arm}_trace"] for arm in self.arms}
        columns: list[tuple[Any, ...]] = []
        for arm, trace in traces.items():
            # Adding 0.0 turns the -0.0 of an inactive feature into 0.0.
            activity = trace["trace"].max("position").values + 0.0
            columns += [
                (f"{arm} feature", self._short(arm).__getitem__),
                (f"{arm} cosine", trace["score"].values.__getitem__, "+.3f"),
                (f"{arm} largest activation", activity.__getitem__, ".3f"),
            ]
        return Table.of(
            range(min(10, *(trace.sizes["rank"] for trace in traces.values()))),
            ("rank", lambda rank: rank + 1, "d"),
            *columns,
            title=f"Features that write {self.preset.inject_word!r} to layer {self.target}",
            caption="One row per rank. Columns, side by side: the features of the cross-layer (clt) and of "
            "the per-layer transcoders (plt) whose decoder vectors have the largest cosine with the "
            "embedding of the word. Largest activation: of that feature in this prompt.",
        )

    def _by_position(self, rows: list[tuple[str, str, dict[str, Any]]]) -> Lines:
        """Curves of P(word) by position of the injection, one per protocol.

        Arguments:
            rows: kind of transcoders, name of the protocol and its record; that of the preset first.
        """
        word = self.preset.inject_word

        def curve(name: str, record: dict[str, Any], family: str = "") -> Line:
            return Line(name, np.array([point["prob"] for point in record["sweep"]]), family=family)

        (_, preset_name, preset_record), *ranked = rows
        return Lines(
            title=f"Probability of {word!r} by the position of the injection",
            caption=f"x: the position at which features are exchanged. y: probability of {word!r} at the end "
            "of the prompt. One curve per kind of transcoder (clt: cross-layer, plt: per-layer) and "
            "protocol. Dashed: without injection.",
            y_name=f"probability of {word!r} at the end",
            lines=(
                Line("without injection", np.full(len(self.exchange.tokens), self.baseline[0]), control=True),
                *(curve(f"{arm} {name}", record, arm) for arm, name, record in ranked),
                curve(f"the {preset_name}", preset_record),
            ),
            log=True,
            **self.exchange.position_axis,
        )

    def _gates(self, highest: float) -> dict[str, Any]:
        """JSON fields that compare the highest probability of the word with the published one; empty if the
        preset's settings were changed."""
        expected = REFERENCE.get(self.settings.preset)
        # A preset with changed fields has no published number to compare with.
        if expected is None or self.preset != PRESETS[self.settings.preset]:
            return {}
        return {
            "reference_max_prob": expected[0],
            "is_close": abs(highest - expected[0]) <= CLOSE,
            "minimum": expected[1],
            "is_above_minimum": highest >= expected[1],
        }

    def _features(self, name: str) -> list[FeatureId]:
        """Features of the result `name`, in the order of its axis `rank`."""
        ranked = self.opened[name]
        pairs = zip(ranked["source_layer"].values.tolist(), ranked["feature"].values.tolist(), strict=True)
        return [FeatureId(layer, index) for layer, index in pairs]

    def _short(self, arm: str) -> list[str]:
        """Short labels of the ranked features of one kind of transcoders. arm: "clt" or "plt"."""
        return list(map(self.ranked_labels[arm].short, self._features(f"{arm}_trace")))

    def _ranked_json(self, arm: str) -> dict[str, Any]:
        """Ranked features of a kind and their activity, under the names of candle-mi's example."""
        trace, dictionary = self.opened[f"{arm}_trace"], self.arms[arm]
        features = self._features(f"{arm}_trace")
        return {
            "schema": dictionary.layout.format,
            "transcoder_repo": dictionary.name,
            "n_layers": len(dictionary.layers),
            "n_features_per_layer": dictionary.n_features,
            "top_20_features_same_layer": [
                {"feature": str(feature), "cosine": score, "label": self.ranked_labels[arm].label(feature)}
                for feature, score in zip(features, trace["score"].values.tolist(), strict=True)
            ],
            "top_20_decoder_vectors_same_layer": trace["vector"],
            "pre_activation_histograms": {
                f"layer_{layer}": {
                    "bin_edges": trace["edge"].sel(window_layer=layer),
                    "counts": trace["count"].sel(window_layer=layer),
                }
                for layer in trace["window_layer"].values.tolist()
            },
            "activation_trace": {
                "feature_ids": list(map(str, features)),
                "layer_indices": trace["source_layer"],
                "positions": trace["position"],
                "values": trace["trace"],
            },
            "w_skip_projection_at_spike": trace["skip_projection"],
        }

    def _protocol(self, arm: str, name: str) -> dict[str, Any]:
        """JSON record of one sweep; arm: "clt" or "plt", name: key of PROTOCOLS."""
        features = self._features(f"{arm}_{name}")
        # The injected feature is the last one of the sweep; all others are suppressed.
        inject = features.pop() if PROTOCOLS[name][1] else None
        sweep = self.opened[f"{arm}_{name}"].isel(strength=0, exchange=0)
        return self._record(name, sweep, self.ranked_labels[arm], features, inject)

    def _record(
        self,
        protocol: str,
        sweep: xr.Dataset,
        labels: FeatureLabels,
        suppress: list[FeatureId],
        inject: FeatureId | None,
    ) -> dict[str, Any]:
        """Record of a sweep over positions for tables and the JSON document.

        Arguments:
            protocol: name of the sweep.
            sweep: logprob and logit, [place, word].
            labels: labels of the features.
            suppress: suppressed features.
            inject: injected feature; None for none.
        """
        probability, logit = np.exp(sweep["logprob"].values[:, 0]), sweep["logit"].values[:, 0]
        best, tokens = int(probability.argmax()), self.exchange.tokens
        return {
            "protocol": protocol,
            "suppress_features": list(map(labels.json, suppress)),
            "inject_feature": None if inject is None else labels.json(inject),
            "strength": self.preset.strength,
            "spike_position": best,
            "spike_token": tokens[best],
            "max_prob": float(probability[best]),
            "max_logit": float(logit[best]),
            "delta_prob": float(probability[best]) - self.baseline[0],
            "delta_logit": float(logit[best]) - self.baseline[1],
            "sweep": position_sweep(tokens, prob=probability, logit=logit),
        }


def protocols(arm: str) -> list[str]:
    """Names of the sweeps that are run for one kind of transcoders. Per-layer transcoders write to a single
    layer, so that they have no ranking over layers. arm: "clt" or "plt"."""
    return [name for name, (over_targets, _) in PROTOCOLS.items() if arm == "clt" or not over_targets]
