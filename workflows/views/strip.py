"""View of a text with its token boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...stages.logits.lens import format_token
from . import paper
from .view import View

__all__ = ["Strip"]

PER_ROW = 60
"""Number of characters per row."""
SHADES = ("#d2e3ec", "#fbdcc8", "#dcebc6", "#e6d8f5", "#f7e6a8")
"""Box colours of the spans, repeated in order."""
PLAIN = "#f4f5f7"
"""Box colour of a token without a span."""


@dataclass(frozen=True, kw_only=True)
class Strip(View):
    """The characters of a text in rows of PER_ROW, with a box around each token and its position above it."""

    kind: ClassVar[str] = "strip"
    on_page: ClassVar[bool] = False
    text: str
    """The text."""
    offsets: tuple[tuple[int, int], ...]
    """(start, end) character offsets of each token; end is exclusive, and equals start for an empty token."""
    spans: tuple[str, ...]
    """Span name of each token, "" for none; tokens with equal names have the same colour."""

    def inches(self) -> tuple[float, float]:
        """0.2 inches per character of a row; see `View.inches`."""
        wide = min(PER_ROW, len(self.text))
        return min(13.0, 2.0 + 0.2 * wide), 0.7 + 0.8 * max(1, -(-len(self.text) // PER_ROW))

    def draw(self, axes: Any) -> None:
        """Draw boxes, positions and characters."""
        from matplotlib.patches import Rectangle

        names = [name for name in dict.fromkeys(self.spans) if name]
        # Byte-level vocabularies split rare characters: several tokens then start at the same character.
        tokens_by_start: dict[int, list[int]] = {}
        for i, ((start, end), name) in enumerate(zip(self.offsets, self.spans, strict=True)):
            colour = SHADES[names.index(name) % len(SHADES)] if name else PLAIN
            if end > start:
                tokens_by_start.setdefault(start, []).append(i)
            # A token that crosses the end of a row has a box in each row.
            for row in range(start // PER_ROW, -(-end // PER_ROW) if end > start else 0):
                box_start, box_end = max(start, row * PER_ROW), min(end, (row + 1) * PER_ROW)
                corner = (box_start - row * PER_ROW - 0.5, -row - 0.3)
                axes.add_patch(Rectangle(corner, box_end - box_start, 0.6, fc=colour, ec=paper.FAINT, lw=0.8))
        small: dict[str, Any] = {"fontsize": 6.5, "color": paper.FAINT, "va": "bottom"}
        for start, positions in tokens_by_start.items():
            number = "–".join(str(i) for i in dict.fromkeys((positions[0], positions[-1])))
            rotation = 90 if "–" in number else 0
            axes.text(start % PER_ROW - 0.4, -(start // PER_ROW) + 0.34, number, rotation=rotation, **small)
        for index, char in enumerate(self.text):
            glyph = paper.fit(format_token(char), 2)
            middle = {"ha": "center", "va": "center", "fontsize": 9, "family": "monospace"}
            colour = paper.FAINT if char == " " else paper.INK
            axes.text(index % PER_ROW, -(index // PER_ROW), glyph, color=colour, **middle)
        axes.set(
            xlim=(-1, min(PER_ROW, len(self.text))), ylim=(-((len(self.text) - 1) // PER_ROW) - 0.6, 0.75)
        )
        axes.axis("off")
