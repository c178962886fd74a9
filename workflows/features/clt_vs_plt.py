"""Do cross-layer and per-layer transcoders find the same features of a word, and do they steer alike?

First the published injection of the preset (planning_in_poems), then for both kinds of transcoders the
features that write most along the word's embedding: how they rank, how active they are along the prompt, and
what the model says when the best five are suppressed at a position, alone or with the best one injected
(stages/features/effects/ranked.py). Each kind reads from its own hook point.

The preset's injection is held against random features as planning_in_poems has it. What both kinds rank best
was not chosen by looking at the prompt: the best five suppressed and the best one injected at the site are
held against as many random features of the same layers that write as much.

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

from ...stages.causal.controls import Null
from ...stages.features.dictionary import Dictionary
from ...stages.features.effects.ranked import RankedExchanges, RankedSweep, RankedTrace
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_token
from ...store.errors import ConfigError
from ..material.answers import number
from ..material.exchange_views import exchange_findings, features_table, site_told
from ..material.feature_controls import FeatureControls, changes
from ..material.feature_injection import Planned, word_id
from ..material.feature_labels import FeatureLabels, ranked_words
from ..material.feature_presets import PRESETS, chosen_preset
from ..settings import ControlSettings, InjectionSettings, setting
from ..views import Data, Finding, Findings, Heatmap, Line, Lines, Table, View, together
from ..workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...stages.forward.models.model import Model

__all__ = ["CltVsPlt", "CltVsPltSettings"]

TOP = 20
REFERENCE = {"llama3.2-1b-524k": (0.687, 0.50), "gemma2-2b-426k": (0.457, 0.30)}
"""Published maximum of the first step, and what it must at least reach."""
CLOSE = 0.01
CLAIMED = "suppress_inject"
"""The protocol of both kinds that is held against random features."""


@dataclass(frozen=True)
class CltVsPltSettings(ControlSettings, InjectionSettings):
    """What `--set` can change; what is left empty is the preset's."""

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


class CltVsPlt(Workflow):
    """The same word through two kinds of transcoders."""

    name = "clt_vs_plt"
    question = "Do cross-layer and per-layer transcoders find the same features, and do they steer alike?"
    settings_type = CltVsPltSettings
    settings: CltVsPltSettings

    def __init__(self, settings: CltVsPltSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = chosen_preset(settings, keep_site=False)
        if not preset.per_layer:
            raise ConfigError(
                f"the preset {settings.preset!r} names no per-layer transcoders; set per_layer= a directory "
                "or org/repo"
            )
        self.planned = planned = Planned(preset, model, settings, ending=preset.ending)
        self.word = word_id(planned.subject, preset.inject_word)
        self.target = planned.inject.layer
        self.arms = {"clt": planned.dictionary, "plt": Dictionary.from_pretrained(preset.per_layer)}
        self.arms["plt"].require_fit(planned.subject.config, planned.subject.name)
        words = (preset.inject_word, preset.suppress_word)
        self.controls = FeatureControls(
            planned, planned.doses, preset.strength, words, settings, preset.looked_at
        )
        sweep = planned.sweep(planned.doses, (preset.strength,), words)
        self.nodes: dict[str, ResultNode] = {"planning": sweep, **self.controls.nodes}
        site = planned.named_site
        places = tuple(range(len(planned.encoding.ids))) if site is None else (site,)
        for arm, dictionary in self.arms.items():
            given = (
                tuple(planned.encoding.ids),
                dictionary.name,
                dictionary.identity,
                self.word,
                self.target,
            )
            experiments: dict[str, RankedTrace | RankedSweep] = {
                "trace": RankedTrace(*given, top_k=TOP),
                "controls": RankedExchanges(
                    *given,
                    inject=protocols(arm)[CLAIMED][1],
                    strength=preset.strength,
                    words=(self.word,),
                    positions=places,
                    draws=settings.controls,
                    seed=settings.seed,
                ),
            }
            for protocol, (over, inject) in protocols(arm).items():
                experiments[protocol] = RankedSweep(
                    *given, over_targets=over, inject=inject, strength=preset.strength, words=(self.word,)
                )
            for name, experiment in experiments.items():
                experiment.cells(planned.subject.config)
                node = planned.subject.on_model(experiment)
                self.nodes[f"{arm}_{name}"] = node
                if name != "controls":
                    self.nodes[f"{arm}_{name}_words"] = ranked_words(planned.subject, dictionary, node)

    @cached_property
    def opened(self) -> dict[str, xr.Dataset]:
        """Every result by name, in memory."""
        return {name: self.result(name).load() for name in self.nodes}

    @cached_property
    def labels(self) -> dict[str, FeatureLabels]:
        """What features are called: by arm, and of the preset under "preset"."""
        subject, ids = self.planned.subject, self.planned.encoding.ids
        found = {"preset": self.controls.labels(self.opened.__getitem__, self.store)}
        for arm in self.arms:
            trace = self.opened[f"{arm}_trace"]
            words = [self.opened[f"{arm}_{name}_words"] for name in ("trace", *protocols(arm))]
            every = [FeatureLabels.of_trace(subject, ids, each, trace) for each in words]
            found[arm] = reduce(or_, every)
        return found

    @property
    def spoken(self) -> tuple[str, ...]:
        """Labels of the preset's features."""
        return self.labels["preset"].spoken

    @property
    def baseline(self) -> tuple[float, float]:
        """Probability and logit of the word without injection."""
        found = self.opened["planning"]
        return float(np.exp(found["baseline_logprob"][0])), float(found["baseline_logit"][0])

    def views(self) -> Iterator[View]:
        """What each protocol reaches, how both kinds rank features, and where the best ones are active."""
        planned, preset = self.planned, self.planned.preset
        planning = self.opened["planning"].isel(strength=0, word=0)
        first = self._causal("preset", "preset", planning, planned.suppress, planned.inject)
        arms = {arm: {name: self._protocol(arm, name) for name in protocols(arm)} for arm in self.arms}
        yield Findings.of(*self._findings(), caption=preset.found)
        yield features_table(self.controls, self.labels["preset"])
        yield Data(
            json={
                "experiment": self.name,
                "model": planned.subject.files.name,
                "prompt": planned.prompt,
                "tokens": planned.tokens,
                "inject_word": preset.inject_word,
                "inject_token_id": self.word,
                "top_k_target_layer": self.target,
                "baseline_prob": self.baseline[0],
                "baseline_logit": self.baseline[1],
                "step_a": first,
                "arms": {arm: self._ranked_json(arm) | told for arm, told in arms.items()},
                "sanity_gates": self._gates(first["max_prob"]),
            }
        )
        reached = [("clt", "preset's features", first)]
        reached += [
            (arm, name.replace("_", " "), told) for arm, by in arms.items() for name, told in by.items()
        ]
        yield Table.of(
            reached,
            ("transcoders", lambda one: one[0]),
            ("protocol", lambda one: one[1]),
            ("p", lambda one: one[2]["max_prob"], ".4e"),
            ("logit", lambda one: one[2]["max_logit"], ".3f"),
            ("position", lambda one: one[2]["spike_position"], "d"),
            ("token", lambda one: format_token(one[2]["spike_token"])),
            title=f"{planned.heading}: probability of {preset.inject_word!r}, largest over positions",
            caption=f"without injection {self.baseline[0]:.4e}, logit {self.baseline[1]:.3f}",
        )
        yield self._ranking()
        by_place = self._by_place(reached)
        title = f"What features of {preset.inject_word!r} do in {planned.subject.name}, by kind of transcoder"
        yield from together("clt_vs_plt", title, by_place, caption="dashed: without injection")
        tokens = [f"{i} {format_token(token)}" for i, token in enumerate(planned.tokens)]
        for arm in self.arms:
            grid = self.opened[f"{arm}_trace"]["trace"].drop_vars(["score", "source_layer", "feature"])
            grid = grid.assign_coords(
                rank=list(map(self.labels[arm].short, self._features(f"{arm}_trace"))), position=tokens
            )
            yield Heatmap.of(
                grid.rename(rank="feature", position="token"),
                f"{arm}: the word's best features along the prompt",
            ).without_first_token()

    def _findings(self) -> Iterator[Finding]:
        """What the preset's features do, and what the best ranked ones of each kind do."""
        word = self.planned.preset.inject_word
        yield from exchange_findings(self.controls, self.opened.__getitem__, self.labels["preset"])
        for arm in self.arms:
            found = changes(self.opened[f"{arm}_controls"]).max(axis=0)
            claim = (
                f"{arm}: the five features that write most along {word!r} suppressed and the first injected "
                f"at {site_told(self.controls)} changes P({word!r}) at the end"
            )
            yield Finding(
                claim, float(found[0]), Null(found[1:], "sets of other features that write as much")
            )

    def _ranking(self) -> Table:
        """The best features of both kinds, side by side."""
        traces = {arm: self.opened[f"{arm}_trace"] for arm in self.arms}
        columns: list[tuple[Any, ...]] = []
        for arm, trace in traces.items():
            most = trace["trace"].max("position").values + 0.0  # what is not active may be -0.0
            columns += [
                (
                    f"{arm} feature",
                    list(map(self.labels[arm].short, self._features(f"{arm}_trace"))).__getitem__,
                ),
                (f"{arm} cosine", trace["score"].values.__getitem__, "+.3f"),
                (f"{arm} most active", most.__getitem__, ".3f"),
            ]
        return Table.of(
            range(min(10, *(trace.sizes["rank"] for trace in traces.values()))),
            ("rank", lambda rank: rank + 1, "d"),
            *columns,
            title=f"Features that write {self.planned.preset.inject_word!r} to layer {self.target}",
        )

    def _by_place(self, reached: list[tuple[str, str, dict[str, Any]]]) -> Lines:
        """Every protocol's probability of the word, by the position of the injection."""
        word, tokens = self.planned.preset.inject_word, self.planned.tokens

        def curve(name: str, told: dict[str, Any], family: str = "") -> Line:
            return Line(name, np.array([point["prob"] for point in told["sweep"]]), family=family)

        (_, first, told), *ranked = reached
        return Lines(
            title=f"Probability of {word!r} by the position of the injection",
            caption="dashed: without injection",
            x=tuple(f"{format_token(token)} ({place})" for place, token in enumerate(tokens)),
            x_name="token at which features are suppressed and injected",
            y_name=f"probability of {word!r} at the end",
            lines=(
                Line("without injection", np.full(len(tokens), self.baseline[0]), control=True),
                *(curve(f"{arm} {name}", each, arm) for arm, name, each in ranked),
                curve(f"the {first}", told),
            ),
            log=True,
        )

    def _gates(self, reached: float) -> dict[str, Any]:
        """The published maximum of the first step against ours; empty where anything but the preset was
        run.
        """
        expected = REFERENCE.get(self.settings.preset)
        if expected is None or self.planned.preset != PRESETS[self.settings.preset]:
            return {}
        return {
            "reference_max_prob": expected[0],
            "is_close": abs(reached - expected[0]) <= CLOSE,
            "minimum": expected[1],
            "is_above_minimum": reached >= expected[1],
        }

    def _features(self, name: str) -> list[FeatureId]:
        """The features of a trace or a sweep, in its order."""
        found = self.opened[name]
        pairs = zip(found["source_layer"].values.tolist(), found["feature"].values.tolist(), strict=True)
        return [FeatureId(layer, index) for layer, index in pairs]

    def _ranked_json(self, arm: str) -> dict[str, Any]:
        """The best features of an arm and what they read, in the fields of candle-mi's example."""
        trace, dictionary = self.opened[f"{arm}_trace"], self.arms[arm]
        features = self._features(f"{arm}_trace")
        return {
            "schema": dictionary.layout.format,
            "transcoder_repo": dictionary.name,
            "n_layers": len(dictionary.layers),
            "n_features_per_layer": dictionary.n_features,
            "top_20_features_same_layer": [
                {"feature": str(feature), "cosine": score, "label": self.labels[arm].label(feature)}
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
            "w_skip_projection_at_spike": number(trace["skip_projection"]),
        }

    def _protocol(self, arm: str, name: str) -> dict[str, Any]:
        """What a sweep of an arm reaches; one that injects has the injected feature last."""
        chosen = self._features(f"{arm}_{name}")
        inject = chosen.pop() if protocols(arm)[name][1] else None
        return self._causal(arm, name, self.opened[f"{arm}_{name}"].isel(word=0), chosen, inject)

    def _causal(
        self, arm: str, protocol: str, sweep: xr.Dataset, suppress: list[FeatureId], inject: FeatureId | None
    ) -> dict[str, Any]:
        probability, logit = np.exp(sweep["logprob"].values), sweep["logit"].values
        best, labels = int(probability.argmax()), self.labels[arm]
        return {
            "protocol": protocol,
            "suppress_features": list(map(labels.json, suppress)),
            "inject_feature": None if inject is None else labels.json(inject),
            "strength": self.planned.preset.strength,
            "spike_position": best,
            "spike_token": self.planned.tokens[best],
            "max_prob": float(probability[best]),
            "max_logit": float(logit[best]),
            "delta_prob": float(probability[best]) - self.baseline[0],
            "delta_logit": float(logit[best]) - self.baseline[1],
            "sweep": [
                {
                    "position": place,
                    "token": token,
                    "prob": float(probability[place]),
                    "logit": float(logit[place]),
                }
                for place, token in enumerate(self.planned.tokens)
            ],
        }


def protocols(arm: str) -> dict[str, tuple[bool, Any]]:
    """Sweeps of an arm: name -> (ranked over all targets, what is injected)."""
    found: dict[str, tuple[bool, Any]] = {
        "suppress_only": (False, ""),
        "suppress_inject": (False, "ranked"),
    }
    if arm == "clt":
        found |= {
            "over_targets_suppress_only": (True, ""),
            "over_targets_suppress_inject": (True, "ranked"),
            "over_targets_suppress_inject_same_layer": (True, "same_layer"),
        }
    return found


WORKFLOW = CltVsPlt
