"""Findings: the claims of an answer as a view, each effect drawn among the draws of its null distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, ClassVar

from ..claim import Claim
from . import paper
from .view import View

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["Findings"]

STROKES = "Dot: the effect, its line 95 % over prompts; grey: random causes of equal size; thin: zero."


@dataclass(frozen=True, kw_only=True)
class Findings(View):
    """Every claim of an answer, the most important first; `findings` in JSON."""

    kind: ClassVar[str] = "findings"
    findings: tuple[Claim, ...]

    @classmethod
    def none(cls, reason: str, sources: tuple[str, ...] = ()) -> Findings:
        """No findings, and in a sentence why: JSON has it under `not_claimed`."""
        told = {"findings": [], "not_claimed": reason}
        return cls(findings=(), title="What was found", caption=reason, json=told, sources=sources)

    @classmethod
    def of(cls, *findings: Claim, title: str = "What was found", **told: Any) -> Findings:
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
