"""Which tokens of a prompt does the answer's logit come from?

Integrated gradients (Sundararajan et al. 2017): gradients of the answer's log-probability are integrated
along the straight line from the embeddings of a baseline prompt to those of the prompt
(stages/causal/attribution/integrated.py). Each position gets an attribution; attributions sum to the
difference of log-probability between prompt and baseline, up to a reported gap. They are compared with exact
runs: the log-probability lost when the embedding of one position is replaced by that of the baseline.

Two claims, about facts that the model knows: replacing the token with the largest attribution loses more than
replacing another token of the same prompt; and attributions rank tokens as exact runs do, against shuffled
attributions. Default prompts are shipped facts; their baselines are other facts of the same length with
another answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.attribution.integrated import IntegratedGradients
from ...stages.causal.grids.patching_metrics import LogProbability
from ...stages.logits.lens import format_text, format_token
from ...store.arrays import Floats
from ..claim import Claim
from ..labelled import labelled, records, values_of
from ..material.unrelated import Unrelated
from ..settings import Count, setting
from ..views import Bars, Lines, Table, View, together
from ..workflow import Nodes
from .pairs import AttributedPairs, AttributionSettings, pair_json

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["IntegratedGradientsTrace", "IntegratedGradientsTraceSettings"]

MEASURED = ("log-probability of the answer", "nats")
"""Name and unit of attributions, for axes."""


@dataclass(frozen=True)
class IntegratedGradientsTraceSettings(AttributionSettings):
    """Settings of the workflow `integrated_gradients`: the facts, and the steps of the integral."""

    steps: Count = setting(32, "number of steps of the integral along the line")


class IntegratedGradientsTrace(AttributedPairs):
    """Workflow that attributes each fact's answer to the tokens of its prompt by integrated gradients from a
    baseline prompt."""

    name = "integrated_gradients"
    question = "Which tokens of a prompt does the answer's logit come from?"
    settings_type = IntegratedGradientsTraceSettings
    settings: IntegratedGradientsTraceSettings

    def plan(self) -> Nodes:
        """Nodes of the attributions, one per fact, and of the ranks of their answers."""
        settings = self.settings
        self.read = self.read_pairs()
        unrelated = Unrelated(self.subject)
        nodes: Nodes = {}
        for number, pair in enumerate(self.read):
            baseline = pair.corrupted
            if not settings.prompt:
                (baseline,) = unrelated.to(pair.clean, 1, seed=settings.seed + number, targets=pair.answers)
            nodes[f"fact_{number}"] = self.on_model(
                IntegratedGradients(
                    prompt=pair.clean,
                    baseline=baseline,
                    metric=LogProbability(pair.answer),
                    steps=settings.steps,
                )
            )
        return self.known_pairs_node() | nodes

    @cached_property
    def facts(self) -> list[xr.Dataset]:
        """Result of each fact, without the positions whose embedding equals the baseline's, in memory."""
        results = [self.result(f"fact_{number}").load() for number in range(len(self.read))]
        # Where the embeddings are equal, the attribution is exactly 0.
        return [fact.isel(position=np.flatnonzero(fact["attribution"].values != 0)) for fact in results]

    @cached_property
    def counted(self) -> list[xr.Dataset]:
        """Results of facts that enter claims: facts known to the model, with several positions different from
        the baseline."""
        return [
            fact
            for fact, is_known in zip(self.facts, self.counts, strict=True)
            if is_known and fact.sizes["position"] > 1
        ]

    @property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed: the model knows too few facts, or only one position differs from the
        baseline; empty otherwise."""
        single = "Only one position differs from the baseline, so that there is no other to compare it with."
        return super().not_claimed or ("" if self.counted else single)

    def claims(self) -> Iterator[Claim]:
        """Claims about the exact effect of the token with the largest attribution, and about the rank
        correlation of attributions with exact effects."""
        settings = self.settings
        largest, controls = zip(*map(self._removed, self.counted), strict=True)
        # Every prompt needs the same number of controls; the shortest has the fewest.
        count, random = min(map(len, controls)), np.random.default_rng(settings.seed)
        drawn = np.array([random.permutation(values)[:count] for values in controls])
        text = (
            "replacing the token with the largest attribution by the baseline's lowers the log-probability "
            "of the answer"
        )
        yield Claim.over(
            text, largest, drawn, "replacing another token of each prompt", settings, unit="nats"
        )
        text = "attributions rank tokens as exact replacements do (Spearman correlation)"
        pairs = [(fact["attribution"].values, fact["removed"].values) for fact in self.counted]
        yield Claim.ranking(text, pairs, "tokens of each prompt", settings)

    def claims_caption(self) -> str:
        """Caption of the claims: the facts they are about, and how much of the difference attributions
        miss."""
        gap = max(abs(float(fact["gap"])) for fact in self.facts)
        return (
            f"Claims are about {len(self.counted)} of {len(self.read)} facts, those whose answer the model "
            "predicts. The attributions of all tokens should sum to the log-probability after the prompt "
            f"minus that after the baseline prompt. With {self.settings.steps} steps of integration, they "
            f"miss it by at most {gap:.3f} nats."
        )

    def _removed(self, fact: xr.Dataset) -> tuple[float, Floats]:
        """Drop of the answer's log-probability, in nats, when the token with the largest attribution is
        replaced, and when each other token is replaced, [token]."""
        # Signed, unlike the table: the claim is that the log-probability falls, not that it changes.
        most, lost = int(fact["attribution"].values.argmax()), values_of(fact["removed"])
        return float(lost[most]), np.delete(lost, most)

    def document(self, number: int) -> dict[str, Any]:
        """JSON document of fact `number`; the tables read it too."""
        fact, pair = self.facts[number], self.read[number]
        value, baseline = fact["value"].values.tolist()
        return {
            **pair_json(pair),
            "is_known": bool(self.counts[number]),
            "log_probability": value,
            "baseline_log_probability": baseline,
            "gap": float(fact["gap"]),
            "tokens": records(fact, "position", "position", "token", "removed", share="attribution"),
        }

    def views(self) -> Iterator[View]:
        """Views in reading order: attributions and exact effects in the first fact, log-probabilities along
        the integration path, and a table of facts."""
        facts = [self.document(number) for number in range(len(self.read))]
        shown, first_fact = self.facts[0], facts[0]
        path = labelled(
            np.stack([fact["path"].values for fact in self.facts]),
            *MEASURED,
            fact=[f"{fact['answer']} ({n})" for n, fact in enumerate(facts)],
            step=shown["step"].values,
        )
        lines = Lines.of(
            path,
            "Log-probability of the answer along the integration path",
            "x: embeddings of all tokens, moved from those of the baseline prompt (0) to those of the prompt "
            "(1). y: log-probability of the answer, in nats. One line per fact.",
            sources=tuple(self.nodes),
        )
        panels: list[View] = [lines]
        if first_fact["tokens"]:  # empty if every position equals that of the baseline
            names = [f"{format_token(row['token'])} {row['position']}" for row in first_fact["tokens"]]
            by_measure = labelled(
                np.stack([shown["attribution"].values, shown["removed"].values]),
                *MEASURED,
                what=["attribution", "lost when replaced"],
                position=names,
            )
            bars = Bars.of(
                by_measure,
                f"Tokens of {first_fact['clean_prompt']!r}",
                "x: token. Two bars per token, in nats. Attribution: by integrated gradients, of the "
                f"log-probability of {first_fact['answer']!r}. Lost when replaced: the log-probability lost "
                "in an exact run in which the token's embedding is replaced by that of the baseline prompt.",
                sources=("fact_0",),
            )
            panels.insert(0, bars)
        title = f"Integrated gradients of {first_fact['answer']!r}"
        yield from together("integrated_gradients", title, *panels, beside=[self.findings], columns=2)
        yield Table.of(
            facts,
            ("prompt", lambda row: format_text(row["clean_prompt"])),
            ("answer", "answer"),
            ("log-probability", "log_probability", ".2f"),
            ("of the baseline", "baseline_log_probability", ".2f"),
            ("gap", "gap", "+.4f"),
            ("largest attribution", _most),
            title=f"Integrated gradients in {self.subject.name}: {len(facts)} facts",
            caption="One row per fact. Log-probability: of the answer after the prompt, in nats. Of the "
            "baseline: the same after the baseline prompt, another fact of the same length. Gap: part of "
            "their difference that the sum of all attributions misses. Largest attribution: the token and "
            "its attribution in nats.",
            sources=tuple(self.nodes),
            json={**self.subject.about, "steps": self.settings.steps, "facts": facts},
        )


def _most(fact: dict[str, Any]) -> str:
    """Token with the largest absolute attribution in a fact, with the attribution as text: "␣nat (+5.64)"."""
    token = max(fact["tokens"], key=lambda row: abs(row["share"]), default=None)
    return "none" if token is None else f"{format_token(token['token'])} ({token['share']:+.2f})"
