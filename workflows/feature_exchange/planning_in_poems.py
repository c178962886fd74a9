"""Do features at an earlier token decide the word a text ends on? Features exchanged at every position.

At one position at a time the features of the expected word are suppressed and one of another word is
injected, in all layers that they write to, and the probability of the other word at the end is measured
(figure 13 of Lindsey et al. 2025, "On the Biology of a Large Language Model"). A rise shows that the
prediction depends on that position.

The null distribution is random features of the same layer with the same norm of their write, with the same
suppression. The parts of the exchange, held-out texts of the same kind, and facts of other kinds are run as
well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...stages.logits.lens import format_probability, format_token
from ..settings import ControlSettings, InjectionSettings, setting
from ..views import Bars, Data, Figure, Line, Lines, Table, View
from .workflow import ExchangeWorkflow, position_sweep

__all__ = ["PlanningInPoems", "PlanningInPoemsSettings"]

SMALLEST = 1e-12
"""Smallest rise of a probability that is marked in the table; smaller ones may be rounding errors."""
SHOWN = 12
"""Number of positions listed in the table."""


@dataclass(frozen=True)
class PlanningInPoemsSettings(ControlSettings, InjectionSettings):
    """Settings of the workflow `planning_in_poems`; empty ones are taken from the preset."""

    site: str = setting(
        "",
        "position that the claim is about: a token of the prompt, or an index; none: the preset's, and for a "
        "prompt of your own the best position, as for each control",
    )
    suppress_word: str = setting("", "word that the suppressed features stand for, one token")
    inject_word: str = setting("", "word that the injected feature stands for, one token")


class PlanningInPoems(ExchangeWorkflow):
    """Workflow that exchanges features at each position of a prompt in turn and measures the probabilities of
    two words at its end."""

    name = "planning_in_poems"
    question = "Do features at an earlier token decide the word a text ends on?"
    settings_type = PlanningInPoemsSettings

    def views(self) -> Iterator[View]:
        """Views in reading order: the exchange, the positions with the highest probability, and the
        probability by position."""
        yield from self.opening()
        preset, exchange, labels, swept = self.preset, self.exchange, self.labels, self.sweep.isel(strength=0)
        word, strength, injected = preset.inject_word, preset.strength, labels.short(exchange.inject)
        probability, suppressed = np.exp(swept["logprob"].transpose("word", "place").values)
        # The run without injection is the same for every position.
        baseline = float(np.exp(swept["baseline_logprob"][0, 0]))
        best = int(probability.argmax())
        highest = float(probability[best])
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
                "max_prob": highest,
            }
        )
        likely = self.subject.token_labels(swept["top_id"].values)
        yield Table.of(
            [rows[i] for i in sorted(np.argsort(-probability, kind="stable")[:SHOWN])],
            ("position", "position", "d"),
            ("token", lambda row: format_token(row["token"])),
            (f"p({format_token(word)})", "prob", ".3e"),
            (f"p({format_token(preset.suppress_word)})", "suppress_word_prob", ".3e"),
            ("KL", "kl_divergence", ".3f"),
            ("most likely", lambda row: likely[row["position"]]),
            ("rise", lambda row: _mark(row["prob"], baseline)),
            title=f"{exchange.heading}: at each position {labels.several(exchange.suppress) or 'nothing'} "
            f"suppressed and {injected} injected, strength {strength:g}",
            caption=f"One row per position of the exchange; shown are the {SHOWN} positions with the highest "
            "probability. p: probability of a word at the end of the prompt. KL: of the next-token "
            f"distribution from that without injection, in nats. Without injection p({format_token(word)}) "
            f"is {baseline:.3e}. It is highest at position {best}: {highest:.3e}, "
            f"{highest / max(baseline, SMALLEST):.3g} times as high. Rise: * more than {baseline:.1e} above "
            "p without injection, *** more than 10 times that.",
            json={"sweep": rows},
        )
        axis = exchange.position_axis
        best_name = axis["x"][best]
        before, is_best = format_probability(baseline), np.arange(len(rows)) == best
        yield Lines(
            title=f"Probability of {word!r} at the end, by position of the injection",
            caption="x: the position at which features are suppressed and injected, one at a time. y: "
            f"probability of {word!r} as the next token after the prompt. Dashed: without injection, "
            f"{before}.",
            y_name=f"P({word!r})",
            lines=(
                Line(f"{injected} injected", probability),
                Line("without injection", np.full(len(rows), baseline), control=True),
            ),
            log=True,
            **axis,
        )
        bars = Bars(
            y_name=f"probability of {word!r} at the end",
            lines=(
                Line("at other positions", np.where(is_best, 0.0, probability)),
                Line(f"at {best_name}: {format_probability(highest)}", is_best * probability, strong=True),
            ),
            stacked=True,
            log=True,
            # Bars on a logarithmic axis need a lower end above 0, below the smallest bar.
            low=min(float(probability.min()), baseline) / 3,
            levels=((baseline, before),),
            **axis,
        )
        yield Figure(
            name="planning_in_poems",
            title=f"Probability that {self.subject.name} ends on {word!r}, by position of {injected}",
            caption=f"x: the token at which {labels.several(exchange.suppress) or 'nothing'} is suppressed "
            f"and {injected} is injected, one run per bar. y: probability of {word!r} after the prompt. "
            f"Dashed: without injection, {before}.",
            panels=(bars,),
        )


def _mark(probability: float, baseline: float) -> str:
    """Table mark of a rise in probability: "***" above 10 times the baseline, "*" above the baseline, ""
    below."""
    rise = probability - baseline
    if rise <= SMALLEST:
        return ""
    return "***" if rise > 10 * baseline else "*" if rise > baseline else ""
