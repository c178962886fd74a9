"""View of the claims of a result; a figure draws each effect with the draws of its null distribution."""

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

# The legend of report/assets/parts.html in short.
STROKES = (
    "Dot: the effect; its line: 95 % interval over prompts; grey: random causes of equal size; thin line: "
    "zero."
)


@dataclass(frozen=True, kw_only=True)
class Findings(View):
    """The claims of a result, most important first; the entry `findings` of the JSON document."""

    kind: ClassVar[str] = "findings"
    findings: tuple[Claim, ...]
    """The claims, most important first."""

    @classmethod
    def none(cls, reason: str, sources: tuple[str, ...] = ()) -> Findings:
        """A view without claims.

        Arguments:
            reason: A sentence that says why; `not_claimed` in the JSON document.
            sources: Results that the reason is read from.
        """
        document = {"findings": [], "not_claimed": reason}
        return cls(findings=(), title="What was found", caption=reason, json=document, sources=sources)

    @classmethod
    def of(cls, *findings: Claim, title: str = "What was found", **view_fields: Any) -> Findings:
        """A view of these claims, with their entries for the JSON document."""
        document: dict[str, Any] = {"findings": [claim.to_json() for claim in findings]}
        if caption := view_fields.get("caption"):
            document["findings_caption"] = caption
        return cls(findings=findings, title=title, json=document, **view_fields)

    def rich(self) -> RichTable:
        """A terminal table with one paragraph per claim; claims not beyond chance are dimmed."""
        table = paper.rich_table(self.title, self.caption, show_header=False)
        for claim in self.findings:
            text = paper.literal(claim.sentence)
            table.add_row(text if claim.is_beyond_chance else f"[dim]{text}[/dim]")
        return table

    def body(self) -> str:
        """HTML list with one item per claim; see `View.body`."""
        return f"<ul>{''.join(f'<li>{escape(claim.sentence)}</li>' for claim in self.findings)}</ul>"

    def inches(self) -> tuple[float, float]:
        """Size of one row per claim; see `View.inches`."""
        return 9.0, 0.6 + 0.55 * len(self.findings)

    def panel(self) -> Findings:
        """View with the drawing's legend appended to its caption, like on a page."""
        return replace(self, caption=f"{self.caption} {STROKES}".strip())

    def draw(self, axes: Any) -> None:
        """Draw each effect with the draws of its null distribution; each row has its own scale, 0 to 100."""
        for row, claim in enumerate(self.findings):
            strip = claim.strip
            axes.plot([strip["zero"]] * 2, [row - 0.15, row + 0.15], color=paper.SOFT, linewidth=0.8)
            axes.plot(strip["draws"], [row] * len(strip["draws"]), "|", color=paper.CONTROL, markersize=12)
            if strip["spread"] is not None:
                axes.plot(strip["spread"], [row, row], color=paper.BLUE, linewidth=1.5)
            axes.plot([strip["effect"]], [row], "o", color=paper.BLUE, markersize=7)
            axes.text(0, row - 0.2, "\n".join(wrap(claim.short, 140)), fontsize=8, va="bottom")
        axes.set_xlim(0, 100)
        # Downward, so that the first claim is on top.
        axes.set_ylim(len(self.findings) - 0.4, -0.7)
        axes.set_axis_off()
