"""The vocabulary of answers. A workflow says what came out in views; everything that shows it reads them.

    Table.of(records, ("layer", "layer", "d"), ("KL", "kl", ".4f"), title="…", json={"layers": records})
    Heatmap.of(array, title="…"),  Lines.of(array),  Figure(name="page", title="…", panels=(one, other))

See workflows/DESIGN.md for how a workflow is written with them.
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
