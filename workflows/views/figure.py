"""Several views as one picture: what is seen side by side is compared."""

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
    """Views, and the figure in which they are side by side.

    Arguments:
        name: of the figure's file, without its ending.
        title: of the figure.
        panels: the views.
        caption: of the figure.
        beside: further panels, which are shown elsewhere too, such as the claims.
        columns: panels of a row at most; 0: as many as fit.
    """
    figure = Figure(name=name, title=title, caption=caption, panels=(*panels, *beside), columns=columns)
    return *panels, figure


@dataclass(frozen=True, kw_only=True)
class Figure(View):
    """Views as panels of a PNG, in rows as they fit; the caption stands under the title. A panel alone takes
    both for its own.

    name: of the file, without its ending.  columns: panels of a row at most; 0: as many as fit.
    """

    kind: ClassVar[str] = "figure"
    on_page: ClassVar[bool] = False
    name: str
    panels: tuple[View, ...]
    columns: int = 0

    def compose(self, footer: str) -> Any:
        """The drawing; raises MissingExtra without matplotlib."""
        panels = [view.panel() for view in self.panels]
        if len(panels) == 1:
            alone = replace(panels[0], title=self.title, caption=self.caption)
            return paper.compose([alone.panel()], foot=footer)
        told: dict[str, Any] = {"title": self.title, "told": self.caption, "columns": self.columns}
        return paper.compose(panels, foot=footer, **told)

    def body(self) -> str:
        """See `View`: a PNG of all panels."""
        panels = [view.panel() for view in self.panels]
        if len(panels) == 1:  # the figure's own title and caption stand around it
            panels = [replace(panels[0], title="", caption="")]
        data = paper.encoded(paper.png(panels))
        return f'<img alt="" src="data:image/png;base64,{data}">'
