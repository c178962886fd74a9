"""Plans: the nodes of a workflow in order, with what each will do, before anything is done.

Border: asks nodes; computes nothing and opens no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..store.errors import PlanError
from .nodes import ConstantNode, Estimate, Node, Status

if TYPE_CHECKING:
    from ..store import Store


@dataclass(frozen=True)
class Step:
    """One node of a plan: what is stored of it, and what is left to do."""

    name: str
    status: Status
    estimate: Estimate

    @property
    def state(self) -> str:
        """"cached", or "will run because …"."""
        return "cached" if self.status.is_cached else f"will run because {self.status.reason}"

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {"name": self.name, "state": self.state, **asdict(self.status), **asdict(self.estimate)}


@dataclass(frozen=True)
class Plan:
    """What running some nodes will do, inputs first."""

    steps: tuple[Step, ...]

    @property
    def is_cached(self) -> bool:
        """Whether nothing will run."""
        return all(step.status.is_cached for step in self.steps)

    @property
    def bytes_read(self) -> int:
        return sum(step.estimate.bytes_read for step in self.steps)

    @property
    def bytes_written(self) -> int:
        return sum(step.estimate.bytes_written for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """Largest memory any one node needs, as far as it is known."""
        return max((step.estimate.peak_bytes for step in self.steps), default=0)

    def check_memory(self, budget: int | None) -> None:
        """Raise PlanError naming the node that does not fit a memory budget, in bytes."""
        for step in self.steps:
            if budget is not None and step.estimate.peak_bytes > budget:
                raise PlanError(
                    f"{step.name} needs about {human_bytes(step.estimate.peak_bytes)} of memory, but the budget is {human_bytes(budget)}; "
                    f"raise --memory, or capture in smaller segments"
                )

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines."""
        totals = {"bytes_read": self.bytes_read, "bytes_written": self.bytes_written, "peak_bytes": self.peak_bytes}
        return {"steps": [step.to_json() for step in self.steps], **totals}

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """(stage, state, cells done, bytes read, bytes written, peak memory) per node, as text."""
        rows = []
        for step in self.steps:
            cells = f"{step.status.cells_cached}/{step.status.cells}" if step.status.cells > 1 else ""
            cost = step.estimate
            rows.append((step.name, step.state, cells, *(human_bytes(size) for size in (cost.bytes_read, cost.bytes_written, cost.peak_bytes))))
        return rows


def plan(nodes: Node | Iterable[Node], store: Store) -> Plan:
    """What computing these nodes would do now."""
    return Plan(tuple(Step(node.name, node.status(store), node.estimate(store)) for node in in_order(nodes) if not isinstance(node, ConstantNode)))


def in_order(nodes: Node | Iterable[Node]) -> Sequence[Node]:
    """Nodes and all they depend on, inputs first, each once."""
    ordered: dict[int, Node] = {}

    def visit(node: Node) -> None:
        if id(node) not in ordered:
            for needed in node.inputs:
                visit(needed)
            ordered[id(node)] = node

    for node in [nodes] if isinstance(nodes, Node) else nodes:
        visit(node)
    return list(ordered.values())


def human_bytes(size: float) -> str:
    """A size in binary units: 1.5 MiB; empty for none."""
    if not size:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
