"""Rich console that escapes control characters in text. Importing this module imports rich.

Rich's own escape sequences (colours, cursor movement of bars) must reach the terminal; those inside text must
not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .terminal import escaped

__all__ = ["EscapingConsole"]


class EscapingConsole(Console):
    """Rich console for text from untrusted files: control characters are shown as escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape the control characters of a text, then render it.

        Besides `render`, because `Text` drops some control characters, and column widths would be too small.
        """
        return super().render_str(escaped(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and escape control characters in all text; rich's own cursor movements stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))
