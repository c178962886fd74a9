"""Can an exchange of features be taken back? One word's features injected, then another's into late layers.

At a site the features of the expected word are suppressed and those of another are injected (the commitment);
at the same position a second feature is injected, but only into layers from a later one on, ever stronger.
Both words at the prompt's end are followed, and how far the attention to the site changes.

At the largest strength the correction is compared with random features of its layer that write the same norm
into the same layers after the same commitment, here and in other texts of the same kind.
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
    """Settings; empty ones are the preset's."""

    inject: str = setting("", "feature of the word committed to, layer:index")
    strength: Positive | None = setting(
        None, "strength of the commitment; none: the preset's, 10 in the published ones"
    )
    inject_word: str = setting("", "the word committed to, one token")
    correct: str = setting("", "feature of the correction, layer:index")
    correct_word: str = setting("", "the correction, one token")
    correct_from_layer: int = setting(0, "first layer the correction is written to; 0: the preset's")
    site: str = setting("", "where all of it is injected: a token of the prompt, or its position")
    max_strength: Positive = setting(20.0, "largest strength of the correction")
    steps: Count = setting(12, "strengths above 0, evenly spaced up to the largest")
    correct_looked_at: Natural = setting(
        0, "features tried on this prompt before the correction was chosen; 0: the preset's, or 1"
    )
    head: str = setting("", "head followed, layer:head; none: 21:5, or the one that moves most")


class Correction(FeatureExchange):
    """A commitment of fixed strength and a correction, the cause in question, into later layers."""

    settings: CorrectionTestSettings
    cause = "correction"
    company = "commitment"

    @cached_property
    def correct(self) -> FeatureId:
        """The feature of the correction. ConfigError where it would be written before its own layer."""
        correct, first = self.dictionary.feature(self.preset.correct), self.preset.correct_from_layer
        if first < correct.layer:
            raise ConfigError(
                f"expected correct_from_layer to be at least {correct.layer}, the layer of {correct}, found "
                f"{first}"
            )
        return correct

    @cached_property
    def doses(self) -> tuple[Dose, ...]:
        """The commitment, then the correction at the strength of the run."""
        strength, first = self.preset.strength, self.preset.correct_from_layer
        commitment = [replace(dose, fixed=dose.factor * strength, factor=0.0) for dose in self.preset_doses]
        correct = Dose(self.correct.layer, self.correct.index, factor=1.0, from_layer=first)
        return (*commitment, correct)

    @property
    def strength(self) -> float:
        """The largest strength of the correction."""
        return self.settings.max_strength

    @property
    def looked_at(self) -> int:
        """Number of features tried before the correction was chosen."""
        return self.preset.correct_looked_at


class CorrectionTest(ExchangeWorkflow):
    """One word's features injected, then another's into later layers, at several strengths.

    Raises ConfigError for a preset that has no correction.
    """

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
        """See `ExchangeWorkflow`."""
        if not preset.correct:
            raise ConfigError(
                f"the preset {self.settings.preset!r} has no correction; set correct, correct_word and "
                "correct_from_layer, or use preset gemma2-2b-426k"
            )
        return preset

    def strengths(self) -> tuple[float, ...]:
        """From 0 up to the largest, evenly spaced."""
        steps = self.settings.steps
        return tuple(step * self.settings.max_strength / steps for step in range(steps + 1))

    def effects(self, result: xr.Dataset) -> Floats:
        """Change of P(correction) from the commitment alone, [place, exchange]."""
        probability = probabilities(result)
        return probability - probability[:, [1]]

    @property
    def claim(self) -> str:
        """What the correction does, in words."""
        exchange, preset = self.exchange, self.preset
        written = f"{self.labels.short(exchange.correct)} into layers from {preset.correct_from_layer} on"
        return (
            f"{written} at {exchange.site_label}, strength {exchange.strength:g}, changes "
            f"P({preset.correct_word!r}) after the commitment"
        )

    @cached_property
    def head(self) -> tuple[int, int] | None:
        """Layer and head followed; None where the default 21:5 is not in the model."""
        config, text = self.subject.config, self.settings.head or "21:5"
        layer, _, head = text.partition(":")
        if not (layer.isdecimal() and head.isdecimal()):
            raise ConfigError(f"expected a head as layer:head, such as 21:5, found {text!r}")
        if int(layer) < config.num_layers and int(head) < config.axis_sizes["head"]:
            return int(layer), int(head)
        if self.settings.head:
            raise ConfigError(
                f"expected a head of {config.num_layers} layers and {config.axis_sizes['head']} heads, found "
                f"{text}"
            )
        return None

    def views(self) -> Iterator[View]:
        """The claims, and both words and the attention at every strength of the correction."""
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
            ("attention moved", "total_routing_shift", ".4f"),
            title=f"{exchange.heading}: {labels.short(exchange.inject)} committed at {exchange.site_label}, "
            f"then {labels.short(exchange.correct)} into layers from {preset.correct_from_layer} on",
            caption=f"without any injection {before['p_commit_word']:.3e} and {before['p_correct_word']:.3e}",
            json={"correction_sweep": points},
        )
        axis: dict[str, Any] = {
            "x": tuple(point["correct_strength"] for point in points),
            "x_name": "strength of the correction",
        }

        def line(name: str, field: str, level: float | None = None) -> Line:
            return Line(name, np.array([point[field] for point in points]), level=level)

        probability = Lines(
            title="Which word wins",
            caption="dashed: without any injection",
            y_name="probability at the end",
            lines=tuple(
                line(repr(word), field, before[field])
                for word, field in zip(words, ("p_commit_word", "p_correct_word"), strict=True)
            ),
            log=True,
            **axis,
        )
        attention = Lines(
            title="How far attention to the site moved",
            y_name="sum of |change of weight|, all heads",
            lines=(line("all heads", "total_routing_shift"),),
            low=0.0,
            **axis,
        )
        title = f"{words[0]!r} injected, then {words[1]!r} into later layers of {self.subject.name}"
        yield from together("correction_test", title, probability, attention)

    def _about(self) -> dict[str, Any]:
        """Settings and sizes, under the names of candle-mi's example."""
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
        """A record per strength; the attention is compared with the run without any injection."""
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
        """Both words and the likeliest token of one run. prefix: "baseline_" for the untouched run."""
        correct, commit = np.exp(run[f"{prefix}logprob"].values).tolist()
        return {
            "p_commit_word": commit,
            "p_correct_word": correct,
            "top1_token": self.subject.tokenizer.decode_token(int(run[f"{prefix}top_id"])),
            "top1_prob": float(np.exp(run[f"{prefix}top_logprob"])),
        }
