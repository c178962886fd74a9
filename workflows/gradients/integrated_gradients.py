"""Which tokens of a prompt does the answer's logit come from?

Integrated gradients, and runs without each token.

Along the straight line from the embeddings of an unrelated prompt to those of the prompt, gradients of the
answer's log-probability are summed up (stages/causal/attribution/integrated.py): each position gets a share,
and the shares add up to what the whole prompt does, but for a gap that is told. Beside them stands what exact
runs say: the log-probability lost when the embedding of one position alone becomes that of the unrelated
prompt.

Defaults: shipped facts, of which those count that the model knows; baselines are other facts of as many
tokens and another answer. Two claims: replacing the position with the largest share loses more than replacing
another one of the same prompt; and shares rank positions as runs do, beside shares shuffled among them.
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


@dataclass(frozen=True)
class IntegratedGradientsTraceSettings(AttributionSettings):
    """What `--set` can change."""

    steps: Count = setting(32, "places along the way at which gradients are taken")


class IntegratedGradientsTrace(AttributedPairs):
    """Paths from unrelated prompts to facts, one per fact."""

    name = "integrated_gradients"
    question = "Which tokens of a prompt does the answer's logit come from?"
    settings_type = IntegratedGradientsTraceSettings
    settings: IntegratedGradientsTraceSettings

    def plan(self) -> Nodes:
        """A result per fact, and which answers the model knows."""
        given = self.settings
        self.read = self.read_pairs()
        unrelated = Unrelated(self.subject)
        nodes: Nodes = {}
        for number, pair in enumerate(self.read):
            baseline = pair.corrupted
            if not given.prompt:
                (baseline,) = unrelated.to(pair.clean, 1, seed=given.seed + number, targets=pair.answers)
            nodes[f"fact_{number}"] = self.on_model(
                IntegratedGradients(
                    prompt=pair.clean,
                    baseline=baseline,
                    metric=LogProbability(pair.answer),
                    steps=given.steps,
                )
            )
        return self.known_pairs_node(self.read) | nodes

    @cached_property
    def facts(self) -> list[xr.Dataset]:
        """What was found of each, over positions whose embedding differs from the baseline's."""
        found = [self.result(f"fact_{number}").load() for number in range(len(self.read))]
        return [each.isel(position=np.flatnonzero(each["attribution"].values != 0)) for each in found]

    @cached_property
    def counted(self) -> list[xr.Dataset]:
        """Facts that the model knows, with more than one position that differs from the baseline."""
        return [
            each
            for each, known in zip(self.facts, self.counts, strict=True)
            if known and each.sizes["position"] > 1
        ]

    @property
    def not_claimed(self) -> str:
        """See `KnownWorkflow`; also where one position alone differs from the baseline."""
        alone = "One position differs from the baseline: there is none to compare it with."
        return super().not_claimed or ("" if self.counted else alone)

    def claims(self) -> Iterator[Claim]:
        """What the position with the largest share is worth by a run, and whether shares rank positions."""
        settings = self.settings
        largest, others = zip(*map(self._removed, self.counted), strict=True)
        count, random = min(map(len, others)), np.random.default_rng(settings.seed)
        drawn = np.array([random.permutation(values)[:count] for values in others])
        text = "without the token of the largest share the answer loses log-probability"
        yield Claim.over(text, largest, drawn, "another token of each prompt", settings, unit="nats")
        text = "shares rank tokens as runs without them do (Spearman)"
        pairs = [(fact["attribution"].values, fact["removed"].values) for fact in self.counted]
        yield Claim.ranking(text, pairs, "tokens of each prompt", settings)

    def claims_caption(self) -> str:
        """Facts that count, and the worst sum of shares."""
        gap = max(abs(float(fact["gap"])) for fact in self.facts)
        return (
            f"{len(self.counted)} of {len(self.read)} facts, whose answer the model predicts; in "
            f"{self.settings.steps} steps shares miss the whole by at most {gap:.3f} nats."
        )

    def _removed(self, fact: xr.Dataset) -> tuple[float, Floats]:
        """What is lost without the token of the largest share, and without each other one, in nats."""
        most, lost = int(fact["attribution"].values.argmax()), values_of(fact["removed"])
        return float(lost[most]), np.delete(lost, most)

    def document(self, number: int) -> dict[str, Any]:
        """A fact in plain values."""
        fact, pair = self.facts[number], self.read[number]
        value, base = fact["value"].values.tolist()
        return {
            **pair_json(pair),
            "is_known": bool(self.counts[number]),
            "log_probability": value,
            "baseline_log_probability": base,
            "gap": float(fact["gap"]),
            "tokens": records(fact, "position", "position", "token", "removed", share="attribution"),
        }

    def views(self) -> Iterator[View]:
        """The claims, the tokens of the first fact both ways, and the way itself."""
        facts = [self.document(number) for number in range(len(self.read))]
        shown, told = self.facts[0], facts[0]
        way = labelled(
            np.stack([fact["path"].values for fact in self.facts]),
            *MEASURED,
            fact=[f"{fact['answer']} ({n})" for n, fact in enumerate(facts)],
            step=shown["step"].values,
        )
        lines = Lines.of(
            way,
            "Along the way",
            "log-probability of each fact's answer from its baseline (0) to its prompt (1)",
            sources=tuple(self.nodes),
        )
        panels: list[View] = [lines]
        if told["tokens"]:  # every position may be that of the baseline
            names = [f"{format_token(each['token'])} {each['position']}" for each in told["tokens"]]
            both = labelled(
                np.stack([shown["attribution"].values, shown["removed"].values]),
                *MEASURED,
                what=["share", "lost without it"],
                position=names,
            )
            bars = Bars.of(
                both,
                f"Tokens of {told['clean_prompt']!r}",
                f"share of each in the log-probability of {told['answer']!r}, and what is lost when its "
                "embedding is that of the baseline",
                sources=("fact_0",),
            )
            panels.insert(0, bars)
        title = f"Where {told['answer']!r} comes from"
        yield from together("integrated_gradients", title, *panels, beside=[self.findings], columns=2)
        yield Table.of(
            facts,
            ("prompt", lambda row: format_text(row["clean_prompt"])),
            ("answer", "answer"),
            ("log-probability", "log_probability", ".2f"),
            ("of the baseline", "baseline_log_probability", ".2f"),
            ("gap", "gap", "+.4f"),
            ("largest share", _most),
            title=f"{self.subject.name}: {len(facts)} facts",
            caption="Log-probability of the answer in nats; the gap is what shares do not add up to.",
            sources=tuple(self.nodes),
            json={**self.subject.about, "steps": self.settings.steps, "facts": facts},
        )


def _most(told: dict[str, Any]) -> str:
    token = max(told["tokens"], key=lambda each: abs(each["share"]), default=None)
    return "none" if token is None else f"{format_token(token['token'])} ({token['share']:+.2f})"
