"""Can an exchange of features be undone at later layers? A commitment, then a correction of growing strength.

At one position the features of the expected word are suppressed and one of another word is injected (the
commitment). At the same position a second feature is injected into later layers only (the correction), at
several strengths. Measured are the probabilities of both words at the end of the prompt, and the change of
attention to the position.

At its largest strength, the correction is compared with random features of its layer that write the same norm
into the same layers after the same commitment, in this prompt and in held-out texts of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.features.effects.doses import Dose
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..settings import ControlSettings, Count, InjectionSettings, Natural, Positive, setting
from ..views import Data, Line, Lines, Table, View, together
from .exchange import FeatureExchange, probabilities
from .presets import FeaturePreset
from .workflow import ExchangeWorkflow

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["CorrectionTest", "CorrectionTestSettings"]


@dataclass(frozen=True)
class CorrectionTestSettings(ControlSettings, InjectionSettings):
    """Settings of the workflow `correction_test`; empty ones are taken from the preset."""

    inject: str = setting("", "feature that the commitment injects, layer:index")
    strength: Positive | None = setting(
        None, "strength of the commitment; none: the preset's, 10 in the published ones"
    )
    inject_word: str = setting("", "word of the commitment, one token")
    correct: str = setting("", "feature that the correction injects, layer:index")
    correct_word: str = setting("", "word of the correction, one token")
    correct_from_layer: int = setting(0, "first layer that the correction is written to; 0: the preset's")
    site: str = setting(
        "", "position of the commitment and of the correction: a token of the prompt, or an index"
    )
    max_strength: Positive = setting(20.0, "largest strength of the correction")
    steps: Count = setting(12, "number of strengths above 0, evenly spaced up to the largest")
    correct_looked_at: Natural = setting(
        0, "features tried on this prompt before the correction was chosen; 0: the preset's, or 1"
    )
    head: str = setting("", "head whose attention is reported, layer:head; none: 21:5, if the model has it")


class Correction(FeatureExchange):
    """Exchange of features of fixed strength (the commitment), and a further feature injected into later
    layers (the correction), which claims are about."""

    settings: CorrectionTestSettings
    cause = "correction"
    company = "commitment"

    @cached_property
    def correct(self) -> FeatureId:
        """Feature that the correction injects. Raises ConfigError if it would be written before its own
        layer."""
        correct, from_layer = self.dictionary.feature(self.preset.correct), self.preset.correct_from_layer
        if from_layer < correct.layer:
            raise ConfigError(
                f"expected correct_from_layer of at least {correct.layer}, the layer of the feature "
                f"{correct}, found {from_layer}; raise it"
            )
        return correct

    @cached_property
    def doses(self) -> tuple[Dose, ...]:
        """All doses that are injected together: first those of the commitment (the exchange of the preset),
        whose strength is fixed, then that of the correction, which the strength of the run multiplies."""
        strength, from_layer = self.preset.strength, self.preset.correct_from_layer
        # A fixed dose does not grow with the strength of the run, which is that of the correction.
        commitment = [replace(dose, fixed=dose.factor * strength, factor=0.0) for dose in self.preset_doses]
        correct = Dose(self.correct.layer, self.correct.index, factor=1.0, from_layer=from_layer)
        # The last dose is the cause, the ones before it its company: tables and controls rely on this order.
        return (*commitment, correct)

    @property
    def strength(self) -> float:
        """Strength of the correction that the claim is about: the largest one."""
        return self.settings.max_strength

    @property
    def looked_at(self) -> int:
        """Number of features tried on this prompt before the correcting feature was selected."""
        return self.preset.correct_looked_at


class CorrectionTest(ExchangeWorkflow):
    """Workflow that commits a text to one word by an exchange of features, then corrects it to another word
    in later layers, at several strengths."""

    name = "correction_test"
    question = "Can an exchange of features be undone at later layers?"
    settings_type = CorrectionTestSettings
    settings: CorrectionTestSettings
    exchange_type = Correction
    exchange: Correction
    every_position = False
    words = ("correct_word", "inject_word")
    with_attention = True

    def checked(self, preset: FeaturePreset) -> FeaturePreset:
        """The preset, if it has a correcting feature; raises ConfigError otherwise."""
        if not preset.correct:
            raise ConfigError(
                f"expected a preset with a correcting feature, found {self.settings.preset!r}; set correct, "
                "correct_word and correct_from_layer, or use preset=gemma2-2b-426k"
            )
        return preset

    def strengths(self) -> tuple[float, ...]:
        """Strengths of the correction: from 0 up to the largest, evenly spaced."""
        steps = self.settings.steps
        return tuple(step * self.settings.max_strength / steps for step in range(steps + 1))

    def effects(self, result: xr.Dataset) -> Floats:
        """Change of the probability of the correction's word from the run with the commitment alone, [place,
        exchange]."""
        probability = probabilities(result)
        # Index 1 of the axis "exchange" is the commitment alone; see `FeatureExchange.tried`.
        return probability - probability[:, [1]]

    @property
    def claim(self) -> str:
        """Text of the claim about the correction."""
        exchange, preset = self.exchange, self.preset
        written = f"{self.labels.short(exchange.correct)} into layers from {preset.correct_from_layer} on"
        return (
            f"injecting {written} at {exchange.site_label}, strength {exchange.strength:g}, changes "
            f"P({preset.correct_word!r}) after the commitment"
        )

    @cached_property
    def head(self) -> tuple[int, int] | None:
        """(layer, head) whose attention is reported; None if the settings name none and the model has no head
        21:5."""
        config, text = self.subject.config, self.settings.head or "21:5"
        layer, _, head = text.partition(":")
        if not (layer.isdecimal() and head.isdecimal()):
            raise ConfigError(f"expected a head as layer:head, such as 21:5, found {text!r}")
        if int(layer) < config.num_layers and int(head) < config.axis_sizes["head"]:
            return int(layer), int(head)
        if self.settings.head:
            raise ConfigError(
                f"expected head as layer:head, in a model of {config.num_layers} layers with "
                f"{config.axis_sizes['head']} heads each, found {text}; choose another head"
            )
        return None

    def views(self) -> Iterator[View]:
        """Views in reading order: the exchanged features, a table by strength of the correction, and curves
        of the probabilities of both words and of attention."""
        yield from self.opening()
        exchange, preset, labels, points = self.exchange, self.preset, self.labels, self._points()
        words = (preset.inject_word, preset.correct_word)
        before = self._predicted(self.sweep.isel(place=0), "baseline_")
        before |= {"routing_head_delta": 0.0, "total_routing_shift": 0.0}
        yield Data(json=self._about() | {"baseline": before, "commitment_only": points[0]})
        yield Table.of(
            points,
            ("strength", "correct_strength", ".2f"),
            (f"p({format_token(words[0])})", "p_commit_word", ".3e"),
            (f"p({format_token(words[1])})", "p_correct_word", ".3e"),
            ("most likely", lambda point: f"{point['top1_token']!r} {point['top1_prob']:.3f}"),
            ("change of attention", "total_routing_shift", ".4f"),
            title=f"{exchange.heading}: {labels.short(exchange.inject)} injected at {exchange.site_label}, "
            f"then {labels.short(exchange.correct)} into layers from {preset.correct_from_layer} on",
            caption="A first injection, the commitment, is followed by a second one in later layers, the "
            "correction. One row per strength of the correction. p: probability of a word at the end of the "
            "prompt. Change of attention: the last token's attention weight to the position of the exchange, "
            "minus that without any injection; |change| summed over all heads. Without any injection the "
            f"probabilities are {before['p_commit_word']:.3e} and {before['p_correct_word']:.3e}.",
            json={"correction_sweep": points},
        )
        axis: dict[str, Any] = {
            "x": tuple(point["correct_strength"] for point in points),
            "x_name": "strength of the correction",
        }

        def line(name: str, field: str, level: float | None = None) -> Line:
            return Line(name, np.array([point[field] for point in points]), level=level)

        probability = Lines(
            title="Probability of both words",
            caption="x: strength of the correction. y: probability at the end of the prompt. Curves: "
            f"{words[0]!r}, whose feature the commitment injects first, and {words[1]!r}, whose feature the "
            "correction injects into later layers. Dashed: without any injection.",
            y_name="probability at the end",
            lines=tuple(
                line(repr(word), field, before[field])
                for word, field in zip(words, ("p_commit_word", "p_correct_word"), strict=True)
            ),
            log=True,
            **axis,
        )
        attention = Lines(
            title="Change of attention to the site",
            caption="x: strength of the correction. y: attention weight from the last token to the site (the "
            "position of the exchange), minus that without any injection; absolute values summed over all "
            "heads.",
            y_name="sum of |change of weight|, all heads",
            lines=(line("all heads", "total_routing_shift"),),
            low=0.0,
            **axis,
        )
        title = f"{words[0]!r} injected, then {words[1]!r} into later layers of {self.subject.name}"
        yield from together("correction_test", title, probability, attention)

    def _about(self) -> dict[str, Any]:
        """Settings and sizes for the JSON document, under the names of candle-mi's example."""
        exchange, preset, config, label = self.exchange, self.preset, self.subject.config, self.labels.json
        return {
            "model_id": self.subject.files.name,
            "clt_repo": preset.dictionary,
            "prompt": preset.prompt + preset.ending,
            "planning_site": exchange.required_site,
            "output_position": exchange.last,
            "n_layers": config.num_layers,
            "n_heads": config.axis_sizes["head"],
            "commit_feature": label(exchange.inject),
            "commit_word": preset.inject_word,
            "suppress_features": list(map(label, exchange.suppress)),
            "commit_strength": preset.strength,
            "correct_feature": label(exchange.correct),
            "correct_word": preset.correct_word,
            "correct_from_layer": preset.correct_from_layer,
            "routing_head": self.head,
        }

    def _points(self) -> list[dict[str, Any]]:
        """Records by strength of the correction; changes of attention are from the run without any
        injection."""
        sweep = self.sweep.isel(place=0)
        change = (sweep["attention"] - sweep["baseline_attention"]).transpose("strength", "layer", "head")
        shift = abs(change).sum(("layer", "head"))
        return [
            {
                "correct_strength": strength,
                **self._predicted(sweep.isel(strength=i)),
                "routing_head_delta": 0.0 if self.head is None else float(change[i, *self.head]),
                "total_routing_shift": float(shift[i]),
            }
            for i, strength in enumerate(sweep["strength"].values.tolist())
        ]

    def _predicted(self, run: xr.Dataset, prefix: str = "") -> dict[str, Any]:
        """JSON fields of one run: probabilities of both words, and the most likely token with its
        probability.

        Arguments:
            run: one strength of the sweep.
            prefix: "baseline_" for the run without injection, else "".
        """
        # In the order of `words`.
        correct, commit = np.exp(run[f"{prefix}logprob"].values).tolist()
        return {
            "p_commit_word": commit,
            "p_correct_word": correct,
            "top1_token": self.subject.tokenizer.decode_token(int(run[f"{prefix}top_id"])),
            "top1_prob": float(np.exp(run[f"{prefix}top_logprob"])),
        }
