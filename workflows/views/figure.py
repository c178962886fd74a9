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
    """Views, followed by the figure that shows them side by side.

    Arguments:
        name: Name of the figure's file, without suffix.
        title: Title of the figure.
        panels: The views.
        caption: Caption of the figure.
        beside: Further panels that the result lists elsewhere, such as the claims; not returned.
        columns: Largest number of panels per row; 0 for as many as fit.

    Returns:
        The views of `panels`, then the figure.
    """
    figure = Figure(name=name, title=title, caption=caption, panels=(*panels, *beside), columns=columns)
    return *panels, figure


@dataclass(frozen=True, kw_only=True)
class Figure(View):
    """A PNG whose panels are views, arranged in rows.

    The caption of the figure is below its title. A single panel takes title and caption of the figure in
    place of its own.
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
        """The matplotlib figure, with a footer in its lower right corner; MissingExtra without matplotlib."""
        panels = [view.panel() for view in self.panels]
        if len(panels) == 1:
            titled = replace(panels[0], title=self.title, caption=self.caption)
            # Again, as `panel` may append to the caption, which was replaced.
            return paper.compose([titled.panel()], foot=footer)
        return paper.compose(
            panels, title=self.title, subtitle=self.caption, foot=footer, columns=self.columns
        )

    def body(self) -> str:
        """HTML image of all panels; see `View.body`."""
        panels = [view.panel() for view in self.panels]
        # The notebook shows title and caption of the figure around the image: not drawn twice.
        if len(panels) == 1:
            panels = [replace(panels[0], title="", caption="")]
        data = paper.encoded(paper.png(panels))
        return f'<img alt="" src="data:image/png;base64,{data}">'
