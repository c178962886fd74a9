"""Views: the building blocks of a workflow's result, shown in terminal, figures, HTML pages and JSON alike.

    Table.of(records, ("layer", "layer", "d"), ("KL", "kl", ".4f"), title="…", json={"layers": records})
    Heatmap.of(array, title="…"),  Lines.of(array),  Figure(name="page", title="…", panels=(one, other))

workflows/DESIGN.md describes how a workflow is written with them.
"""

from __future__ import annotations

from .attention import Attention
from .circuit import CircuitDrawing
from .cones import Cones
from .curves import Bars, Curve, Line, Lines
from .figure import Figure, together
from .findings import Findings
from .graph.graph import Graph
from .heatmap import Heatmap
from .strip import Strip
from .tables import Column, Styled, Table, bold, dash, dim, points
from .texts import Lens, Measure, Text, Tokens
from .view import Choice, Data, Note, Picture, Values, View

__all__ = [
    "Attention",
    "Bars",
    "Choice",
    "CircuitDrawing",
    "Cones",
    "Column",
    "Curve",
    "Data",
    "Figure",
    "Findings",
    "Graph",
    "Heatmap",
    "Lens",
    "Line",
    "Lines",
    "Measure",
    "Note",
    "Picture",
    "Styled",
    "Strip",
    "Table",
    "Text",
    "Tokens",
    "Values",
    "View",
    "bold",
    "dash",
    "dim",
    "points",
    "together",
]
