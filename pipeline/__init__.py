"""Stages, plans, execution: cached analyses as a dataflow graph over a store.

Knows labelled arrays, keys and Dask; knows no model and no science, and never imports torch.
"""

from __future__ import annotations

from .execute import Context, run
from .nodes import ConstantNode, Estimate, Node, Part, Port, SourceNode, StageNode, Status
from .plan import Plan, Step, plan
from .progress import Progress
from .stage import Output, Stage, stage

__all__ = [
    "stage",
    "Stage",
    "Output",
    "run",
    "plan",
    "Plan",
    "Step",
    "Node",
    "StageNode",
    "SourceNode",
    "ConstantNode",
    "Port",
    "Part",
    "Status",
    "Estimate",
    "Context",
    "Progress",
]
