"""Reports: a page per workflow that a browser opens offline, made of views. See DESIGN.md."""

from __future__ import annotations

from ..views import (
    Attention,
    Choice,
    Column,
    Graph,
    Heatmap,
    Lens,
    Line,
    Lines,
    Note,
    Run,
    Table,
    Text,
    Tokens,
    Values,
    View as Element,
)
from .tables import from_rich

__all__ = [
    "Attention",
    "Choice",
    "Column",
    "Element",
    "Graph",
    "Heatmap",
    "Lens",
    "Line",
    "Lines",
    "Note",
    "Run",
    "Table",
    "Text",
    "Tokens",
    "Values",
    "from_rich",
]
