"""A text cut into its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...stages.logits.lens import format_token
from . import paper
from .view import View

__all__ = ["Strip"]

PER_ROW = 60
"""Characters."""
SHADES = ("#d2e3ec", "#fbdcc8", "#dcebc6", "#e6d8f5", "#f7e6a8")
PLAIN = "#f4f5f7"


@dataclass(frozen=True, kw_only=True)
class Strip(View):
    """The characters of a text in rows, with a box around each token and its position above.

    offsets: first character of each token and the one after its last; none for a token of no character.
    spans: what a token belongs to, "" for nothing; tokens of one span have one colour.
    """

    kind: ClassVar[str] = "strip"
    on_page: ClassVar[bool] = False
    text: str
    offsets: tuple[tuple[int, int], ...]
    spans: tuple[str, ...]

    def inches(self) -> tuple[float, float]:
        """A fifth of an inch for each character of a row."""
        wide = min(PER_ROW, len(self.text))
        return min(13.0, 2.0 + 0.2 * wide), 0.7 + 0.8 * max(1, -(-len(self.text) // PER_ROW))

    def draw(self, axes: Any) -> None:
        """Boxes, positions, characters."""
        from matplotlib.patches import Rectangle

        names = [name for name in dict.fromkeys(self.spans) if name]
        # Byte-level vocabularies split rare characters: several tokens then begin at one.
        sharing: dict[int, list[int]] = {}
        for i, ((start, end), name) in enumerate(zip(self.offsets, self.spans, strict=True)):
            colour = SHADES[names.index(name) % len(SHADES)] if name else PLAIN
            if end > start:
                sharing.setdefault(start, []).append(i)
            for line in range(start // PER_ROW, -(-end // PER_ROW) if end > start else 0):
                left, right = max(start, line * PER_ROW), min(end, (line + 1) * PER_ROW)
                corner = (left - line * PER_ROW - 0.5, -line - 0.3)
                axes.add_patch(Rectangle(corner, right - left, 0.6, fc=colour, ec=paper.FAINT, lw=0.8))
        small: dict[str, Any] = {"fontsize": 6.5, "color": paper.FAINT, "va": "bottom"}
        for start, positions in sharing.items():
            number = "–".join(str(i) for i in dict.fromkeys((positions[0], positions[-1])))
            turned = 90 if "–" in number else 0
            axes.text(start % PER_ROW - 0.4, -(start // PER_ROW) + 0.34, number, rotation=turned, **small)
        for place, char in enumerate(self.text):
            shown = paper.fit(format_token(char), 2)
            middle = {"ha": "center", "va": "center", "fontsize": 9, "family": "monospace"}
            colour = paper.FAINT if char == " " else paper.INK
            axes.text(place % PER_ROW, -(place // PER_ROW), shown, color=colour, **middle)
        axes.set(
            xlim=(-1, min(PER_ROW, len(self.text))), ylim=(-((len(self.text) - 1) // PER_ROW) - 0.6, 0.75)
        )
        axes.axis("off")
