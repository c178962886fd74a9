"""Plans: the nodes of a workflow in order, with what each will do, before anything is done.

Border: asks nodes; computes nothing, and works on a read-only store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..store.arrays import shown
from ..store.display import html
from ..store.errors import PlanError
from .nodes import Estimate, Node, Status, estimate_of, one_look, status_of
from .sources import ConstantNode

if TYPE_CHECKING:
    from ..store import Store
    from .context import Context


@dataclass(frozen=True)
class Step:
    """One node of a plan: what is stored of it, and what is left to do."""

    name: str
    status: Status
    estimate: Estimate

    @property
    def state(self) -> str:
        """'cached', or 'will run because …'."""
        work = f": {self.estimate.work}" if self.estimate.work else ""
        told = "cached" if self.status.is_cached else f"will run because {self.status.reason}{work}"
        return f"{told} ({self.status.warning})" if self.status.warning else told

    def to_json(self) -> dict[str, Any]:
        """Name and state, and beside them the fields of status and estimate."""
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
        """Of all steps together; a cached one reads none."""
        return sum(step.estimate.bytes_read for step in self.steps)

    @property
    def bytes_written(self) -> int:
        """Of all steps together, as far as it is known."""
        return sum(step.estimate.bytes_written for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """Largest memory any one cell needs, as far as it is known."""
        return max((step.estimate.peak_bytes for step in self.steps), default=0)

    @property
    def seconds(self) -> float | None:
        """Expected wall time of all steps, one after another; the model they share is read once.

        None where it is not known of one of them.
        """
        estimates = [step.estimate for step in self.steps if not step.status.is_cached]
        if any(estimate.seconds is None for estimate in estimates):
            return None
        work = sum((estimate.seconds or 0.0) - estimate.setup_seconds for estimate in estimates)
        return round(work + max((estimate.setup_seconds for estimate in estimates), default=0.0), 3)

    def check_memory(self, budget: int | None) -> None:
        """Raise PlanError naming the node whose smallest piece of work exceeds a budget in bytes."""
        for step in self.steps:
            if budget is not None and step.estimate.peak_bytes > budget:
                raise PlanError(
                    f"{step.name} needs about {human_bytes(step.estimate.peak_bytes)} of memory at once, the "
                    f"budget is {human_bytes(budget)}; raise --memory, or capture with smaller segments"
                )

    def to_json(self) -> dict[str, Any]:
        """Every step, and what holds of all of them: bytes, peak memory, seconds (None: not known)."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "is_cached": self.is_cached,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
        }

    def rows(self) -> list[tuple[str, str, str, str, str, str, str]]:
        """(stage, state, cells done, bytes read, bytes written, peak memory, time) per node, as text."""
        rows = []
        for step in self.steps:
            held, cost = step.status, step.estimate
            cells = f"{held.cells_cached}/{held.cells}" if held.cells > 1 else ""
            sizes = [human_bytes(size) for size in (cost.bytes_read, cost.bytes_written, cost.peak_bytes)]
            took = "" if step.status.is_cached else human_seconds(cost.seconds)
            rows.append((step.name, step.state, cells, sizes[0], sizes[1], sizes[2], took))
        return rows

    def _repr_html_(self) -> str:
        """For a notebook: a line per stage, and the sums."""
        columns = ["stage", "state", "cells", "read", "written", "peak memory", "time"]
        sizes = [human_bytes(size) or "nothing" for size in (self.bytes_read, self.bytes_written)]
        seconds = "" if self.seconds is None else f"; {self.seconds:.3g} s as last time"
        told = "all cached" if self.is_cached else f"{sizes[0]} read, {sizes[1]} written{seconds}"
        return html.shown("Plan", html.table(columns, self.rows(), right=[2, 3, 4, 5, 6]), told)


def plan(nodes: Node | Iterable[Node], store: Store, where: Context | None = None) -> Plan:
    """What computing these nodes would do now.

    where: they would run; PlanError where that cannot be.
    """
    with one_look():
        asked = [node for node in in_order(nodes) if not isinstance(node, ConstantNode)]
        found = Plan(tuple(Step(n.name, status_of(n, store), estimate_of(n, store)) for n in asked))
        if where is not None and where.has_workers and not found.is_cached:
            where.require_shared(store)
            for node in asked:
                if not status_of(node, store).is_cached:
                    node.require_workers(where)
        return found


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


_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def as_bytes(size: int | str | None) -> int | None:
    """A memory budget in bytes from a number or a text like "2GiB"; PlanError for anything else."""
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0):
        return size
    text = size.replace(" ", "").upper() if isinstance(size, str) else ""
    number = text.rstrip("KMGTIB")
    with suppress(ValueError, KeyError, OverflowError):
        if (count := int(float(number) * _UNITS[text[len(number) :] or "B"])) >= 0:
            return count
    raise PlanError(f'expected a size such as "2GiB" or "500MB", or a number of bytes, found {shown(size)}')


def human_seconds(seconds: float | None) -> str:
    """An estimate of a time: "about 3.1 s"; "unknown" where nothing is known."""
    return "unknown" if seconds is None else f"about {seconds:.2g} s"


def human_bytes(size: float) -> str:
    """A size in binary units: 1.5 MiB; empty for none."""
    if not size:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
