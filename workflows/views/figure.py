"""Figures: several views as the panels of one PNG."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from . import paper
from .view import View

__all__ = ["Figure", "together"]


def together(
    name: str, title: str, *panels: View, caption: str = "", beside: Iterable[View] = (), columns: int = 0
) -> tuple[View, ...]:
    """Combine views into a figure that shows them side by side, and return both.

    Arguments:
        name: Name of the figure's file, without suffix.
        title: Title of the figure.
        panels: The views, in order.
        caption: Caption of the figure.
        beside: Views that the figure shows after `panels`, but that are not returned, because the workflow
            already lists them elsewhere.
        columns: Largest number of panels per row; 0 for as many as fit.

    Returns:
        The views of `panels`, then the figure.
    """
    figure = Figure(name=name, title=title, caption=caption, panels=(*panels, *beside), columns=columns)
    return *panels, figure


@dataclass(frozen=True, kw_only=True)
class Figure(View):
    """A PNG file whose panels are views, arranged in rows below the figure's title and caption.

    If there is only one panel, it is drawn with the title and caption of the figure instead of its own.
    """

    kind: ClassVar[str] = "figure"
    on_page: ClassVar[bool] = False
    name: str
    """Name of the file, without suffix."""
    panels: tuple[View, ...]
    """Views to draw, in order."""
    columns: int = 0
    """Largest number of panels per row; 0 for as many as fit."""

    def compose(self, footer: str) -> Any:
        """Draw the panels as a matplotlib figure.

        Arguments:
            footer: Text in the lower right corner.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        panels = [view.panel() for view in self.panels]
        if len(panels) == 1:
            titled = replace(panels[0], title=self.title, caption=self.caption)
            # `panel` is called again: it may append a legend to the caption, which was just replaced.
            return paper.compose([titled.panel()], foot=footer)
        return paper.compose(
            panels, title=self.title, subtitle=self.caption, foot=footer, columns=self.columns
        )

    def body(self) -> str:
        """HTML image of all panels, for a notebook."""
        panels = [view.panel() for view in self.panels]
        # The notebook shows title and caption of the figure around the image; a panel must not repeat them.
        if len(panels) == 1:
            panels = [replace(panels[0], title="", caption="")]
        data = paper.encoded(paper.png(panels))
        return f'<img alt="" src="data:image/png;base64,{data}">'
