"""Do cross-layer and per-layer transcoders find the same features of a word, and do they steer alike?

First the published injection of the preset (planning_in_poems), then for both kinds of transcoders the
features that write most along the word's embedding: how they rank, how active they are along the prompt, and
what the model says when the best five are suppressed at a position, alone or with the best one injected
(stages/features/effects/ranked.py). Each kind reads from its own hook point.

The preset's injection is compared with random features, as in planning_in_poems. The features that both kinds
rank best were not chosen by looking at the prompt: the best five suppressed and the best one injected at the
site are compared with as many random features of the same layers that write the same norm.

A caution that comes with the published numbers: subtracting vectors that point along a word may make it
likelier; large additions leave the range in which a model is linear.
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
REFERENCE = {"llama3.2-1b-524k": (0.687, 0.50), "gemma2-2b-426k": (0.457, 0.30)}
"""Published maximum of the first step, and what it must at least reach."""
CLOSE = 0.01
CLAIMED = "suppress_inject"
"""The protocol of both kinds that is compared with random features."""
PROTOCOLS: dict[str, tuple[bool, Any]] = {
    "suppress_only": (False, ""),
    "suppress_inject": (False, "ranked"),
    "over_targets_suppress_only": (True, ""),
    "over_targets_suppress_inject": (True, "ranked"),
    "over_targets_suppress_inject_same_layer": (True, "same_layer"),
}
"""Sweeps by name: (whether features are ranked over all layers written to, what is injected)."""


@dataclass(frozen=True)
class CltVsPltSettings(ControlSettings, InjectionSettings):
    """Settings; empty ones are the preset's."""

    suppress: tuple[str, ...] = setting((), 'features to suppress first, layer:index; "none" for none')
    inject: str = setting("", "feature to inject first, layer:index; its layer is the target of the rankings")
    site: str = setting(
        "",
        "where the claims are made: a token of the prompt, or its position; none: the preset's, and for a "
        "prompt of your own the best of all, as each control is",
    )
    per_layer: str = setting("", "per-layer transcoders: directory or org/repo")
    suppress_word: str = setting("", "word the suppressed features stand for, one token")
    inject_word: str = setting("", "word whose embedding features are ranked by, one token")


class CltVsPlt(ExchangeWorkflow):
    """The same word through two kinds of transcoders."""

    name = "clt_vs_plt"
    question = "Do cross-layer and per-layer transcoders find the same features, and do they steer alike?"
    settings_type = CltVsPltSettings
    settings: CltVsPltSettings

    def checked(self, preset: FeaturePreset) -> FeaturePreset:
        """See `ExchangeWorkflow`."""
        if not preset.per_layer:
            raise ConfigError(
                f"the preset {self.settings.preset!r} names no per-layer transcoders; set per_layer= a "
                "directory or org/repo"
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
        """The cross-layer ("clt") and the per-layer ("plt") transcoders that are compared."""
        per_layer = Dictionary.from_pretrained(self.preset.per_layer)
        per_layer.require_fit(self.subject.config, self.subject.name)
        return {"clt": self.exchange.dictionary, "plt": per_layer}

    def further_nodes(self) -> Nodes:
        """For each kind the ranking, its sweeps, its controls at the site, and what the features write."""
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
                over, inject = PROTOCOLS[protocol]
                experiments[protocol] = RankedExchanges(*ranked, over_targets=over, inject=inject, **swept)
            for name, experiment in experiments.items():
                experiment.cells(self.subject.config)
                node = nodes[f"{arm}_{name}"] = self.subject.on_model(experiment)
                if name != "controls":
                    nodes[f"{arm}_{name}_words"] = ranked_words(self.subject, dictionary, node)
        return nodes

    @cached_property
    def opened(self) -> dict[str, xr.Dataset]:
        """Results of both kinds by node name, in memory."""
        return {name: self.result(name).load() for name in self.nodes if name[:4] in ("clt_", "plt_")}

    @cached_property
    def ranked_labels(self) -> dict[str, FeatureLabels]:
        """Labels of the ranked features of each kind."""
        labels = {}
        for arm in self.arms:
            trace = self.opened[f"{arm}_trace"]
            words = [self.opened[f"{arm}_{name}_words"] for name in ("trace", *protocols(arm))]
            parts = [FeatureLabels.of_trace(self.subject, self.exchange.ids, part, trace) for part in words]
            labels[arm] = reduce(or_, parts)
        return labels

    @property
    def baseline(self) -> tuple[float, float]:
        """Probability and logit of the word without injection."""
        sweep = self.sweep.isel(place=0)
        return float(np.exp(sweep["baseline_logprob"][0])), float(sweep["baseline_logit"][0])

    def views(self) -> Iterator[View]:
        """What each protocol reaches, how both kinds rank features, and where the best ones are active."""
        yield self.features_table()
        preset, exchange = self.preset, self.exchange
        first = self._reached(
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
                "step_a": first,
                "arms": {arm: self._ranked_json(arm) | records for arm, records in arms.items()},
                "sanity_gates": self._gates(first["max_prob"]),
            }
        )
        reached = [("clt", "preset's features", first)]
        reached += [
            (arm, name.replace("_", " "), record)
            for arm, records in arms.items()
            for name, record in records.items()
        ]
        yield Table.of(
            reached,
            ("transcoders", lambda row: row[0]),
            ("protocol", lambda row: row[1]),
            ("p", lambda row: row[2]["max_prob"], ".4e"),
            ("logit", lambda row: row[2]["max_logit"], ".3f"),
            ("position", lambda row: row[2]["spike_position"], "d"),
            ("token", lambda row: format_token(row[2]["spike_token"])),
            title=f"{exchange.heading}: probability of {preset.inject_word!r}, largest over positions",
            caption=f"without injection {self.baseline[0]:.4e}, logit {self.baseline[1]:.3f}",
        )
        yield self._ranking()
        by_position = self._by_position(reached)
        title = f"What features of {preset.inject_word!r} do in {self.subject.name}, by kind of transcoder"
        yield from together("clt_vs_plt", title, by_position, caption="dashed: without injection")
        tokens = [f"{i} {format_token(token)}" for i, token in enumerate(exchange.tokens)]
        for arm in self.arms:
            grid = self.opened[f"{arm}_trace"]["trace"].drop_vars(["score", "source_layer", "feature"])
            grid = grid.assign_coords(rank=self._short(arm), position=tokens)
            yield Heatmap.of(
                grid.rename(rank="feature", position="token"),
                f"{arm}: the word's best features along the prompt",
            ).without_first_token()

    def claims(self) -> Iterator[Claim]:
        """The effect of the preset's features, and of the best ranked features of each kind."""
        yield from super().claims()
        word = self.preset.inject_word
        for arm in self.arms:
            effects = changes(self.opened[f"{arm}_controls"]).max(axis=0)
            claim = (
                f"{arm}: the five features that write most along {word!r} suppressed and the first injected "
                f"at {self.exchange.site_label} changes P({word!r}) at the end"
            )
            of = "sets of other features that write as much"
            yield Claim.against(claim, effects[0], effects[1:], of)

    def _ranking(self) -> Table:
        """The best features of both kinds, side by side."""
        traces = {arm: self.opened[f"{arm}_trace"] for arm in self.arms}
        columns: list[tuple[Any, ...]] = []
        for arm, trace in traces.items():
            most = trace["trace"].max("position").values + 0.0  # an inactive feature may be -0.0
            columns += [
                (f"{arm} feature", self._short(arm).__getitem__),
                (f"{arm} cosine", trace["score"].values.__getitem__, "+.3f"),
                (f"{arm} most active", most.__getitem__, ".3f"),
            ]
        return Table.of(
            range(min(10, *(trace.sizes["rank"] for trace in traces.values()))),
            ("rank", lambda rank: rank + 1, "d"),
            *columns,
            title=f"Features that write {self.preset.inject_word!r} to layer {self.target}",
        )

    def _by_position(self, reached: list[tuple[str, str, dict[str, Any]]]) -> Lines:
        """Every protocol's probability of the word, by the position of the injection."""
        word, tokens = self.preset.inject_word, self.exchange.tokens

        def curve(name: str, record: dict[str, Any], family: str = "") -> Line:
            return Line(name, np.array([point["prob"] for point in record["sweep"]]), family=family)

        (_, first, record), *ranked = reached
        return Lines(
            title=f"Probability of {word!r} by the position of the injection",
            caption="dashed: without injection",
            x=tuple(f"{format_token(token)} ({i})" for i, token in enumerate(tokens)),
            x_name="token at which features are suppressed and injected",
            y_name=f"probability of {word!r} at the end",
            lines=(
                Line("without injection", np.full(len(tokens), self.baseline[0]), control=True),
                *(curve(f"{arm} {name}", row, arm) for arm, name, row in ranked),
                curve(f"the {first}", record),
            ),
            log=True,
        )

    def _gates(self, reached: float) -> dict[str, Any]:
        """The published maximum of the preset's features beside ours; empty where the preset was changed."""
        expected = REFERENCE.get(self.settings.preset)
        if expected is None or self.preset != PRESETS[self.settings.preset]:
            return {}
        return {
            "reference_max_prob": expected[0],
            "is_close": abs(reached - expected[0]) <= CLOSE,
            "minimum": expected[1],
            "is_above_minimum": reached >= expected[1],
        }

    def _features(self, name: str) -> list[FeatureId]:
        """The features of a trace or a sweep, in its order."""
        ranked = self.opened[name]
        pairs = zip(ranked["source_layer"].values.tolist(), ranked["feature"].values.tolist(), strict=True)
        return [FeatureId(layer, index) for layer, index in pairs]

    def _short(self, arm: str) -> list[str]:
        """Short labels of the features of a ranking."""
        return list(map(self.ranked_labels[arm].short, self._features(f"{arm}_trace")))

    def _ranked_json(self, arm: str) -> dict[str, Any]:
        """The best features of a kind and their activity, under the names of candle-mi's example."""
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
        """Record of a sweep of a kind; an injected feature is the last of its features."""
        chosen = self._features(f"{arm}_{name}")
        inject = chosen.pop() if PROTOCOLS[name][1] else None
        sweep = self.opened[f"{arm}_{name}"].isel(strength=0, exchange=0)
        return self._reached(name, sweep, self.ranked_labels[arm], chosen, inject)

    def _reached(
        self,
        protocol: str,
        sweep: xr.Dataset,
        labels: FeatureLabels,
        suppress: list[FeatureId],
        inject: FeatureId | None,
    ) -> dict[str, Any]:
        """Record of a sweep [place, word]: its features, the word at every position, and its largest
        probability."""
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
    """Names of the sweeps of a kind; per-layer transcoders write to one layer, and need no ranking over
    layers."""
    return [name for name, (over_targets, _) in PROTOCOLS.items() if arm == "clt" or not over_targets]
