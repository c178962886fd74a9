"""Findings: what an answer claims, each beside what chance does.

The sentence is made of the numbers, here and nowhere else: an effect that random causes of equal size reach
as often as `chance` allows is told as no more than chance, whoever would have liked it otherwise. A terminal
prints the sentences, a page and a figure draw each effect among the draws of its null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...stages.causal.controls import CHANCE, Null, Side, interval, random_means
from . import paper
from .view import View

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["Finding", "Findings"]

NO_MORE = "no more than chance"
NO_CONTROL = "nothing is claimed, as no control was run"
STROKES = "Dot: the effect, its line 95 % over prompts; grey: random causes of equal size; thin: zero."


@dataclass(frozen=True)
class Finding:
    """One claim.

    claim: what was done to what, and read where: "injecting L0:128 at ' in' raises P(' English')". effect:
    the measure, in `unit`. null: the measure under random causes of equal size. spread: interval of the
    effect over `prompts`, where there is more than one, else over `noises`. held_out: whether the cause was
    chosen on other prompts than these. noises: of which it is the mean in each prompt.
    """

    claim: str
    effect: float
    null: Null
    unit: str = ""
    spread: tuple[float, float] | None = None
    prompts: int = 1
    held_out: bool = False
    noises: int = 1
    chance: float = CHANCE

    @classmethod
    def over(
        cls,
        claim: str,
        effects: Any,
        others: Any,
        of: str,
        *,
        draws: int,
        seed: int,
        side: Side = "above",
        **told: Any,
    ) -> Finding:
        """A claim about several prompts: the mean of `effects` [prompt], beside means over these prompts of
        one cause drawn in each, from `others` [prompt, cause] and the cause itself. told: further fields."""
        count = draws if np.size(others) else 0  # without others no control was run
        null = Null(random_means(np.column_stack([effects, others]), count, seed=seed), of, side)
        return cls(
            claim,
            float(np.mean(effects)),
            null,
            spread=interval(effects, seed=seed),
            prompts=len(effects),
            **told,
        )

    @property
    def is_beyond_chance(self) -> bool:
        """Whether random causes reach the effect more rarely than `chance`."""
        return self.null.is_beyond_chance(self.effect, self.chance)

    @property
    def verdict(self) -> str:
        """ "beyond chance", that it is no more than that, or that nothing is claimed without a control."""
        if not self.null.is_run:
            return NO_CONTROL
        return "beyond chance" if self.is_beyond_chance else NO_MORE

    @property
    def short(self) -> str:
        """The claim with its effect and the verdict."""
        return f"{self.claim}: {self._told(self.effect)}, {self.verdict}"

    @property
    def sentence(self) -> str:
        """The claim with its effect and its null, or that it is no more than chance."""
        if not self.null.is_run:
            return f"{self.claim}: {self._told(self.effect)}{self._over}; {NO_CONTROL} (controls=0)."
        verdict = "" if self.is_beyond_chance else f", {NO_MORE}"
        return f"{self.claim}: {self._told(self.effect)}{self._over}{verdict}. {self.beside}"

    @property
    def _over(self) -> str:
        """Of what the effect is a mean, how far that is certain, and where the cause was chosen."""
        told = []
        if self.prompts > 1 or self.spread is not None:
            low, high = self.spread or (self.effect, self.effect)
            which = "held-out prompts" if self.held_out else "prompts"
            many = f"{self.prompts} {which}" if self.prompts > 1 else f"{self.noises} noises"
            told.append(f"95 % over {many}: {self._told(low)} to {self._told(high)}")
        if self.prompts == 1 and self.held_out:
            told.append("chosen on other prompts")
        return f" ({'; '.join(told)})" if told else ""

    @property
    def beside(self) -> str:
        """The null in a sentence."""
        null, (low, high) = self.null, self.null.bound()
        many, count = len(null.values), null.as_large(self.effect)
        does = "does" if count == 1 else "do"
        reached = f"{count or 'none'} {does} as much"
        chosen = f", chosen among {null.looked_at}" if null.looked_at > 1 else ""
        return (
            f"{many} {null.of}: median {self._told(null.median)}, 95 % between {self._told(low)} and "
            f"{self._told(high)}; {reached} (p = {null.share_as_large(self.effect):.2g}{chosen})."
        )

    def to_json(self) -> dict[str, Any]:
        """As documents have it under `findings`."""
        return {
            "claim": self.claim,
            "effect": self.effect,
            "unit": self.unit,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "interval_95": self.spread,
            "prompts": self.prompts,
            "held_out": self.held_out,
            "noises": self.noises,
            "chance": self.chance,
            "null": self.null.to_json(self.effect),
        }

    def _told(self, value: float) -> str:
        return f"{value:+.3g} {self.unit}".strip()

    @property
    def strip(self) -> Mapping[str, Any]:
        """Places from 0 to 100 on a common axis: of every draw, zero, the effect and its interval."""
        ends: list[float] = [*self.null.values.tolist(), self.effect, 0.0, *(self.spread or ())]
        low, high = min(ends), max(ends)
        wide = (high - low) or 1.0

        def place(value: float) -> float:
            return round(2.0 + 96.0 * (value - low) / wide, 2)

        return {
            "draws": [place(value) for value in self.null.values.tolist()],
            "zero": place(0.0),
            "effect": place(self.effect),
            "spread": None if self.spread is None else [place(end) for end in self.spread],
        }


@dataclass(frozen=True, kw_only=True)
class Findings(View):
    """Every claim of an answer, the most important first. JSON has them under `findings`."""

    kind: ClassVar[str] = "findings"
    findings: tuple[Finding, ...]

    @classmethod
    def none(cls, reason: str, sources: tuple[str, ...] = ()) -> Findings:
        """No findings, and in a sentence why: JSON has it under `not_claimed`."""
        told = {"findings": [], "not_claimed": reason}
        return cls(findings=(), title="What was found", caption=reason, json=told, sources=sources)

    @classmethod
    def of(cls, *findings: Finding, title: str = "What was found", **told: Any) -> Findings:
        """The findings, also for JSON."""
        return cls(
            findings=findings, title=title, json={"findings": [each.to_json() for each in findings]}, **told
        )

    def rich(self) -> RichTable:
        """A paragraph each; what is no more than chance stands back."""
        table = paper.rich_table(self.title, self.caption, show_header=False)
        for each in self.findings:
            text = paper.literal(each.sentence)
            table.add_row(text if each.is_beyond_chance else f"[dim]{text}[/dim]")
        return table

    def body(self) -> str:
        """A list item for each finding."""
        return f"<ul>{''.join(f'<li>{escape(each.sentence)}</li>' for each in self.findings)}</ul>"

    def inches(self) -> tuple[float, float]:
        """A row per finding."""
        return 9.0, 0.6 + 0.55 * len(self.findings)

    def panel(self) -> Findings:
        """With what its strokes are in the caption, as a page says it."""
        return replace(self, caption=f"{self.caption} {STROKES}".strip())

    def draw(self, axes: Any) -> None:
        """Each effect among the draws of its null, every row on a scale of its own."""
        for row, each in enumerate(self.findings):
            strip = each.strip
            axes.plot([strip["zero"]] * 2, [row - 0.15, row + 0.15], color=paper.SOFT, linewidth=0.8)
            axes.plot(strip["draws"], [row] * len(strip["draws"]), "|", color=paper.CONTROL, markersize=12)
            if strip["spread"] is not None:
                axes.plot(strip["spread"], [row, row], color=paper.BLUE, linewidth=1.5)
            axes.plot([strip["effect"]], [row], "o", color=paper.BLUE, markersize=7)
            axes.text(0, row - 0.2, "\n".join(wrap(each.short, 140)), fontsize=8, va="bottom")
        axes.set_xlim(0, 100)
        axes.set_ylim(len(self.findings) - 0.4, -0.7)
        axes.set_axis_off()
