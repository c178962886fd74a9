"""Stages, plans, execution: cached analyses as a dataflow graph over a store.

Knows labelled arrays, keys and Dask; knows no model and no science, and never imports torch. Importing it
costs numpy at most: xarray comes with the first result that is opened, Dask with the first cell that runs.
"""

from __future__ import annotations

from .context import Context
from .declaration import Declaration, Output
from .execute import run
from .nodes import Estimate, Node, Part, Port, Status
from .pinned import PinnedResource
from .plan import Plan, Step, plan
from .progress import Progress
from .sources import ConstantNode, SourceNode
from .stage import Stage, stage
from .stage_node import StageNode

__all__ = [
    "stage",
    "Stage",
    "Output",
    "Declaration",
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
    "PinnedResource",
]
