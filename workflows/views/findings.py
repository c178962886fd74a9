"""View of the claims of a workflow: measured effects, each compared with its null distribution."""

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

# The legend of report/assets/parts.html, shortened.
STROKES = (
    "Blue dot: measured effect; blue line: its 95 % confidence interval. Grey ticks: the null distribution, "
    "one tick per random control. Thin line: zero."
)


@dataclass(frozen=True, kw_only=True)
class Findings(View):
    """The claims of a workflow: sentences about a cause, its effect, the null distribution and the
    p-value."""

    kind: ClassVar[str] = "findings"
    findings: tuple[Claim, ...]
    """The claims, most important first."""

    @classmethod
    def none(cls, reason: str, sources: tuple[str, ...] = ()) -> Findings:
        """A view of a workflow that could claim nothing, with the reason as its caption.

        Arguments:
            reason: Sentence that says why nothing is claimed; entry `not_claimed` of the JSON document.
            sources: Names of the workflow's results from which the reason follows.
        """
        document = {"findings": [], "not_claimed": reason}
        return cls(findings=(), title="What was found", caption=reason, json=document, sources=sources)

    @classmethod
    def of(cls, *findings: Claim, title: str = "What was found", **view_fields: Any) -> Findings:
        """A view of claims, most important first; they are the entry `findings` of the JSON document.

        Arguments:
            findings: The claims.
            title: Title of the view.
            view_fields: Other fields of the view.
        """
        document: dict[str, Any] = {"findings": [claim.to_json() for claim in findings]}
        if caption := view_fields.get("caption"):
            document["findings_caption"] = caption
        return cls(findings=findings, title=title, json=document, **view_fields)

    def rich(self) -> RichTable:
        """A terminal table with the sentence of one claim per row, dimmed if its effect is within chance."""
        table = paper.rich_table(self.title, self.caption, show_header=False)
        for claim in self.findings:
            text = paper.literal(claim.sentence)
            table.add_row(text if claim.is_beyond_chance else f"[dim]{text}[/dim]")
        return table

    def body(self) -> str:
        """HTML list with the sentence of one claim per item, for a notebook."""
        return f"<ul>{''.join(f'<li>{escape(claim.sentence)}</li>' for claim in self.findings)}</ul>"

    def inches(self) -> tuple[float, float]:
        """(width, height) of the drawing in inches: one row per claim."""
        return 9.0, 0.6 + 0.55 * len(self.findings)

    def panel(self) -> Findings:
        """The view to draw in a figure: its caption ends with the legend of the drawing."""
        return replace(self, caption=f"{self.caption} {STROKES}".strip())

    def draw(self, axes: Any) -> None:
        """Draw a row per claim: the effect, its interval and the null distribution, on a scale of its own."""
        for row, claim in enumerate(self.findings):
            # x coordinates of the drawing, scaled to 0..100.
            x_of = claim.strip
            axes.plot([x_of["zero"]] * 2, [row - 0.15, row + 0.15], color=paper.SOFT, linewidth=0.8)
            axes.plot(x_of["draws"], [row] * len(x_of["draws"]), "|", color=paper.CONTROL, markersize=12)
            if x_of["spread"] is not None:
                axes.plot(x_of["spread"], [row, row], color=paper.BLUE, linewidth=1.5)
            axes.plot([x_of["effect"]], [row], "o", color=paper.BLUE, markersize=7)
            axes.text(0, row - 0.2, "\n".join(wrap(claim.short, 140)), fontsize=8, va="bottom")
        axes.set_xlim(0, 100)
        # Downward, so that the first claim is on top.
        axes.set_ylim(len(self.findings) - 0.4, -0.7)
        axes.set_axis_off()
