"""Reports: a page per workflow that a browser opens offline, made of a few kinds of elements.

    from .report import Heatmap, Table
    return [Heatmap(title="Recovery", values=grid, rows=layers, columns=tokens, value_name="recovery")]

See DESIGN.md for what each element shows and how a workflow says what its page has.
"""

from __future__ import annotations

from .elements import Choice, Column, Element, Note, Picture, Run, Table, Values
from .graph import Graph
from .plots import Attention, Heatmap, Lens, Line, Lines, Measure, Text, Tokens
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
    "Measure",
    "Note",
    "Picture",
    "Run",
    "Table",
    "Text",
    "Tokens",
    "Values",
    "from_rich",
]
