"""What rich draws, tables and bars: its own escape sequences reach the terminal, those in the text do not.

Border: as `terminal.py`. Importing this module imports rich.
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
    """A console of rich for text that others wrote: its control characters are shown."""

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does it. `Text` would drop some control characters, and columns would be too narrow."""
        return super().render_str(escaped(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does it; segments with `control` are moves of the cursor that rich itself asks for."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))
