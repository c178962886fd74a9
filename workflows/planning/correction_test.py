"""Can an exchange of features be taken back? One word's features injected, then another's into late layers.

At a site the features of the expected word are suppressed and a word is committed to; at the same position a
second feature is injected, but only into layers from a later one on, ever stronger. Followed are both words
at the prompt's end and how far the attention to the site moved (stages/features/effects/sweeps.py).

At the largest strength the correction is held against random features of its layer that write as much into
the same layers after the same commitment, here and in other texts of the same kind
(material/feature_controls.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.features.effects.sweeps import Dose
from ...stages.logits.lens import format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..material.exchange_views import (
    ExchangeWorkflow,
    features_table,
    finding,
    held_out_finding,
    parts_table,
    site_told,
)
from ..material.feature_controls import FeatureControls, probabilities
from ..material.feature_injection import Planned
from ..material.feature_presets import chosen_preset
from ..settings import ControlSettings, Count, InjectionSettings, Natural, Positive, setting
from ..views import Data, Finding, Findings, Line, Lines, Table, View, together

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.model import Model

__all__ = ["CorrectionTest", "CorrectionTestSettings"]


@dataclass(frozen=True)
class CorrectionTestSettings(ControlSettings, InjectionSettings):
    """What `--set` can change; what is left empty is the preset's."""

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


class CorrectionTest(ExchangeWorkflow):
    """One word's features injected, then another's into later layers, at several strengths.

    Raises ConfigError for a preset that has no correction.
    """

    name = "correction_test"
    question = "Can an exchange of features be taken back in later layers?"
    settings_type = CorrectionTestSettings
    settings: CorrectionTestSettings

    def __init__(self, settings: CorrectionTestSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = chosen_preset(settings)
        if not preset.correct:
            raise ConfigError(
                f"the preset {settings.preset!r} has no correction; set correct, correct_word and "
                "correct_from_layer, or use preset gemma2-2b-426k"
            )
        self.planned = planned = Planned(preset, model, settings, ending=preset.ending)
        self.correct = planned.dictionary.feature(preset.correct)
        if preset.correct_from_layer < self.correct.layer:
            raise ConfigError(
                f"expected correct_from_layer to be at least {self.correct.layer}, the layer of "
                f"{self.correct}, found {preset.correct_from_layer}"
            )
        committed = tuple(
            Dose(dose.layer, dose.index, fixed=dose.factor * preset.strength) for dose in planned.doses
        )
        correction = Dose(
            self.correct.layer, self.correct.index, factor=1.0, from_layer=preset.correct_from_layer
        )
        strengths = tuple(step * settings.max_strength / settings.steps for step in range(settings.steps + 1))
        doses, words = (*committed, correction), (preset.inject_word, preset.correct_word)
        self.controls = FeatureControls(
            planned,
            doses,
            settings.max_strength,
            words[::-1],
            settings,
            preset.correct_looked_at,
            cause="correction",
            company="commitment",
        )
        edge = (planned.last, planned.site)
        sweep = planned.sweep(doses, strengths, words, positions=(planned.site,), edge=edge)
        self.nodes = {"sweep": sweep, **self.controls.nodes}

    @cached_property
    def sweep(self) -> xr.Dataset:
        """What the correction does at the one position, [strength, ...], in memory."""
        return self.result("sweep").load().isel(position=0)

    @cached_property
    def head(self) -> tuple[int, int] | None:
        """The head followed; None where 21:5 was meant and the model is smaller."""
        config = self.planned.subject.config
        text = self.settings.head or "21:5"
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
        """Both words and the attention, at every strength of the correction."""
        planned, preset, points = self.planned, self.planned.preset, self._points()
        words, labels = (preset.inject_word, preset.correct_word), self.labels
        before = self._said(self.sweep, "baseline_") | {"routing_head_delta": 0.0, "total_routing_shift": 0.0}
        yield Findings.of(*self._findings(), caption=preset.found)
        yield features_table(self.controls, self.labels)
        yield parts_table(self.controls, self.result)
        yield Data(json=self._about() | {"baseline": before, "commitment_only": points[0]})
        site = f"'{format_token(planned.tokens[planned.site])}' ({planned.site})"
        yield Table.of(
            points,
            ("strength", "correct_strength", ".2f"),
            (f"p({format_token(words[0])})", "p_commit_word", ".3e"),
            (f"p({format_token(words[1])})", "p_correct_word", ".3e"),
            ("most likely", lambda one: f"{one['top1_token']!r} {one['top1_prob']:.3f}"),
            ("attention moved", "total_routing_shift", ".4f"),
            title=f"{planned.heading}: {labels.short(planned.inject)} committed at {site}, then "
            f"{labels.short(self.correct)} into layers from {preset.correct_from_layer} on",
            caption=f"without any injection {before['p_commit_word']:.3e} and {before['p_correct_word']:.3e}",
            json={"correction_sweep": points},
        )
        by_strength: dict[str, Any] = {
            "x": tuple(point["correct_strength"] for point in points),
            "x_name": "strength of the correction",
        }

        def line(name: str, what: str, level: float | None = None) -> Line:
            return Line(name, np.array([point[what] for point in points]), level=level)

        which = Lines(
            title="Which word wins",
            caption="dashed: without any injection",
            y_name="probability at the end",
            lines=tuple(
                line(repr(word), what, before[what])
                for word, what in zip(words, ("p_commit_word", "p_correct_word"), strict=True)
            ),
            log=True,
            **by_strength,
        )
        moved = Lines(
            title="How far attention to the site moved",
            y_name="sum of |change of weight|, all heads",
            lines=(line("all heads", "total_routing_shift"),),
            low=0.0,
            **by_strength,
        )
        title = f"{words[0]!r} injected, then {words[1]!r} into later layers of {planned.subject.name}"
        yield from together("correction_test", title, which, moved)

    def _findings(self) -> Iterator[Finding]:
        """How much likelier the correction is than with the commitment alone, here and in its kin."""
        controls, preset = self.controls, self.planned.preset
        written = f"{self.labels.short(self.correct)} into layers from {preset.correct_from_layer} on"
        claim = (
            f"{written} at {site_told(controls)}, strength {controls.strength:g}, changes "
            f"P({preset.correct_word!r}) after the commitment"
        )
        yield finding(controls, taken_back(self.result("controls")), claim)
        if controls.held_out:
            there = taken_back(self.result("held_out"))
            yield held_out_finding(controls, there, f"the same in {controls.kin.where}")

    def _about(self) -> dict[str, Any]:
        """The other fields of candle-mi's example."""
        planned, preset, config = self.planned, self.planned.preset, self.planned.subject.config
        return {
            "model_id": planned.subject.files.name,
            "clt_repo": preset.dictionary,
            "prompt": planned.prompt,
            "planning_site": planned.site,
            "output_position": planned.last,
            "n_layers": config.num_layers,
            "n_heads": config.axis_sizes["head"],
            "commit_feature": self.labels.json(planned.inject),
            "commit_word": preset.inject_word,
            "suppress_features": list(map(self.labels.json, planned.suppress)),
            "commit_strength": preset.strength,
            "correct_feature": self.labels.json(self.correct),
            "correct_word": preset.correct_word,
            "correct_from_layer": preset.correct_from_layer,
            "routing_head": self.head,
        }

    def _points(self) -> list[dict[str, Any]]:
        """Every strength; how far attention moved is told from the run without any injection."""
        change = self.sweep["attention"] - self.sweep["baseline_attention"]
        shift = abs(change).sum(("layer", "head"))
        return [
            {
                "correct_strength": strength,
                **self._said(self.sweep.isel(strength=i)),
                "routing_head_delta": 0.0 if self.head is None else float(change[i, *self.head]),
                "total_routing_shift": float(shift[i]),
            }
            for i, strength in enumerate(self.sweep["strength"].values.tolist())
        ]

    def _said(self, run: xr.Dataset, prefix: str = "") -> dict[str, Any]:
        """Both words, and the likeliest token, of one run; those without any injection are "baseline_"."""
        words = np.exp(run[f"{prefix}logprob"].values)
        return {
            "p_commit_word": float(words[0]),
            "p_correct_word": float(words[1]),
            "top1_token": self.planned.subject.tokenizer.decode_token(int(run[f"{prefix}top_id"])),
            "top1_prob": float(np.exp(run[f"{prefix}top_logprob"])),
        }


def taken_back(found: xr.Dataset) -> Floats:
    """Change of P(correction) from that with the commitment alone, [place, exchange]."""
    likely = probabilities(found)
    return likely - likely[:, [1]]


WORKFLOW = CorrectionTest
