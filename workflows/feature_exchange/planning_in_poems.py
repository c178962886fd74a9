"""Do features at an earlier token decide the word a text ends on? Exchanged at every position.

At each position the features of the expected word are suppressed and one of another word is injected, in all
layers they write to; the probability of that word at the end is followed (figure 13 of Lindsey et al. 2025,
"On the Biology of a Large Language Model"). Where it rises, the end reads what was put there.

The null is random features of the same layer that write the same norm, with the same suppression. Beside it
stand the parts of the exchange, other texts of the same kind on which nothing was chosen, and facts of other
kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...stages.logits.lens import format_probability, format_token
from ..material.answers import named
from ..settings import ControlSettings, InjectionSettings, setting
from ..views import Bars, Data, Figure, Line, Lines, Table, View
from .workflow import ExchangeWorkflow, position_sweep

__all__ = ["PlanningInPoems", "PlanningInPoemsSettings"]

SMALLEST = 1e-12
"""Smallest rise of a probability that is marked."""
SHOWN = 12
"""Positions in the table."""


@dataclass(frozen=True)
class PlanningInPoemsSettings(ControlSettings, InjectionSettings):
    """Settings; empty ones are the preset's."""

    site: str = setting(
        "",
        "where the claim is made: a token of the prompt, or its position; none: the preset's, and for a "
        "prompt of your own the best of all, as each control is",
    )
    suppress_word: str = setting("", "word the suppressed features stand for, one token")
    inject_word: str = setting("", "word the injected feature stands for, one token")


class PlanningInPoems(ExchangeWorkflow):
    """Suppress and inject at every position, and follow both words at the end."""

    name = "planning_in_poems"
    question = "Do features at an earlier token decide the word a text ends on?"
    settings_type = PlanningInPoemsSettings

    def views(self) -> Iterator[View]:
        """The claims, the positions that change most, and the probability at every position."""
        yield from self.opening()
        preset, exchange, labels, swept = self.preset, self.exchange, self.labels, self.sweep.isel(strength=0)
        word, strength, injected = preset.inject_word, preset.strength, labels.short(exchange.inject)
        probability, suppressed = np.exp(swept["logprob"].transpose("word", "place").values)
        baseline = float(np.exp(swept["baseline_logprob"][0, 0]))
        best = int(probability.argmax())
        most = float(probability[best])
        rows = position_sweep(
            exchange.tokens,
            prob=probability,
            suppress_word_prob=suppressed,
            kl_divergence=swept["kl"],
            l2_distance=swept["distance"],
        )
        yield Data(
            json={
                "kind": preset.kind,
                "model": self.subject.files.name,
                "clt_repo": preset.dictionary,
                "prompt": preset.prompt + preset.ending,
                "tokens": exchange.tokens,
                "suppress_word": preset.suppress_word,
                "inject_word": word,
                "suppress_features": list(map(labels.json, exchange.suppress)),
                "inject_feature": labels.json(exchange.inject),
                "strength": strength,
                "baseline_prob": baseline,
                "max_position": best,
                "max_prob": most,
            }
        )
        likely = [format_token(token) for token in named(self.subject, swept["top_id"].values)]
        yield Table.of(
            [rows[i] for i in sorted(np.argsort(-probability, kind="stable")[:SHOWN])],
            ("position", "position", "d"),
            ("token", lambda row: format_token(row["token"])),
            (f"p({format_token(word)})", "prob", ".3e"),
            (f"p({format_token(preset.suppress_word)})", "suppress_word_prob", ".3e"),
            ("KL", "kl_divergence", ".3f"),
            ("most likely", lambda row: likely[row["position"]]),
            ("", lambda row: _mark(row["prob"], baseline)),
            title=f"{exchange.heading}: at each position {labels.several(exchange.suppress) or 'nothing'} "
            f"suppressed and {injected} injected, strength {strength:g}",
            caption=f"without injection {baseline:.3e}; most at position {best}, {most:.3e}, "
            f"{most / max(baseline, SMALLEST):.3g} times as much",
            json={"sweep": rows},
        )
        tokens = tuple(f"{format_token(token)} ({i})" for i, token in enumerate(exchange.tokens))
        axis: dict[str, Any] = {"x": tokens, "x_name": "token at which features are suppressed and injected"}
        before, is_best = format_probability(baseline), np.arange(len(tokens)) == best
        yield Lines(
            title=f"Probability of {word!r} at the end, by position of the injection",
            caption=f"dashed: without injection, {before}",
            y_name=f"P({word!r})",
            lines=(
                Line(f"{injected} injected", probability),
                Line("without injection", np.full(len(tokens), baseline), control=True),
            ),
            log=True,
            **axis,
        )
        bars = Bars(
            y_name=f"probability of {word!r} at the end",
            lines=(
                Line("elsewhere", np.where(is_best, 0.0, probability)),
                Line(f"at {tokens[best]}: {format_probability(most)}", is_best * probability, strong=True),
            ),
            stacked=True,
            log=True,
            low=min(float(probability.min()), baseline) / 3,
            levels=((baseline, before),),
            **axis,
        )
        yield Figure(
            name="planning_in_poems",
            title=f"Where injecting {injected} makes {self.subject.name} end on {word!r}",
            caption=f"each bar is one run; dashed: without injection, {before}",
            panels=(bars,),
        )


def _mark(probability: float, baseline: float) -> str:
    """ "***" where the probability rises more than tenfold, "*" where it more than doubles."""
    rise = probability - baseline
    if rise <= SMALLEST:
        return ""
    return "***" if rise > 10 * baseline else "*" if rise > baseline else ""
