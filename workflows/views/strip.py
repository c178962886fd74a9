"""View of a text that shows how it is divided into tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...stages.logits.lens import format_token
from . import paper
from .view import View

__all__ = ["Strip"]

PER_ROW = 60
"""Number of characters of the text per row of the drawing."""
SHADES = ("#d2e3ec", "#fbdcc8", "#dcebc6", "#e6d8f5", "#f7e6a8")
"""Colours of the boxes around tokens: one per span name, repeated if there are more names."""
PLAIN = "#f4f5f7"
"""Colour of the box around a token that belongs to no span."""


@dataclass(frozen=True, kw_only=True)
class Strip(View):
    """A text with a box around each token and the token's position above its box, in rows of 60
    characters."""

    kind: ClassVar[str] = "strip"
    on_page: ClassVar[bool] = False
    text: str
    """The text."""
    offsets: tuple[tuple[int, int], ...]
    """(start, end) character offsets of each token; end is exclusive, and equals start for an empty token."""
    spans: tuple[str, ...]
    """Name of the span that each token belongs to, "" for none; equal names have the same colour."""

    def inches(self) -> tuple[float, float]:
        """(width, height) of the drawing in inches: 0.2 per character of a row, 0.8 per row."""
        longest_row = min(PER_ROW, len(self.text))
        return min(13.0, 2.0 + 0.2 * longest_row), 0.7 + 0.8 * max(1, -(-len(self.text) // PER_ROW))

    def draw(self, axes: Any) -> None:
        """Draw boxes, positions and characters; a character is 1 wide, and rows are 1 apart, going down."""
        from matplotlib.patches import Rectangle

        names = [name for name in dict.fromkeys(self.spans) if name]
        # Byte-level vocabularies split rare characters: several tokens then start at the same character.
        tokens_by_start: dict[int, list[int]] = {}
        for position, ((start, end), name) in enumerate(zip(self.offsets, self.spans, strict=True)):
            colour = SHADES[names.index(name) % len(SHADES)] if name else PLAIN
            if end > start:
                tokens_by_start.setdefault(start, []).append(position)
            # A token that crosses the end of a row has a box in each row.
            for row in range(start // PER_ROW, -(-end // PER_ROW) if end > start else 0):
                box_start, box_end = max(start, row * PER_ROW), min(end, (row + 1) * PER_ROW)
                corner = (box_start - row * PER_ROW - 0.5, -row - 0.3)
                axes.add_patch(Rectangle(corner, box_end - box_start, 0.6, fc=colour, ec=paper.FAINT, lw=0.8))
        small: dict[str, Any] = {"fontsize": 6.5, "color": paper.FAINT, "va": "bottom"}
        for start, positions in tokens_by_start.items():
            # "3", or "3–5" for several tokens, which is written upright to stay as narrow.
            numbers = "–".join(str(position) for position in dict.fromkeys((positions[0], positions[-1])))
            rotation = 90 if "–" in numbers else 0
            axes.text(start % PER_ROW - 0.4, -(start // PER_ROW) + 0.34, numbers, rotation=rotation, **small)
        for index, char in enumerate(self.text):
            glyph = paper.fit(format_token(char), 2)
            centred = {"ha": "center", "va": "center", "fontsize": 9, "family": "monospace"}
            colour = paper.FAINT if char == " " else paper.INK
            axes.text(index % PER_ROW, -(index // PER_ROW), glyph, color=colour, **centred)
        last_row = (len(self.text) - 1) // PER_ROW
        axes.set(xlim=(-1, min(PER_ROW, len(self.text))), ylim=(-last_row - 0.6, 0.75))
        axes.axis("off")
