"""Do features at an earlier token decide the word a text ends on? Exchanged at every position.

At each position of a poem, or of another text, the features of the expected word are suppressed and one of
another word is injected, at all layers they write to; the probability of that word at the end is followed
(figure 13 of Lindsey et al. 2025, "On the Biology of a Large Language Model";
stages/features/effects/sweeps.py). Where it rises, the end reads what was put there.

That alone says nothing of the feature: what a change of its size does at that place is its null, random
features of the same layer that write as much, with the same suppression. Beside it stand the parts of the
exchange, other texts of the same kind on which nothing was chosen, and facts of other kinds
(material/feature_controls.py).

The suppression moves with the injection. Prompts end in a space of their own, as in the published runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.logits.lens import format_probability, format_token
from ..material.answers import named
from ..material.exchange_views import ExchangeWorkflow, exchange_findings, features_table, parts_table
from ..material.feature_controls import FeatureControls
from ..material.feature_injection import Planned
from ..material.feature_presets import chosen_preset
from ..settings import ControlSettings, InjectionSettings, setting
from ..views import Bars, Data, Figure, Findings, Line, Lines, Table, View
from ..workflow import loaded

if TYPE_CHECKING:
    from ...stages.forward.models.model import Model

__all__ = ["PlanningInPoems", "PlanningInPoemsSettings"]

SMALLEST = 1e-12
"""Probability from which on a rise is marked."""
SHOWN = 12
"""Positions in the table."""


@dataclass(frozen=True)
class PlanningInPoemsSettings(ControlSettings, InjectionSettings):
    """What `--set` can change; what is left empty is the preset's."""

    site: str = setting(
        "",
        "where the claim is made: a token of the prompt, or its position; none: the preset's, and for a "
        "prompt of your own the best of all, as each control is",
    )
    suppress_word: str = setting("", "word the suppressed features stand for, one token")
    inject_word: str = setting("", "word the injected feature stands for, one token")


class PlanningInPoems(ExchangeWorkflow):
    """Suppress and inject, position by position."""

    name = "planning_in_poems"
    question = "Do features at an earlier token decide the word a text ends on?"
    settings_type = PlanningInPoemsSettings
    settings: PlanningInPoemsSettings

    sweep = loaded("sweep")
    """The one strength, [strength, position] and [strength, position, word]."""

    def __init__(self, settings: PlanningInPoemsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = chosen_preset(settings, keep_site=False)
        self.planned = planned = Planned(preset, model, settings, ending=preset.ending)
        words = (preset.inject_word, preset.suppress_word)
        self.controls = FeatureControls(
            planned, planned.doses, preset.strength, words, settings, preset.looked_at
        )
        sweep = planned.sweep(planned.doses, (preset.strength,), words)
        self.nodes = {"sweep": sweep, **self.controls.nodes}

    def views(self) -> Iterator[View]:
        """The positions that change most, in their order, and the probability at every position."""
        planned, preset, swept = self.planned, self.planned.preset, self.sweep.isel(strength=0)
        word, strength = preset.inject_word, preset.strength
        labels = self.labels
        injected = labels.short(planned.inject)
        probability = np.exp(swept["logprob"].transpose("position", "word").values)
        baseline = float(np.exp(swept["baseline_logprob"][0]))
        best = int(probability[:, 0].argmax())
        most = float(probability[best, 0])
        sweep = [
            {
                "position": place,
                "token": token,
                "prob": float(probability[place, 0]),
                "suppress_word_prob": float(probability[place, 1]),
                "kl_divergence": float(swept["kl"][place]),
                "l2_distance": float(swept["distance"][place]),
            }
            for place, token in enumerate(planned.tokens)
        ]
        yield Findings.of(*exchange_findings(self.controls, self.result, labels), caption=preset.found)
        yield features_table(self.controls, labels)
        yield parts_table(self.controls, self.result)
        yield Data(
            json={
                "kind": preset.kind,
                "model": planned.subject.files.name,
                "clt_repo": preset.dictionary,
                "prompt": planned.prompt,
                "tokens": planned.tokens,
                "suppress_word": preset.suppress_word,
                "inject_word": word,
                "suppress_features": list(map(labels.json, planned.suppress)),
                "inject_feature": labels.json(planned.inject),
                "strength": strength,
                "baseline_prob": baseline,
                "max_position": best,
                "max_prob": most,
            }
        )
        off = labels.several(planned.suppress) or "nothing"
        likely = [format_token(token) for token in named(planned.subject, swept["top_id"].values)]
        yield Table.of(
            [sweep[place] for place in sorted(np.argsort(-probability[:, 0], kind="stable")[:SHOWN])],
            ("position", "position", "d"),
            ("token", lambda one: format_token(one["token"])),
            (f"p({format_token(word)})", "prob", ".3e"),
            (f"p({format_token(preset.suppress_word)})", "suppress_word_prob", ".3e"),
            ("KL", "kl_divergence", ".3f"),
            ("most likely", lambda one: likely[one["position"]]),
            ("", lambda one: _mark(one["prob"], baseline)),
            title=f"{planned.heading}: at each position {off} suppressed and {injected} "
            f"injected, strength {strength:g}",
            caption=f"without injection {baseline:.3e}; most at position {best}, {most:.3e}, "
            f"{most / max(baseline, SMALLEST):.3g} times as much",
            json={"sweep": sweep},
        )
        tokens = tuple(f"{format_token(token)} ({place})" for place, token in enumerate(planned.tokens))
        where: dict[str, Any] = {"x": tokens, "x_name": "token at which features are suppressed and injected"}
        chance, here = format_probability(baseline), np.arange(len(tokens)) == best
        yield Lines(
            title=f"Probability of {word!r} at the end, by position of the injection",
            caption=f"dashed: without injection, {chance}",
            y_name=f"P({word!r})",
            lines=(
                Line(f"{injected} injected", probability[:, 0]),
                Line("without injection", np.full(len(tokens), baseline), control=True),
            ),
            log=True,
            **where,
        )
        bars = Bars(
            y_name=f"probability of {word!r} at the end",
            lines=(
                Line("elsewhere", np.where(here, 0.0, probability[:, 0])),
                Line(f"at {tokens[best]}: {format_probability(most)}", here * probability[:, 0], strong=True),
            ),
            stacked=True,
            log=True,
            low=min(float(probability[:, 0].min()), baseline) / 3,
            levels=((baseline, chance),),
            **where,
        )
        yield Figure(
            name="planning_in_poems",
            title=f"Where injecting {injected} makes {planned.subject.name} end on {word!r}",
            caption=f"each bar is one run; dashed: without injection, {chance}",
            panels=(bars,),
        )


def _mark(probability: float, baseline: float) -> str:
    """*** where the word became ten times likelier than that again, * where likelier by as much as it was."""
    rise = probability - baseline
    if rise <= SMALLEST:
        return ""
    return "***" if rise > 10 * baseline else "*" if rise > baseline else ""


WORKFLOW = PlanningInPoems
